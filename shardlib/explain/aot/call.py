"""Tracing of a function call, with the mapping from its arguments to the inputs of the jaxpr."""

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.sharding import NamedSharding, Sharding
from jaxtyping import PyTree

Step: TypeAlias = Callable[..., Any]
"""Any function, jitted or not, or an object with a method `program`; see `compile_step`."""
NO_KEYWORDS: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Call:
    """A traced call of a jitted function.

    Attributes:
        given: The arguments that hold arrays, as `ShapeDtypeStruct`s, keyword arguments last.
        names: Their names.
        jaxpr: The traced computation.
        inputs: For each input of `jaxpr`, the index of a leaf of `given`, or a constant in a tuple.
        params: The parameters of `jax.jit`, by JAX's names; empty if the step computes more than
            one jitted function.
    """

    given: tuple[Any, ...]
    names: tuple[str, ...]
    jaxpr: ClosedJaxpr
    inputs: list[Any]
    params: dict[str, Any]

    @classmethod
    def of(
        cls, step: Step, arguments: tuple[Any, ...], keywords: Mapping[str, Any] = NO_KEYWORDS
    ) -> "Call":
        """Returns the traced call of a function."""
        values = {**dict(enumerate(arguments)), **keywords}
        named = dict(zip(values, _names(step, arguments, keywords), strict=True))
        arrays = [at for at, value in values.items() if _holds_arrays(value)]
        given = tuple(jax.tree.map(_array_leaf, values[at]) for at in arrays)
        names = tuple(named[at] for at in arrays)

        def called(*given: PyTree) -> Any:
            now = {**values, **dict(zip(arrays, given, strict=True))}
            positional = [now.pop(at) for at in range(len(arguments))]
            return step(*positional, **now)

        try:
            traced = jax.make_jaxpr(called)(*given)
        except ValueError as error:
            # JAX cannot trace a call of a jitted function that has compiler options.
            if "compiler_options" not in str(error):
                raise
            jaxpr, inputs, params = _by_itself(step, arguments, keywords, list(named.values()))
            return cls(given, names, jaxpr, inputs, params)
        call = _only_call(traced)
        if call is None:
            # A ClosedJaxpr holds its own constants.
            return cls(given, names, traced, list(range(len(traced.jaxpr.invars))), {})
        return cls(given, names, call.params["jaxpr"], _inputs(traced, call), dict(call.params))

    @property
    def shardings(self) -> list[Any]:
        """The `in_shardings` and `out_shardings` of the function."""
        return [*self.params.get("in_shardings", ()), *self.params.get("out_shardings", ())]

    @property
    def donated(self) -> tuple[bool, ...]:
        """Whether each array of the arguments is donated, in order."""
        flags = self.params.get("donated_invars", [False] * len(self.inputs))
        pairs = zip(self.inputs, flags, strict=True)
        taken = {at for at, donated in pairs if donated and isinstance(at, int)}
        return tuple(at in taken for at in range(len(jax.tree.leaves(self.given))))

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The compiler options of the function itself."""
        return dict(self.params.get("compiler_options_kvs", ()))

    def placed(
        self,
        move: Callable[[Any], Any] = lambda tree: tree,
        place: Callable[[Any], Any] = lambda sharding: sharding,
    ) -> tuple[Any, ...]:
        """Returns the arguments after `move`.

        An array without a sharding gets the `in_shardings` of the function, after `place`.
        """
        leaves, tree = jax.tree.flatten(move(self.given))
        shardings = self.params.get("in_shardings", [None] * len(self.inputs))
        for at, sharding in zip(self.inputs, shardings, strict=True):
            if not isinstance(at, int) or not isinstance(sharding, Sharding):
                continue
            if getattr(leaves[at], "sharding", None) is None:
                here = place(sharding)
                leaves[at] = abstract_leaf(leaves[at], lambda _, here=here: here)
        return jax.tree.unflatten(tree, leaves)


def jitted(step: Step, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Returns the jitted function of a step.

    If the step is not jitted yet, arguments without arrays are static: they may set array sizes.
    """
    if hasattr(step, "program"):
        return step.program(*arguments, **keywords)
    if hasattr(step, "trace"):
        return step
    static = [at for at, value in enumerate(arguments) if _is_static(value)]
    names = [name for name, value in keywords.items() if _is_static(value)]
    return jax.jit(step, static_argnums=static, static_argnames=names)


