"""A function and what it is called with: what it is traced to, and which array is what in that."""

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import NamedSharding, Sharding

NO_KEYWORDS: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Call:
    """What a jitted function is traced to.

    Attributes:
        given: The arguments that hold arrays, those by keyword last, as `ShapeDtypeStruct`s.
        names: Their names.
        jaxpr: What is computed.
        inputs: For each input of it, the number of a leaf of `given`, or a constant in a tuple.
        params: What `jax.jit` was told, by the names that JAX has for it; empty where more is
            computed than what one jitted function does.
    """

    given: tuple[Any, ...]
    names: tuple[str, ...]
    jaxpr: ClosedJaxpr
    inputs: list[Any]
    params: dict[str, Any]

    @classmethod
    def of(
        cls, step: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any] = NO_KEYWORDS
    ) -> "Call":
        """Traces a function."""
        values = {**dict(enumerate(arguments)), **keywords}
        named = dict(zip(values, _names(step, arguments, keywords), strict=True))
        arrays = [at for at, value in values.items() if _holds_arrays(value)]
        given = tuple(jax.tree.map(_array_leaf, values[at]) for at in arrays)
        names = tuple(named[at] for at in arrays)

        def called(*given: Any) -> Any:
            now = {**values, **dict(zip(arrays, given, strict=True))}
            positional = [now.pop(at) for at in range(len(arguments))]
            return step(*positional, **now)

        try:
            traced = jax.make_jaxpr(called)(*given)
        except ValueError as error:
            # JAX has no equation for a jitted function with options for the compiler.
            if "compiler_options" not in str(error):
                raise
            jaxpr, inputs, params = _by_itself(step, arguments, keywords, list(named.values()))
            return cls(given, names, jaxpr, inputs, params)
        call = _only_call(traced)
        if call is None:
            # A ClosedJaxpr holds its constants itself.
            return cls(given, names, traced, list(range(len(traced.jaxpr.invars))), {})
        return cls(given, names, call.params["jaxpr"], _inputs(traced, call), dict(call.params))

    @property
    def shardings(self) -> list[Any]:
        """The shardings that the function itself gives to arguments and results."""
        return [*self.params.get("in_shardings", ()), *self.params.get("out_shardings", ())]

    @property
    def donated(self) -> tuple[bool, ...]:
        """Of each array of the arguments, in order, whether the function takes its memory."""
        flags = self.params.get("donated_invars", [False] * len(self.inputs))
        pairs = zip(self.inputs, flags, strict=True)
        taken = {at for at, donated in pairs if donated and isinstance(at, int)}
        return tuple(at in taken for at in range(len(jax.tree.leaves(self.given))))

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The options for the compiler that the function has itself."""
        return dict(self.params.get("compiler_options_kvs", ()))

    def placed(
        self,
        move: Callable[[Any], Any] = lambda tree: tree,
        place: Callable[[Any], Any] = lambda sharding: sharding,
    ) -> tuple[Any, ...]:
        """Returns the arguments as `move` makes them, each array that lies nowhere on what `place`
        makes of where the function takes it."""
        leaves, tree = jax.tree.flatten(move(self.given))
        shardings = self.params.get("in_shardings", [None] * len(self.inputs))
        for at, sharding in zip(self.inputs, shardings, strict=True):
            if not isinstance(at, int) or not isinstance(sharding, Sharding):
                continue
            if getattr(leaves[at], "sharding", None) is None:
                here = place(sharding)
                leaves[at] = abstract_leaf(leaves[at], lambda _, here=here: here)
        return jax.tree.unflatten(tree, leaves)


def jitted(step: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Returns the jitted function of a step. Of one that is not jitted yet, arguments that hold no
    arrays are static: they may say how large an array is."""
    if hasattr(step, "program"):
        return step.program(*arguments, **keywords)
    if hasattr(step, "trace"):
        return step
    static = [at for at, value in enumerate(arguments) if _is_static(value)]
    names = [name for name, value in keywords.items() if _is_static(value)]
    return jax.jit(step, static_argnums=static, static_argnames=names)


