"""Bounds on the difference between two ways to sum the same float32 numbers.

A sum of `n` numbers computed as a tree has log2(n) roundings between any number and the result,
each of at most one unit roundoff `u` (2**-24 in float32). Another order of the same sum is thus the
exact sum of numbers that are each changed by at most `u * log2(n)`, relatively, twice (once for
each order). A matrix product consists of such sums. Another mesh therefore computes the results of
one device for weights changed by this amount.

The effect of such a change on losses, gradients and optimizer state depends on the model. A softmax
is insensitive; a batch normalisation over few examples magnifies it; an Adam update of a gradient
that is zero up to rounding is all rounding. The effect is not estimated but measured: the program
of one device runs again from parameters changed by this amount, with random signs, without another
compilation.

Source: Higham 2002, "Accuracy and Stability of Numerical Algorithms", sec. 4.2 (sums) and 1.5
(backward errors and conditioning).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.source_info_util import summarize
from jax.typing import DTypeLike

from shardlib.cost.traced.products import PRODUCTS
from shardlib.jaxprs import equations
from shardlib.testing.traced import inner_programs, shape_of

Change = Callable[[np.ndarray], np.ndarray]
"""A function that changes the initial value of a parameter."""

NUM_PROBES = 3

_SUMS = ("reduce_sum", "cumsum", "cumlogsumexp", "reduce_window_sum", "scatter-add", "scatter_add")


class Reductions(NamedTuple):
    """The sums of a program."""

    terms: int
    """Terms of the largest sum, including what the loops around it add up."""
    unit_roundoff: float
    """Unit roundoff of the narrowest floating-point dtype of any computation or transfer."""

    @property
    def relative(self) -> float:
        """The relative change of the terms that is equivalent to another order of the sum."""
        return self.unit_roundoff * max(1.0, math.log2(self.terms))


def reductions(jaxpr: Jaxpr) -> Reductions:
    """Returns the sums of a program as traced by JAX."""
    terms, unit = 1, unit_roundoff(np.float32)
    for equation, trips in equations(jaxpr):
        unit = max([unit, *(unit_roundoff(x.dtype) for x in _floating(equation.outvars))])
        if equation.primitive.name in (*PRODUCTS, *_SUMS):
            sizes = [x.size for x in _floating(equation.invars)]
            terms = max(terms, trips * _terms(equation, sizes)) if sizes else terms
    return Reductions(terms, unit)


def _floating(values: Iterable[Var | Literal]) -> list[ShapedArray]:
    shaped = [x.aval for x in values if isinstance(x.aval, ShapedArray)]
    return [x for x in shaped if jnp.issubdtype(x.dtype, jnp.inexact)]


def _terms(equation: JaxprEqn, sizes: list[int]) -> int:
    """Returns the most numbers summed into one element of the result of an equation."""
    name, shape = equation.primitive.name, shape_of(equation.invars[0])
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return math.prod(shape[dim] for dim in contracted)
    if name in PRODUCTS:
        return min(sizes)
    if name == "reduce_sum":
        return math.prod(shape[dim] for dim in equation.params["axes"])
    if name.startswith("scatter"):
        return math.prod(shape_of(equation.invars[1])[:-1])
    return max(shape, default=1)


class Rounding(NamedTuple):
    """An equation whose result is narrower than float32."""

    dtype: np.dtype
    argument: int | None
    """Index of the only program argument that the result is computed from, if there is only one."""
    source: str


def roundings(jaxpr: Jaxpr, origins: Mapping[Var, int] | None = None) -> Iterator[Rounding]:
    """Yields the roundings of a program to less than float32, in program order. `origins` are the
    arguments of the whole program by variable; by default this is the whole program."""
    made_of = dict(zip(jaxpr.invars, range(len(jaxpr.invars)), strict=True))
    made_of = made_of if origins is None else dict(origins)
    for equation in jaxpr.eqns:
        operands = [x for x in equation.invars if isinstance(x, Var)]
        origin = made_of.get(operands[0]) if len(operands) == 1 else None
        programs = list(inner_programs(equation))
        for program, given in programs:
            yield from roundings(program, {v: made_of[x] for v, x in given.items() if x in made_of})
        for variable in () if programs else equation.outvars:
            if origin is not None:
                made_of[variable] = origin
            for value in _floating([variable]):
                if unit_roundoff(value.dtype) > unit_roundoff(np.float32):
                    yield Rounding(value.dtype, origin, summarize(equation.source_info))


def unit_roundoff(dtype: DTypeLike) -> float:
    """Returns the largest relative change of a number by rounding to a dtype."""
    return float(jnp.finfo(dtype).eps) / 2


def perturbations(relative: float) -> list[Change]:
    """Returns the changes of the parameters, one for each probe."""
    return [perturbation(relative, seed) for seed in range(NUM_PROBES)]


def perturbation(relative: float, seed: int) -> Change:
    """Returns a function that changes every number but integers by `relative`, up or down at
    random."""
    rng = np.random.default_rng(seed)

    def change(leaf: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        signs = rng.choice((-1.0, 1.0), leaf.shape)
        return (widened(leaf) * (1.0 + relative * signs)).astype(leaf.dtype)

    return change


def widened(value: np.ndarray) -> np.ndarray:
    """Returns numbers in double precision."""
    return value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)
