"""The order in which a traced step uses its arguments."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from shardlib.jaxprs import subprograms

Key = tuple[float, ...]


class Use(NamedTuple):
    """The first use of an argument.

    An argument that a loop slices into layers has its position in two parts: the path to the loop,
    and the path within the body.
    """

    position: tuple[int, ...]
    """Index of the equation, of the equation inside it, and so on."""
    within: tuple[int, ...] = ()
    layers: int | None = None
    """Trips of the loop over slices of the argument; None without such a loop."""

    def key(self, layer: int | None) -> Key:
        """Returns a key that sorts uses, and the layers of a stack, by when they run."""
        return (
            self.position + self.within if layer is None else (*self.position, layer, *self.within)
        )


LAST = Use((2**31,))
"""The use of an unused argument."""


def shape_of(value: Var | Literal) -> tuple[int, ...]:
    """Returns the shape of a value; empty for values that are not arrays."""
    return getattr(value.aval, "shape", ())


def inner_programs(equation: JaxprEqn) -> Iterator[tuple[Jaxpr, dict[Var, Var]]]:
    """Yields the programs that an equation runs, and the operand that each argument receives.

    The arguments of a program are the last operands of the equation; leading operands are a
    predicate or constants. The condition of a loop receives its own constants, which come first,
    and not the constants of the body.
    """
    for program in subprograms(equation):
        operands = list(equation.invars)
        if equation.primitive.name == "while":
            own, body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
            is_condition = program is equation.params["cond_jaxpr"].jaxpr
            del operands[slice(own, own + body) if is_condition else slice(own)]
        pairs = zip(reversed(program.invars), reversed(operands), strict=False)
        yield program, {inner: outer for inner, outer in pairs if isinstance(outer, Var)}


def first_uses(jaxpr: Jaxpr) -> Mapping[Var, Use]:
    """Returns the first use of each argument of a program."""
    uses: dict[Var, Use] = {}
    for position, equation in enumerate(jaxpr.eqns):
        programs = list(inner_programs(equation))
        if not programs:
            for operand in equation.invars:
                if isinstance(operand, Var):
                    uses.setdefault(operand, Use((position,)))
        for program, operands in programs:
            for argument, use in first_uses(program).items():
                if argument in operands:
                    operand = operands[argument]
                    is_sliced = len(shape_of(operand)) > len(shape_of(argument))
                    uses.setdefault(operand, _outside(equation, position, use, is_sliced))
    return uses


def _outside(equation: JaxprEqn, position: int, use: Use, is_sliced: bool) -> Use:
    """Returns the use of an operand, from the use of the argument of the inner program."""
    if use.layers is None and is_sliced and equation.primitive.name == "scan":
        return Use((position,), use.position, equation.params["length"])
    return use._replace(position=(position, *use.position))
