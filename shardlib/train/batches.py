"""Batches and inputs of a step: checked once per structure, and moved to their shardings."""

import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from shardlib.errors import DataError, RuleError, did_you_mean
from shardlib.losses.microbatch import split
from shardlib.losses.signature import Inputs
from shardlib.paths import named_leaves, path_string
from shardlib.sharding.constrain import Scope
from shardlib.sharding.partition import place
from shardlib.train.state import Definition

BatchAxes: TypeAlias = Mapping[str, tuple[str | None, ...]]
"""Logical axes of batch leaves by path."""


def structure(definition: Definition, batch: PyTree, inputs: Inputs = ()) -> tuple[Any, ...]:
    """Returns the cache key of a program: the definition of the state, the structure, shapes and
    dtypes of the batch, and the structure, shapes, dtypes and shardings of the inputs.

    Raises:
        DataError: If a leaf of the batch is not an array. The message names all such leaves.
    """
    leaves, treedef = jax.tree.flatten(batch)
    try:
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    except AttributeError:
        check_batch(batch)
        raise
    if not inputs:
        return definition, treedef, shapes
    leaves, inputs_def = jax.tree.flatten(inputs)
    kinds = tuple(
        (np.shape(x), getattr(x, "dtype", type(x)), getattr(x, "sharding", None)) for x in leaves
    )
    return definition, treedef, shapes, inputs_def, kinds


def axes_of_leaves(batch_axes: BatchAxes | None) -> dict[str, tuple[str | None, ...]]:
    """Returns the argument `batch_axes` of a step as a dict; raises `RuleError` for other types."""
    axes = {} if batch_axes is None else batch_axes
    if isinstance(axes, Mapping) and all(isinstance(x, tuple | list) for x in axes.values()):
        return {path: tuple(names) for path, names in axes.items()}
    raise RuleError(
        f"batch_axes is {axes!r}, expected a dict with a tuple of logical axes for each leaf.\n"
        "  Write it as batch_axes={'tokens': ('batch', 'length')}."
    )


def check_batch(batch: PyTree) -> None:
    """Raises `DataError` for leaves that are not arrays [batch, ...], naming all of them, and for a
    batch without rows. Leaves may differ in their rows, as nodes and edges of graphs do."""
    faults, fixes, rows = [], {}, []
    for path, leaf in named_leaves(batch, is_leaf=_is_list_of_numbers).items():
        name = f"the batch's {path}" if path else "the batch"
        if isinstance(leaf, str | bytes) or _is_object(leaf):
            faults.append(f"{name} is text or an object ({type(leaf).__name__}).")
            fixes["Remove everything that is not a number from the batch."] = True
        elif not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            faults.append(f"{name} is a Python {type(leaf).__name__}, not an array [batch, ...].")
            fixes[_MAKE_ARRAY] = True
        elif not tuple(leaf.shape):
            faults.append(f"{name} is a scalar, which has no rows.")
            fixes[_MAKE_ARRAY] = True
        else:
            rows.append(leaf.shape[0])
    if rows and not any(rows):
        faults.append("no leaf of the batch has a row.")
        fixes["Leave out empty batches."] = True
    if faults:
        raise DataError("\n".join(faults) + "\n  " + " ".join(fixes))


def _is_list_of_numbers(node: object) -> bool:
    is_list = isinstance(node, list | tuple) and bool(node)
    return is_list and all(isinstance(x, bool | int | float) for x in jax.tree.leaves(node))


_MAKE_ARRAY = (
    "Convert lists of numbers with numpy.asarray, and pass values shared by all rows as an extra "
    "input: step(state, batch, value) calls loss_fn(model, batch, rng, value)."
)


def batch_shardings(batch: PyTree, scope: Scope, batch_axes: BatchAxes) -> PyTree:
    """Returns the sharding of every leaf of a batch.

    Raises:
        DataError: If a leaf is not an array [batch, ...], or none has a row.
        RuleError: If the rules cannot place a leaf, for example because the mesh does not divide
            the batch, or if `batch_axes` names a leaf that does not exist.
    """
    check_batch(batch)
    paths = named_leaves(batch)
    unknown = [name for name in batch_axes if name not in paths]
    if unknown:
        raise RuleError(
            f"batch_axes names {', '.join(map(repr, unknown))}, but the batch holds "
            f"{', '.join(paths)}.{did_you_mean(unknown[0], paths)}\n  Name leaves of the batch."
        )
    if scope.rules.names is not None:
        batch_axes = {}  # Found rules have no names of this model: they cut rows alone.

    def sharding(path: KeyPath, leaf: jax.Array) -> NamedSharding:
        rank = len(leaf.shape)
        axes = batch_axes.get(path_string(path), ("batch", *[None] * (rank - 1))[:rank])
        shape = tuple(leaf.shape)
        try:
            return scope.sharding(axes, shape, "activations")
        except RuleError as error:
            if axes[0] is None or not _places_one_row(scope, axes, shape):
                raise
            problem = str(error).partition("\n")[0]
            raise RuleError(
                f"the batch's {path_string(path) or 'array'}: {problem}\n"
                "  Drop a smaller last batch (drop_last=True in most loaders) or pad it, choose "
                "another batch size, or change the mesh or the rules of the batch."
            ) from None

    return jax.tree_util.tree_map_with_path(sharding, batch)


