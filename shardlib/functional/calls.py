"""Calls of a merged module inside a trace, and the state after them."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import KeyPath

from shardlib.errors import ModelError
from shardlib.functional.precision import Precision
from shardlib.functional.protocol import FunctionalModule, Tree
from shardlib.paths import named_leaves, path_string

_UNBOUND = re.compile(r"unbound axis name: ([^\s.]+)")


def call(
    module: FunctionalModule,
    params: Tree,
    model_state: Tree,
    key: jax.Array,
    fn: Callable[[Any], Any],
    *,
    precision: Precision | None = None,
) -> tuple[Any, Tree]:
    """Calls `fn(model)` on the module over these arrays.

    The batch of a step is the global one, so a layer that reduces over the devices of a `pmap`
    (`BatchNorm(axis_name="batch")`) has nothing left to reduce: its axes are bound to size 1.

    Args:
        module: The functional view.
        params: The trained parameters, in their storage dtype.
        model_state: The state that calls update, and untrained parameters.
        key: The key of the module's random streams.
        fn: Returns a pytree of arrays.
        precision: The policy that casts parameters as they enter the model; no cast by default.

    Returns:
        The result of `fn`, and the model state after it, with its dtypes and the untrained
        parameters unchanged.

    Raises:
        ModelError: If `fn` reduces over an axis that nothing binds.
    """

    def run(params: Tree, model_state: Tree, key: jax.Array) -> tuple[Any, Tree]:
        held = model_state
        if precision is not None:
            params = precision.cast_params(params, module.float32)
            held = precision.cast_params(held, module.float32, only=module.frozen)
        model = module.merge(params, held, key)
        model = model if precision is None else precision.prepare(model)
        return fn(model), _after(module, model, model_state)

    try:
        return with_axes(module.reduces_over, run)(params, model_state, key)
    except NameError as error:
        raise unbound_axis(module.name, error) from error


def updated(module: FunctionalModule, model_state: Tree) -> dict[str, Any]:
    """Returns the leaves of the model state that a call may update, by path."""
    leaves = named_leaves(model_state)
    return {path: leaf for path, leaf in leaves.items() if path not in module.frozen}


def with_axes(names: frozenset[str], fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` with the axes of these names bound to size 1, over which sums and means are
    identities. An axis that is manual here is bound already."""
    for name in sorted(names - set(jax.sharding.get_abstract_mesh().manual_axes)):
        fn = functools.partial(
            jax.vmap, in_axes=None, out_axes=None, axis_name=name, axis_size=1
        )(fn)  # fmt: skip
    return fn


def unbound_axis(model: str, error: NameError) -> Exception:
    """Returns the error to raise for a `NameError`: a `ModelError` for an unbound JAX axis."""
    unbound = _UNBOUND.search(str(error))
    if unbound is None:
        return error
    return ModelError(
        f"{model} or its loss reduces over the axis {unbound[1]!r}, which no vmap, pmap or "
        "`axis_name` of a layer binds.\n"
        "  Drop the reduction: a batch is global here, so its mean covers all devices."
    )


def _after(module: FunctionalModule, model: Any, before: Tree) -> Tree:
    new = named_leaves(module.collect(model))

    def after(path: KeyPath, old: jax.Array) -> jax.Array:
        name = path_string(path)
        # A changed dtype would recompile the next step.
        return old if name in module.frozen else new[name].astype(old.dtype)

    return jax.tree_util.tree_map_with_path(after, before)
