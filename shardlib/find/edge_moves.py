"""The moves of an operand or a result between its layout and that in an operation."""

import dataclasses
import functools

from shardlib.cost.machine.rates import Rates
from shardlib.find.equivalence import Classes, Edge
from shardlib.find.moves import Network, is_nested, keeps_blocks, num_changes
from shardlib.find.opt_state import StateCuts
from shardlib.partitioner.layout import Dims

_MAX_CHANGES = {"param": 2, "activation": 1}
"""Mesh axes that a move may change. More only add steps between two layouts."""

Piece = tuple[Dims, frozenset[str]]
"""A layout in an operation, and the axes along which a sum is pending."""
Move = tuple[int, tuple[Dims, Dims, frozenset[str]]]
"""How often a move happens, its two layouts, and the axes along which a sum is pending."""


@dataclasses.dataclass(frozen=True)
class EdgeMoves:
    """The moves that a program makes on a mesh."""

    classes: Classes
    network: Network
    rates: Rates
    summed_to: StateCuts | None
    """The further cuts of optimizer state, if gradients are summed straight into its parts."""
    _: dataclasses.KW_ONLY
    nested_params: bool
    """Whether a move of a parameter only adds or removes mesh axes."""
    gathers: int
    """How often an operand is gathered: once, and once more each time that its layer is computed
    again. What was gathered last is kept for the backward pass."""

    def into(
        self, edge: Edge, is_result: bool, options: tuple[Dims, ...], pieces: tuple[Piece, ...]
    ) -> list[list[tuple[Dims, float]]]:
        """Returns for each layout in an operation the layouts of the tensor, of `options`, from
        which an operand moves there, or to which a result moves, with the seconds of a move."""
        of_edge = edge.bytes, edge.differentiated, is_result, self._is_param(edge)
        key = of_edge, self.gathers, self.nested_params, options, pieces
        known = self.network.of_edges
        if self.summed_to is None and key in known:
            return known[key]
        found = [
            [
                (dims, self.seconds(edge, is_result, dims, piece))
                for dims in options
                if self.allows(edge, dims, piece)
            ]
            for piece in pieces
        ]
        if self.summed_to is None:
            known[key] = found
        return found

    def allows(self, edge: Edge, dims: Dims, piece: Piece) -> bool:
        """Returns whether a program moves an operand or a result so."""
        cut, pending = piece
        is_param = self._is_param(edge)
        if is_param and self.nested_params and not is_nested(dims, cut):
            return False  # XLA would gather all of a parameter whose axes go to another dim.
        return _is_sensible(dims, cut, pending, is_param)

    def seconds(self, edge: Edge, is_result: bool, dims: Dims, piece: Piece) -> float:
        """Returns the exposed seconds of a move forward, and of its gradient's backward, in a
        microbatch."""
        forward, backward = (
            sum(count * self.network.move(edge.bytes, *move) for count, move in moves)
            for moves in self.forward_and_backward(edge, is_result, dims, piece)
        )
        if self._is_param(edge):
            rates = self.rates
            return (1 - rates.hide_gather) * forward + (1 - rates.hide_data) * backward
        return (1 - self.rates.hide_tensor) * (forward + backward)

    def forward_and_backward(
        self, edge: Edge, is_result: bool, dims: Dims, piece: Piece
    ) -> tuple[list[Move], list[Move]]:
        """Returns the moves forward, and of gradients backward."""
        cut, pending = piece
        if is_result:
            back = [(1, (dims, cut, frozenset[str]()))] if edge.differentiated else []
            return [(1, (cut, dims, pending))], back
        back = [(1, (cut, self._summed(edge, dims), pending))]
        return [(self.gathers, (dims, cut, frozenset()))], back if edge.differentiated else []

    def _is_param(self, edge: Edge) -> bool:
        return self.classes.tensors[edge.tensor].kind == "param"

    def _summed(self, edge: Edge, dims: Dims) -> Dims:
        """Returns the layout to which the gradient of an operand with the layout `dims` is
        summed."""
        if self.summed_to is None:
            return dims
        further = self.summed_to.further(self.classes.tensors[edge.tensor], dims)
        return tuple(cut + further.get(dim, ()) for dim, cut in enumerate(dims))


@functools.lru_cache(maxsize=2**14)
def _is_sensible(dims: Dims, pieces: Dims, pending: frozenset[str], is_param: bool) -> bool:
    """Returns whether a move is one that a program makes: few axes change, in whole blocks."""
    limit = _MAX_CHANGES["param" if is_param else "activation"]
    changes = num_changes(dims, pieces)
    few = (
        changes <= limit or is_nested(dims, pieces) or (pending and changes <= limit + len(pending))
    )
    return bool(few) and keeps_blocks(dims, pieces) and keeps_blocks(pieces, dims)
