"""The functional view of linen modules."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.core import DenyList
from flax.errors import FlaxError
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from shardlib.errors import ModelError, did_you_mean
from shardlib.functional.calls import unbound_axis
from shardlib.functional.protocol import (
    AxesByPath,
    Inputs,
    Keys,
    Tree,
    VariableTree,
    axis_names_of,
    keys_of,
)

_INTERMEDIATES = "intermediates"


class LinenFunctional:
    """The functional view of a linen module: `merge` returns a bound module.

    Every collection that `init` makes is a parameter or state, except collections that modules only
    `sow` into. These and `intermediates` are outputs of a call. The loss reads them after it, as in
    `model.variables["intermediates"]`, and the next merge drops them.
    """

    def __init__(self, module: linen.Module, inputs: Inputs, wrt: Any = None):
        if not inputs:
            raise ModelError(
                f"{type(module).__name__} is a linen module: its parameters are known only from "
                "example inputs.\n"
                "  Pass them: inputs=(x,), as in sl.init_state(model, optimizer, inputs=(x,))."
            )
        self.name = type(module).__name__
        if not callable(module):
            raise ModelError(
                f"{self.name} is a linen module without __call__, which makes its parameters.\n"
                "  Define a __call__ that runs each layer once; a loss may call any method."
            )
        self._module = module
        self._inputs = inputs
        boxed, self.reduces_over = self._traced()
        self._sown = frozenset(
            name for name in boxed if name != "params" and self._inits_without(name)
        )
        held = {name: tree for name, tree in boxed.items() if name not in self._sown}
        self._trained = _trained(self.name, wrt, held)
        parts = self._parts(_unboxed(held))
        self._params, self._rest = map(_layout, parts)
        self._shapes = self._params.to_tree(parts[0]), self._rest.to_tree(parts[1])
        self.float32 = frozenset[str]()
        leaves = _named(held)
        self.axes: AxesByPath = {path: names for path, (_, names) in leaves.items()}
        self.kinds: Mapping[str, str] = {path: kind for path, (kind, _) in leaves.items()}
        self.frozen = frozenset(
            path
            for path, kind in self.kinds.items()
            if kind == "params" and kind not in self._trained
        )

    def _traced(self) -> tuple[dict[str, Any], frozenset[str]]:
        """Returns the abstract initial variables, and the axes over which layers reduce."""
        axes = set[str]()

        def look(fn: Any, args: Any, kwargs: Any, context: Any) -> Any:
            name = getattr(context.module, "axis_name", None)
            axes.update([name] if isinstance(name, str) else [])
            return fn(*args, **kwargs)

        try:
            with linen.intercept_methods(look):
                boxed = jax.eval_shape(self._boxed, jax.random.key(0))
        except NameError as error:
            raise unbound_axis(self.name, error) from error
        return dict(boxed), frozenset(axes)

    def _inits_without(self, collection: str) -> bool:
        """Returns whether `init` succeeds if it may not write to a collection.

        `sow` skips such a collection; a variable that cannot be made is an error.
        """
        try:
            jax.eval_shape(lambda key: self._boxed(key, collection), jax.random.key(0))
        except FlaxError:
            return False
        return True

    def _boxed(self, key: jax.Array, *closed: str) -> Any:
        def filled(x: Any) -> Any:
            return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x

        streams, mutable = self._streams(key), DenyList((_INTERMEDIATES, *closed))
        if isinstance(self._inputs, Mapping):
            named = {name: filled(x) for name, x in self._inputs.items()}
            return self._module.init(streams, **named, mutable=mutable)
        return self._module.init(streams, *map(filled, self._inputs), mutable=mutable)

    def _streams(self, key: jax.Array) -> dict[str, jax.Array]:
        # linen takes "params" for every requested stream without a key.
        return {name: jax.random.fold_in(key, i) for i, name in enumerate(("params", "dropout"))}

    def _parts(self, variables: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the trained collections, and the other collections that are kept."""
        kept = {name: tree for name, tree in variables.items() if name not in self._sown}
        return (
            {name: tree for name, tree in kept.items() if name in self._trained},
            {name: tree for name, tree in kept.items() if name not in self._trained},
        )

    def shapes(self) -> tuple[Tree, Tree]:
        return self._shapes

    def init(self, key: jax.Array) -> tuple[Tree, Tree]:
        params, rest = self._parts(_unboxed(self._boxed(key)))
        return self._params.to_tree(params), self._rest.to_tree(rest)

    def merge(self, params: Tree, model_state: Tree, key: jax.Array) -> linen.Module:
        held = {**self._params.to_variables(params), **self._rest.to_variables(model_state)}
        return self._module.bind(
            held, rngs=self._streams(key), mutable=DenyList(("params", *self._trained))
        )

    def collect(self, module: linen.Module) -> Tree:
        passed = {_INTERMEDIATES, *self._sown, *self._trained}
        held = {name: tree for name, tree in module.variables.items() if name not in passed}
        expected = set(self._rest.paths)
        kept = {path[0] for path in expected}
        collected: dict[Keys, Any] = {}
        for keys, leaf in jax.tree_util.tree_flatten_with_path(_unboxed(held))[0]:
            path = _path(keys_of(keys))
            # Sown values are usually tuples, and so outputs in a collection without state.
            if path[0] in kept or not any(hasattr(key, "idx") for key in keys):
                collected[path] = leaf
        if changed := collected.keys() ^ expected:
            raise ModelError(
                f"the call of {self.name} added or removed variables: "
                f"{', '.join(sorted('/'.join(path) for path in changed))}.\n"
                "  Make them whenever the module is initialised, with a fixed shape, or sow "
                "them into the collection 'intermediates'."
            )
        return self._rest.to_tree([collected[path] for path in self._rest.paths])


