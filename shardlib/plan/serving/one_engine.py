"""The best plan with one engine on a whole cluster, of a mesh, slots or a chunk that are given."""

from collections.abc import Iterator, Mapping

from shardlib.cost.layout import Layout
from shardlib.errors import MeshError
from shardlib.plan.serving.question import ServingQuestion
from shardlib.plan.serving.refusals import choice_does_not_fit, does_not_fit
from shardlib.plan.serving.search import (
    CHUNKS,
    Replica,
    ServingPlan,
    best_of,
    chunks_for,
    rank,
    replicas_of,
)
from shardlib.plan.serving.served_model import ServedModel


def one_engine(
    model: ServedModel,
    question: ServingQuestion,
    sizes: Mapping[str, int] | None,
    slots: int | None,
    chunk: int | None,
) -> tuple[Replica, ServingPlan]:
    """Returns the best plan that fits; with more `slots` than fit, that of the least memory.

    Args:
        model, question: The model and the question.
        sizes: Sizes of its mesh axes; None for any.
        slots: Its slots, rounded up to what its copies divide; None for any number that fits.
        chunk: Tokens of prompts that a step of each copy reads; None for any number.

    Raises:
        MeshError: If not one sequence fits, or the rules `serve` cannot place the model on the
            mesh.
    """
    every = replicas_of(model, question)
    replicas = [one for one in every if sizes is None or _is_on(one.layout, sizes)]
    if every and not replicas:
        known = ", ".join(one.plan(1, CHUNKS[0], 1).mesh for one in every)
        raise MeshError(
            f"the rules serve cannot place {model.name} on this mesh of {question.cluster.name}.\n"
            f"  Choose one of: {known}."
        )
    found = [(one, list(_plans(one, slots, chunk))) for one in replicas]
    fitting = [
        (one, best)
        for one, plans in found
        if (best := best_of((plan for plan in plans if plan.fits), question))
    ]
    if fitting:
        most = max(plan.tokens_per_second for _, plan in fitting)
        return min(fitting, key=lambda pair: rank(pair[1], most))
    over = [(one, plan) for one, plans in found for plan in plans if plan.most_slots]
    if not over:
        raise _refusal(model, question, every, replicas, chunk)
    return min(over, key=lambda pair: pair[1].memory.total)


def _is_on(layout: Layout, sizes: Mapping[str, int]) -> bool:
    """Returns whether a layout is that of a mesh; `data` and `fsdp` both divide slots."""
    cut = {axis: n for axis, n in sizes.items() if n > 1 and axis not in ("data", "fsdp")}
    return cut == {axis: n for axis in ("expert", "tensor") if (n := layout.size(axis)) > 1}


def _plans(replica: Replica, slots: int | None, chunk: int | None) -> Iterator[ServingPlan]:
    """Yields plans that fit or, with a number of slots, all."""
    if slots is None:
        yield from replica.plans(1, chunk)
        return
    own = -(-slots // replica.layout.data)
    for one in chunks_for(replica.question) if chunk is None else [chunk]:
        yield replica.plan(own, one, 1)


def _refusal(
    model: ServedModel,
    question: ServingQuestion,
    every: list[Replica],
    asked: list[Replica],
    chunk: int | None,
) -> MeshError:
    """Returns the error for what is asked, or for the model if no mesh and chunk fit."""
    smallest = CHUNKS[0] if chunk is None else min(chunk, CHUNKS[0])
    if all(one.over(1, smallest) > 0 for one in every):
        return does_not_fit(model, question, every, smallest)
    return choice_does_not_fit(asked, [one for one in every if one not in asked], chunk)
