"""Experts among the discovered axes: what a model stacks in its parameters and sends rows to.

An axis is one of experts if the program says so, whatever its name is:

- each product of a parameter with activations has it as a batch dim: a matrix for each expert;
- an operation on activations alone makes it (the dispatch of rows to experts), and another one sums
  it or looks up rows along it (what comes back).

A head is not an expert: a projection makes it. Groups of `jax.lax.ragged_dot` and weights whose dim
`shardlib.nn.moe` calls `expert` are experts too.

Source of dispatch and combination as products: Lepikhin et al. 2020, "GShard", algorithm 1.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from shardlib.cost.traced.primitives import PARAMS_TABLE
from shardlib.cost.traced.products import PRODUCTS, RAGGED
from shardlib.find.equivalence import Classes, Edge, OperationClass, TensorClass

EXPERT = "expert"
"""The mesh axis of experts, and the name of their dim in `shardlib.nn.moe`."""
_MOVES_ROWS = ("gather", "scatter")
"""Beginnings of the names of operations other than products that send rows to experts."""


@dataclasses.dataclass(frozen=True)
class FoundExperts:
    """The experts of a model; none by default."""

    axes: frozenset[int] = frozenset()
    """Discovered axes of experts in parameters and activations."""
    dims: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """The dim of the experts, by class of parameters."""
    names: frozenset[str] = frozenset()
    """Names that place them, as in `Tensor.names`."""
    in_region: bool = False
    """Whether a manual region sends the rows, so that the program does not show it."""
    count: int = 0
    """The greatest number that divides the experts of all parameters; 0 without experts."""


NONE = FoundExperts()


def experts_of(classes: Classes) -> FoundExperts:
    """Returns the experts of a traced loss."""
    found = _Found(classes)
    for operation in classes.operations:
        found.add(operation)
    axes = found.sent | found.opaque
    dims = {
        number: dim
        for number, tensor in enumerate(classes.tensors)
        for dim, axis in enumerate(tensor.axes if tensor.kind == "param" else ())
        if axis in axes and (found.key(tensor), axis) not in found.mixed
    }
    count = math.gcd(*(classes.tensors[number].shape[dim] for number, dim in dims.items()))
    placed = (classes.tensors[number].names[dim : dim + 1] for number, dim in dims.items())
    names = frozenset(name for one in placed for name in one if name is not None)
    return FoundExperts(frozenset(found.sent), dims, names, found.in_region, count)


class _Found:
    """What operations tell about experts."""

    def __init__(self, classes: Classes):
        self.classes = classes
        self.sent = set[int]()
        """Axes of experts in parameters and activations."""
        self.opaque = set[int]()
        """Axes of experts in parameters alone."""
        self.mixed = set[tuple[frozenset[int], int]]()
        """Parameters that a product reads whole along an axis, or sums along it."""
        self.in_region = False
        self._routed = _routed(classes)

    def key(self, tensor: TensorClass) -> frozenset[int]:
        """Returns the axes that a parameter has in a layer."""
        return frozenset(axis for axis in tensor.axes if not self.classes.axes[axis].is_layers)

    def add(self, operation: OperationClass) -> None:
        for edge in operation.operands:
            tensor = self.classes.tensors[edge.tensor]
            if tensor.kind != "param":
                continue
            if operation.name == "shard_map" and PARAMS_TABLE + EXPERT in tensor.names:
                self.opaque.add(tensor.axes[tensor.names.index(PARAMS_TABLE + EXPERT)])
                self.in_region = True
            elif operation.name in PRODUCTS:
                is_ragged = operation.name in RAGGED and edge.dims.count(None) == 1
                for axis, factor in zip(tensor.axes, edge.dims, strict=True):
                    if is_ragged and factor is None:
                        self.opaque.add(axis)
                    else:
                        self._read(operation, tensor, axis, factor)

    def _read(
        self, operation: OperationClass, tensor: TensorClass, axis: int, factor: int | None
    ) -> None:
        """Notes how a product reads a dim of a parameter."""
        if factor not in operation.factors.shared:
            self.mixed.add((self.key(tensor), axis))
        elif axis in self._routed:
            self.sent.add(axis)


def _routed(classes: Classes) -> set[int]:
    """Returns the axes that operations on activations alone make, and take back."""
    made, taken = set[int](), set[int]()
    for operation in classes.operations:
        moves_rows = operation.name in PRODUCTS or operation.name.startswith(_MOVES_ROWS)
        if moves_rows and all(
            classes.tensors[e.tensor].kind != "param" for e in operation.operands
        ):
            operands = _axes(classes, operation.operands)
            results = set[int]().union(*_axes(classes, operation.results))
            made |= {axis for axis in results if any(axis not in axes for axes in operands)}
            taken |= set[int]().union(*operands) - results
    return made & taken


def _axes(classes: Classes, edges: Sequence[Edge]) -> list[tuple[int, ...]]:
    return [classes.tensors[edge.tensor].axes for edge in edges]
