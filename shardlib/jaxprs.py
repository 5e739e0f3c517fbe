"""Walking through traced programs."""

from collections.abc import Iterator
from typing import Any


def subprograms(equation: Any) -> Iterator[Any]:
    """Yields the programs that an equation runs: loop bodies, branches, called functions."""
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(one, "jaxpr", one)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr
