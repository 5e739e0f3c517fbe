"""Gradients and sums of a batch over the stages of a pipeline.

It works for any loss whose model runs its layers with one `scan_layers`. The layers are divided
over the mesh axis `stage` as in `StageCut`. Embeddings run on the first stage, head and loss on the
last, and the gradients of their parameters are summed over the stages once per step. Microbatches
have the same examples and random keys as in `accumulate_gradients`, so the results are equal.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, PyTree, Shaped

from shardlib.errors import ModelError
from shardlib.losses.aggregate import Mean, map_outputs
from shardlib.losses.microbatch import unsplit, widened
from shardlib.losses.results import Sums, loss_mean
from shardlib.nn.stages import StageCut, layer_faults, layers_before
from shardlib.partitioner import ValueLayout
from shardlib.paths import named_leaves
from shardlib.sharding.constrain import platform
from shardlib.sharding.manual import axis_size, manual
from shardlib.sharding.partition import Placement, pin
from shardlib.train.batches import microbatch_shapes
from shardlib.train.gradients import Gradients, LossArguments, PartLoss, part_key
from shardlib.train.partitioning import (
    ArgumentLayouts,
    Outputs,
    anywhere,
    placed_layouts,
    whole_layouts,
)
from shardlib.train.pipeline import exchange, padding
from shardlib.train.pipeline.config import PipelineConfig
from shardlib.train.pipeline.cut import Loss, LossTrace, cut, trace_loss
from shardlib.train.pipeline.execute import AXIS, Part, Stage, Tick, ticks
from shardlib.train.pipeline.lookups import refuse_lookups
from shardlib.train.pipeline.schedules import (
    Schedule,
    forward_schedule,
    make_schedule,
)
from shardlib.train.reduce.reduction import Reduction

BUBBLE_METRIC = "pipeline_bubble"


def pipelined_gradients(
    loss: PartLoss,
    arguments: LossArguments,
    first_index: jax.Array | int = 0,
    *,
    microbatches: int,
    config: PipelineConfig | None = None,
) -> Gradients:
    """Returns the gradients of a batch, computed in microbatches by all stages concurrently.

    The result equals the result of `accumulate_gradients`, with `pipeline_bubble` added to the
    sums: the fraction of turns in which stages were idle, as counted while they ran.

    Args:
        loss: The loss; its model runs its layers with one `scan_layers`.
        arguments: Its arguments, with layers sharded over `stage`. No call may update the model
            state, and the inputs are replicated over the stages.
        first_index: Index of the first microbatch among all parts of the step.
        microbatches: Number of microbatches M; divides the rows.
        config: The schedule; 1F1B if left out.

    Raises:
        ModelError: If the model cannot be cut into stages, or the schedule does not fit the layers,
            stages and microbatches. It is raised while tracing, before anything is compiled.
    """
    grads, sums = pipelined_groups(
        loss, arguments, None, first_index, microbatches=microbatches, config=config
    )
    return Gradients(loss.pin(grads), sums, arguments.model_state)


def pipelined_groups(
    loss: PartLoss,
    arguments: LossArguments,
    reduction: Reduction | None,
    first_index: jax.Array | int = 0,
    *,
    microbatches: int,
    config: PipelineConfig | None = None,
) -> tuple[PyTree, Sums]:
    """Returns the gradients and sums of the groups of a reduction, each with its own pipeline.

    It takes the arguments of `pipelined_gradients`. Group g takes the g-th block of equally many
    rows, and its microbatches are numbered after those in earlier groups. The results are arrays
    [groups, ...], sharded over the axis of the groups; the gradients of `reduction.with_stages` are
    summed over the groups. Without a reduction there is one pipeline and no dim of groups. One
    region is manual over both axes, because regions nest in mesh order only.
    """
    config, stages = config or PipelineConfig(), _stages()
    schedule = make_schedule(
        config.schedule, stages=stages, microbatches=microbatches, chunks=config.chunks
    )
    axis = None if reduction is None else reduction.hops.axis
    summed = frozenset() if reduction is None else reduction.with_stages(loss.definition)
    region = _Region(loss, arguments, schedule, config, axis)

    def gradients(stage: Stage, tick: Tick) -> PyTree:
        result = stage.gradients(tick, axis, summed)
        grads = result.layers
        if schedule.chunks > 1 and stage.layers_cut.is_even:
            grads = exchange.to_store(grads, AXIS, stages, schedule.chunks)
        return region.pin(grads), result.shared, result.sums, result.turns

    def layouts(shape: PyTree) -> list[ValueLayout | None]:
        layers, shared, *rest = shape
        places = loss.definition.gradients
        return [
            *placed_layouts(layers, places),
            *placed_layouts(shared, places),
            *anywhere(rest),
        ]

    outer = () if axis is None else (axis,)
    over, every = PartitionSpec(*outer, AXIS), PartitionSpec(*outer)
    layer_grads, shared_grads, sums, turns = region.run(
        gradients, first_index, (over, every, every, over), layouts
    )
    sums = _rows(sums, len(outer))
    by_path = {**shared_grads, **region.stored(layer_grads, outer)}
    groups = turns.shape[: len(outer)]
    grads = [
        by_path[path] if path in by_path else jnp.zeros((*groups, *leaf.shape), widened(leaf).dtype)
        for path, leaf in named_leaves(arguments.params).items()
    ]
    total = jnp.full(groups, stages * schedule.turns, jnp.float32)
    idle = total - jnp.sum(turns, axis=(-2, -1))
    grads = jax.tree.unflatten(jax.tree.structure(arguments.params), grads)
    return grads, {**sums, BUBBLE_METRIC: Mean(idle, total)}


def pipelined_sums(
    loss: PartLoss,
    arguments: LossArguments,
    *,
    microbatches: int,
    config: PipelineConfig | None = None,
) -> Sums:
    """Returns the sums of a batch without gradients, in M + S - 1 forward turns.

    It takes the arguments of `pipelined_gradients`. The layers stay on the stages that store them,
    whatever the training schedule, and any number of microbatches that divides the rows works.

    Raises:
        ModelError: If the model cannot be cut into stages.
    """
    schedule = forward_schedule(stages=_stages(), microbatches=microbatches)
    region = _Region(loss, arguments, schedule, config or PipelineConfig(), None)
    return _rows(region.run(Stage.sums, 0, PartitionSpec(), anywhere), 0)


@dataclasses.dataclass(frozen=True)
class _Region:
    """The part of a program that is manual over the stages, and over groups with stages of their
    own."""

    loss: PartLoss
    arguments: LossArguments
    """The arguments of the loss outside of the region."""
    schedule: Schedule
    config: PipelineConfig
    axis: str | None
    """The mesh axis of groups that each have their own stages, or None."""

    def run(
        self,
        compute: Callable[[Stage, Tick], PyTree],
        first_index: jax.Array | int,
        out_specs: PyTree,
        outputs: Outputs,
    ) -> Any:
        """Calls `compute(stage, ticks)` on all stages. `out_specs` are PartitionSpecs of the
        results over the manual axes, and `outputs` their layouts over the other axes, as in
        `LossPartitioner.run_at`."""
        params, model_state, batch, key, inputs = self.arguments
        layers, shared = self._divided(params)
        frozen, state = self._divided(model_state)
        layers, frozen = self._slotted(layers, frozen)

        def region(tick: Tick, *rest: Any) -> PyTree:
            layers, frozen, shared, batch, state, key, first, inputs = rest
            if self.axis is not None:
                first = first + jax.lax.axis_index(self.axis) * self.schedule.microbatches
            tick = jax.tree.map(lambda column: column[:, 0], tick)
            traced = self._trace(batch, self._loss_by_path(state, key, first, inputs))
            arguments = tick, layers, frozen, shared, batch, state, key, first, inputs

            def on_stage(tick: Tick, *rest: Any) -> PyTree:
                layers, frozen, shared, batch, *of_loss = rest
                loss = self._loss_by_path(*of_loss)
                return compute(self._stage(traced, loss, layers, frozen, shared, batch), tick)

            result = self.loss.run_at(
                on_stage,
                arguments,
                lambda: self._layouts(arguments),
                outputs,
                traced.constrains,
            )
            return result if self.axis is None else jax.tree.map(lambda x: x[None], result)

        every, axes = PartitionSpec(), (AXIS,) if self.axis is None else (AXIS, self.axis)
        rows = PartitionSpec(*axes[1:])
        by_stage = PartitionSpec(AXIS)
        specs = (
            *(PartitionSpec(None, AXIS), by_stage, by_stage, every),
            *(rows, every, every, every, every),
        )
        first = jnp.asarray(first_index, jnp.int32)
        return manual(region, axes, specs, out_specs)(
            ticks(self.schedule), layers, frozen, shared, batch, state, key, first, inputs
        )

    @property
    def _layer_paths(self) -> frozenset[str]:
        """Paths of the variables, trained and frozen, that are divided over the stages."""
        definition = self.loss.definition
        return frozenset(
            path
            for path, placement in {**definition.params, **definition.model_state}.items()
            if placement.has_stages
        )

    def _moved(
        self, leaves: Mapping[str, jax.Array], places: Mapping[str, Placement]
    ) -> dict[str, jax.Array]:
        """Returns the leaves whose layers `stage` does not divide."""
        return {path: x for path, x in leaves.items() if places[path].moved_stage}

    def _layers_cut(self, num_layers: int) -> StageCut:
        """Returns the cut of a number of layers.

        Raises:
            ModelError: If they do not fit the stages and chunks.
        """
        stages, chunks = self.schedule.stages, self.schedule.chunks
        if faults := layer_faults(num_layers, stages, chunks):
            raise ModelError("\n".join(faults))
        definition = self.loss.definition
        placements = [*definition.params.values(), *definition.model_state.values()]
        return StageCut(num_layers, stages, chunks, layers_before(placements))

    def _slotted(
        self, layers: dict[str, jax.Array], frozen: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns the divided variables, trained and frozen, with those in slots that `stage` does
        not divide. They are cast first, as the loss would cast them, because that sends less."""
        definition, policy = self.loss.definition, self.loss.precision
        module = definition.module
        trained, other = definition.params, definition.model_state
        moved = policy.cast_params(self._moved(layers, trained), module.float32)
        held = policy.cast_params(self._moved(frozen, other), module.float32, only=module.frozen)
        if not moved | held:
            return layers, frozen
        cut = self._layers_cut(next(iter((moved | held).values())).shape[0])
        return (
            layers | padding.to_slots(moved, trained, cut, definition.scope),
            frozen | padding.to_slots(held, other, cut, definition.scope),
        )

    def stored(self, grads: dict[str, jax.Array], group: tuple[str, ...]) -> dict[str, jax.Array]:
        """Returns gradients of layers as they are stored; `group` is the axis of their leading dim
        of groups, if any."""
        definition = self.loss.definition
        moved = self._moved(grads, definition.params)
        if not moved:
            return grads
        places = {
            path: at if (at := definition.gradients[path]).moved_stage else definition.params[path]
            for path in moved
        }
        cut = self._layers_cut(next(iter(places.values())).shape[0])
        return grads | padding.from_slots(moved, places, cut, definition.scope, group)

    def _divided(self, tree: PyTree) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns the leaves that are divided over the stages, and the others, by path."""
        leaves, divided = named_leaves(tree), self._layer_paths
        layers = {path: x for path, x in leaves.items() if path in divided}
        return layers, {path: x for path, x in leaves.items() if path not in divided}

    def _stage(
        self,
        traced: LossTrace,
        loss: Loss,
        layers: PyTree,
        frozen: PyTree,
        shared: PyTree,
        batch: PyTree,
    ) -> Stage:
        """Returns one stage, from the arrays inside the region."""
        schedule, parts = self.schedule, self.schedule.microbatches
        layers_cut = self._layers_cut(traced.num_layers)
        skip_idle = _skip_idle(self.config, traced)
        cut_loss = cut(loss, traced, {**layers, **frozen}, layers_cut, skip_idle=skip_idle)
        if schedule.chunks > 1 and layers_cut.is_even:
            layers, frozen = (
                exchange.to_run(leaves, AXIS, schedule.stages, schedule.chunks)
                for leaves in (layers, frozen)
            )
        batch = jax.tree.map(lambda x: x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), batch)
        return Stage(
            cut_loss, schedule, layers_cut, skip_idle, self.pin, layers, frozen, shared, batch
        )

    def _layouts(self, arguments: tuple[Any, ...]) -> ArgumentLayouts:
        """Returns the layouts of a stage's arguments over the non-manual mesh axes."""
        tick, layers, frozen, shared, batch, state, key, first, inputs = arguments
        loss, places = self.loss, self.loss.definition.params
        rows, axes = loss.batch_layouts(batch)
        layouts = [
            *whole_layouts(tick),
            *placed_layouts(layers, places, lambda path: True),
            *loss.state_layouts(frozen),
            *placed_layouts(shared, places, lambda path: True),
            *rows,
            *loss.state_layouts(state),
            *whole_layouts((key, first)),
            *loss.input_layouts(inputs),
        ]
        return layouts, axes

    def _trace(self, batch: PyTree, loss: Loss) -> LossTrace:
        """Traces the loss of a microbatch, and checks that its layers fit the stages."""
        schedule = self.schedule
        one = microbatch_shapes(batch, schedule.microbatches)
        part = Part(one, jax.ShapeDtypeStruct((), jnp.int32))  # type: ignore[arg-type]
        leaves = named_leaves(self.arguments.params)
        leaves |= self._divided(self.arguments.model_state)[0]
        traced = trace_loss(loss, leaves, self._layer_paths, part)
        if traced.constrains or self.loss.constrain == "user":  # XLA partitions
            params = self.loss.definition.params
            specs = {at: params[x].spec for at, x in enumerate(sorted(leaves)) if x in params}
            for program in traced.ends:
                refuse_lookups(program, specs, self.loss.definition.scope)
        self._layers_cut(traced.num_layers)
        return traced

    def _loss_by_path(
        self,
        state: Mapping[str, jax.Array],
        key: jax.Array,
        first_index: jax.Array,
        inputs: tuple[Any, ...],
    ) -> Loss:
        """Returns the loss of a microbatch as a function of parameters and frozen layers by
        path; `state` holds the rest of the model state."""

        def like(tree: PyTree, leaves: Mapping[str, jax.Array]) -> PyTree:
            return jax.tree.unflatten(
                jax.tree.structure(tree), [leaves[path] for path in named_leaves(tree)]
            )

        def run(leaves: Mapping[str, jax.Array], part: Part) -> tuple[jax.Array, Sums]:
            params = like(self.arguments.params, leaves)
            model_state = like(self.arguments.model_state, {**leaves, **state})
            own_key = part_key(key, first_index + part.index)
            arguments = LossArguments(params, model_state, part.batch, own_key, inputs)
            sums, new = self.loss(arguments)
            _refuse_updates(model_state, new)
            slots = map_outputs(lambda rows: self._slot(rows, part.index), sums)
            return loss_mean(sums).total, slots

        return run

    def _slot(
        self, rows: Shaped[Array, "rows ..."], index: Int[Array, ""]
    ) -> Shaped[Array, "microbatches rows ..."]:
        """Returns the rows of a microbatch at its index, with zeros for all others, so that they
        can be summed over turns and stages. Booleans become int8."""
        rows = rows.astype(jnp.int8) if rows.dtype == jnp.bool else rows
        zeros = jnp.zeros((self.schedule.microbatches, *rows.shape), rows.dtype)
        return jax.lax.dynamic_update_index_in_dim(zeros, rows, index, 0)

    def pin(self, grads: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns gradients by path, constrained to their placements."""
        definition = self.loss.definition
        return pin(grads, definition.gradients, definition.scope)


def _rows(sums: Sums, num_outer: int) -> Sums:
    """Returns outputs [groups?, microbatches, r, ...] as rows in batch order, [groups?, b, ...].

    `num_outer` is 1 with groups and 0 without.
    """
    return map_outputs(jax.vmap(unsplit) if num_outer else unsplit, sums)


def _refuse_updates(old: PyTree, new: PyTree) -> None:
    after = named_leaves(new)
    updated = [path for path, leaf in named_leaves(old).items() if after[path] is not leaf]
    if updated:
        raise ModelError(
            f"the model updates variables when it is called: {', '.join(updated[:4])}"
            f"{', ...' if len(updated) > 4 else ''}. The stages of a pipeline run microbatches "
            "side by side and keep no order of updates.\n"
            "  Use a model without running statistics, or a mesh without stage."
        )


def _skip_idle(config: PipelineConfig, traced: LossTrace) -> bool:
    """Returns whether idle stages may skip their computation; see `pipeline.execute`."""
    if config.skip_idle is None:
        return not (traced.sends or platform() == "cpu" or axis_size("context") > 1)
    if config.skip_idle and traced.sends:
        raise ModelError(
            "idle stages cannot skip the computation: the model uses collective-permute, as ring "
            "attention does, which needs all stages.\n"
            "  Set skip_idle to null or false, or choose a method without a ring."
        )
    return config.skip_idle


def _stages() -> int:
    if axis_size(AXIS) == 1:
        raise ModelError(
            "there are no stages: the mesh has no axis `stage` of more than one device here.\n"
            "  Give the mesh stage=2 or more, or run without a pipeline."
        )
    return axis_size(AXIS)
