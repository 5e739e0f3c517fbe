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
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardlib.testing.order import equations
from shardlib.testing.training import Change, Leaves

NUM_PROBES = 3

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
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


def reductions(jaxpr: Any) -> Reductions:
    """Returns the sums of a program as traced by JAX."""
    terms, unit = 1, unit_roundoff(np.float32)
    for equation, trips in equations(jaxpr):
        unit = max([unit, *(unit_roundoff(x.dtype) for x in _floating(equation.outvars))])
        if equation.primitive.name in (*_PRODUCTS, *_SUMS):
            sizes = [x.size for x in _floating(equation.invars)]
            terms = max(terms, trips * _terms(equation, sizes)) if sizes else terms
    return Reductions(terms, unit)


def _floating(variables: Any) -> list[Any]:
    shaped = [x.aval for x in variables if hasattr(x.aval, "dtype")]
    return [x for x in shaped if jnp.issubdtype(x.dtype, jnp.floating)]


def _terms(equation: Any, sizes: list[int]) -> int:
    """Returns the most numbers summed into one element of the result of an equation."""
    name, shape = equation.primitive.name, equation.invars[0].aval.shape
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return math.prod(shape[dim] for dim in contracted)
    if name in _PRODUCTS:
        return min(sizes)
    if name == "reduce_sum":
        return math.prod(shape[dim] for dim in equation.params["axes"])
    if name.startswith("scatter"):
        return math.prod(equation.invars[1].aval.shape[:-1])
    return max(shape, default=1)


def unit_roundoff(dtype: Any) -> float:
    """Returns the largest relative change of a number by rounding to a dtype."""
    return float(jnp.finfo(dtype).eps) / 2


def perturbations(relative: float) -> list[Change]:
    """Returns the changes of the parameters, one for each probe."""
    return [perturbation(relative, seed) for seed in range(NUM_PROBES)]


def perturbation(relative: float, seed: int) -> Change:
    """Returns a function that changes every float by `relative`, up or down at random."""
    rng = np.random.default_rng(seed)

    def change(leaves: Leaves) -> Leaves:
        return {path: changed(leaf) for path, leaf in leaves.items()}

    def changed(leaf: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        signs = rng.choice((-1.0, 1.0), leaf.shape)
        return (leaf.astype(np.float64) * (1.0 + relative * signs)).astype(leaf.dtype)

    return change