def bound(
    step: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments with those by keyword in their positions, as far as they have one: so
    `jax.jit` takes them where it is given shardings, too. The others are in the order of JAX.

    Raises:
        TypeError: If the function does not take them.
    """
    if not keywords:
        return arguments, {}
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return arguments, dict(sorted(keywords.items()))
    found = signature.bind(*arguments, **keywords)
    return found.args, dict(sorted(found.kwargs.items()))


def abstract_leaf(leaf: Any, place: Callable[[Any], Any] = lambda sharding: sharding) -> Any:
    """Returns an array as a `ShapeDtypeStruct`, with what `place` makes of its sharding; what is no
    array as it is."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    placed = place(sharding if isinstance(sharding, NamedSharding) else None)
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed, weak_type=weak)


def _array_leaf(leaf: Any) -> Any:
    """As `abstract_leaf`; a Python number, too, which beside arrays is one of them to JAX."""
    if isinstance(leaf, bool | int | float | complex):
        kind = jax.typeof(leaf)
        return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)
    return abstract_leaf(leaf)


def _names(
    function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[str, ...]:
    """Returns the names of the arguments, as JAX gives them to the program."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = inspect.Parameter
    by_place = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    known = [p.name for p in parameters if p.kind in by_place]
    rest = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), "argument")
    positional = [
        known[n] if n < len(known) else f"{rest}/{n - len(known)}" for n in range(len(arguments))
    ]
    return (*positional, *keywords)


def _holds_arrays(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves)


def _is_static(value: Any) -> bool:
    return not _holds_arrays(value) and isinstance(value, Hashable)


def _only_call(traced: ClosedJaxpr) -> Any:
    """Returns the equation that calls the jitted function, where there is nothing else. It may
    return more than `step` did: what `nnx.jit` writes back into modules."""
    equations = traced.jaxpr.eqns
    is_call = len(equations) == 1 and "in_shardings" in equations[0].params
    return equations[0] if is_call else None


def _inputs(traced: ClosedJaxpr, call: Any) -> list[Any]:
    """Returns, for each input of the call, the number of a leaf of the arguments, or a constant in
    a tuple."""
    jaxpr = traced.jaxpr
    places: dict[int, Any] = {id(var): at for at, var in enumerate(jaxpr.invars)}
    constants = zip(jaxpr.constvars, traced.consts, strict=True)
    places |= {id(var): (np.asarray(value),) for var, value in constants}
    return [(x.val,) if isinstance(x, Literal) else places[id(x)] for x in call.invars]


def _by_itself(
    step: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], names: list[str]
) -> tuple[ClosedJaxpr, list[Any], dict[str, Any]]:
    """Returns what a function of `jax.jit` is traced to, its inputs and what it was told, without
    an equation that calls it. Static arguments are those whose names are not among the inputs'."""
    traced = step.trace(*arguments, **keywords)
    # JAX has no public name for what it calls a parameter of an equation, where there is none.
    params, constants = dict(traced._params), traced._consts
    taken = [_words(name) for name in traced.jaxpr.jaxpr.debug_info.arg_names or ()]
    inputs: list[Any] = [(np.asarray(value),) for value in constants]
    at = 0
    for name, value in zip(names, [*arguments, *keywords.values()], strict=True):
        words, leaves = _words(name), jax.tree.leaves(value)
        if _holds_arrays(value):
            inputs += range(at, at := at + len(leaves))
        elif any(found[: len(words)] == words for found in taken):
            inputs += [(leaf,) for leaf in leaves]
    return traced.jaxpr, inputs, params


def _words(name: str) -> list[str]:
    return re.findall(r"\w+", name)


def unbound(subject: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns a function, and the arguments that `subject` gives it before others: the Flax module
    that is called or whose method is, and what `functools.partial` binds to a jitted function. So
    their arrays are no constants of the program, and random streams may advance."""
    if isinstance(subject, functools.partial) and hasattr(subject.func, "trace"):
        return subject.func, subject.args, subject.keywords
    owner = getattr(subject, "__self__", subject)
    if not isinstance(owner, nnx.Module):
        return subject, (), {}
    method = getattr(subject, "__func__", type(owner).__call__)
    first, *rest = inspect.signature(method).parameters.values()

    @functools.wraps(method)
    def call(model: Any, *arguments: Any, **keywords: Any) -> Any:
        return method(model, *arguments, **keywords)

    call.__signature__ = inspect.Signature([first.replace(name="model"), *rest])  # type: ignore[attr-defined]
    return nnx.jit(call), (owner,), {}
