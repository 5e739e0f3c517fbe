"""Factors of operations: the dims that may be cut, and the work left after the cut.

A factor is one loop of an operation. A matmul `[m, k] @ [k, n]` has three: m and n, which run
through an operand and the result, and k, which is contracted. Cut along a factor, an operation is
the same operation on pieces. The pieces of a result are parts of it or, for a contracted factor,
terms of a sum. A dim without a factor must be whole. Shardy describes operations in the same way
(openxla.org/shardy, "Sharding rules").
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax.numpy as jnp

Dim = int | None
"""The factor of a dim; None for a dim that must be whole."""
Reduction = Literal["sum", "max", "min", "and", "or"]
Linear = Literal["no", "first", "each", "all"]
"""Operands through which an operation passes a pending sum: none, the first, any one of them while
the others are complete (`each`), or all of them alike (`all`)."""


class Cut(Protocol):
    """The cut of an operation on this device."""

    def parts(self, factor: Dim) -> int:
        """Returns the number of pieces along a factor; 1 for an uncut factor, or None."""
        ...

    def index(self, factor: Dim) -> Any:
        """Returns the index of the piece that this device computes, an int32 scalar."""
        ...


Local = Callable[[Any, list[Any], Cut], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Factors:
    """The factors of one operation."""

    operands: tuple[tuple[Dim, ...], ...]
    """The factor of each dim of each operand."""
    results: tuple[tuple[Dim, ...], ...]
    """The factor of each dim of each result."""
    sizes: tuple[int, ...]
    """The size of each factor."""
    reduced: dict[int, Reduction] = dataclasses.field(default_factory=dict)
    """Contracted factors, and the reduction that combines the pieces of the results."""
    flops: float = 0.0
    linear: Linear = "no"
    local: Local | None = None
    """`local(equation, pieces, cut)` computes the operation on pieces; None binds it unchanged."""


def bind(equation: Any, values: Sequence[Any], **changes: Any) -> Sequence[Any]:
    """Returns the results of an equation's primitive on other operands, with some parameters
    changed. Shardings among the parameters are left out: they describe the whole value."""
    params = {**equation.params, **changes}
    params |= {name: None for name in ("out_sharding", "sharding") if name in params}
    options = equation.primitive.get_bind_params(params)
    found = equation.primitive.bind(*values, **options)
    return found if equation.primitive.multiple_results else [found]


def pieces(shape: Sequence[int], dims: Sequence[Dim], cut: Cut) -> tuple[int, ...]:
    """Returns the shape of a piece of a value whose dims have these factors."""
    return tuple(n // cut.parts(factor) for n, factor in zip(shape, dims, strict=True))


Rule = Callable[[Any], Factors | None]
RULES: dict[str, Rule] = {}
"""Rules by the name of a primitive. A rule returns None if an equation must be computed whole."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function of an equation as the rule of the named primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def factors_of(equation: Any) -> Factors | None:
    """Returns the factors of an equation; None if it is unknown and must be computed whole."""
    name = equation.primitive.name
    if name in RULES:
        return RULES[name](equation)
    return _elementwise(equation) if name in ELEMENTWISE else None


_NAMES = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos
    cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min
    mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial
    population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh threefry2x32 tie xor zeta
"""
ELEMENTWISE = frozenset(_NAMES.split())
"""Primitives that compute each element from the elements at the same position."""
_UNARY_LINEAR = frozenset({"convert_element_type", "copy", "copy_p", "imag", "name", "neg", "real"})


def _elementwise(equation: Any) -> Factors | None:
    """Every dim of the result is a factor; scalars and operand dims of size 1 are repeated."""
    avals = [var.aval for var in equation.invars]
    shape = equation.outvars[0].aval.shape
    if any(out.aval.shape != shape for out in equation.outvars):
        return None
    if not all(a.shape == () or _repeats(a.shape, shape) for a in avals):
        return None
    if shape and all(a.shape == () for a in avals):
        return None  # the result splits the bits of a number into several smaller ones
    operands = tuple(
        tuple(dim if n == shape[dim] else None for dim, n in enumerate(a.shape)) for a in avals
    )
    every = tuple(range(len(shape)))
    size = float(math.prod(shape))
    return Factors(
        operands,
        (every,) * len(equation.outvars),
        tuple(shape),
        flops=size,
        linear=_linearity(equation),
    )


COLLECTIVES = ("psum", "pmax", "pmin", "ppermute")


@rule(*COLLECTIVES)
def collective(equation: Any) -> Factors | None:
    """A collective over axes of an outer region does the same with every element.

    Over a `jax.vmap` axis it is a reduction: `axes` holds the position of the dim.
    """
    axes = equation.params.get("axes", ())
    shapes = [var.aval.shape for var in equation.invars]
    if any(isinstance(axis, int) for axis in axes):
        return _over_dims(equation, axes) if len(shapes) == 1 else None
    starts = itertools.accumulate((len(shape) for shape in shapes), initial=0)
    dims = tuple(tuple(range(at, at + len(s))) for at, s in zip(starts, shapes, strict=False))
    is_linear = equation.primitive.name in ("psum", "ppermute") and len(shapes) == 1
    sizes = tuple(n for shape in shapes for n in shape)
    return Factors(dims, dims, sizes, linear="first" if is_linear else "no")


def _over_dims(equation: Any, axes: Sequence[Any]) -> Factors | None:
    kinds: dict[str, Reduction] = {"psum": "sum", "pmax": "max", "pmin": "min"}
    shape, kind = equation.invars[0].aval.shape, kinds[equation.primitive.name]
    if not all(isinstance(axis, int) for axis in axes) or equation.params["axis_index_groups"]:
        return None
    every = tuple(range(len(shape)))
    kept = tuple(dim for dim in every if dim not in axes)
    reduced: dict[int, Reduction] = dict.fromkeys(axes, kind)
    return Factors((every,), (kept,), tuple(shape), reduced, float(math.prod(shape)))


def _repeats(small: Sequence[int], shape: Sequence[int]) -> bool:
    return len(small) == len(shape) and all(
        n in (1, full) for n, full in zip(small, shape, strict=True)
    )


def _linearity(equation: Any) -> Linear:
    name, (first, *_) = equation.primitive.name, [var.aval.dtype for var in equation.invars]
    out = equation.outvars[0].aval.dtype
    if not jnp.issubdtype(out, jnp.inexact) or not jnp.issubdtype(first, jnp.inexact):
        return "no"
    if name in ("add", "add_any", "sub"):
        return "all"
    if name in ("mul", "div") and jnp.finfo(out).maxexp < 128:
        return "no"  # in float16 the terms can overflow although the sum does not
    if name == "mul":
        return "each"
    if name == "div":
        return "first"
    # A sum sends fewer bytes before it is widened. If narrowed first, its terms would be rounded.
    same = out.itemsize == first.itemsize
    return "first" if name in _UNARY_LINEAR and same else "no"


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A `Cut` that is known at trace time: (parts, index) by factor."""

    at: dict[int, tuple[int, int]]

    def parts(self, factor: Dim) -> int:
        return self.at.get(factor, (1, 0))[0] if factor is not None else 1

    def index(self, factor: Dim) -> Any:
        return jnp.int32(self.at.get(factor, (1, 0))[1] if factor is not None else 0)
