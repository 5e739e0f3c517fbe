"""The held-out split: whole documents, chosen by their content."""

from collections.abc import Sequence

import numpy as np


def held_out(hashes: np.ndarray, sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Returns the hashes of the documents to hold out.

    Documents are taken in order of their hash while their sizes stay within `fraction` of the
    whole; larger ones are passed over, and where none fits, the smallest is taken. Equal documents
    are taken together, so no document is on both sides. The choice depends neither on the order of
    documents nor on a seed. With fewer than two different documents, none can be held out.

    Args:
        hashes: Of each document, `[n] uint64`.
        sizes: Of each document, in any one unit, `[n] int64`.
        fraction: Share of the sum of sizes, in [0, 1).

    Returns:
        Sorted hashes, `[m] uint64`.
    """
    distinct, first, copies = np.unique(hashes, return_index=True, return_counts=True)
    if fraction == 0 or len(distinct) < 2:
        return distinct[:0]
    weights = sizes[first] * copies
    budget = fraction * weights.sum()
    candidates = np.flatnonzero(weights <= budget)
    taken = candidates[np.cumsum(weights[candidates]) <= budget]
    if not len(taken):
        taken = np.argsort(weights, kind="stable")[:1]
    return distinct[taken]


def union(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the sorted distinct hashes of several sets, `[n] uint64`."""
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *parts]))


def is_in(hashes: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Returns whether each document is among the chosen ones, `[n] bool`."""
    return np.isin(hashes, chosen)