def microbatch_shapes(batch: PyTree, microbatches: int) -> PyTree:
    """Returns one microbatch of a batch as `ShapeDtypeStruct`s.

    Raises:
        ModelError: If the number of microbatches does not divide the rows.
    """
    return jax.eval_shape(
        lambda whole: jax.tree.map(lambda x: x[0], split(whole, microbatches)), batch
    )


def _places_one_row(scope: Scope, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> bool:
    """Returns whether the mesh fails to divide only the number of rows."""
    try:
        scope.sharding((None, *axes[1:]), shape, "activations")
        scope.sharding((axes[0],), (0,), "activations")
    except RuleError:
        return False
    return True


def input_shardings(inputs: Inputs, scope: Scope) -> tuple[Any, ...]:
    """Returns the sharding of every leaf of the extra inputs.

    Arrays on the mesh keep their sharding. Other arrays are placed like parameters without
    metadata, by the path patterns of the rules or else by `auto`. Scalars are replicated.

    Raises:
        DataError: If a leaf is not a number or an array.
        RuleError: If the rules cannot place a leaf.
    """
    leaves = named_leaves(inputs)
    wrong = [path for path, x in leaves.items() if not _is_numeric(x)]
    if wrong:
        raise DataError(
            f"extra inputs of the step are not numbers or arrays: "
            f"{', '.join(f'{path} ({type(leaves[path]).__name__})' for path in wrong)}.\n"
            "  Pass pytrees of arrays, such as the parameters of a model or a whole state."
        )
    return tuple(_placed_input(tree, scope) for tree in inputs)


def _placed_input(tree: PyTree, scope: Scope) -> PyTree:
    # Patterns refer to the tree of one input, so the index of the input is not part of the path.
    elsewhere = {
        path: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x))
        for path, x in named_leaves(tree).items()
        if not _is_on(x, scope) and np.shape(x)
    }
    placed = place(elsewhere, {}, scope.rules.of("params"), scope.mesh)

    def sharding(path: KeyPath, leaf: Any) -> Sharding:
        if _is_on(leaf, scope):
            return leaf.sharding
        name = path_string(path)
        spec = placed[name].spec if name in placed else PartitionSpec()
        return NamedSharding(scope.mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _is_on(x: object, scope: Scope) -> bool:
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == scope.mesh


def _is_numeric(x: object) -> bool:
    if isinstance(x, bool | int | float | complex):
        return True
    return hasattr(x, "shape") and hasattr(x, "dtype") and not _is_object(x)


def _is_object(x: object) -> bool:
    """Returns whether a value is a NumPy array of text, times or Python objects."""
    return isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "OSUMm"


def host_arrays(tree: PyTree) -> PyTree:
    """Returns a tree with torch tensors replaced by NumPy arrays that share their memory."""
    return jax.tree.map(lambda x: _from_torch(x) if _is_tensor(x) else x, tree)


def moved(tree: PyTree, placed: PyTree) -> PyTree | None:
    """Returns a tree of arrays with the given shardings, or None if none has to move.

    torch tensors on the CPU become arrays with the same bits.

    Raises:
        DataError: If an array cannot be moved.
    """
    leaves, treedef = jax.tree.flatten(tree)
    shardings = treedef.flatten_up_to(placed)
    new = [_moved(*pair) for pair in zip(leaves, shardings, strict=True)]
    if all(x is old for x, old in zip(new, leaves, strict=True)):
        return None
    return treedef.unflatten(new)


def _moved(x: Any, sharding: Sharding) -> Any:
    if _is_tensor(x):
        return _from_torch(x)
    if not isinstance(x, jax.Array) or not x.committed:
        return x
    if x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    try:
        return jax.device_put(x, sharding)
    except ValueError as error:
        raise DataError(
            f"an array of shape {x.shape} on {x.sharding} cannot be moved to {sharding}: "
            f"{str(error).partition(chr(10))[0]}\n"
            "  Pass host arrays, or arrays on the devices of the mesh."
        ) from None


def _is_tensor(x: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _from_torch(x: Any) -> np.ndarray:
    try:
        x = x.detach()
        if str(x.dtype) == "torch.bfloat16":  # NumPy has no bfloat16.
            return x.view(sys.modules["torch"].uint16).numpy().view(jnp.bfloat16)
        return x.numpy()
    except (TypeError, RuntimeError) as error:
        raise DataError(
            f"a torch tensor of dtype {x.dtype} on {x.device} cannot be read: {error}\n"
            "  Give tensors on the CPU, or NumPy arrays."
        ) from None
