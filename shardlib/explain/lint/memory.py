"""Checks of memory: state that a step holds twice, old and new (SL301, SL302).

A gradient has the shape of its parameter, but depends on it only through differentiated code. An
updated value has the same shape and also depends on the parameter outside of that code.
"""

import collections
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from shardlib import humanize
from shardlib.explain.analysis.equations import joined
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.subject import DIFFERENTIATED, Argument, Subject, array_text
from shardlib.jaxprs import array_of, subprograms

_RETURNED = 0.9
"""Minimal share of an argument's bytes that a step returns if it updates the argument."""
_COPIES = ("sharding_constraint", "reshard", "copy", "copy_p", "optimization_barrier")

Kind = tuple[tuple[int, ...], str]
"""The shape and dtype of an array."""


def not_reused(subject: Subject) -> Iterator[Finding]:
    """Yields SL301: donated arrays whose buffer no result reuses."""
    reused = {number for _, number, _ in subject.module.donations()}
    for leaf in subject.leaves:
        held = leaf.bytes_per_device
        large = held >= subject.limits.donated_bytes
        if leaf.donated and large and leaf.number is not None and leaf.number not in reused:
            yield Finding(
                "SL301",
                leaf.path,
                f"{leaf.path} {array_text(leaf)} is donated, but no result has its shape, dtype "
                f"and sharding: {humanize.size(held)} on each device are held in addition to the "
                "new value.",
                "Return the new value in the dtype and with the sharding of the old one (cast it, "
                "and pin it with out_shardings), or do not donate it.",
                subject.step_source,
                bytes=held,
            )


def not_donated(subject: Subject) -> Iterator[Finding]:
    """Yields SL302: arguments that the step updates and does not donate."""
    if subject.donated is None or subject.jaxpr is None:
        return
    updated = _updated(subject.leaves, subject.jaxpr)
    owners: dict[str, list[Argument]] = collections.defaultdict(list)
    for leaf in subject.leaves:
        if leaf.is_state:
            owners[leaf.owner].append(leaf)
    for owner, leaves in owners.items():
        returned = [leaf.bytes_per_device for leaf in leaves if leaf.path in updated]
        held = sum(leaf.bytes_per_device for leaf in leaves)
        enough = max(subject.limits.donated_bytes, _RETURNED * held)
        if sum(returned) < enough or any(leaf.donated for leaf in leaves):
            continue
        # An element of *args has no name of its own.
        by_name = "donate_argnums=..." if "/" in owner else f"donate_argnames={owner!r}"
        yield Finding(
            "SL302",
            owner,
            f"the step returns a new value of {owner}, {len(returned)} arrays of "
            f"{humanize.size(sum(returned))} on each device, and does not donate it: old and new "
            "are held at once.",
            f"Donate it: jax.jit(step, {by_name}).",
            subject.step_source,
            bytes=sum(returned),
        )


def _updated(arguments: Sequence[Argument], jaxpr: ClosedJaxpr) -> set[str]:
    """Returns the paths of the arrays that the step updates."""
    # Scalars may be Python numbers, and are too small to matter.
    leaves = [leaf for leaf in arguments if leaf.shape]
    arrays = [(n, a) for n, a in enumerate(map(array_of, jaxpr.jaxpr.invars)) if a.shape]
    kinds = {number: _kind(array) for number, array in arrays}
    if list(map(_kind, leaves)) != list(kinds.values()):
        return set()
    by_number = dict(zip(kinds, leaves, strict=True))
    donated = frozenset(number for number, leaf in by_number.items() if leaf.donated)
    states = {number: kind for number, kind in kinds.items() if by_number[number].is_state}
    updated = _own_updates(states, _results_of(jaxpr.jaxpr), donated)
    return {by_number[number].path for number in updated}


def _kind(array: Argument | ShapedArray) -> Kind:
    return tuple(array.shape), str(array.dtype)


class _Flow(NamedTuple):
    """The inputs that a value depends on, as bits, and the input that it equals, if any."""

    inputs: int = 0
    same: int | None = None


def _results_of(jaxpr: Jaxpr) -> list[tuple[Kind, int]]:
    """Returns the kind of each computed result, and the inputs that it depends on outside of
    differentiated code, as bits."""
    inputs = [_Flow(1 << number, number) for number in range(len(jaxpr.invars))]
    flows = zip(jaxpr.outvars, _run(jaxpr, inputs, ""), strict=True)
    return [(_kind(array_of(var)), flow.inputs) for var, flow in flows if flow.same is None]


def _run(jaxpr: Jaxpr, inputs: Sequence[_Flow], name: str) -> list[_Flow]:
    flows = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atoms: Sequence[Var | Literal]) -> list[_Flow]:
        return [_Flow() if isinstance(v, Literal) else flows.get(v, _Flow()) for v in atoms]

    for equation in jaxpr.eqns:
        results = _results(equation, read(equation.invars), joined(name, equation))
        flows |= dict(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


def _results(equation: JaxprEqn, inputs: list[_Flow], name: str) -> list[_Flow]:
    count = len(equation.outvars)
    if DIFFERENTIATED in name:
        return [_Flow()] * count
    if equation.primitive.name in _COPIES and len(inputs) == count:
        return inputs
    programs = list(subprograms(equation))
    if len(programs) == 1:
        (program,) = programs
        if (len(program.invars), len(program.outvars)) == (len(inputs), count):
            flows = _run(program, inputs, name)
            # Each iteration of a loop may change its carry.
            is_loop = equation.primitive.name == "scan"
            return [flow._replace(same=None) for flow in flows] if is_loop else flows
    if any(_differentiates(program, name) for program in programs):
        return [_Flow()] * count
    return [_Flow(functools.reduce(operator.or_, (flow.inputs for flow in inputs), 0))] * count


def _differentiates(program: Jaxpr, name: str) -> bool:
    for equation in program.eqns:
        here = joined(name, equation)
        if DIFFERENTIATED in here or any(_differentiates(p, here) for p in subprograms(equation)):
            return True
    return False


def _own_updates(
    states: Mapping[int, Kind], results: Sequence[tuple[Kind, int]], donated: frozenset[int]
) -> set[int]:
    """Returns the inputs that the step certainly updates.

    If a result could be the new value of two inputs, it counts for neither of them.

    Args:
        states: Kind of each input of the state. Its new value must have the same kind.
        results: Kind of each result, and the inputs that it depends on, as bits.
        donated: The donated inputs. They take a result even if another input could have it.
    """
    candidates = {
        number: [at for at, (k, inputs) in enumerate(results) if k == kind and inputs >> number & 1]
        for number, kind in states.items()
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
