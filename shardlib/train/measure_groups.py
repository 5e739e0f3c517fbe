"""Microbatch time of each group, measured on its own devices."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from shardlib.errors import ModelError
from shardlib.losses.results import Sums, loss_mean
from shardlib.losses.signature import check_arity
from shardlib.mesh import mesh_sizes
from shardlib.sharding.constrain import use
from shardlib.sharding.manual import manual
from shardlib.train.batches import batch_shardings
from shardlib.train.gradients import LossArguments, PartLoss, part_key
from shardlib.train.reduce.reduction import AXIS
from shardlib.train.reduce.uneven import check_rows
from shardlib.train.state import TrainState, state_shardings
from shardlib.train.step import TrainStep

_POLL_SECONDS = 1e-4


def measure_groups(
    step: TrainStep, state: TrainState, batch: PyTree, *, repeats: int = 3
) -> tuple[float, ...]:
    """Returns the seconds per microbatch gradient of each group along `data`.

    Each group computes and is timed independently, without communication over `data` until all
    groups are done. All processes must call this together, and get the same times. `balance` or
    `ReductionConfig.group_seconds` turns them into microbatch counts.

    Args:
        step: The step whose loss is computed, on a mesh without `stage`.
        state: A state, which is not changed.
        batch: Pytree of arrays [groups * m, ...], a microbatch of m rows for each group.
        repeats: Number of runs after a first run that compiles. The shortest counts, because other
            work on the machine disturbs it least.

    Raises:
        ModelError: If the number of groups does not divide the rows, the mesh has `stage`, or
            `repeats` is not positive.
    """
    if repeats < 1:
        raise ModelError(f"repeats={repeats} is not positive.\n  Use 3, or more on a busy machine.")
    sizes = mesh_sizes(state.definition.scope.mesh)
    if sizes.get("stage", 1) > 1:
        raise ModelError(
            "groups that split stage cannot take unequal shares, so there is nothing to measure.\n"
            "  Use a mesh without stage."
        )
    groups = sizes.get(AXIS, 1)
    check_rows(batch, groups)
    program = _program(step, state, batch)
    jax.block_until_ready(program(state, batch))
    runs = [_time(lambda: program(state, batch), groups) for _ in range(repeats)]
    seconds = np.min(runs, axis=0).astype(np.float32)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        # A group ends with the last of its processes. Processes without its devices report 0.
        seconds = np.max(multihost_utils.process_allgather(seconds), axis=0)
    return tuple(float(s) for s in seconds)


def _program(step: TrainStep, state: TrainState, batch: PyTree) -> Any:
    scope = state.definition.scope
    check_arity(step.loss_fn, ())
    loss = PartLoss(state.definition, step.loss_fn, step.precision)

    def group(*leaves: Any) -> tuple[PyTree, Sums]:
        part = LossArguments(*leaves)
        result = loss.gradients(part._replace(key=part_key(part.key, 0)))
        return jax.tree.map(lambda x: x[None], (result.grads, result.sums))

    def run(state: TrainState, batch: PyTree) -> tuple[PyTree, Sums]:
        arguments = state.params, state.model_state, batch, state.rng
        with use(scope.mesh, scope.rules):
            if AXIS not in scope.mesh.axis_names:
                return group(*arguments)
            own, shared = PartitionSpec(AXIS), PartitionSpec()
            return manual(group, (AXIS,), (shared, shared, own, shared), own)(*arguments)

    placed = state_shardings(state), batch_shardings(batch, scope, step.batch_axes)
    axes = (AXIS,) if AXIS in scope.mesh.axis_names else ()
    by_group = NamedSharding(scope.mesh, PartitionSpec(*axes))
    return jax.jit(run, in_shardings=placed, out_shardings=(None, by_group))


def _time(run: Callable[[], tuple[PyTree, Sums]], groups: int) -> list[float]:
    """Returns the seconds until the last local device of each group was done, 0 if it has none."""
    start = time.perf_counter()
    _, sums = run()
    waiting = defaultdict(list)
    for shard in loss_mean(sums).weight.addressable_shards:
        waiting[shard.index[0].start or 0].append(shard.data)
    seconds = [0.0] * groups
    while waiting:
        for group in [g for g, shards in waiting.items() if all(x.is_ready() for x in shards)]:
            seconds[group] = time.perf_counter() - start
            del waiting[group]
        time.sleep(_POLL_SECONDS)
    return seconds
