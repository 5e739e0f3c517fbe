"""One functional view of NNX and linen modules.

A module is split once into plain nested dicts of arrays with string keys: `params` (trained) and
`model_state` (what a forward pass updates, such as batch statistics). Inside of a traced step
`merge` gives back a module to call, and `collect` what it updated. The state of random number
generators is kept nowhere: `merge` derives it from a key, so that a step's randomness depends on
that key alone and neither on the mesh nor on how often the module ran before.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from shardlib.errors import ModelError
from shardlib.paths import key_string, path_string

Tree = dict[str, Any]
AxesByPath = dict[str, tuple[str | None, ...] | None]
Inputs = tuple[Any, ...] | Mapping[str, Any]


class FunctionalModule(Protocol):
    """A module apart from its arrays. `axes` holds the logical axes of each leaf of `params` and
    `model_state` by path; `None` for a leaf that names none. `float32` holds the paths of the
    parameters that are not to be rounded: NNX variables with the metadata `float32=True`."""

    axes: AxesByPath
    float32: frozenset[str]

    def init(self, key: jax.Array) -> tuple[Tree, Tree]:
        """Returns fresh `(params, model_state)`; meant to be traced."""
        ...

    def merge(self, params: Tree, model_state: Tree, key: jax.Array) -> Any:
        """Returns the module over these arrays, its random streams derived from `key`."""
        ...

    def collect(self, module: Any) -> Tree:
        """Returns the `model_state` of a merged module, after calls."""
        ...


def functional(make: Any, inputs: Inputs = ()) -> FunctionalModule:
    """Returns the functional view of a module, without allocating an array.

    Args:
        make: `make(rngs) -> module` for an NNX or linen module, or a linen module itself.
        inputs: For linen, example arguments of its `__call__` (arrays or `ShapeDtypeStruct`s): a
            tuple, or a dict of keyword arguments.

    Raises:
        ModelError: If `make` returns neither kind of module, a linen module comes without inputs,
            or an NNX module holds arrays outside of its variables.
    """
    if isinstance(make, linen.Module):
        return LinenFunctional(make, inputs)
    if isinstance(make, nnx.Module):
        raise ModelError(
            f"{type(make).__name__} is an NNX module that already holds its arrays on one device.\n"
            "  Pass a function that makes it, `lambda rngs: Model(..., rngs=rngs)`, or place what "
            "is in memory with `sl.shard(model)`."
        )
    made: list[Any] = []

    def trace(key: jax.Array) -> None:
        module = _make(make, key)
        made.append(NnxFunctional(make, module) if isinstance(module, nnx.Module) else module)

    jax.eval_shape(trace, jax.random.key(0))
    if isinstance(made[0], NnxFunctional):
        return made[0]
    if isinstance(made[0], linen.Module):
        return LinenFunctional(made[0], inputs)
    raise ModelError(
        f"the model function returned {type(made[0]).__name__}, which is no Flax module.\n"
        "  Return an `nnx.Module` or a `flax.linen.Module`."
    )


def _make(make: Callable[[nnx.Rngs], Any], key: jax.Array) -> Any:
    # NNX would read logical names as mesh axes and place every variable as it is made.
    with nnx.use_eager_sharding(False):
        return make(nnx.Rngs(key))


def _nested(flat: Mapping[tuple[str, ...], Any]) -> Tree:
    tree: Tree = {}
    for path, leaf in flat.items():
        *parents, name = path
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def _lookup(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The structure of an `nnx.State` and the path of each of its leaves."""

    treedef: Any
    paths: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, state: Any) -> "_Layout":
        variables, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_variable)
        paths = []
        for path, variable in variables:
            leaves, _ = jax.tree_util.tree_flatten_with_path(variable.get_value())
            prefix = tuple(key_string(key) for key in path)
            paths += [(*prefix, *(key_string(key) for key in inner)) for inner, _ in leaves]
        return cls(jax.tree.structure(state), tuple(paths))

    def to_tree(self, state: Any) -> Tree:
        return _nested(dict(zip(self.paths, jax.tree.leaves(state), strict=True)))

    def to_state(self, tree: Tree) -> Any:
        return jax.tree.unflatten(self.treedef, [_lookup(tree, path) for path in self.paths])


