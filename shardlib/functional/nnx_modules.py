"""The functional view of NNX modules."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import PyTree

from shardlib.errors import ModelError
from shardlib.functional.protocol import AxesByPath, Tree, VariableTree, axis_names_of, keys_of

Make = Callable[[nnx.Rngs], Any]

_LOG = logging.getLogger(__name__)


def made_by(make: Make, key: jax.Array) -> Any:
    """Returns the module that a function makes from a key."""
    # NNX would read logical names as mesh axes and place every new variable by them.
    with nnx.use_eager_sharding(False):
        module = make(nnx.Rngs(key))
    _mark_loose_arrays(module)
    return module


class NnxFunctional:
    """The functional view of an NNX module."""

    def __init__(self, module: nnx.Module, wrt: Any = None, make: Make | None = None):
        """Inspects a module, whose arrays may be traced and are not kept. `wrt` filters the
        variables to train, by default `nnx.Param`; `make` made the module, or is None for one in
        memory."""
        _tell_of_loose_arrays(module)
        if make is not None:
            _refuse_placed_arrays(module)
        self.name = type(module).__name__
        self._make = make
        self._trained = _trained(wrt)
        self._graphdef, params, rngs, rest = self._split(module)
        self._params, self._rest = _layout(params), _layout(rest)
        self._rngs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rngs)
        trees = self._params.to_tree(params), self._rest.to_tree(rest)
        self._shapes = jax.eval_shape(lambda trees: trees, trees)
        self.axes: AxesByPath = {**_axes(params), **_axes(rest)}
        self.kinds: Mapping[str, str] = {**_of_each(params, _kind), **_of_each(rest, _kind)}
        self.frozen = frozenset(p for p, is_param in _of_each(rest, _is_param).items() if is_param)
        kept = {**_of_each(params, _keeps_float32), **_of_each(rest, _keeps_float32)}
        self.float32 = frozenset(path for path, is_kept in kept.items() if is_kept)
        self.reduces_over = frozenset(
            name
            for _, node in nnx.iter_graph(module)
            if isinstance(node, nnx.Module)
            and isinstance(name := getattr(node, "axis_name", None), str)
        )

    def _split(self, module: nnx.Module) -> tuple[Any, ...]:
        return nnx.split(module, self._trained, nnx.RngState, ...)

    def shapes(self) -> tuple[Tree, Tree]:
        return self._shapes

    def init(self, key: jax.Array) -> tuple[Tree, Tree]:
        if self._make is None:
            raise ModelError(
                f"{self.name} was given as a module in memory, which cannot be remade.\n"
                "  Place its arrays with sl.init_state(model, optimizer) or "
                "sl.materialize(abstract, params=model), or pass the function that makes it."
            )
        _, params, _, rest = self._split(made_by(self._make, key))
        return self._params.to_tree(params), self._rest.to_tree(rest)

    def merge(self, params: Tree, model_state: Tree, key: jax.Array) -> nnx.Module:
        leaves, treedef = jax.tree.flatten(self._rngs)
        fresh = [_fresh_rng(leaf, key, i) for i, leaf in enumerate(leaves)]
        return nnx.merge(
            self._graphdef,
            self._params.to_variables(params),
            jax.tree.unflatten(treedef, fresh),
            self._rest.to_variables(model_state),
        )

    def collect(self, module: nnx.Module) -> Tree:
        # Values that a module sows during a call are outputs of that call, not state.
        rest = nnx.state(module, nnx.Not(nnx.Any(self._trained, nnx.RngState, nnx.Intermediate)))
        expected = set(self._rest.paths)
        variables, _ = jax.tree_util.tree_flatten_with_path(rest, is_leaf=_is_variable)
        flat: dict[tuple[str, ...], Any] = {}
        for path, variable in variables:
            inner, _ = jax.tree_util.tree_flatten_with_path(_value(variable))
            leaves = {(*keys_of(path), *keys_of(within)): leaf for within, leaf in inner}
            is_sown = isinstance(_value(variable), tuple) and expected.isdisjoint(leaves)
            flat |= {} if is_sown else leaves
        if flat.keys() != expected:
            changed = sorted("/".join(path) for path in flat.keys() ^ expected)
            raise ModelError(
                f"the call of {self.name} added or removed variables: {', '.join(changed)}.\n"
                "  Make them in __init__, with a fixed shape."
            )
        return self._rest.to_tree([flat[path] for path in self._rest.paths])


def _trained(wrt: Any) -> Any:
    try:
        wanted = nnx.filterlib.to_predicate(nnx.Param if wrt is None else wrt)
    # Flax fails to format its own message for some filters.
    except (TypeError, ValueError):
        raise ModelError(
            f"wrt is {wrt!r}, which is not a filter of NNX variables.\n"
            "  Give a type of variable, such as nnx.Param or a class of your own, a function of "
            "(path, variable), or a tuple of these."
        ) from None
    return nnx.All(wanted, nnx.Not(nnx.RngState))


def _fresh_rng(template: jax.ShapeDtypeStruct, key: jax.Array, index: int) -> jax.Array:
    """Returns a key for each key variable (one per layer of a stack); zero for each counter."""
    if not jnp.issubdtype(template.dtype, jax.dtypes.prng_key):
        return jnp.zeros(template.shape, template.dtype)
    key = jax.random.fold_in(key, index)
    return jax.random.split(key, template.shape) if template.shape else key


def _mark_loose_arrays(module: Any) -> None:
    """Marks arrays outside of variables as data: NNX takes traced ones for static attributes."""
    nodes = nnx.iter_graph(module) if isinstance(module, nnx.Module) else ()
    for node in [node for _, node in nodes if isinstance(node, nnx.Pytree)]:
        for name, value in vars(node).items():
            if isinstance(value, Tracer):
                setattr(node, name, nnx.data(value))


def _tell_of_loose_arrays(module: nnx.Module) -> None:
    """Logs floating arrays outside of variables: they are model state, as in Flax."""
    loose = [
        "/".join(str(part) for part in path)
        for path, node in nnx.iter_graph(module)
        if isinstance(node, jax.Array | np.ndarray) and jnp.issubdtype(node.dtype, jnp.floating)
    ]
    if loose:
        _warn_once(type(module).__name__, ", ".join(loose))


@functools.cache
def _warn_once(model: str, loose: str) -> None:
    text = "%s holds arrays outside of variables, which are not trained: %s"
    _LOG.warning(f"{text}. To train one, wrap it in nnx.Param.", model, loose)


def _refuse_placed_arrays(module: nnx.Module) -> None:
    """Rejects arrays bound to one device: a program on all devices cannot take them."""
    placed = [
        "/".join(keys_of(path))
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(module))
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed
    ]
    if placed:
        raise ModelError(
            f"the function that makes {type(module).__name__} returned arrays already placed on "
            f"devices: {', '.join(placed[:4])}{', ...' if len(placed) > 4 else ''}.\n"
            "  Pass the module itself, sl.init_state(model, optimizer), which moves them."
        )


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


def _value(node: Any) -> Any:
    return node.get_value() if _is_variable(node) else node


def _metadata(node: Any) -> Mapping[str, Any]:
    return node.get_metadata() if _is_variable(node) else {}


def _layout(state: PyTree) -> VariableTree:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_variable)
    paths = []
    for path, variable in leaves:
        inner, _ = jax.tree_util.tree_flatten_with_path(_value(variable))
        paths += [(*keys_of(path), *keys_of(within)) for within, _ in inner]
    return VariableTree(jax.tree.structure(state), tuple(paths))


def _of_each(state: PyTree, say: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Returns `say` of the variables and loose arrays of a state for each leaf by path."""
    by_path = {}
    variables, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_variable)
    for path, variable in variables:
        for inner, leaf in jax.tree_util.tree_flatten_with_path(_value(variable))[0]:
            by_path["/".join((*keys_of(path), *keys_of(inner)))] = say(variable, leaf)
    return by_path


def _axes(state: PyTree) -> AxesByPath:
    return _of_each(
        state,
        lambda variable, leaf: axis_names_of(
            _metadata(variable).get("out_sharding"), np.ndim(leaf)
        ),
    )


def _kind(variable: object, _: Any) -> str:
    return type(variable).__name__


def _is_param(variable: object, _: Any) -> bool:
    return isinstance(variable, nnx.Param)


def _keeps_float32(variable: object, _: Any) -> bool:
    return bool(_metadata(variable).get("float32"))
