"""The functional view of any supported form of a model."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from shardlib.errors import ModelError
from shardlib.functional.linen_modules import LinenFunctional
from shardlib.functional.nnx_modules import NnxFunctional, made_by
from shardlib.functional.protocol import FunctionalModule, Inputs, Tree
from shardlib.paths import named_leaves


def functional(make: Any, inputs: Inputs = (), wrt: Any = None) -> FunctionalModule:
    """Returns the functional view of a module, without allocating an array.

    Args:
        make: `make(rngs) -> module` for an NNX or linen module, a linen module itself, an NNX
            module in memory, whose arrays are inspected but not kept, or a functional view.
        inputs: For linen, example arguments of its `__call__` (arrays or `ShapeDtypeStruct`s): a
            tuple, or a dict of keyword arguments.
        wrt: The variables to train: for NNX a filter, `nnx.Param` by default; for linen the name of
            a collection or several, `"params"` by default.

    Raises:
        ModelError: If `make` does not return a Flax module, a linen module has no inputs, or `wrt`
            is not a filter or names a missing collection.
    """
    if isinstance(make, NnxFunctional | LinenFunctional):
        return make
    if isinstance(make, linen.Module):
        return LinenFunctional(make, inputs, wrt)
    if isinstance(make, nnx.Module):
        return NnxFunctional(make, wrt)
    if isinstance(make, type) and issubclass(make, linen.Module):
        raise ModelError(
            f"the model is the linen class {make.__name__}, not a module.\n"
            f"  Give an instance, such as {make.__name__}(...)."
        )
    if not callable(make):
        raise ModelError(_not_a_module(f"the model is {make!r}"))
    _check_takes_rngs(make)
    made: list[Any] = []

    def trace(key: jax.Array) -> None:
        module = made_by(make, key)
        is_nnx = isinstance(module, nnx.Module)
        made.append(NnxFunctional(module, wrt, make) if is_nnx else module)

    jax.eval_shape(trace, jax.random.key(0))
    if isinstance(made[0], NnxFunctional):
        return made[0]
    if isinstance(made[0], linen.Module):
        return LinenFunctional(made[0], inputs, wrt)
    raise ModelError(_not_a_module(f"the model function returned {type(made[0]).__name__}"))


def _check_takes_rngs(make: Callable[..., Any]) -> None:
    """Raises `ModelError` for a function that does not take one argument by position."""
    # The signature of an NNX class is that of its metaclass, which takes anything.
    call, *itself = (make.__init__, None) if inspect.isclass(make) else (make,)
    try:
        inspect.signature(call).bind(*itself, None)
    except ValueError:
        return  # Not written in Python: the call itself will fail.
    except TypeError as error:
        name = getattr(make, "__name__", repr(make))
        raise ModelError(
            f"the model function {name} cannot be called as make(rngs): {error}.\n"
            f"  Pass a function of one argument, such as lambda rngs: Model(..., rngs=rngs)."
        ) from None


def _not_a_module(what: str) -> str:
    return (
        f"{what}, which is not a Flax module.\n"
        "  Give an `nnx.Module`, a `flax.linen.Module`, or a function that returns one."
    )


def check_trained(module: FunctionalModule, params: Tree) -> None:
    """Raises `ModelError` for a module without parameters to train, or with some that have no
    gradient."""
    refuse_no_params(module, params)
    refuse_integer_params(params)


def refuse_integer_params(params: Tree) -> None:
    """Raises `ModelError` for parameters that have no gradient; names all of them."""
    wrong = [
        f"{path} ({leaf.dtype})"
        for path, leaf in named_leaves(params).items()
        if not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if wrong:
        raise ModelError(
            f"parameters that are not floating-point have no gradient: {', '.join(wrong)}.\n"
            "  Hold them in an nnx.Variable instead of an nnx.Param, or for linen in a collection "
            "of their own: self.variable('constants', ...)."
        )


def refuse_no_params(module: FunctionalModule, params: Tree) -> None:
    """Raises `ModelError` for a module without parameters to train."""
    if jax.tree.leaves(params):
        return
    by_kind: dict[str, list[str]] = {}
    for path, kind in module.kinds.items():
        by_kind.setdefault(kind, []).append(path)
    variables = "; ".join(
        f"{kind} ({', '.join(paths[:4])}{', ...' if len(paths) > 4 else ''})"
        for kind, paths in by_kind.items()
    )
    raise ModelError(
        f"{module.name} has no parameter to train: its variables are {variables or 'none'}.\n"
        "  Say which of them to train, as in sl.init_state(..., wrt=MyVariable) for NNX or "
        'wrt=("params", "my_collection") for linen, or make them nnx.Param.'
    )
