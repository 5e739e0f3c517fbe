"""Restore of the newest valid checkpoint in one or several directories."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardlib.checkpoint.errors import DamageError
from shardlib.checkpoint.manifest import Manifest, Partial
from shardlib.errors import CheckpointError

if TYPE_CHECKING:
    from shardlib.checkpoint.store import RunCheckpoints

Accept = Callable[[Manifest], bool | None]
"""Called with a manifest before any array is read: False skips the checkpoint, an error ends the
search."""


def restore_newest(
    stores: Sequence["RunCheckpoints"], target: Any, accept: Accept, partial: Partial
) -> tuple[Manifest, Any] | None:
    """Restores the newest valid step and sets aside newer steps that do not validate.

    Args:
        stores: The stores to search. If several have a step, the first of them is used.
        target: As in `RunCheckpoints.restore`.
        accept: Selects checkpoints; see `Accept`.
        partial: As in `RunCheckpoints.restore`.

    Returns:
        The manifest and the state; None if every checkpoint was skipped.

    Raises:
        CheckpointError: If there are checkpoints but all are damaged; they are left in place. Also
            if the newest one is from another model or in a later format, or one is a symbolic
            link.
    """
    damaged: list[tuple[RunCheckpoints, int]] = []
    passed_over: list[tuple[RunCheckpoints, int]] = []
    while (choice := _next(stores, [*damaged, *passed_over])) is not None:
        store, step = choice
        try:
            found = store.restore_accepted(step, target, accept, partial=partial)
        except DamageError as error:
            reason = str(error).rpartition("\n")[0]  # The last line suggests what this loop does.
            store.notify(f"step {step} does not validate, trying the one before it: {reason}")
            damaged.append(choice)
            continue
        if found is None:
            passed_over.append(choice)
            continue
        for faulty, damaged_step in damaged:
            faulty.set_aside(damaged_step)
        if damaged:
            store.notify(f"step {step} is restored in its place")
        return found
    if damaged:
        raise CheckpointError(
            "none of the checkpoints validates:\n"
            + "".join(f"  {store.directory}, step {step}\n" for store, step in damaged)
            + "  They are left as they are. Restore them from a copy, or train in another run_dir."
        )
    return None


def _next(
    stores: Sequence["RunCheckpoints"], tried: Sequence[tuple["RunCheckpoints", int]]
) -> tuple["RunCheckpoints", int] | None:
    """Returns the newest untried checkpoint, the same on every process."""

    def newest(_: list[str]) -> str:
        for store in stores:
            for step in store.links():  # Resuming from an older step would lose its target.
                store.manifest(step)
        steps = [
            (step, -index)
            for index, store in enumerate(stores)
            for step in store.candidates()
            if (store, step) not in tried
        ]
        step, index = max(steps, default=(-1, 0))
        return f"{step} {-index}"

    step, index = map(int, stores[0].peers.decide("newest", "", newest).split())
    return None if step < 0 else (stores[index], step)
