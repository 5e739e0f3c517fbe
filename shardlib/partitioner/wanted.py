"""Where what reads a value would have it, followed backwards through a program.

A gradient is a sum over the batch. Where the optimizer state is cut, only a part of each gradient
is read on a device: a sum that is taken straight into that part is a reduce-scatter, half of what an
all-reduce sends, and a loop that stacks gradients of layers stacks parts of them.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from shardlib.partitioner.factors import Factors, factors_of
from shardlib.partitioner.layout import Dims

_FOLLOWED = frozenset(
    [
        "convert_element_type",
        "copy",
        "copy_p",
        "transpose",
        "squeeze",
        "reshape",
        "neg",
        "add",
        "add_any",
        "sub",
        "mul",
        "div",
        "broadcast_in_dim",
        "name",
        "select_n",
    ]
)


def wanted_layouts(jaxpr: Any, outputs: Sequence[Dims | None]) -> dict[Any, Dims]:
    """Returns the dims that readers want, by variable.

    Args:
        jaxpr: An open jaxpr.
        outputs: What is wanted of its results.
    """
    wanted: dict[Any, Dims] = {}

    def want(atom: Any, dims: Dims | None) -> None:
        if dims is not None and any(dims) and not isinstance(atom, Literal):
            wanted.setdefault(atom, dims)

    for atom, dims in zip(jaxpr.outvars, outputs, strict=True):
        want(atom, dims)
    if not wanted:
        return wanted
    for equation in reversed(jaxpr.eqns):
        if equation.primitive.name not in _FOLLOWED:
            continue
        found = wanted.get(equation.outvars[0])
        factors = factors_of(equation) if found is not None else None
        if found is None or factors is None:
            continue
        for number, atom in enumerate(equation.invars):
            want(atom, _through(factors, number, found))
    return wanted


def _through(factors: Factors, operand: int, result: Dims) -> Dims:
    axes = {
        factor: dim
        for factor, dim in zip(factors.results[0], result, strict=True)
        if factor is not None
    }
    return tuple(
        axes.get(factor, ()) if factor is not None else () for factor in factors.operands[operand]
    )
