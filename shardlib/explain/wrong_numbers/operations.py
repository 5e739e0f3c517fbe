"""Layouts of the results of operations within one device."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardlib.explain.hlo.aliasing import ELEMENTWISE
from shardlib.explain.hlo.text import Instruction
from shardlib.explain.wrong_numbers.layout import (
    Dim,
    Factor,
    Side,
    Tiling,
    assembled,
    forget,
    is_known,
    merged,
    moved,
    put_together,
    reshape,
    unknown,
)
from shardlib.explain.wrong_numbers.values import Context, SpmdValue, dims_and_order

Pairs = list[tuple[Side, Side]]
"""Pairs of dims that an operation assumes to be the same."""
Shapes = Mapping[str, str]
"""The shapes of values by name, with their layouts in memory."""

_ELEMENTWISE = (ELEMENTWISE - {"bitcast"}) | {
    *("map", "optimization-barrier", "domain", "copy-start", "copy-done", "bitcast-convert")
}


class _Op(NamedTuple):
    """An operation, with the values of its operands and the shape of its result."""

    instruction: Instruction
    operands: Sequence[SpmdValue]
    shape: tuple[int, ...]
    context: Context


def layout_of(
    instruction: Instruction, operands: Sequence[SpmdValue], shapes: Shapes, context: Context
) -> tuple[Tiling, Pairs]:
    """Returns the layout of a result, and the pairs of operand dims that must agree."""
    shape, _ = dims_and_order(instruction.shape)
    op, opcode = _Op(instruction, operands, shape, context), instruction.opcode
    if opcode in _ELEMENTWISE:
        return _together(op)
    if opcode in _PAIRED:
        return _PAIRED[opcode](op)
    if opcode == "bitcast" and operands:
        before = shapes.get(instruction.operand_names[0], "")
        return context.once(_bitcast, instruction.shape, operands[0].layout, before), []
    if opcode == "scatter" and is_unpooling(instruction):
        return unpooled(operands[2].layout, shape), []
    if opcode in _MOVES and operands:
        return _MOVES[opcode](op), []
    return unknown(shape), []


def _together(op: _Op) -> tuple[Tiling, Pairs]:
    alike = [operand.layout for operand in op.operands if operand.layout.shape == op.shape]
    if not alike:
        return unknown(op.shape), []
    tiling, pairs = alike[0], []
    for other in alike[1:]:
        if other == tiling or not other.axes:
            continue
        pairs += [((tiling, dim), (other, dim)) for dim in range(len(op.shape))]
        tiling = merged(tiling, other)
    return tiling, pairs


def _updated(op: _Op) -> tuple[Tiling, Pairs]:
    """Returns the layout after a dynamic update slice. Dims that the update fills whole take its
    layout, because a loop stacks its outputs in zeros of unknown layout."""
    tiling, update = op.operands[0].layout, op.operands[1].layout
    partial = [n for n, size in enumerate(update.shape) if size != op.shape[n]]
    whole = forget(update, op.shape, partial)
    pairs = [((tiling, dim), (whole, dim)) for dim in range(len(op.shape)) if dim not in partial]
    return merged(tiling, whole), pairs


def _selected(op: _Op) -> tuple[Tiling, Pairs]:
    """Returns the layout of a max-pool's gradient, the operand's. In dims without a window, operand
    and cotangent have the same parts."""
    tiling, cotangent = op.operands[0].layout, op.operands[1].layout
    alike = [n for n, size in enumerate(op.shape) if cotangent.shape[n] == size]
    return tiling, [((tiling, dim), (cotangent, dim)) for dim in alike]


def is_unpooling(instruction: Instruction) -> bool:
    """Whether a scatter, or a loop of updates, is the gradient of a max-pool on CPU devices: there
    XLA computes the indices of the largest elements, and adds the cotangent at them."""
    return instruction.op_name.endswith("select_and_scatter")


def unpooled(cotangent: Tiling, shape: tuple[int, ...]) -> Tiling:
    """Returns the layout of a max-pool's gradient, `shape`, from that of its flat cotangent.

    Only the first and the last dim, of the batch and the features as a rule, can be found in a flat
    array without the window. They are known where they lie on one axis each.
    """
    count = math.prod(cotangent.shape)
    tilings: dict[int, tuple[Tiling, Dim]] = {}
    for dim, sizes in ((0, (shape[0], -1)), (len(shape) - 1, (-1, shape[-1]))):
        if count % shape[dim] == 0:
            sizes = [size if size > 0 else count // shape[dim] for size in sizes]
            layout = reshape(cotangent, sizes)
            factors = layout.dims[0 if dim == 0 else 1]
            if is_known(factors) and len({factor.axis for factor in factors}) == 1:
                tilings[dim] = layout, factors
    rest = unknown(shape)
    return assembled(tilings.get(n, (rest, rest.dims[n])) for n in range(len(shape)))


def _dot(op: _Op) -> tuple[Tiling, Pairs]:
    """Returns the layout of a product: batch dims, then the remaining dims of each operand."""
    if len(op.operands) < 2:
        return unknown(op.shape), []
    left, right = op.operands[0].layout, op.operands[1].layout
    batch, summed = (
        [numbers(op.instruction, f"{side}_{kind}_dims") for side in ("lhs", "rhs")]
        for kind in ("batch", "contracting")
    )
    both = [*zip(*batch, strict=True), *zip(*summed, strict=True)]
    pairs: Pairs = [((left, one), (right, other)) for one, other in both]
    parts: list[tuple[Tiling, Dim]] = [(left, left.dims[dim]) for dim in batch[0]]
    # Two operands have separate axes, even if they are the same value.
    right = Tiling(*right)
    for layout, taken in ((left, (*batch[0], *summed[0])), (right, (*batch[1], *summed[1]))):
        parts += [(layout, dim) for n, dim in enumerate(layout.dims) if n not in taken]
    tiling = assembled(parts)
    return (tiling if tiling.shape == op.shape else unknown(op.shape)), pairs


def _convolution(op: _Op) -> tuple[Tiling, Pairs]:
    """Returns the layout of a convolution: a matmul in batch and features, unknown in the rest."""
    labels = re.match(r"(\w+)_(\w+)->(\w+)", op.instruction.attributes.get("dim_labels", ""))
    if labels is None or len(op.operands) < 2:
        return unknown(op.shape), []
    left, right = op.operands[0].layout, op.operands[1].layout
    right = Tiling(*right)
    lhs, rhs, out = labels[1], labels[2], labels[3]
    groups = [op.instruction.attributes.get(f"{n}_group_count", "1") for n in ("feature", "batch")]
    parts: list[tuple[Tiling, Dim]] = [(left, (Factor(size),)) for size in op.shape]
    if groups == ["1", "1"]:
        parts[out.index("b")] = (left, left.dims[lhs.index("b")])
        parts[out.index("f")] = (right, right.dims[rhs.index("o")])
        pairs: Pairs = [((left, lhs.index("f")), (right, rhs.index("i")))]
    else:
        pairs = []
        if groups[1] == "1":
            parts[out.index("b")] = (left, left.dims[lhs.index("b")])
    tiling = assembled(parts)
    return (tiling if tiling.shape == op.shape else unknown(op.shape)), pairs


def _concatenated(op: _Op) -> tuple[Tiling, Pairs]:
    (along,) = numbers(op.instruction, "dimensions") or [0]
    parts = [operand.layout for operand in op.operands]
    apart = parts[0].shape[along] == 1 or is_known(parts[0].dims[along])
    if apart and len({part.dims for part in parts}) == 1:
        return put_together(parts, along, op.context.vectors), []
    tiling, pairs = forget(op.operands[0].layout, op.shape, (along,)), []
    for other in op.operands[1:]:
        rest = forget(other.layout, op.shape, (along,))
        pairs += [((tiling, dim), (rest, dim)) for dim in range(len(op.shape))]
        tiling = merged(tiling, rest)
    return tiling, pairs


def _part(op: _Op) -> Tiling:
    """Returns the layout of a dynamic slice.

    A sliced dim is known only if its starts are known and differ between devices. It is then the
    device's part of the dim.
    """
    tiling = op.operands[0].layout
    whole = tiling.shape
    starts = op.operands[1:]
    if len(whole) != len(op.shape):
        return unknown(op.shape)
    for dim, size in enumerate(op.shape):
        if size == whole[dim]:
            continue
        start = op.context.offsets(starts[dim]) if len(starts) == len(op.shape) else None
        if start is None or not starts[dim].same:
            now = [size if n == dim else length for n, length in enumerate(tiling.shape)]
            tiling = forget(tiling, now, (dim,))
        else:
            clipped = op.context.vectors[start].clip(0, whole[dim] - size)
            tiling = moved(
                tiling, dim, op.context.vectors.number(clipped), size, op.context.vectors
            )
    return tiling


def _sliced(op: _Op) -> Tiling:
    """Returns the layout of a slice with the same bounds on all devices."""
    tiling = op.operands[0].layout
    bounds = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", op.instruction.attributes.get("slice", ""))
    if len(bounds) != len(op.shape):
        return unknown(op.shape)
    for dim, (start, _, step) in enumerate(bounds):
        if op.shape[dim] == tiling.shape[dim]:
            continue
        if step not in ("", "1"):
            now = [op.shape[n] if n == dim else size for n, size in enumerate(tiling.shape)]
            tiling = forget(tiling, now, (dim,))
        else:
            offset = op.context.vectors.number(np.full(op.context.vectors.devices, int(start)))
            tiling = moved(tiling, dim, offset, op.shape[dim], op.context.vectors)
    return tiling


def _transposed(op: _Op) -> Tiling:
    layout = op.operands[0].layout
    return Tiling(
        tuple(layout.dims[dim] for dim in numbers(op.instruction, "dimensions")), layout.axes
    )


def _bitcast(shape: str, layout: Tiling, shape_before: str, _: Context) -> Tiling:
    """Returns the layout of a bitcast: a reshape of the dims in memory order."""
    dims, after = dims_and_order(shape)
    before = dims_and_order(shape_before)[1]
    if len(before) != len(layout.dims):
        return unknown(dims)
    physical = Tiling(tuple(layout.dims[dim] for dim in before), layout.axes)
    tiling = reshape(physical, [dims[dim] for dim in after])
    return Tiling(tuple(tiling.dims[after.index(n)] for n in range(len(dims))), tiling.axes)


def _broadcast(op: _Op) -> Tiling:
    layout = op.operands[0].layout
    at = numbers(op.instruction, "dimensions")
    return assembled(
        (layout, layout.dims[at.index(n)])
        if n in at and layout.shape[at.index(n)] == size
        else (layout, (Factor(size),))
        for n, size in enumerate(op.shape)
    )


def _kept(op: _Op) -> Tiling:
    """Returns the layout that keeps the dims that the operation does not change."""
    layout = op.operands[0].layout
    if len(layout.dims) != len(op.shape):
        return unknown(op.shape)
    changed = {n for n, size in enumerate(layout.shape) if size != op.shape[n]}
    if op.instruction.opcode == "pad":
        padded = [part != "0_0" for part in op.instruction.attributes.get("padding", "").split("x")]
        changed |= {n for n, is_padded in enumerate(padded) if is_padded}
    if op.instruction.opcode == "reverse":
        changed |= set(numbers(op.instruction, "dimensions"))
    return forget(layout, op.shape, changed)


def _windowed(op: _Op) -> Tiling:
    """Returns the layout that keeps the dims in which the window has size and stride 1."""
    layout = op.operands[0].layout
    sizes, strides = window_of(op.instruction)
    moves = (size > 1 or stride > 1 for size, stride in zip(sizes, strides, strict=True))
    changed = {n for n, is_moving in enumerate(moves) if is_moving}
    changed |= {n for n, size in enumerate(layout.shape) if size != op.shape[n]}
    return forget(layout, op.shape, changed)


def _gathered(op: _Op) -> Tiling:
    """Returns the layout of a gather: rows follow the indices, dims in a row follow the table."""
    table, indices = op.operands[0].layout, op.operands[1].layout
    within, at = numbers(op.instruction, "offset_dims"), numbers(op.instruction, "index_vector_dim")
    gone = {
        *numbers(op.instruction, "collapsed_slice_dims"),
        *numbers(op.instruction, "operand_batching_dims"),
    }
    kept = [n for n in range(len(table.dims)) if n not in gone]
    rows = [n for n in range(len(indices.dims)) if n not in at]
    if len(kept) != len(within) or len(rows) + len(kept) != len(op.shape):
        return unknown(op.shape)
    sources = {dim: (table, n) for dim, n in zip(within, kept, strict=True)}
    others = (dim for dim in range(len(op.shape)) if dim not in sources)
    sources |= {dim: (indices, n) for dim, n in zip(others, rows, strict=True)}
    parts = ((size, *sources[dim]) for dim, size in enumerate(op.shape))
    return assembled(
        (layout, layout.dims[n] if layout.shape[n] == size else (Factor(size),))
        for size, layout, n in parts
    )


def _reduced(op: _Op) -> Tiling:
    layout, gone = op.operands[0].layout, numbers(op.instruction, "dimensions")
    return assembled((layout, dim) for n, dim in enumerate(layout.dims) if n not in gone)


_PAIRED: dict[str, Callable[[_Op], tuple[Tiling, Pairs]]] = {
    "dynamic-update-slice": _updated,
    "dot": _dot,
    "convolution": _convolution,
    "select-and-scatter": _selected,
    "concatenate": _concatenated,
}
_MOVES: dict[str, Callable[[_Op], Tiling]] = {
    "transpose": _transposed,
    "reshape": lambda op: reshape(op.operands[0].layout, op.shape),
    "broadcast": _broadcast,
    **dict.fromkeys(("pad", "reverse", "sort", "topk", "scatter"), _kept),
    "reduce-window": _windowed,
    "gather": _gathered,
    "reduce": _reduced,
    "slice": _sliced,
    "dynamic-slice": _part,
}


def numbers(instruction: Instruction, name: str) -> list[int]:
    """Returns the integers of an attribute such as `dimensions={0,1}`."""
    return [int(part) for part in re.findall(r"\d+", instruction.attributes.get(name, ""))]


def window_of(instruction: Instruction) -> tuple[list[int], list[int]]:
    """Returns the sizes and strides of a window by dim."""
    text = instruction.attributes.get("window", "")
    sizes, strides = (re.search(rf"\b{name}=([\dx]+)", text) for name in ("size", "stride"))
    window = [int(part) for part in sizes[1].split("x")] if sizes else []
    return window, [int(part) for part in strides[1].split("x")] if strides else [1] * len(window)
