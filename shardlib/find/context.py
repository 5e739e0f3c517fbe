"""Rows that devices along the mesh axis `context` share in attention through `attend`.

Each device holds some positions of every row. Operations on single positions need nothing of other
devices, and `attend` exchanges what positions need of each other. Other operations between
positions, such as attention of the model's own, would gather whole rows.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from shardlib.cost.traced.attention import Kind, exchanged
from shardlib.find.equivalence import Classes, OperationClass
from shardlib.find.moves import Network
from shardlib.nn.attention.order import AXIS as CONTEXT
from shardlib.nn.attention.order import ring_tile
from shardlib.partitioner.attention import HEADS, LENGTH
from shardlib.partitioner.factors import Assignment


@dataclasses.dataclass(frozen=True)
class FoundRows:
    """The rows that a model attends to through `attend`."""

    attentions: tuple[OperationClass, ...]
    axes: frozenset[int]
    """The discovered axes of their positions."""

    def faults(self, size: int) -> Iterator[str]:
        """Yields why `size` devices along `context` cannot share a row."""
        if not self.attentions:
            yield "no attention of the model goes through shardlib.nn.attention.attend"
        for operation in self.attentions:
            what, heads = operation.attention, operation.factors.sizes[HEADS]
            assert what is not None
            shard, left = divmod(what.length, size)
            if what.method == "ulysses":
                if heads % size:
                    yield f"{heads} key-value heads cannot be divided for attention by ulysses"
            elif left or ring_tile("contiguous", shard) is None:
                yield f"rows of {what.length} positions do not divide into tiles on each device"


def rows_of(classes: Classes) -> FoundRows:
    """Returns the rows of attention in a traced loss."""
    attentions = tuple(one for one in classes.operations if one.attention is not None)
    axes = frozenset(
        classes.tensors[edge.tensor].axes[dim]
        for operation in attentions
        for edge in operation.edges
        for dim, factor in enumerate(edge.dims)
        if factor == LENGTH
    )
    return FoundRows(attentions, axes)


def attended_axes(classes: Classes) -> dict[int, str]:
    """Returns the names by which `attend` asks for rules of positions and heads, by axis."""
    names = {LENGTH: "length", HEADS: "heads"}
    return {
        classes.tensors[edge.tensor].axes[dim]: names[factor]
        for operation in rows_of(classes).attentions
        for edge in operation.edges
        for dim, factor in enumerate(edge.dims)
        if factor in names
    }


def attention_rules(
    classes: Classes, cuts: Sequence[Assignment]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the rules of activations that `attend` asks for, from the cut of each operation."""
    for operation, cut in zip(classes.operations, cuts, strict=True):
        if operation.attention is not None:
            heads = cut.get(HEADS, ())
            yield "length", cut.get(LENGTH, ())
            yield from (("heads", heads), ("kv_heads", heads))
    # Of attention that is not one operation, all heads are on each device.
    yield from ((name, ()) for name in ("length", "heads", "kv_heads", "head_dim"))


def exchange_seconds(
    classes: Classes, operation: OperationClass, cut: Assignment, network: Network
) -> float:
    """Returns the seconds in which devices exchange what attention and its gradient need."""
    axes = frozenset((CONTEXT,))
    sent = exchanges(classes, operation, cut, network)
    return sum(network.collective(kind, axes, num_bytes) for kind, num_bytes in sent)


def exchanges(
    classes: Classes, operation: OperationClass, cut: Assignment, network: Network
) -> Iterator[tuple[Kind, float]]:
    """Yields the collectives along `context` of attention and its gradient, and their bytes."""
    what, shards = operation.attention, network.degree(cut.get(LENGTH, ()))
    if what is None or shards == 1:
        return
    parts = network.degree(axis for axes in cut.values() for axis in axes)
    arrays = operation.operands[:3]
    held = [edge.bytes / parts for edge in arrays]
    width = arrays[1].bytes // classes.tensors[arrays[1].tensor].elements
    for is_gradient in (False, True):
        yield from exchanged(what, shards, held, width, is_gradient=is_gradient)
