"""The order in which a program uses its arguments, and which are stacks of layers."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from shardlib.jaxprs import scan_parts, subprograms

Key = tuple[float, ...]


class Use(NamedTuple):
    """The first use of an argument."""

    position: tuple[int, ...]
    """Index of the equation, of the equation inside it, and so on."""
    depth: int | None = None
    """Length of the prefix of `position` that leads to the loop over slices of the argument; None
    without such a loop."""
    layers: int | None = None
    """Trips of that loop."""

    def key(self, layer: int | None) -> Key:
        """Returns a key that sorts uses, and the layers of a stack, by when they run."""
        if layer is None or self.depth is None:
            return self.position
        return (*self.position[: self.depth], layer, *self.position[self.depth :])


LAST = Use((2**31,))
"""The use of an unused argument."""


def first_uses(jaxpr: Any) -> dict[int, Use]:
    """Returns the first use of each argument of a program, by its index.

    Args:
        jaxpr: The program as traced by JAX, closed or not.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    index = {variable: i for i, variable in enumerate(jaxpr.invars)}
    found: dict[int, Use] = {}
    for position, equation in enumerate(jaxpr.eqns):
        for argument, use in _uses_in(equation, position):
            if not _is_literal(argument) and argument in index:
                found.setdefault(index[argument], use)
    return found


def _uses_in(equation: Any, position: int) -> Iterator[tuple[Any, Use]]:
    """Yields the arguments of an equation, and their uses."""
    inner = list(subprograms(equation))
    if not inner:
        for argument in equation.invars:
            yield argument, Use((position,))
    for jaxpr in inner:
        # Leading arguments that the inner program lacks are a predicate or other constants.
        skipped = len(equation.invars) - len(jaxpr.invars)
        for at, use in first_uses(jaxpr).items():
            outer = at + skipped
            if not 0 <= outer < len(equation.invars):
                continue
            depth, layers = use.depth, use.layers
            if depth is not None:
                depth += 1
            elif _is_sliced(equation, outer):
                depth, layers = 1, equation.params["length"]
            yield equation.invars[outer], Use((position, *use.position), depth, layers)


def _is_sliced(equation: Any, argument: int) -> bool:
    """Whether a loop gives each trip its own slice of an argument."""
    if equation.primitive.name != "scan":
        return False
    return argument >= sum(scan_parts(equation))


def _is_literal(argument: Any) -> bool:
    return hasattr(argument, "val")


def equations(jaxpr: Any, trips: int = 1) -> Iterable[tuple[Any, int]]:
    """Yields all equations of a program, including inner ones, with their number of runs."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation, trips
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in subprograms(equation):
            yield from equations(inner, trips * times)
