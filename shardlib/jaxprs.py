"""Walks over traced programs.

The structure of jaxprs is not a stable interface of JAX: the names of equation parameters change
between versions. Facts are therefore read from shapes where possible.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeGuard, cast

import jax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.source_info_util import NameStack, current_name_stack, user_context

_CALLS = """
    jit pjit closed_call core_call eval_jaxpr composite linear_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr
"""
CALLS = frozenset(_CALLS.split())
CUSTOM_GRADIENTS = frozenset({"custom_vjp_call", "custom_vjp_call_jaxpr"})
REMAT = frozenset({"remat", "remat2", "checkpoint"})
_PROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "callee")


def array_of(variable: Var | Literal) -> ShapedArray:
    """Returns the shape and dtype of a variable of a jaxpr."""
    return cast(ShapedArray, variable.aval)


def subprograms(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yields the programs that an equation runs: loop bodies, branches, called functions."""
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(one, "jaxpr", one)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def equations(jaxpr: Jaxpr, runs: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Yields all equations of a program, including inner ones, with their number of runs. Loops of
    unknown length count once."""
    for equation in jaxpr.eqns:
        yield equation, runs
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in subprograms(equation):
            yield from equations(inner, runs * times)


@contextlib.contextmanager
def context_of(equation: JaxprEqn) -> Iterator[None]:
    """Enters the context of an equation, such as a compute placement, on the mesh at hand."""
    here = jax.sharding.get_abstract_mesh()
    with equation.ctx.manager, jax.sharding.use_abstract_mesh(here):
        yield


def bind_again(equation: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of an equation for other operands, in its context, such as a compute
    placement, and under its names."""
    options, source = equation.primitive.get_bind_params(equation.params), equation.source_info
    names = current_name_stack() + source.name_stack
    with user_context(source.traceback, name_stack=names), equation.ctx.manager:
        results = equation.primitive.bind(*operands, **options)
    return results if equation.primitive.multiple_results else [results]


def holds(jaxpr: Jaxpr, *names: str) -> bool:
    """Whether a program, or one inside it, has one of some primitives."""
    return any(equation.primitive.name in names for equation, _ in equations(jaxpr))


def reshaped_dims(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yields runs of dims of a shape and the dims that a reshape makes of each, in order.

    The runs are as short as the sizes allow. Dims of size 1 at the end are left out."""
    i = j = 0
    while i < len(old) and j < len(new):
        first, start, left, right = i, j, old[i], new[j]
        while left != right:
            if left < right:
                i += 1
                left *= old[i]
            else:
                j += 1
                right *= new[j]
        i, j = i + 1, j + 1
        yield range(first, i), range(start, j)


class Atom(Protocol):
    """An operand of an operation: a `Value`, or a `Literal` of JAX."""

    @property
    def aval(self) -> ShapedArray: ...


class Value:
    """The result of an operation. `const` holds the array of a captured constant."""

    __slots__ = ("aval", "const")

    def __init__(self, aval: ShapedArray, const: Any = None):
        self.aval = aval
        self.const = const


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One operation, as an equation of a jaxpr."""

    equation: JaxprEqn
    """The equation; its variables belong to the jaxpr that it came from."""
    invars: tuple[Atom, ...]
    outvars: tuple[Value, ...]
    stack: str
    """Names of JAX transformations, from the outermost."""
    names: NameStack
    """The same names as a `NameStack`, to trace the operation under."""

    @property
    def primitive(self) -> Primitive:
        return self.equation.primitive

    @property
    def params(self) -> dict[str, Any]:
        return self.equation.params

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.equation.primitive.name


@dataclasses.dataclass(frozen=True, eq=False)
class FlatProgram:
    """Operations in order, with calls inlined except loops and branches."""

    invars: tuple[Value, ...]
    """Constants, then arguments."""
    outvars: tuple[Atom, ...]
    operations: tuple[Operation, ...]

    @functools.cached_property
    def kinds(self) -> tuple[int, ...]:
        """The number of each operation's kind. Operations of one kind have equal primitives,
        parameters, shapes and dtypes, as in layers that repeat."""
        numbers: dict[tuple[object, ...], int] = {}
        kinds = []
        for operation in self.operations:
            values = (*operation.invars, *operation.outvars)
            types = (f"{v.aval} {is_literal(v)}" for v in values)
            key = operation.name, str(operation.params), *types
            kinds.append(numbers.setdefault(key, len(numbers)))
        return tuple(kinds)


def scan_parts(scan: JaxprEqn | Operation) -> tuple[int, int]:
    """Returns the number of operands of a scan that are constant over trips, and the number carried
    from trip to trip; the others are sliced along their first dim."""
    body = scan.params["jaxpr"].jaxpr
    cut = _more_dims(scan.invars, body.invars)
    carried = len(body.outvars) - _more_dims(scan.outvars, body.outvars)
    return len(body.invars) - carried - cut, carried


def _more_dims(outside: Sequence[Any], inside: Sequence[Var]) -> int:
    """Returns the number of sliced or stacked values, which have one more dim outside the body."""
    pairs = zip(outside, inside, strict=True)
    return sum(len(out.aval.shape) > len(array_of(within).shape) for out, within in pairs)


@functools.lru_cache(maxsize=4096)
def flatten(jaxpr: Jaxpr, fenced: bool = False, *, compiled: bool = False) -> FlatProgram:
    """Returns an open jaxpr with its calls inlined and dead code removed.

    Args:
        jaxpr: The program.
        fenced: Whether calls stay that recompute and must not be merged with the first computation:
            the backward pass of a `jax.checkpoint`.
        compiled: Whether loops of one trip are inlined, too, as XLA does.
    """
    inputs = tuple(Value(array_of(var)) for var in (*jaxpr.constvars, *jaxpr.invars))
    operations: list[Operation] = []
    outputs = _Flattening(operations, fenced, compiled).write(jaxpr, inputs, "", None)
    needed = {value for value in outputs if not is_literal(value)}
    kept = []
    for operation in reversed(operations):
        if needed.intersection(operation.outvars) or operation.equation.effects:
            kept.append(operation)
            needed.update(value for value in operation.invars if not is_literal(value))
    return FlatProgram(inputs, tuple(outputs), tuple(reversed(kept)))


def is_literal(value: object) -> TypeGuard[Literal]:
    """Returns whether a value is a constant of the program."""
    return hasattr(value, "val")


def is_fence(equation: JaxprEqn) -> bool:
    """Returns whether an equation recomputes and must not be merged with the first computation."""
    params = equation.params
    is_remat = equation.primitive.name in REMAT
    return bool(is_remat and params["differentiated"] and params["prevent_cse"])


@dataclasses.dataclass(frozen=True)
class _Flattening:
    """Options of `flatten`, and the operations so far."""

    operations: list[Operation]
    fenced: bool
    compiled: bool

    def write(
        self, jaxpr: Jaxpr, inputs: Sequence[Atom], stack: str, names: NameStack | None
    ) -> list[Atom]:
        """Appends the operations of a jaxpr; returns its results."""
        values: dict[Var, Atom] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

        def read(variable: Any) -> Atom:
            return cast(Atom, variable) if is_literal(variable) else values[variable]

        for equation in jaxpr.eqns:
            name_stack = equation.source_info.name_stack
            here = f"{stack}/{name_stack}"
            named = name_stack if names is None else names + name_stack
            given = tuple(read(var) for var in equation.invars)
            inner, captured = called(equation)
            results: Sequence[Atom]
            if inner is not None and not (self.fenced and is_fence(equation)):
                results = self._inline(inner, captured, given, here, named)
            elif self.compiled and _loops_once(equation):
                results = self._only_trip(equation, given, here, named)
            else:
                results = tuple(Value(array_of(var)) for var in equation.outvars)
                self.operations.append(Operation(equation, given, results, here, named))
            values.update(zip(equation.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _inline(
        self,
        inner: Jaxpr,
        captured: Sequence[Any],
        given: Sequence[Atom],
        stack: str,
        names: NameStack,
    ) -> list[Atom]:
        arrays = captured or [None] * len(inner.constvars)
        pairs = zip(inner.constvars, arrays, strict=True)
        constants = tuple(Value(array_of(var), array) for var, array in pairs)
        arguments = given[len(given) - len(inner.invars) :]
        return self.write(inner, (*constants, *arguments), stack, names)

    def _only_trip(
        self, scan: JaxprEqn, given: Sequence[Atom], stack: str, names: NameStack
    ) -> list[Atom]:
        """Appends the body of a loop of one trip."""
        program = scan.params["jaxpr"]
        whole = sum(scan_parts(scan))
        sliced = [self._reshaped(x, x.aval.shape[1:], stack, names) for x in given[whole:]]
        given = (*given[:whole], *sliced)
        made = self._inline(program.jaxpr, program.consts, given, stack, names)
        shapes = [array_of(var).shape for var in scan.outvars]
        return [
            x if x.aval.shape == shape else self._reshaped(x, shape, stack, names)
            for x, shape in zip(made, shapes, strict=True)
        ]

    def _reshaped(self, value: Atom, shape: tuple[int, ...], stack: str, names: NameStack) -> Value:
        equation = _reshape(value.aval.shape, value.aval.dtype, shape)
        result = Value(array_of(equation.outvars[0]))
        self.operations.append(Operation(equation, (value,), (result,), stack, names))
        return result


@functools.lru_cache(maxsize=4096)
def _reshape(before: tuple[int, ...], dtype: Any, after: tuple[int, ...]) -> JaxprEqn:
    given = jax.ShapeDtypeStruct(before, dtype)
    (equation,) = jax.make_jaxpr(lambda x: jax.lax.reshape(x, after))(given).eqns
    return equation


def _loops_once(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "scan" and equation.params["length"] == 1


def called(equation: JaxprEqn) -> tuple[Jaxpr | None, Sequence[Any]]:
    """Returns the program that an equation runs once unchanged, and its constants; None for other
    equations."""
    if equation.primitive.name not in CALLS | REMAT:
        return None, ()
    for key in _PROGRAMS:
        program = equation.params.get(key)
        inner = getattr(program, "jaxpr", program)
        if hasattr(inner, "eqns"):
            return inner, getattr(program, "consts", ())
    return None, ()