def _trained(model: str, wrt: Any, held: Mapping[str, Any]) -> frozenset[str]:
    names = ("params",) if wrt is None else (wrt,) if isinstance(wrt, str) else wrt
    is_names = isinstance(names, tuple | list | set | frozenset)
    if not is_names or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"wrt is {wrt!r}, but {model} is a linen module.\n"
            f"  Name collections of its variables, as in wrt='params': {', '.join(held)}."
        )
    unknown = [name for name in names if name not in held]
    if unknown and wrt is not None:
        raise ModelError(
            f"wrt names {', '.join(map(repr, unknown))}, but the collections of {model} are "
            f"{', '.join(held) or 'none'}.{did_you_mean(unknown[0], held)}\n  Name some of these."
        )
    return frozenset(names)


def _path(keys: Keys) -> Keys:
    """Returns the path of a variable, without the name of the collection of parameters."""
    return keys[1:] if keys[0] == "params" else keys


def _layout(variables: PyTree) -> VariableTree:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(variables)
    return VariableTree(treedef, tuple(_path(keys_of(path)) for path, _ in leaves))


def _named(boxed: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Returns the collection and the logical axes of each leaf by path."""
    names_by_path: dict[str, tuple[str, Any]] = {}
    leaves, _ = jax.tree_util.tree_flatten_with_path(boxed, is_leaf=_is_box)
    for keys, box in leaves:
        path, collection = "/".join(_path(keys_of(keys))), keys_of(keys)[0]
        # Linen reads names as a PartitionSpec: its attention reshapes a kernel after naming dims.
        spec = PartitionSpec(*box.names) if _is_box(box) else None
        names = None if spec is None else axis_names_of(spec, np.ndim(box.value))
        if path in names_by_path:
            raise ModelError(
                f"{path} is a parameter, and a variable of the collection "
                f"{collection!r}.\n  Rename the submodule or the collection."
            )
        names_by_path[path] = collection, names
    return names_by_path


def _is_box(node: object) -> bool:
    return isinstance(node, linen.meta.AxisMetadata) and hasattr(node, "names")


def _unboxed(variables: PyTree) -> PyTree:
    # The box's own `unbox` would constrain its value by linen's rules wherever a mesh is set.
    return jax.tree.map(
        lambda node: node.value if _is_box(node) else node, variables, is_leaf=_is_box
    )
