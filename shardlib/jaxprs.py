"""Walking through traced programs.

The layout of jaxprs is no stable interface of JAX: parameters of equations are called otherwise
from version to version, so that what can be is read from shapes.
"""

from collections.abc import Iterator
from typing import Any


def subprograms(equation: Any) -> Iterator[Any]:
    """Yields the programs that an equation runs: loop bodies, branches, called functions."""
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(one, "jaxpr", one)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def scan_parts(equation: Any) -> tuple[int, int]:
    """Returns how many operands of a scan are the same in each trip, and how many are carried from
    trip to trip; the others are cut along their first dim."""
    body = equation.params["jaxpr"].jaxpr
    cut = _more_dims(equation.invars, body.invars)
    carried = len(body.outvars) - _more_dims(equation.outvars, body.outvars)
    return len(body.invars) - carried - cut, carried


def _more_dims(outside: Any, inside: Any) -> int:
    """What is cut, or stacked from the results of trips, has one dim more than in the body."""
    return sum(
        len(out.aval.shape) > len(within.aval.shape)
        for out, within in zip(outside, inside, strict=True)
    )
