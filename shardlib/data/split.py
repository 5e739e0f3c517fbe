"""The held-out split: whole documents, chosen by their content."""

from collections.abc import Sequence

import numpy as np


def held_out(hashes: np.ndarray, sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Returns the hashes of the documents to hold out.

    Documents are taken in hash order while their sizes stay within `fraction` of the total. Larger
    documents are skipped; if none fits, the smallest is taken. Equal documents are taken together,
    so no document is on both sides. The choice depends neither on the order of documents nor on a
    seed. With fewer than two distinct documents, none is held out.

    Args:
        hashes: Hash of each document, `[n] uint64`.
        sizes: Size of each document in any common unit, `[n] int64`.
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
    """Returns a mask of the documents whose hash is in `chosen`, `[n] bool`."""
    return np.isin(hashes, chosen)
