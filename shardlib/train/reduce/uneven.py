"""Groups of unequal speed: microbatch counts and the layout of rows."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int, PyTree

from shardlib.errors import ModelError
from shardlib.paths import named_leaves


def balance(seconds_per_microbatch: Sequence[float], total: int) -> tuple[int, ...]:
    """Returns the number of microbatches of each group, chosen so that all groups end together.
    Times are measured or estimated, for one microbatch on each group, in any unit.

    Each group gets at least one. Microbatches are assigned one by one to the group that would
    finish its next one first. This minimizes the time of the slowest group.

    Raises:
        ModelError: If there are fewer microbatches than groups, or a time is not positive.
    """
    seconds = [float(s) for s in seconds_per_microbatch]
    if not seconds or not all(0 < s < math.inf for s in seconds):
        raise ModelError(
            f"the groups take {', '.join(map(str, seconds)) or 'no'} seconds a microbatch, which "
            "must be positive and finite.\n  Measure every group again."
        )
    if total < len(seconds):
        raise ModelError(
            f"{total} microbatches are too few for {len(seconds)} groups: each takes at least "
            f"one.\n  Use {len(seconds)} microbatches or more."
        )
    counts = [1] * len(seconds)
    for _ in range(total - len(seconds)):
        ends = [(count + 1) * s for count, s in zip(counts, seconds, strict=True)]
        counts[ends.index(min(ends))] += 1
    return tuple(counts)


def arrange_batch(batch: PyTree, counts: Sequence[int]) -> PyTree:
    """Returns a batch laid out so that the rows of each group are in its own shard.

    Group g takes the next `counts[g] * m` rows, where m is the number of rows of one microbatch.
    Every group gets room for the largest count. Unused room repeats the first row of the batch and
    is never computed. Microbatch i of a group has its rows i, i + n, i + 2n, ... with n the largest
    count, as in `microbatch.split`. With equal counts the batch does not change.

    Args:
        batch: Pytree of arrays [sum(counts) * m, ...], of NumPy or JAX.
        counts: Microbatches of each group. For the rows of one process, the counts of its groups.

    Returns:
        Arrays [groups * max(counts) * m, ...] of the same kind.

    Raises:
        ModelError: If the number of microbatches does not divide the rows of a leaf.
    """
    check_rows(batch, sum(counts))
    if len(set(counts)) == 1:
        return batch
    return jax.tree.map(lambda x: x[arranged_rows(counts, x.shape[0] // sum(counts))], batch)


def arranged_rows(counts: Sequence[int], per_microbatch: int) -> Int[np.ndarray, " rows"]:
    """Returns the index of the plain row in each row of the arranged batch; see `arrange_batch`.
    `per_microbatch` is the rows of one microbatch of one group."""
    most = max(counts)
    rows = np.zeros((len(counts), per_microbatch, most), np.int32)
    first = 0
    for group, count in enumerate(counts):
        size = count * per_microbatch
        # Strided as in an even split, so that every group reads its rows the same way.
        rows[group, :, :count] = first + np.arange(size).reshape(per_microbatch, count)
        first += size
    return rows.reshape(-1)


def check_rows(batch: PyTree, total: int) -> None:
    """Raises `ModelError` for leaves whose first dim `total` microbatches do not divide."""
    faults = [
        f"the batch's {path or 'array'} has shape {tuple(leaf.shape)}, whose first dim "
        f"cannot be divided into {total} microbatches over all groups."
        for path, leaf in named_leaves(batch).items()
        if not leaf.shape or leaf.shape[0] % total
    ]
    if faults:
        raise ModelError("\n".join(faults) + f"\n  Choose a batch that is a multiple of {total}.")
