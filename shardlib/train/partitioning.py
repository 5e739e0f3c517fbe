"""Partitioning of a loss, by shardlib or by XLA under the constraints of the model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from shardlib.errors import ModelError, did_you_mean
from shardlib.find.axes import Kind
from shardlib.find.planned import planned_layouts
from shardlib.jaxprs import Value
from shardlib.mesh import entry_axes
from shardlib.partitioner import (
    Partition,
    PartitionedFunction,
    ValueLayout,
    analyze,
    execute,
    from_spec,
    trace,
    who_partitions,
)
from shardlib.partitioner.layout import Dims
from shardlib.paths import named_leaves
from shardlib.sharding.constrain import Scope, manual_axes
from shardlib.sharding.partition import Placement
from shardlib.train.batches import BatchAxes, batch_shardings
from shardlib.train.state import Definition

Constrain = Literal["auto", "user"]
"""`auto`: shardlib partitions the values that the model leaves unconstrained. `user`: XLA does."""


def check_constrain(constrain: str) -> None:
    """Raises `ModelError` if the value is not a `Constrain`."""
    choices = get_args(Constrain)
    if constrain not in choices:
        raise ModelError(
            f"constrain={constrain!r} is not one of {', '.join(map(repr, choices))}."
            f"{did_you_mean(str(constrain), choices)}\n"
            "  Leave it out: 'auto' lets shardlib partition what the model leaves open."
        )


ArgumentLayouts = tuple[list[ValueLayout], tuple[str, ...]]
"""The layouts of the leaves of arguments, and the mesh axes that shard the rows of the batch."""
Outputs = Callable[[PyTree], list[ValueLayout | None]]
"""Maps an abstract result to the layouts of its leaves; None for a leaf that stays where it is
computed."""


@dataclasses.dataclass(frozen=True)
class LossPartitioner:
    """Runs functions of the loss's arguments with their values partitioned."""

    definition: Definition
    _: dataclasses.KW_ONLY
    batch_axes: BatchAxes = dataclasses.field(default_factory=dict)
    """Logical axes of batch leaves by path, as in `make_train_step`."""
    constrain: Constrain = "user"
    """The partitioner of the loss, as in `make_train_step`."""
    inputs_at: PyTree = ()
    """The shardings of the leaves of `inputs`."""
    on_partition: Callable[[Partition], None] = lambda partition: None
    """Called while the loss is traced, with the partitioner and the reason for choosing it."""

    def run(self, fn: Callable[..., Any], arguments: tuple[Any, ...], outputs: Outputs) -> Any:
        """Returns `fn(*arguments)` for the `LossArguments` of a part; `outputs` as in `run_at`."""
        return self.run_at(
            fn,
            arguments,
            lambda: self._layouts(arguments),
            outputs,
            planned=lambda closed: self._planned(closed, arguments),
        )

    def _planned(self, closed: ClosedJaxpr, arguments: tuple[Any, ...]) -> dict[Value, Dims]:
        """Returns the layouts of values that the rules name, for a model that names none."""
        if self._scope.rules.names is None:
            return {}
        kinds: tuple[Kind, ...] = ("param", "constant", "input", "constant", "constant")
        named: list[tuple[str, Kind]] = [
            (path, "param" if path in self.definition.module.frozen else kind)
            for tree, kind in zip(arguments, kinds, strict=True)
            for path in named_leaves(tree)
        ]
        return planned_layouts(closed, named, self._scope.rules, self._scope.sizes)

    def run_at(
        self,
        fn: Callable[..., Any],
        arguments: tuple[Any, ...],
        layouts: Callable[[], ArgumentLayouts],
        outputs: Outputs,
        constrains: bool | None = None,
        planned: Callable[[ClosedJaxpr], Mapping[Value, Dims]] = lambda closed: {},
    ) -> Any:
        """Returns `fn(*arguments)`."""
        if reason := self._reason_for_xla():
            self.on_partition(Partition("XLA", reason))
            return fn(*arguments)
        traced = trace(fn, arguments)
        inputs, batch = layouts()

        def layouts_of_values() -> PartitionedFunction:
            wanted = planned(traced.closed)
            return analyze(traced, self._scope, inputs, outputs, batch, wanted)

        partition, analyzed = who_partitions(traced, layouts_of_values, constrains)
        self.on_partition(partition)
        return traced(arguments) if analyzed is None else execute(analyzed, self._scope, arguments)

    @property
    def _scope(self) -> Scope:
        return self.definition.scope

    def _reason_for_xla(self) -> str | None:
        """Returns why XLA partitions every loss here, or None if it depends on the loss."""
        if self.constrain == "user":
            return "constrain is 'user'"
        sizes = {name: n for name, n in self._scope.sizes.items() if name not in manual_axes()}
        return "nothing is left to cut here" if all(n == 1 for n in sizes.values()) else None

    def _layouts(self, arguments: tuple[Any, ...]) -> ArgumentLayouts:
        params, model_state, part, key, inputs = arguments
        batch, axes = self.batch_layouts(part)
        layouts = [
            *placed_layouts(params, self.definition.params, lambda path: True),
            *self.state_layouts(model_state),
            *batch,
            *whole_layouts(key),
            *self.input_layouts(inputs),
        ]
        return layouts, axes

    def batch_layouts(self, part: PyTree) -> ArgumentLayouts:
        """Returns the layout of each leaf of a batch, and the mesh axes that shard its rows."""
        placed = batch_shardings(part, self._scope, self.batch_axes)
        leaves = zip(jax.tree.leaves(part), jax.tree.leaves(placed), strict=True)
        batch = [_layout(sharding.spec, len(leaf.shape), stored=False) for leaf, sharding in leaves]
        axes = dict.fromkeys(axis for layout in batch for axis in (layout.dims or ((),))[0])
        return batch, tuple(axes)

    def state_layouts(self, model_state: PyTree) -> list[ValueLayout]:
        """Returns the layout of each leaf of the model state."""
        frozen = self.definition.module.frozen.__contains__
        return placed_layouts(model_state, self.definition.model_state, frozen)

    def input_layouts(self, inputs: PyTree) -> list[ValueLayout]:
        """Returns the layout of each leaf of the extra inputs."""
        pairs = zip(jax.tree.leaves(inputs), jax.tree.leaves(self.inputs_at), strict=True)
        return [_layout(sharding.spec, jnp.ndim(leaf), stored=True) for leaf, sharding in pairs]


def whole_layouts(tree: PyTree) -> list[ValueLayout]:
    """Returns the layouts of replicated leaves."""
    return [from_spec((), len(leaf.shape)) for leaf in jax.tree.leaves(tree)]


def placed_layouts(
    tree: PyTree,
    places: Mapping[str, Placement],
    stored: Callable[[str], bool] = lambda path: False,
) -> list[ValueLayout]:
    """Returns the layouts of leaves from their placements, without the manual mesh axes."""
    return [
        _layout(places[path].spec, len(leaf.shape), stored(path))
        for path, leaf in named_leaves(tree).items()
    ]


def _layout(spec: PartitionSpec, rank: int, stored: bool) -> ValueLayout:
    gone = manual_axes()
    entries = [tuple(axis for axis in entry_axes(e) if axis not in gone) for e in spec]
    return from_spec(entries, rank, stored=stored)


def anywhere(shape: PyTree) -> list[ValueLayout | None]:
    """Returns the `outputs` for a function whose results stay where they are computed."""
    return [None] * len(jax.tree.leaves(shape))
