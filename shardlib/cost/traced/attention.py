"""Attention that is traced as one operation, on one device of a mesh."""

from collections.abc import Iterator, Sequence
from typing import Literal

from shardlib.cost.traced.layout import (
    MICRO,
    Axes,
    Equation,
    Spec,
    Spreading,
    ValueSharding,
    nbytes,
)
from shardlib.nn.attention.as_one import RowAttention
from shardlib.nn.attention.order import AXIS, hops

Shardings = list[ValueSharding]
_FLOAT32 = 4
_KEY_VALUES = (1, 2)
"""Positions of the keys and values among operands, and of their gradients among results."""
HEAD_NAMES = "heads", "kv_heads", "kv_heads"
"""Names of the heads of queries, keys and values."""
Kind = Literal["all_gather", "reduce_scatter", "all_to_all", "shift"]


def description(equation: Equation) -> RowAttention | None:
    """Returns what an opaque operation stands for, if that is attention."""
    what = equation.params["what"][0]
    return what if isinstance(what, RowAttention) else None


def ruled(spread: Spreading, shape: tuple[int, ...], name: str) -> Spec:
    """Returns how the rules cut rows and heads of this name, as in `nn.attention.region`."""
    return spread.resolve(("batch", None, name, "head_dim"), shape, "activations")


def attended(spread: Spreading, equation: Equation, shardings: Shardings) -> Shardings:
    """Returns the layouts of the results, and records what devices send: operands in other layouts,
    and keys and values along `context`.

    Positions stay cut along `context` alone. `attend` cuts rows and heads as the rules say; in
    other attention they stay cut. Key-value heads that are not cut as query heads are whole; each
    device reads the ones that its query heads share.
    """
    specs = [laid.spec for laid in shardings[:2]]
    what = description(equation)
    if what is not None:
        named = zip(specs, equation.invars, HEAD_NAMES, strict=False)
        specs = [_as_ruled(ruled(spread, v.aval.shape, name), spec) for spec, v, name in named]
    query, key = map(_cut, specs)
    shares_rows = what is None or what.shares_rows
    wanted = query[0], query[1] if shares_rows else (), query[2]
    # Mesh axes of devices that share key-value heads.
    shared = () if key[2] == query[2] else query[2]

    def laid_out(at: int, rank: int) -> ValueSharding:
        if shared and at in _KEY_VALUES:
            # Their gradients are sums over the devices that share a head.
            return ValueSharding(_spec((*wanted[:2], ()), rank), shared)
        return ValueSharding(_spec(wanted, rank))

    for at, (var, laid) in enumerate(zip(equation.invars, shardings, strict=True)):
        spread.relaid(var.aval, laid, laid_out(at, len(var.aval.shape)).spec)
    if what is not None:
        _exchange(spread, equation, what, _spec(wanted, 4))
    return [laid_out(at, len(var.aval.shape)) for at, var in enumerate(equation.outvars)]


def attention_flops(spread: Spreading, equation: Equation, out: ValueSharding) -> float:
    """Returns the FLOPs of one device for all pairs of its rows: of two products, or of the four
    gradients of these. Positions in zig-zag order balance what a mask leaves of them."""
    query, key, value = (var.aval.shape for var in equation.invars[:3])
    pairs = zip(query[:3], out.spec[:3], strict=True)
    rows, length, heads = (size / spread.shards(axes) for size, axes in pairs)
    what = description(equation)
    length *= what.length if what else key[1]
    products = 2 if equation.params["linear"] else 1
    return 2.0 * rows * length * heads * (query[3] + value[3]) * products


def _exchange(spread: Spreading, equation: Equation, what: RowAttention, spec: Spec) -> None:
    """Records what the devices that share a row send each other."""
    arrays = [var.aval for var in equation.invars[:3]]
    # The program may be that of one device already.
    shards = round(what.length / arrays[0].shape[1] * spread.shards(spec[1]))
    heads = round(what.heads / arrays[0].shape[2] * spread.shards(spec[2]))
    parts = spread.shards((*spec[0], *spec[1]))
    of_device = what.heads // heads, *[what.kv_heads_of_device(heads)] * 2
    held = [nbytes(x) * n / x.shape[2] / parts for x, n in zip(arrays, of_device, strict=True)]
    width, is_gradient = arrays[1].dtype.itemsize, equation.params["linear"]
    for kind, num_bytes in exchanged(what, shards, heads, held, width, is_gradient=is_gradient):
        spread.send(kind, (AXIS,), num_bytes)


def exchanged(
    what: RowAttention,
    shards: int,
    parts: int,
    held: Sequence[float],
    width: int,
    *,
    is_gradient: bool,
) -> Iterator[tuple[Kind, float]]:
    """Yields the collectives along `context` of attention or of its gradient, and their bytes as in
    `Link.seconds`.

    Args:
        what: The attention.
        shards: The devices that share a row.
        parts: Parts into which the heads are cut.
        held: Bytes of the query, the keys and the values on a device.
        width: Bytes of an element of the keys.
        is_gradient: Whether it is the gradient, which computes the scores again.
    """
    query, shared = held[0], held[1] + held[2]
    gradients = shared / width * _FLOAT32
    if shards == 1 or not what.shares_rows:
        return
    if what.method == "ulysses":
        # Query, keys, values and the result, or their gradients: exchanged operands are kept.
        yield "all_to_all", 2 * query + shared * what.key_copies(shards, parts)
    elif what.method == "gather":
        yield "all_gather", shards * shared
        if is_gradient:
            yield "reduce_scatter", shards * gradients
    else:
        for _ in range(hops("contiguous", what.mask, shards, what.length // shards)):
            yield "shift", shared + (gradients if is_gradient else 0.0)
        if is_gradient:
            yield "shift", gradients


def _as_ruled(rules: Spec, spec: Spec) -> Spec:
    """Returns a layout with rows and heads as in the rules, which never cut in time."""
    in_time = tuple(axis for axis in spec[0] if axis == MICRO)
    return (*rules[0], *in_time), spec[1], rules[2], ()


def _cut(spec: Spec) -> tuple[Axes, Axes, Axes]:
    """Returns the mesh axes that may cut rows, positions and heads."""
    return spec[0], tuple(axis for axis in spec[1] if axis in (AXIS, MICRO)), spec[2]


def _spec(cut: tuple[Axes, Axes, Axes], rank: int) -> Spec:
    """Returns the layout of an array of heads, of segment ids, or of sinks."""
    rows, length, heads = cut
    return {4: (rows, length, heads, ()), 2: (rows, length), 1: (heads,)}[rank]
