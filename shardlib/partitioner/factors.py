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
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from shardlib.jaxprs import Operation, array_of, context_of, flatten, is_literal
from shardlib.partitioner.layout import Dims, Sizes, degree

Dim = int | None
"""The factor of a dim; None for a dim that must be whole."""
Reduction = Literal["sum", "max", "min", "and", "or"]
Linear = Literal["no", "first", "each", "all"]
"""Operands through which an operation passes a pending sum: none, the first, any one of them while
the others are complete (`each`), or all of them alike (`all`)."""


Assignment = dict[int, tuple[str, ...]]
"""The mesh axes of each cut factor, major to minor."""


@dataclasses.dataclass(frozen=True)
class DevicePiece:
    """The piece of an operation that this device computes, inside a manual region."""

    assignment: Assignment
    axis_sizes: Sizes

    def parts(self, factor: Dim) -> int:
        """Returns the number of pieces along a factor; 1 for an uncut factor, or None."""
        return degree(self._axes(factor), self.axis_sizes)

    def index(self, factor: Dim) -> jax.Array:
        """Returns the index of the piece along a factor, an int32 scalar."""
        at = jnp.int32(0)
        for axis in self._axes(factor):
            at = at * self.axis_sizes[axis] + lax.axis_index(axis).astype(jnp.int32)
        return at

    def _axes(self, factor: Dim) -> tuple[str, ...]:
        return () if factor is None else self.assignment.get(factor, ())


Arrays = Sequence[jax.Array]
"""The operands or the results of an operation."""
Local = Callable[[Operation, Arrays, DevicePiece], Arrays]


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
    what: Hashable = None
    """What an opaque operation stands for."""
    local: Local | None = None
    """`local(operation, operands, piece)` computes a piece of the results from pieces of the
    operands; None binds the operation unchanged."""

    @property
    def shared(self) -> frozenset[int]:
        """The factors of all operands and results, such as the batch dims of a product."""
        every = (*self.operands, *self.results)
        return frozenset.intersection(
            *(frozenset(f for f in dims if f is not None) for dims in every)
        )

    def compute(self, operation: Operation, operands: Arrays, piece: DevicePiece) -> Arrays:
        """Returns a piece of the results from pieces of the operands."""
        if self.local is None:
            return bind(operation, operands)
        return self.local(operation, operands, piece)


class FactorList(list[int]):
    """The sizes of the factors of an operation, in the order of their creation."""

    def new(self, size: int, sums: dict[int, Reduction] | None = None) -> int:
        """Adds a factor and returns its number; notes it in `sums`, if given, as summed."""
        self.append(size)
        if sums is not None:
            sums[len(self) - 1] = "sum"
        return len(self) - 1


def bind(operation: Operation, values: Arrays, **changes: object) -> Arrays:
    """Returns the results of an operation's primitive on other operands, with some parameters
    changed. Shardings among the parameters are left out: they describe the whole value."""
    params = {**operation.params, **changes}
    params |= {name: None for name in ("out_sharding", "sharding") if name in params}
    if params.get("update_jaxpr") is not None:
        params["update_jaxpr"] = _retraced(params["update_jaxpr"], params["update_consts"])
    options = operation.primitive.get_bind_params(params)
    with context_of(operation.equation):
        results = operation.primitive.bind(*values, **options)
    return results if operation.primitive.multiple_results else [results]


def _retraced(update: Jaxpr, consts: Arrays) -> Jaxpr:
    """Returns the function by which a scatter combines two numbers, traced in this region.

    JAX constrains its values if it was traced within another region. The compiler for TPUs then
    ends the process where it computes a scatter of constants. `jaxpr_as_fun` would trace it in the
    other region again.
    """
    flat = flatten(update)

    def combine(*numbers: jax.Array) -> Arrays:
        known: dict[Any, Any] = dict(zip(flat.invars, (*consts, *numbers), strict=True))

        def read(v: Any) -> Any:
            return v.val if is_literal(v) else known[v]

        for operation in flat.operations:
            results = bind(operation, [read(v) for v in operation.invars])
            known.update(zip(operation.outvars, results, strict=True))
        return [read(v) for v in flat.outvars]

    numbers = [jax.ShapeDtypeStruct((), array_of(v).dtype) for v in update.invars]
    return jax.make_jaxpr(combine)(*numbers).jaxpr


