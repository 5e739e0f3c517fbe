"""Hashes for splits and orders, equal on every machine and library version."""

import hashlib
from collections.abc import Iterable

import numpy as np


def content_hash(content: bytes) -> int:
    """Returns a 64-bit hash of bytes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def digest(parts: Iterable[object]) -> str:
    """Returns a digest of the `repr` of plain values, as 32 hexadecimal digits."""
    return hashlib.blake2b(repr(tuple(parts)).encode(), digest_size=16).hexdigest()


def derive_seed(seed: int, *names: object) -> int:
    """Returns a 32-bit seed for one use of the run's seed, independent of its other uses."""
    return int(digest((seed, *names))[:8], 16)


def mix(values: np.ndarray, seed: int) -> np.ndarray:
    """Returns values scrambled by a seed, a bijection from `[n] uint64` to `[n] uint64`.

    Sorting by the result is a shuffle that does not depend on NumPy's generators.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014
    (the finaliser of SplitMix64).
    """
    z = np.asarray(values, np.uint64) ^ np.uint64(content_hash(seed.to_bytes(16, "little")))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def shuffled(count: int, seed: int) -> np.ndarray:
    """Returns a permutation of `range(count)`, `[count] int64`."""
    return np.argsort(mix(np.arange(count, dtype=np.uint64), seed), kind="stable")
