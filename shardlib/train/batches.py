"""Batches and inputs of a step: checked once per structure, and moved to their shardings."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.errors import DataError, ModelError, RuleError, did_you_mean
from shardlib.paths import named_leaves, path_string
from shardlib.sharding.constrain import Scope
from shardlib.sharding.partition import place

BatchAxes = Mapping[str, tuple[str | None, ...]]


def structure(state: Any, batch: Any, inputs: tuple[Any, ...] = ()) -> Any:
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
    key = state.definition, treedef, shapes
    return (*key, _structure_of_inputs(inputs)) if inputs else key


def _structure_of_inputs(inputs: tuple[Any, ...]) -> Any:
    leaves, treedef = jax.tree.flatten(inputs)
    return treedef, tuple(
        (np.shape(x), getattr(x, "dtype", type(x)), getattr(x, "sharding", None)) for x in leaves
    )


def check_batch(batch: Any) -> None:
    """Raises `DataError` for leaves that are not arrays [batch, ...]; names all of them."""
    faults, fixes = [], {}
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
    if faults:
        raise DataError("\n".join(faults) + "\n  " + " ".join(fixes))


def _is_list_of_numbers(node: object) -> bool:
    is_list = isinstance(node, list | tuple) and bool(node)
    return is_list and all(isinstance(x, bool | int | float) for x in jax.tree.leaves(node))


_MAKE_ARRAY = (
    "Convert lists of numbers with numpy.asarray, and pass values shared by all rows as an extra "
    "input: step(state, batch, value) calls loss_fn(model, batch, rng, value)."
)


def batch_shardings(batch: Any, scope: Scope, batch_axes: BatchAxes) -> Any:
    """Returns the sharding of every leaf of a batch.

    Raises:
        DataError: If a leaf is not an array [batch, ...].
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

    def sharding(path: Any, leaf: Any) -> NamedSharding:
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


def _places_one_row(scope: Scope, axes: Any, shape: tuple[int, ...]) -> bool:
    """Returns whether the mesh fails to divide only the number of rows."""
    try:
        scope.sharding((None, *axes[1:]), shape, "activations")
        scope.sharding((axes[0],), (0,), "activations")
    except RuleError:
        return False
    return True


def input_shardings(inputs: tuple[Any, ...], scope: Scope) -> tuple[Any, ...]:
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
    elsewhere = {
        path: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x))
        for path, x in leaves.items()
        if not _is_on(x, scope) and np.shape(x)
    }
    # Patterns refer to the tree of one input, so the index of the input is not part of the path.
    by_inner: dict[str, Any] = {}
    for at in range(len(inputs)):
        inner = {p.partition("/")[2]: x for p, x in elsewhere.items() if p.split("/")[0] == str(at)}
        placed = place(inner, {}, scope.rules.of("params"), scope.mesh)
        by_inner |= {f"{at}/{path}".rstrip("/"): p.spec for path, p in placed.items()}

    def sharding(path: Any, leaf: Any) -> Any:
        if _is_on(leaf, scope):
            return leaf.sharding
        return NamedSharding(scope.mesh, by_inner.get(path_string(path), PartitionSpec()))

    return jax.tree_util.tree_map_with_path(sharding, inputs)


def _is_on(x: Any, scope: Scope) -> bool:
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == scope.mesh


def _is_numeric(x: Any) -> bool:
    if isinstance(x, bool | int | float | complex):
        return True
    return hasattr(x, "shape") and hasattr(x, "dtype") and not _is_object(x)


def _is_object(x: Any) -> bool:
    """Returns whether a value is a NumPy array of text, times or Python objects."""
    return isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "OSUMm"


@dataclasses.dataclass
class Program:
    """A jitted step that moves its arguments to their shardings.

    Arguments with other shardings are detected by the error that JAX raises, so arguments that need
    not move cost nothing. After the first move, all later arguments are inspected before the call.
    """

    jitted: Any
    placed: tuple[Any, ...]
    """The shardings of the arguments after the state."""
    moves: bool = False

    def __call__(self, state: Any, *arguments: Any) -> Any:
        if self.moves:
            return self.jitted(state, *(moved(arguments, self.placed) or arguments))
        try:
            return self.jitted(state, *arguments)
        except (TypeError, ValueError):
            new = moved(arguments, self.placed)
            if new is None:
                raise
        self.moves = True
        return self.jitted(state, *new)


def host_arrays(tree: Any) -> Any:
    """Returns a tree with torch tensors replaced by NumPy arrays that share their memory."""
    return jax.tree.map(lambda x: _from_torch(x) if _is_tensor(x) else x, tree)


def moved(tree: Any, placed: Any) -> Any | None:
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


def _moved(x: Any, sharding: Any) -> Any:
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


def _is_tensor(x: Any) -> bool:
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


def refuse_shared(state: Any, inputs: tuple[Any, ...]) -> None:
    """Raises `ModelError` for inputs that the step donates or that an earlier step donated."""
    donated = {id(x) for x in jax.tree.leaves(state)}
    for x in jax.tree.leaves(inputs):
        if not isinstance(x, jax.Array):
            continue
        if id(x) in donated:
            raise ModelError(
                f"the input {_path_of(x, inputs)} is an array of the state, which the step "
                "donates.\n  Pass a copy: jax.tree.map(jax.numpy.copy, ...)."
            )
        if x.is_deleted():
            raise ModelError(
                f"the input {_path_of(x, inputs)} was already donated to a step as part of its "
                "state.\n  Pass the state that the step returned."
            )


def _path_of(leaf: Any, tree: Any) -> str:
    return next(path for path, x in named_leaves(tree).items() if x is leaf)