def bound(
    step: Step, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments, with keyword arguments moved to their positions where possible.

    A function with `in_shardings` takes positional arguments only. The remaining keyword arguments
    are in JAX's order, by name.

    Raises:
        TypeError: If the function does not accept the arguments.
    """
    if not keywords:
        return arguments, {}
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return arguments, dict(sorted(keywords.items()))
    bound_arguments = signature.bind(*arguments, **keywords)
    return bound_arguments.args, dict(sorted(bound_arguments.kwargs.items()))


def abstract_leaf(leaf: PyTree, place: Callable[[Any], Any] = lambda sharding: sharding) -> Any:
    """Returns an array as a `ShapeDtypeStruct` with its sharding after `place`.

    A leaf that is not an array is returned as it is.
    """
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    placed = place(sharding if isinstance(sharding, NamedSharding) else None)
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed, weak_type=weak)


def _array_leaf(leaf: PyTree) -> Any:
    """Returns a leaf as `abstract_leaf` does, and a Python number as a scalar array, as in JAX."""
    if isinstance(leaf, bool | int | float | complex):
        kind = jax.typeof(leaf)
        return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)
    return abstract_leaf(leaf)


def _names(
    function: Step, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[str, ...]:
    """Returns the names that JAX gives to the arguments in the program."""
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


def _holds_arrays(value: PyTree) -> bool:
    leaves = jax.tree.leaves(value)
    return any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves)


def _is_static(value: PyTree) -> bool:
    return not _holds_arrays(value) and isinstance(value, Hashable)


def _only_call(traced: ClosedJaxpr) -> JaxprEqn | None:
    """Returns the equation that calls the jitted function if it is the only one, else None.

    It may return more than `step` did: `nnx.jit` also returns what it writes back into modules.
    """
    equations = traced.jaxpr.eqns
    is_call = len(equations) == 1 and "in_shardings" in equations[0].params
    return equations[0] if is_call else None


def _inputs(traced: ClosedJaxpr, call: JaxprEqn) -> list[Any]:
    """Returns the index of an argument leaf, or a constant in a tuple, for each input of a call."""
    jaxpr = traced.jaxpr
    places: dict[int, Any] = {id(var): at for at, var in enumerate(jaxpr.invars)}
    constants = zip(jaxpr.constvars, traced.consts, strict=True)
    places |= {id(var): (np.asarray(value),) for var, value in constants}
    return [(x.val,) if isinstance(x, Literal) else places[id(x)] for x in call.invars]


def _by_itself(
    step: Step, arguments: tuple[Any, ...], keywords: Mapping[str, Any], names: list[str]
) -> tuple[ClosedJaxpr, list[Any], dict[str, Any]]:
    """Returns the jaxpr of a jitted function, its inputs and the parameters of `jax.jit`.

    The call has no equation to read them from. An argument is static if the inputs of the jaxpr do
    not include its name.
    """
    traced = step.trace(*arguments, **keywords)
    # JAX has no public name for these parameters without a call equation.
    params, constants = dict(traced._params), traced._consts
    taken = [_words(name) for name in traced.jaxpr.jaxpr.debug_info.arg_names or ()]
    inputs: list[Any] = [(np.asarray(value),) for value in constants]
    at = 0
    for name, value in zip(names, [*arguments, *keywords.values()], strict=True):
        words, leaves = _words(name), jax.tree.leaves(value)
        if _holds_arrays(value):
            inputs += range(at, at := at + len(leaves))
        elif any(name_words[: len(words)] == words for name_words in taken):
            inputs += [(leaf,) for leaf in leaves]
    return traced.jaxpr, inputs, params


def _words(name: str) -> list[str]:
    return re.findall(r"\w+", name)


def unbound(subject: Step) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the function behind `subject`, and the arguments that `subject` binds.

    The bound arguments are the Flax module of a module or method, or what `functools.partial` binds
    to a jitted function. Passing them as arguments keeps their arrays from becoming constants of
    the program, and random streams may advance.
    """
    if isinstance(subject, functools.partial) and hasattr(subject.func, "trace"):
        return subject.func, subject.args, subject.keywords
    owner = getattr(subject, "__self__", subject)
    if not isinstance(owner, nnx.Module):
        return subject, (), {}
    method = getattr(subject, "__func__", type(owner).__call__)
    first, *rest = inspect.signature(method).parameters.values()

    @functools.wraps(method)
    def call(model: nnx.Module, *arguments: PyTree, **keywords: PyTree) -> Any:
        return method(model, *arguments, **keywords)

    call.__signature__ = inspect.Signature([first.replace(name="model"), *rest])  # type: ignore[attr-defined]
    return nnx.jit(call), (owner,), {}
