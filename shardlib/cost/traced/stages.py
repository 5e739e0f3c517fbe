"""Costs that the stages of a pipeline add to a traced step.

`costs.Walk` counts the loop over layers that `stage` cuts by itself, for one stage. A stage of
shardlib keeps the input of each microbatch alone, and runs its layers again before their backward
pass (`shardlib.train.pipeline`).
"""

from collections.abc import Iterable

from shardlib.cost.costs import CollectiveCost
from shardlib.cost.layout import Layout
from shardlib.cost.traced.costs import Tally
from shardlib.cost.traced.layout import Spec, spec_of
from shardlib.rules.resolve import STAGE
from shardlib.sharding.partition import Placement


def spec_in_step(placement: Placement) -> Spec:
    """Returns the layout of a parameter during a step: each stage has its own layers, also of
    parameters that `stage` cuts along another dim between steps."""
    spec = spec_of(placement.spec, len(placement.shape))
    if not placement.moved_stage:
        return spec
    return ((STAGE,), *(tuple(axis for axis in cut if axis != STAGE) for cut in spec[1:]))


def rerun(staged: Tally) -> Tally:
    """Returns the counts of layers that also run their forward pass once more, as recomputation.
    Only then they write what the backward pass reads."""
    again = Tally()
    again.add(staged, 1)
    for counts in (again.products, again.attended, again.moved):
        for (during, what), count in [*counts.items()]:
            if during == "forward":
                counts["recompute", what] += count  # type: ignore[index]
    for passes in (again.fused_bytes, again.exponentials, again.kernels):
        passes["recompute"] += passes["forward"]
    again.fused_bytes["forward"] -= staged.kept_bytes  # type: ignore[assignment]
    return again


def stage_collectives(
    layout: Layout, carried_bytes: float, *, summed_bytes: float, moved_bytes: Iterable[float]
) -> list[CollectiveCost]:
    """Returns the collectives over `stage` in a step.

    Args:
        layout: The layout of the step.
        carried_bytes: Bytes that a device sends to the next stage for a microbatch.
        summed_bytes: Bytes of a device of the gradients that all stages share.
        moved_bytes: Bytes of a device of layers that `stage` does not divide, which come to their
            stages once a step, and of their gradients, which go back.
    """
    turns = layout.chunks * layout.microbatches + layout.stage - 1
    sends = CollectiveCost(STAGE, "shift", (STAGE,), carried_bytes, 1.0, 2 * turns, "data", "any")
    summed = CollectiveCost("data", "all_reduce", (STAGE,), summed_bytes)
    moved = [CollectiveCost(STAGE, "all_to_all", (STAGE,), each) for each in moved_bytes if each]
    return [sends, summed, *moved]
