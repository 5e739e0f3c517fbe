"""Conversion of pytrees to plain nested dicts of arrays with stable string keys, and back.

A checkpoint must outlive the Python classes of its state: optax renames a NamedTuple, a model
moves to another module, a reader has only numpy. The stored tree therefore has no classes. Fields,
dict keys and positions become string keys, and containers without leaves (`None`,
`optax.EmptyState`, `optax.MaskedNode`) vanish. The target of a restore supplies the classes.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree

from shardlib.errors import CheckpointError
from shardlib.paths import key_string

FORBIDDEN = "./"
# The dtypes that both numpy (with ml_dtypes) and TensorStore support.
STORABLE = (
    *("bool", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
Leaf = Any
"""A leaf of a state: an array, a typed PRNG key, a number or a `jax.ShapeDtypeStruct`."""
_KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """Shape and dtype of one leaf; a typed PRNG key has the dtype `key<fry>` or the like."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def flatten(tree: PyTree) -> dict[str, Leaf]:
    """Returns the leaves of a tree by path (`params/layers/kernel`), in tree order.

    Raises:
        CheckpointError: If a key is empty or contains `.`, `/` or an unprintable character, or two
            keys of one container have the same text (`1` and `"1"`); every such key is listed.
            Also if the tree is a bare leaf, which has no path.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    paths = [tuple(key_string(key) for key in path) for path, _ in leaves]
    if paths == [()]:
        raise CheckpointError(
            f"a checkpoint holds a tree, not a bare {type(tree).__name__}.\n"
            "  Put the value in a dict: {'value': ...}."
        )
    faults = _faulty_keys(paths)
    if faults:
        raise CheckpointError(
            "keys of the tree cannot be stored:\n"
            + "".join(f"  {fault}\n" for fault in faults)
            + f"  Rename them: keys are printable, not empty, without {' or '.join(FORBIDDEN)}, "
            "and differ as text."
        )
    return {"/".join(path): leaf for path, (_, leaf) in zip(paths, leaves, strict=True)}


def leaf_spec(leaf: Leaf) -> LeafSpec:
    """Returns the shape and dtype of an array, a scalar or a `jax.ShapeDtypeStruct`."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return LeafSpec(tuple(leaf.shape), str(leaf.dtype))


def dtype_of(spec: LeafSpec) -> np.dtype:
    """Returns the dtype that a spec names, including PRNG key dtypes.

    Raises:
        CheckpointError: If it is a PRNG key dtype that this JAX does not know.
    """
    if not spec.dtype.startswith("key<"):
        return np.dtype(spec.dtype)
    for impl in _KEY_IMPLS:
        dtype = jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype
        if str(dtype) == spec.dtype:
            return dtype
    raise CheckpointError(
        f"{spec.dtype} is not a PRNG key dtype of {', '.join(_KEY_IMPLS)}.\n"
        "  Restore into your own target, with keys of that type."
    )


def is_storable_path(path: str) -> bool:
    """Whether `flatten` may return a path."""
    return path.isprintable() and "." not in path and all(path.split("/"))


def is_key(leaf: Leaf) -> bool:
    """Whether a leaf is an array of typed PRNG keys, or describes one."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def sharding_of(leaf: Leaf) -> Sharding | None:
    """Returns the sharding of a leaf; None for numpy arrays, numbers and structs without one."""
    return getattr(leaf, "sharding", None)


def check_leaves(leaves: Mapping[str, Leaf]) -> None:
    """Rejects leaves that are not arrays or numbers of a storable dtype.

    Raises:
        CheckpointError: If a leaf is a string, an object, or of another dtype; all are listed.
    """
    faults = [
        f"{path}: {type(leaf).__name__} of {leaf_spec(leaf).dtype}"
        for path, leaf in leaves.items()
        if not is_key(leaf) and leaf_spec(leaf).dtype not in STORABLE
    ]
    if faults:
        raise CheckpointError(
            "leaves of the tree cannot be stored:\n"
            + "".join(f"  {fault}\n" for fault in faults)
            + f"  Cast them to one of {', '.join(STORABLE)}, or keep them in static fields."
        )


def _faulty_keys(paths: Iterable[tuple[str, ...]]) -> list[str]:
    """Returns one text for each key that cannot be stored."""
    faults: dict[str, None] = {}
    leaves: set[tuple[str, ...]] = set()
    branches: set[tuple[str, ...]] = set()
    for path in paths:
        for depth, key in enumerate(path):
            where = "/".join(path[:depth]) or "the root"
            if not key:
                faults[f"an empty key below {where}"] = None
            elif not key.isprintable() or any(mark in key for mark in FORBIDDEN):
                faults[f"{key!r} below {where}"] = None
        if path in leaves or path in branches or any(path[:n] in leaves for n in range(len(path))):
            faults[f"{'/'.join(path)}: two keys with this text"] = None
        leaves.add(path)
        branches.update(path[:n] for n in range(len(path)))
    return list(faults)
