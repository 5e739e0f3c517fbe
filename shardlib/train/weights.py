"""Initial weights given by the user: checked together, then copied onto their shards."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from shardlib.errors import ModelError, did_you_mean
from shardlib.functional import FunctionalModule
from shardlib.paths import matches, named_leaves
from shardlib.sharding.partition import weights_by_path


def place_weights(
    module: FunctionalModule,
    expected: Mapping[str, jax.ShapeDtypeStruct],
    weights: PyTree,
    fresh: Sequence[str] = (),
    *,
    donate: bool = False,
) -> dict[str, jax.Array]:
    """Returns weights, as in the `params` of `init_state`, by path, each on its shards.

    `expected` is every leaf of `params` and `model_state`, with its sharding. Weights may leave out
    parameters whose paths match the patterns `fresh`. Without `donate`, weights that lie on their
    shards are copied.

    Raises:
        ModelError: If a weight is missing, unknown, or has another type, shape or dtype, or a
            pattern matches nothing. The message lists all of them, and nothing is allocated.
    """
    given = _by_path(weights)
    made = {path: leaf for tree in module.shapes() for path, leaf in named_leaves(tree).items()}
    params = {*named_leaves(module.shapes()[0]), *module.frozen}
    has_state = any(path in given for path in made if path not in params)
    # Model state is given completely or not at all.
    required = [path for path in made if has_state or path in params]
    skipped = {path for path in required for pattern in fresh if matches(pattern, path)}
    missing = [path for path in required if path not in given and path not in skipped]
    extra = [path for path in given if path not in made]
    unused = [pattern for pattern in fresh if not any(matches(pattern, path) for path in required)]
    faults = [
        *(f"{path}: missing." for path in missing),
        *(f"{path}: not a weight of the model.{did_you_mean(path, missing)}" for path in extra),
        *(
            f"{path}: given in params and also matched by fresh."
            for path in sorted(skipped & given.keys())
        ),
        *(f"fresh={pattern!r} matches no parameter." for pattern in unused),
    ]
    for path in given.keys() & made.keys():
        dtypes = {np.dtype(made[path].dtype), np.dtype(expected[path].dtype)}
        faults += _leaf_faults(path, given[path], made[path].shape, dtypes)
    if faults:
        raise ModelError(
            "\n".join(faults) + f"\n  Give every weight of {module.name} under its path, with its "
            "shape and dtype (cast with x.astype), and list patterns of weights to initialise: "
            'fresh=("head/**",).'
        )
    return {path: _placed(leaf, expected[path], donate) for path, leaf in given.items()}


def _by_path(weights: PyTree) -> dict[str, Any]:
    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights)
    if isinstance(weights, nnx.State):
        weights = nnx.filter_state(weights, nnx.Not(nnx.Any(nnx.RngState, nnx.Intermediate)))
    return {leaf.path: leaf.value for leaf in weights_by_path(weights)}


def _leaf_faults(
    path: str, leaf: object, shape: tuple[int, ...], dtypes: Collection[np.dtype]
) -> list[str]:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
        return [f"{path}: a {kind}, expected an array of numpy or JAX."]
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return [f"{path}: a donated or deleted array, expected an array in memory."]
    faults = []
    if tuple(leaf.shape) != tuple(shape):
        faults.append(f"{path}: shape {tuple(leaf.shape)}, expected {tuple(shape)}.")
    if leaf.dtype not in dtypes:
        expected = " or ".join(sorted(map(str, dtypes)))
        faults.append(f"{path}: dtype {leaf.dtype}, expected {expected}.")
    return faults


def _placed(leaf: jax.Array | np.ndarray, like: jax.ShapeDtypeStruct, donate: bool) -> jax.Array:
    """Returns a weight on its shards, and a copy unless it is given away: a step donates the state.

    If the sharding spans processes, each process copies its own shards out of its full array.
    """
    sharding: Any = like.sharding
    if (
        donate
        and isinstance(leaf, jax.Array)
        and leaf.dtype == like.dtype
        and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    ):
        return leaf
    is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if is_global or sharding.is_fully_addressable:
        placed = jax.device_put(leaf, sharding, may_alias=False)
    else:
        whole = np.asarray(leaf)
        placed = jax.make_array_from_callback(
            whole.shape, sharding, lambda index: np.array(whole[index])
        )
    # A shard on the device that already held the array may alias it despite `may_alias=False`.
    return jnp.array(placed, like.dtype, copy=isinstance(leaf, jax.Array))