def piece_shape(shape: Sequence[int], dims: Sequence[Dim], piece: DevicePiece) -> tuple[int, ...]:
    """Returns the shape of a piece of a value whose dims have these factors."""
    return tuple(n // piece.parts(factor) for n, factor in zip(shape, dims, strict=True))


def dims_of(factors: Sequence[Dim], assignment: Assignment) -> Dims:
    """Returns the mesh axes of each dim of a value whose dims have these factors."""
    return tuple(assignment.get(factor, ()) if factor is not None else () for factor in factors)


Rule = Callable[[Operation], Factors | None]
RULES: dict[str, Rule] = {}
"""Rules by the name of a primitive. A rule returns None if an operation must be computed whole."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a function of an operation as the rule of the named primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def factors_of(operation: Operation) -> Factors | None:
    """Returns the factors of an operation; None if it is unknown and must be computed whole."""
    name = operation.name
    if name in RULES:
        return RULES[name](operation)
    return _elementwise(operation) if name in ELEMENTWISE else None


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
_UNARY_LINEAR = frozenset({"convert_element_type", "copy", "copy_p", "name", "neg"})


def _elementwise(operation: Operation) -> Factors | None:
    """Every dim of the result is a factor; scalars and operand dims of size 1 are repeated."""
    avals = [var.aval for var in operation.invars]
    shape = operation.outvars[0].aval.shape
    if any(out.aval.shape != shape for out in operation.outvars):
        return None
    if not all(a.shape == () or _repeats(a.shape, shape) for a in avals):
        return None
    if shape and all(a.shape == () for a in avals):
        return None  # the result splits the bits of a number into several smaller ones
    operands = tuple(
        tuple(dim if n == shape[dim] else None for dim, n in enumerate(a.shape)) for a in avals
    )
    results = (tuple(range(len(shape))),) * len(operation.outvars)
    flops, linear = float(math.prod(shape)), _linearity(operation)
    return Factors(operands, results, tuple(shape), flops=flops, linear=linear)


COLLECTIVES = ("psum", "pmax", "pmin", "ppermute")


@rule(*COLLECTIVES)
def collective(operation: Operation) -> Factors | None:
    """A collective over axes of an outer region does the same with every element.

    Over a `jax.vmap` axis it is a reduction: `axes` holds the position of the dim.
    """
    axes = operation.params.get("axes", ())
    shapes = [var.aval.shape for var in operation.invars]
    if any(isinstance(axis, int) for axis in axes):
        return _over_dims(operation, axes) if len(shapes) == 1 else None
    starts = itertools.accumulate((len(shape) for shape in shapes), initial=0)
    dims = tuple(tuple(range(at, at + len(s))) for at, s in zip(starts, shapes, strict=False))
    is_linear = operation.name in ("psum", "ppermute") and len(shapes) == 1
    sizes = tuple(n for shape in shapes for n in shape)
    return Factors(dims, dims, sizes, linear="first" if is_linear else "no")


def _over_dims(operation: Operation, axes: Sequence[object]) -> Factors | None:
    kinds: dict[str, Reduction] = {"psum": "sum", "pmax": "max", "pmin": "min"}
    shape, kind = operation.invars[0].aval.shape, kinds[operation.name]
    if not all(isinstance(axis, int) for axis in axes) or operation.params["axis_index_groups"]:
        return None
    every = tuple(range(len(shape)))
    kept = tuple(dim for dim in every if dim not in axes)
    reduced: dict[int, Reduction] = {dim: kind for dim in every if dim in axes}
    return Factors((every,), (kept,), tuple(shape), reduced, float(math.prod(shape)))


def _repeats(small: Sequence[int], shape: Sequence[int]) -> bool:
    return len(small) == len(shape) and all(
        n in (1, full) for n, full in zip(small, shape, strict=True)
    )


def overflows(dtype: jnp.dtype) -> bool:
    """Returns whether terms can overflow in a dtype although their sum does not, as in float16. A
    number of float32 or bfloat16 is far from its limits."""
    return bool(jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).maxexp < 128)


def _linearity(operation: Operation) -> Linear:
    name, first = operation.name, operation.invars[0].aval.dtype
    out = operation.outvars[0].aval.dtype
    if not jnp.issubdtype(out, jnp.inexact) or not jnp.issubdtype(first, jnp.inexact):
        return "no"
    if name in ("add", "add_any", "sub", "mul", "div") and overflows(out):
        return "no"
    if name in ("add", "add_any", "sub"):
        return "all"
    if name == "mul":
        return "each"
    if name == "div":
        return "first"
    # A sum sends fewer bytes before it is widened. In a dtype of fewer bits or a smaller range its
    # terms would be rounded, or overflow.
    return "first" if name in _UNARY_LINEAR and out == first else "no"
