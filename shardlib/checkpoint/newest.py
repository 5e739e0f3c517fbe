"""The newest checkpoint that validates, of one directory or of several."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardlib.checkpoint.damage import DamageError
from shardlib.checkpoint.manifest import Manifest, Partial
from shardlib.errors import CheckpointError

if TYPE_CHECKING:
    from shardlib.checkpoint.store import RunCheckpoints

Accept = Callable[[Manifest], bool | None]
"""Sees a manifest before any array is read: False passes the checkpoint over, what it raises ends
the search."""


def restore_newest(
    stores: Sequence["RunCheckpoints"], target: Any, accept: Accept, partial: Partial
) -> tuple[Manifest, Any] | None:
    """Restores the newest step that validates; sets aside those newer ones that do not.

    Args:
        stores: Where to look. Of two checkpoints of one step, that of the first store is taken.
        target: As of `RunCheckpoints.restore`.
        accept: Which checkpoints would do; see `Accept`.
        partial: As of `RunCheckpoints.restore`.

    Returns:
        The manifest and the state; None if there is no checkpoint but those that are passed over.

    Raises:
        CheckpointError: If there are checkpoints and none of them validates; all are left in place.
            Or if the newest one is of another model, or of a later format, or one is a symbolic
            link.
    """
    damaged: list[tuple[RunCheckpoints, int]] = []
    passed_over: list[tuple[RunCheckpoints, int]] = []
    while (choice := _next(stores, [*damaged, *passed_over])) is not None:
        store, step = choice
        try:
            found = store.restore_accepted(step, target, accept, partial=partial)
        except DamageError as error:
            reason = str(error).rpartition("\n")[0]  # The last line says what is done here.
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
    """Returns the newest checkpoint that has not been tried, the same on every process."""

    def newest(_: list[str]) -> str:
        for store in stores:
            for step in store.links():  # To go on from one before it would lose what it leads to.
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