class NnxFunctional:
    """The functional view of an NNX module."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], module: nnx.Module):
        """Args: what makes the module, and one that it made, whose arrays may be traced."""
        _refuse_loose_arrays(module)
        self._make = make
        self._graphdef, params, rngs, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
        self._params, self._rest = _Layout.of(params), _Layout.of(rest)
        self._rngs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rngs)
        self.axes: AxesByPath = {**_nnx_axes(params), **_nnx_axes(rest)}
        self.float32 = frozenset(
            p for p, is_kept in _metadata(params, "float32").items() if is_kept
        )

    def init(self, key: jax.Array) -> tuple[Tree, Tree]:
        _, params, _, rest = nnx.split(_make(self._make, key), nnx.Param, nnx.RngState, ...)
        return self._params.to_tree(params), self._rest.to_tree(rest)

    def merge(self, params: Tree, model_state: Tree, key: jax.Array) -> nnx.Module:
        leaves, treedef = jax.tree.flatten(self._rngs)
        fresh = [_fresh_rng(leaf, key, i) for i, leaf in enumerate(leaves)]
        return nnx.merge(
            self._graphdef,
            self._params.to_state(params),
            jax.tree.unflatten(treedef, fresh),
            self._rest.to_state(model_state),
        )

    def collect(self, module: nnx.Module) -> Tree:
        # What a module sows during a call is an output of that call, not state.
        kept = nnx.Not(nnx.Any(nnx.Param, nnx.RngState, nnx.Intermediate))
        rest = nnx.state(module, kept)
        layout = _Layout.of(rest)
        if layout.paths != self._rest.paths:
            new = sorted("/".join(path) for path in set(layout.paths) ^ set(self._rest.paths))
            raise ModelError(
                f"the call of {type(module).__name__} added or removed variables: "
                f"{', '.join(new)}.\n  Make them in __init__, with the shape they keep."
            )
        return layout.to_tree(rest)


def _fresh_rng(template: jax.ShapeDtypeStruct, key: jax.Array, index: int) -> jax.Array:
    """A key for each key variable (one for each layer of a stack); a zero for each counter."""
    if not jnp.issubdtype(template.dtype, jax.dtypes.prng_key):
        return jnp.zeros(template.shape, template.dtype)
    key = jax.random.fold_in(key, index)
    return jax.random.split(key, template.shape) if template.shape else key


def _refuse_loose_arrays(module: nnx.Module) -> None:
    """An array outside of a variable would be a constant of the compiled step, and untrained."""
    loose = [
        "/".join(str(part) for part in path)
        for path, node in nnx.iter_graph(module)
        if isinstance(node, jax.Array | np.ndarray)
    ]
    if loose:
        raise ModelError(
            f"{type(module).__name__} holds arrays outside of variables: {', '.join(loose)}.\n"
            "  Wrap each in nnx.Param (trained) or nnx.Variable (not trained)."
        )


def _nnx_axes(state: Any) -> AxesByPath:
    names = _metadata(state, "out_sharding")
    return {path: None if axes is None else tuple(axes) for path, axes in names.items()}


def _metadata(state: Any, key: str) -> dict[str, Any]:
    """What the variables of an `nnx.State` say under a key, by the path of each of their leaves."""
    found = {}
    variables, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_variable)
    for path, variable in variables:
        said = variable.get_metadata().get(key)
        for inner, _ in jax.tree_util.tree_flatten_with_path(variable.get_value())[0]:
            found[path_string((*path, *inner))] = said
    return found


class LinenFunctional:
    """The functional view of a linen module: `merge` gives a bound module."""

    def __init__(self, module: linen.Module, inputs: Inputs):
        if not inputs:
            raise ModelError(
                f"{type(module).__name__} is a linen module: its parameters are known only from "
                "example inputs.\n"
                "  Pass them: sl.init_state(model, optimizer, inputs=(x,))."
            )
        self._module = module
        self._inputs = inputs
        boxed = jax.eval_shape(self._boxed, jax.random.key(0))
        self.float32 = frozenset[str]()
        self._state_names = [name for name in boxed if name != "params"]
        self.axes: AxesByPath = {}
        for collection, tree in boxed.items():
            leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_box)
            for path, leaf in leaves:
                names = tuple(leaf.names) if _is_box(leaf) else None
                inside = () if collection == "params" else (jax.tree_util.DictKey(collection),)
                self.axes[path_string((*inside, *path))] = names

    def _boxed(self, key: jax.Array) -> Any:
        def filled(x: Any) -> Any:
            return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x

        streams = self._streams(key)
        if isinstance(self._inputs, Mapping):
            named = {name: filled(x) for name, x in self._inputs.items()}
            return self._module.init(streams, **named)
        return self._module.init(streams, *map(filled, self._inputs))

    def _streams(self, key: jax.Array) -> dict[str, jax.Array]:
        # linen takes "params" for every stream that a module asks for and that has no key.
        return {name: jax.random.fold_in(key, i) for i, name in enumerate(("params", "dropout"))}

    def init(self, key: jax.Array) -> tuple[Tree, Tree]:
        variables = dict(jax.tree.map(_unboxed, self._boxed(key), is_leaf=_is_box))
        return variables.pop("params", {}), variables

    def merge(self, params: Tree, model_state: Tree, key: jax.Array) -> linen.Module:
        return self._module.bind(
            {"params": params, **model_state},
            rngs=self._streams(key),
            mutable=list(model_state) or False,
        )

    def collect(self, module: linen.Module) -> Tree:
        # A collection that only a call makes, by `sow`, is an output of that call, not state.
        return {name: module.variables[name] for name in self._state_names}


def _is_box(node: Any) -> bool:
    return isinstance(node, linen.meta.AxisMetadata) and hasattr(node, "names")


def _unboxed(node: Any) -> Any:
    # The box's own `unbox` would constrain its value by linen's rules wherever a mesh is set.
    return node.value if _is_box(node) else node
