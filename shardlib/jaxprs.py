"""Walks over traced programs.

The structure of jaxprs is not a stable interface of JAX: the names of equation parameters change
between versions. Facts are therefore read from shapes where possible.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

_CALLS = """
    jit pjit closed_call core_call eval_jaxpr composite linear_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr
"""
CALLS = frozenset(_CALLS.split())
REMAT = frozenset({"remat", "remat2", "checkpoint"})
_PROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "callee")


def subprograms(equation: Any) -> Iterator[Any]:
    """Yields the programs that an equation runs: loop bodies, branches, called functions."""
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(one, "jaxpr", one)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def scan_parts(equation: Any) -> tuple[int, int]:
    """Returns the number of operands of a scan that are constant over trips, and the number carried
    from trip to trip; the others are sliced along their first dim."""
    body = equation.params["jaxpr"].jaxpr
    cut = _more_dims(equation.invars, body.invars)
    carried = len(body.outvars) - _more_dims(equation.outvars, body.outvars)
    return len(body.invars) - carried - cut, carried


def _more_dims(outside: Any, inside: Any) -> int:
    """Returns the number of sliced or stacked values, which have one more dim outside the body."""
    return sum(
        len(out.aval.shape) > len(within.aval.shape)
        for out, within in zip(outside, inside, strict=True)
    )


class Value:
    """The result of an operation. `const` holds the array of a captured constant."""

    __slots__ = ("aval", "const")

    def __init__(self, aval: Any, const: Any = None):
        self.aval = aval
        self.const = const


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One operation, as an equation of a jaxpr."""

    equation: Any
    """The equation; its variables belong to the jaxpr that it came from."""
    invars: tuple[Any, ...]
    """Values, or literals with `val`."""
    outvars: tuple[Value, ...]
    stack: str
    """Names of JAX transformations, from the outermost."""
    names: Any
    """The same names as a `NameStack`, to trace the operation under."""

    @property
    def primitive(self) -> Any:
        return self.equation.primitive

    @property
    def params(self) -> Any:
        return self.equation.params

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.equation.primitive.name


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Operations in order, with calls inlined except loops and branches."""

    invars: tuple[Value, ...]
    """Constants, then arguments."""
    outvars: tuple[Any, ...]
    operations: tuple[Operation, ...]


@functools.lru_cache(maxsize=4096)
def flatten(jaxpr: Any, fenced: bool = False) -> Program:
    """Returns a jaxpr with its calls inlined and dead code removed.

    Args:
        jaxpr: An open jaxpr.
        fenced: Whether to keep calls that recompute and must not be merged with the first
            computation: the backward pass of a `jax.checkpoint`.
    """
    inputs = tuple(Value(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars))
    operations: list[Operation] = []
    outputs = _write(jaxpr, inputs, "", None, operations, fenced)
    needed = {value for value in outputs if not is_literal(value)}
    kept = []
    for operation in reversed(operations):
        if needed.intersection(operation.outvars) or operation.equation.effects:
            kept.append(operation)
            needed.update(value for value in operation.invars if not is_literal(value))
    return Program(inputs, tuple(outputs), tuple(reversed(kept)))


def is_literal(value: Any) -> bool:
    """Returns whether a value is a constant of the program."""
    return hasattr(value, "val")


def is_fence(equation: Any) -> bool:
    """Returns whether an equation recomputes and must not be merged with the first computation."""
    params = equation.params
    is_remat = equation.primitive.name in REMAT
    return bool(is_remat and params["differentiated"] and params["prevent_cse"])


def _write(
    jaxpr: Any, inputs: Any, stack: str, names: Any, operations: list[Operation], fenced: bool
) -> list[Any]:
    """Appends the operations of a jaxpr; returns its results."""
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

    def read(var: Any) -> Any:
        return var if is_literal(var) else values[var]

    for equation in jaxpr.eqns:
        name_stack = equation.source_info.name_stack
        here, named = f"{stack}/{name_stack}", name_stack if names is None else names + name_stack
        given = tuple(read(var) for var in equation.invars)
        inner, captured = _called(equation)
        if inner is not None and not (fenced and is_fence(equation)):
            arrays = captured or [None] * len(inner.constvars)
            pairs = zip(inner.constvars, arrays, strict=True)
            constants = tuple(Value(var.aval, array) for var, array in pairs)
            arguments = given[len(given) - len(inner.invars) :]
            results = _write(inner, (*constants, *arguments), here, named, operations, fenced)
        else:
            results = [Value(var.aval) for var in equation.outvars]
            operations.append(Operation(equation, given, tuple(results), here, named))
        values.update(zip(equation.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _called(equation: Any) -> tuple[Any, Any]:
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
