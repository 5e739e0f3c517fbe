"""Which arguments a traced step updates: what it returns of them, changed and not differentiated.

A gradient has the shape of its parameter and depends on it, but only through what is
differentiated; so does a new value, but through more than that.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardlib.explain.equations import joined
from shardlib.explain.lint.activations import DIFFERENTIATED
from shardlib.jaxprs import subprograms

_COPIES = ("sharding_constraint", "reshard", "copy", "copy_p", "optimization_barrier")


class _Flow(NamedTuple):
    """What a value is made of: the inputs as bits, and the one that it is, unchanged."""

    inputs: int = 0
    same: int | None = None


def updates(jaxpr: Any) -> list[tuple[Any, frozenset[int]]]:
    """Returns the shape and dtype of each result that is computed, and the numbers of the inputs
    that it depends on outside of what is differentiated.

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
            # Each turn of a loop may change what it hands on.
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
    """Returns the inputs of which the step returns a new value, as far as that is sure: where two
    could be the old value of the same result, it is neither.

    Args:
        wanted: The kind of each input: what its new value must equal.
        found: The kind of each result, and the inputs that it depends on.
        donated: The inputs that are donated, which take a result that another could have, too.
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
