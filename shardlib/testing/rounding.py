"""By how much two ways of adding up the same float32 numbers may differ.

A sum of `n` numbers that is computed as a tree has log2(n) roundings between any number and the
result, each of at most one unit roundoff `u` (2**-24 in float32). Another order of the same sum is
therefore the exact sum of numbers that are each changed by at most `u * log2(n)`, relatively, twice
(once for each order). A matrix product is made of such sums, so another mesh computes what one
device would compute from weights that differ by as much.

What such a change does to losses, gradients and optimizer state depends on the model: a softmax is
tame, a batch normalisation over few examples magnifies, an Adam update of a gradient that is zero
up to rounding is all rounding. It is not estimated but measured: the program of the one device runs
again from parameters changed by that much, signs at random. No compilation is needed for it.

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
    """Terms of the largest, what loops around it add up included."""
    unit_roundoff: float
    """Of the narrowest floating-point dtype that anything is computed in or sent in."""

    @property
    def relative(self) -> float:
        """The relative change of the terms that another order of the sum amounts to."""
        return self.unit_roundoff * max(1.0, math.log2(self.terms))


def reductions(jaxpr: Any) -> Reductions:
    """Returns the sums of a program as JAX traced it."""
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
    """How many numbers one element of the result of an equation is the sum of, at most."""
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
    """Returns by how much rounding to a dtype changes a number at most, relatively."""
    return float(jnp.finfo(dtype).eps) / 2


def perturbations(relative: float) -> list[Change]:
    """Returns what the probes do to the parameters."""
    return [perturbation(relative, seed) for seed in range(NUM_PROBES)]


def perturbation(relative: float, seed: int) -> Change:
    """Returns what changes every floating-point number by `relative`, up or down at random."""
    rng = np.random.default_rng(seed)

    def change(leaves: Leaves) -> Leaves:
        return {path: changed(leaf) for path, leaf in leaves.items()}

    def changed(leaf: np.ndarray) -> np.ndarray:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        signs = rng.choice((-1.0, 1.0), leaf.shape)
        return (leaf.astype(np.float64) * (1.0 + relative * signs)).astype(leaf.dtype)

    return change
