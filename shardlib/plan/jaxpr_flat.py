"""Traced programs without the calls in them: one list of operations, as a compiler sees it."""

import dataclasses
import functools
from typing import Any

_CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    )
)
_PROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


class Value:
    """What an operation gives."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any):
        self.aval = aval


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One operation, as an equation of a jaxpr."""

    primitive: Any
    invars: tuple[Any, ...]
    """Values, or literals with `val`."""
    outvars: tuple[Value, ...]
    params: Any
    stack: str
    """Names of what JAX transformed, from the outermost."""

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.primitive.name


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Operations in order, with no call among them but loops and branches."""

    invars: tuple[Value, ...]
    """Constants, then arguments."""
    outvars: tuple[Any, ...]
    operations: tuple[Operation, ...]


@functools.lru_cache(maxsize=4096)
def flatten(jaxpr: Any) -> Program:
    """Returns a jaxpr with its calls written out, without what nothing reads."""
    inputs = tuple(Value(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars))
    operations: list[Operation] = []
    outputs = _write(jaxpr, inputs, "", operations)
    needed = {value for value in outputs if not is_literal(value)}
    kept = []
    for operation in reversed(operations):
        if needed.intersection(operation.outvars):
            kept.append(operation)
            needed.update(value for value in operation.invars if not is_literal(value))
    return Program(inputs, tuple(outputs), tuple(reversed(kept)))


def is_literal(value: Any) -> bool:
    """Returns whether a value is a constant of the program."""
    return hasattr(value, "val")


def _write(jaxpr: Any, inputs: Any, stack: str, operations: list[Operation]) -> list[Any]:
    """Appends the operations of a jaxpr; returns its results."""
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

    def read(var: Any) -> Any:
        return var if is_literal(var) else values[var]

    for equation in jaxpr.eqns:
        here = f"{stack}/{equation.source_info.name_stack}"
        given = tuple(read(var) for var in equation.invars)
        inner = _called(equation)
        if inner is not None:
            constants = tuple(Value(var.aval) for var in inner.constvars)
            arguments = given[len(given) - len(inner.invars) :]
            results = _write(inner, (*constants, *arguments), here, operations)
        else:
            results = [Value(var.aval) for var in equation.outvars]
            operations.append(
                Operation(equation.primitive, given, tuple(results), equation.params, here)
            )
        values.update(zip(equation.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _called(equation: Any) -> Any:
    """The program that an equation runs once as it is; None for all others."""
    if equation.primitive.name not in _CALLS:
        return None
    for key in _PROGRAMS:
        program = equation.params.get(key)
        program = getattr(program, "jaxpr", program)
        if hasattr(program, "eqns"):
            return program
    return None
