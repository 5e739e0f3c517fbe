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
from shardlib.partitioner.attention import HEADS, LENGTH
from shardlib.partitioner.factors import Assignment


@dataclasses.dataclass(frozen=True)
class FoundRows:
    """The rows that a model attends to through `attend`."""

    attentions: tuple[OperationClass, ...]
    axes: frozenset[int]
    """The discovered axes of their positions."""
    unshared: tuple[str, ...] = ()
    """Why `attend` refuses to share rows for other attention of the model."""

    def faults(self, size: int) -> Iterator[str]:
        """Yields why `size` devices along `context` cannot share a row."""
        if not self.attentions:
            yield "no self-attention of the model goes through shardlib.nn.attention.attend"
        yield from self.unshared
        for operation in self.attentions:
            assert operation.attention is not None
            yield from operation.attention.faults(size)


def rows_of(classes: Classes, unshared: Sequence[str] = ()) -> FoundRows:
    """Returns the rows of attention in a traced loss. `unshared` is as in `FoundRows`."""
    attentions = tuple(
        one for one in classes.operations if one.attention and one.attention.shares_rows
    )
    axes = frozenset(
        classes.tensors[edge.tensor].axes[dim]
        for operation in attentions
        for edge in operation.edges
        for dim, factor in enumerate(edge.dims)
        if factor == LENGTH
    )
    return FoundRows(attentions, axes, tuple(unshared))


def attended_axes(classes: Classes) -> dict[int, str]:
    """Returns the names by which `attend` asks for rules of positions and heads, by axis."""
    names = {LENGTH: "length", HEADS: "heads"}
    return {
        classes.tensors[edge.tensor].axes[dim]: names[factor]
        for operation in classes.operations
        if operation.attention is not None
        for edge in operation.edges
        for dim, factor in enumerate(edge.dims)
        if factor in names
    }


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
    heads = network.degree(cut.get(HEADS, ()))
    arrays = operation.operands[:3]
    held = [edge.bytes / parts for edge in arrays]
    width = arrays[1].bytes // classes.tensors[arrays[1].tensor].elements
    for is_gradient in (False, True):
        yield from exchanged(what, shards, heads, held, width, is_gradient=is_gradient)
