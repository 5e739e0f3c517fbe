"""Detection of the arguments that a traced step updates.

A gradient has the shape of its parameter, but depends on it only through differentiated code. An
updated value has the same shape and also depends on the parameter outside of that code.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardlib.explain.analysis.equations import joined
from shardlib.explain.lint.activations import DIFFERENTIATED
from shardlib.jaxprs import subprograms

_COPIES = ("sharding_constraint", "reshard", "copy", "copy_p", "optimization_barrier")


class _Flow(NamedTuple):
    """The inputs that a value depends on, as bits, and the input that it equals, if any."""

    inputs: int = 0
    same: int | None = None


def updates(jaxpr: Any) -> list[tuple[Any, frozenset[int]]]:
    """Returns the aval of each computed result, and the inputs that it depends on outside of
    differentiated code, by number.

    Args:
        jaxpr: The traced step, a `ClosedJaxpr`.
    """
    inside = jaxpr.jaxpr
    inputs = [_Flow(1 << number, number) for number in range(len(inside.invars))]
    found = _run(inside, inputs, "")
    results = zip(inside.outvars, found, strict=True)
    return [(v.aval, frozenset(_bits(flow.inputs))) for v, flow in results if flow.same is None]


def _run(jaxpr: Any, inputs: Sequence[_Flow], name: str) -> list[_Flow]:
    known: dict[Any, _Flow] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(variable: Any) -> _Flow:
        return _Flow() if hasattr(variable, "val") else known.get(variable, _Flow())

    for equation in jaxpr.eqns:
        here = joined(name, equation)
        read_here = [read(variable) for variable in equation.invars]
        known |= dict(zip(equation.outvars, _results(equation, read_here, here), strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _results(equation: Any, inputs: list[_Flow], name: str) -> list[_Flow]:
    count = len(equation.outvars)
    if DIFFERENTIATED in name:
        return [_Flow()] * count
    if equation.primitive.name in _COPIES and len(inputs) == count:
        return inputs
    programs = list(subprograms(equation))
    if len(programs) == 1:
        program = getattr(programs[0], "jaxpr", programs[0])
        if (len(program.invars), len(program.outvars)) == (len(inputs), count):
            found = _run(program, inputs, name)
            # Each iteration of a loop may change its carry.
            is_loop = equation.primitive.name == "scan"
            return [flow._replace(same=None) for flow in found] if is_loop else found
    if any(_differentiates(program, name) for program in programs):
        return [_Flow()] * count
    together = 0
    for flow in inputs:
        together |= flow.inputs
    return [_Flow(together)] * count


def _differentiates(program: Any, name: str) -> bool:
    for equation in getattr(program, "jaxpr", program).eqns:
        here = joined(name, equation)
        if DIFFERENTIATED in here or any(_differentiates(p, here) for p in subprograms(equation)):
            return True
    return False


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def own_updates(
    wanted: Mapping[int, Any], found: list[tuple[Any, frozenset[int]]], donated: frozenset[int]
) -> set[int]:
    """Returns the inputs that the step certainly updates.

    If a result could be the new value of two inputs, it counts for neither of them.

    Args:
        wanted: Kind of each input. Its new value must have the same kind.
        found: Kind of each result, and the inputs that it depends on.
        donated: The donated inputs. They take a result even if another input could have it.
    """
    candidates = {
        number: [at for at, (k, inputs) in enumerate(found) if k == kind and number in inputs]
        for number, kind in wanted.items()
    }
    order = sorted(candidates, key=lambda n: (len(candidates[n]), n not in donated))
    taken: dict[int, int] = {}
    lost: set[int] = set()
    for number in order:
        free = [at for at in candidates[number] if at not in taken]
        if free:
            taken[free[0]] = number
        else:
            lost |= set(candidates[number])
    return {number for at, number in taken.items() if at not in lost or number in donated}
