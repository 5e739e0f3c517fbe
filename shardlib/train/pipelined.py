"""Gradients and sums of a batch over the stages of a pipeline.

It works for any loss whose model runs its layers with one `scan_layers`. The layers are divided
over the mesh axis `stage`. Embeddings run on the first stage, head and loss on the last, and the
gradients of their parameters are summed over the stages once per step. Microbatches have the same
examples and random keys as in `accumulate_gradients`, so the results are equal.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib.errors import ModelError
from shardlib.losses.aggregate import Mean, map_outputs
from shardlib.losses.microbatch import split, unsplit
from shardlib.mesh import entry_axes
from shardlib.partitioner import Layout
from shardlib.paths import named_leaves
from shardlib.sharding.constrain import platform
from shardlib.sharding.manual import axis_size, manual
from shardlib.sharding.partition import pin
from shardlib.train.gradients import Gradients, Inputs, PartLoss, Sums, loss_mean, part_key
from shardlib.train.partitioning import Outputs, anywhere, placed_layouts, whole_layouts
from shardlib.train.pipeline import exchange
from shardlib.train.pipeline.config import PipelineConfig
from shardlib.train.pipeline.cut import Loss, Plan, cut, plan
from shardlib.train.pipeline.execute import AXIS, Part, Pipeline
from shardlib.train.pipeline.schedules import (
    Schedule,
    forward_schedule,
    layer_faults,
    make_schedule,
)
from shardlib.train.pipeline.turns import ticks

BUBBLE_METRIC = "pipeline_bubble"


def pipelined_gradients(
    loss: PartLoss,
    params: Any,
    model_state: Any,
    batch: Any,
    key: jax.Array,
    inputs: Inputs = (),
    *,
    microbatches: int,
    config: PipelineConfig | None = None,
    first_index: jax.Array | int = 0,
) -> Gradients:
    """Returns the gradients of a batch, computed in microbatches by all stages concurrently.

    The result equals the result of `accumulate_gradients`, with `pipeline_bubble` added to the
    sums: the fraction of turns in which stages were idle, as counted while they ran.

    Args:
        loss: The loss; its model runs its layers with one `scan_layers`.
        params: The trained parameters, with layers sharded over `stage`.
        model_state: The untrained state of the model; no call may update it.
        batch: Pytree of arrays [b, ...].
        key: The key of the step.
        inputs: Extra inputs of the loss, replicated over the stages.
        microbatches: Number of microbatches M; divides b.
        config: The schedule; 1F1B if left out.
        first_index: Index of the first microbatch among all parts of the step.

    Raises:
        ModelError: If the model cannot be cut into stages, or the schedule does not fit the layers,
            stages and microbatches. It is raised while tracing, before anything is compiled.
    """
    arguments = loss, params, model_state, batch, key, inputs
    grads, sums = _gradients(arguments, first_index, microbatches, config, None)
    return Gradients(loss.pin(grads), sums, model_state)


def pipelined_groups(
    loss: PartLoss,
    params: Any,
    model_state: Any,
    batch: Any,
    key: jax.Array,
    inputs: Inputs = (),
    *,
    microbatches: int,
    axis: str,
    config: PipelineConfig | None = None,
) -> tuple[Any, Sums]:
    """Returns the gradients and sums of the groups along a mesh axis, each with its own pipeline.

    It takes the arguments of `pipelined_gradients`. Group g takes the g-th block of equally many
    rows, and its microbatches are numbered after those in earlier groups. The results are arrays
    [groups, ...], sharded over `axis`. One region is manual over both axes, because regions nest in
    mesh order only.
    """
    arguments = loss, params, model_state, batch, key, inputs
    return _gradients(arguments, 0, microbatches, config, axis)


def pipelined_sums(
    loss: PartLoss,
    params: Any,
    model_state: Any,
    batch: Any,
    key: jax.Array,
    inputs: Inputs = (),
    *,
    microbatches: int,
    config: PipelineConfig | None = None,
    first_index: jax.Array | int = 0,
) -> Sums:
    """Returns the sums of a batch without gradients, in M + S - 1 forward turns.

    It takes the arguments of `pipelined_gradients`. The layers stay on the stages that store them,
    whatever the training schedule, and any number of microbatches that divides b works.

    Raises:
        ModelError: If the model cannot be cut into stages.
    """
    schedule = forward_schedule(stages=_stages(), microbatches=microbatches)
    job = _job(loss, params, schedule, config)

    def stage(pipeline: Pipeline, *arguments: Any) -> Any:
        return pipeline.sums(*arguments)

    arguments = params, model_state, batch, key, inputs
    return _rows(job.run(stage, *arguments, first_index, PartitionSpec(), anywhere), 0)


def _gradients(
    arguments: tuple[PartLoss, Any, Any, Any, jax.Array, Inputs],
    first_index: jax.Array | int,
    microbatches: int,
    config: PipelineConfig | None,
    axis: str | None,
) -> tuple[Any, Sums]:
    """Returns the gradients and sums of a batch, or of each group along `axis` as
    [groups, ...]."""
    loss, params, model_state, batch, key, inputs = arguments
    config, stages = config or PipelineConfig(), _stages()
    schedule = make_schedule(
        config.schedule, stages=stages, microbatches=microbatches, chunks=config.chunks
    )
    job, v = _job(loss, params, schedule, config, axis), config.chunks

    def stage(pipeline: Pipeline, tick: Any, layers: Any, shared: Any, batch: Any) -> Any:
        if v > 1:
            layers = exchange.to_run(layers, AXIS, stages, v)
        found = pipeline.gradients(tick, layers, shared, batch)
        grads = exchange.to_store(found.layers, AXIS, stages, v) if v > 1 else found.layers
        return job.pin(grads), found.shared, found.sums, found.turns

    def outputs(shape: Any) -> list[Layout | None]:
        places = loss.definition.gradients
        layers, shared, sums, turns = shape
        return [
            *placed_layouts(layers, places),
            *placed_layouts(shared, places),
            *anywhere((sums, turns)),
        ]

    outer = () if axis is None else (axis,)
    over, every = PartitionSpec(*outer, AXIS), PartitionSpec(*outer)
    specs = (over, every, every, over)
    layer_grads, shared_grads, sums, turns = job.run(
        stage, params, model_state, batch, key, inputs, first_index, specs, outputs
    )
    sums = _rows(sums, len(outer))
    found = {**layer_grads, **shared_grads}
    groups = turns.shape[: len(outer)]
    grads = {
        path: found[path] if path in found else jnp.zeros((*groups, *leaf.shape), jnp.float32)
        for path, leaf in named_leaves(params).items()
    }
    total = jnp.full(groups, stages * schedule.turns, jnp.float32)
    idle = total - jnp.sum(turns, axis=(-2, -1)).astype(jnp.float32)
    grads = jax.tree.unflatten(jax.tree.structure(params), grads.values())
    return grads, {**sums, BUBBLE_METRIC: Mean(idle, total)}


@dataclasses.dataclass(frozen=True)
class _Job:
    """The loss, schedule and mesh axes of a pipelined computation."""

    loss: PartLoss
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    """Shapes of all parameters, by path."""
    treedef: Any
    schedule: Schedule
    config: PipelineConfig
    layer_paths: frozenset[str]
    axis: str | None
    """The mesh axis of groups that each have their own stages, or None."""

    def run(
        self,
        stage: Callable[..., Any],
        params: Any,
        model_state: Any,
        batch: Any,
        key: jax.Array,
        inputs: Inputs,
        first_index: Any,
        out_specs: Any,
        outputs: Outputs,
    ) -> Any:
        """Calls `stage(pipeline, tick, layers, shared, batch)` on all stages.

        Args:
            stage: The function.
            params, model_state, batch, key, inputs, first_index: As in `pipelined_gradients`.
            out_specs: PartitionSpecs of the results over the manual axes.
            outputs: Layouts of the results over the other axes, as in `LossPartitioner.run_at`.
        """
        leaves = named_leaves(params)
        layers = {path: x for path, x in leaves.items() if path in self.layer_paths}
        shared = {path: x for path, x in leaves.items() if path not in self.layer_paths}

        def region(tick: Any, *rest: Any) -> Any:
            layers, shared, batch, state, key, first, inputs = rest
            if self.axis is not None:
                first = first + jax.lax.axis_index(self.axis) * self.schedule.microbatches
            tick = jax.tree.map(lambda column: column[:, 0], tick)
            planned = self.plan(batch, self.loss_by_path(state, key, first, inputs))
            arguments = tick, layers, shared, batch, state, key, first, inputs

            def on_stage(*arguments: Any) -> Any:
                tick, layers, shared, batch, *of_loss = arguments
                pipeline = self.pipeline(planned, layers, self.loss_by_path(*of_loss))
                return stage(pipeline, tick, layers, shared, batch)

            found = self.loss.partitioner.run_at(
                on_stage,
                arguments,
                lambda: self._layouts(arguments),
                outputs,
                planned.constrains,
            )
            return found if self.axis is None else jax.tree.map(lambda x: x[None], found)

        every, axes = PartitionSpec(), (AXIS,) if self.axis is None else (AXIS, self.axis)
        rows = PartitionSpec(*axes[1:])
        by_stage = (PartitionSpec(None, AXIS), PartitionSpec(AXIS))
        specs = (*by_stage, every, rows, every, every, every, every)
        first = jnp.asarray(first_index, jnp.int32)
        return manual(region, axes, specs, out_specs)(
            ticks(self.schedule), layers, shared, batch, model_state, key, first, inputs
        )

    def _layouts(self, arguments: tuple[Any, ...]) -> tuple[list[Layout], tuple[str, ...]]:
        """Returns the layouts of a stage's arguments over the non-manual mesh axes, and the mesh
        axes of the batch."""
        tick, layers, shared, batch, state, key, first, inputs = arguments
        partitioner, places = self.loss.partitioner, self.loss.definition.params
        rows, axes = partitioner.batch_layouts(batch)
        layouts = [
            *whole_layouts(tick),
            *placed_layouts(layers, places, lambda path: True),
            *placed_layouts(shared, places, lambda path: True),
            *rows,
            *partitioner.state_layouts(state),
            *whole_layouts((key, first)),
            *partitioner.input_layouts(inputs),
        ]
        return layouts, axes

    def plan(self, batch: Any, loss: Loss) -> Plan:
        """Returns the cut of the loss, after checking that its layers fit the stages."""
        schedule = self.schedule
        parts = jax.eval_shape(lambda batch: split(batch, schedule.microbatches), batch)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
        part = Part(one, jax.ShapeDtypeStruct((), jnp.int32))  # type: ignore[arg-type]
        planned = plan(loss, self.shapes, self.layer_paths, part)  # type: ignore[arg-type]
        faults = layer_faults(planned.num_layers, stages=schedule.stages, chunks=schedule.chunks)
        if faults:
            raise ModelError("\n".join(faults))
        return planned

    def pipeline(self, planned: Plan, layers: Any, loss: Loss) -> Pipeline:
        """Returns the pipeline of one stage, from the arrays inside the region."""
        schedule = self.schedule
        per_chunk = planned.num_layers // (schedule.stages * schedule.chunks)
        parts = cut(loss, planned, layers, per_chunk)
        skip_idle = _skip_idle(self.config, planned)
        return Pipeline(parts, schedule, planned.num_layers, skip_idle, self.pin)

    def loss_by_path(self, model_state: Any, key: Any, first_index: Any, inputs: Inputs) -> Loss:
        """Returns the loss of a microbatch as a function of parameters by path."""

        def run(leaves: Any, part: Part) -> tuple[jax.Array, Sums]:
            tree = jax.tree.unflatten(self.treedef, [leaves[path] for path in self.shapes])
            part_at = part_key(key, first_index + part.index)
            sums, new = self.loss(tree, model_state, part.batch, part_at, inputs)
            _refuse_updates(model_state, new)
            slots = map_outputs(lambda rows: self._slot(rows, part.index), sums)
            return loss_mean(sums).total, slots

        return run

    def _slot(self, rows: jax.Array, index: jax.Array) -> jax.Array:
        """Returns the rows [r, ...] of a microbatch as [microbatches, r, ...], zero elsewhere, so
        that they can be summed over turns and stages. Booleans become int8."""
        rows = rows.astype(jnp.int8) if rows.dtype == jnp.bool else rows
        zeros = jnp.zeros((self.schedule.microbatches, *rows.shape), rows.dtype)
        return jax.lax.dynamic_update_index_in_dim(zeros, rows, index, 0)

    def pin(self, grads: dict[str, jax.Array]) -> dict[str, jax.Array]:
        definition = self.loss.definition
        return pin(grads, definition.gradients, definition.scope)


def _job(
    loss: PartLoss,
    params: Any,
    schedule: Schedule,
    config: PipelineConfig | None,
    axis: str | None = None,
) -> _Job:
    shapes = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in named_leaves(params).items()
    }
    layer_paths = frozenset(
        path
        for path, placement in loss.definition.params.items()
        if placement.spec and AXIS in entry_axes(placement.spec[0])
    )
    treedef = jax.tree.structure(params)
    return _Job(loss, shapes, treedef, schedule, config or PipelineConfig(), layer_paths, axis)


def _rows(sums: Sums, num_outer: int) -> Sums:
    """Returns outputs [groups?, microbatches, r, ...] as rows in batch order, [groups?, b, ...].

    `num_outer` is 1 with groups and 0 without.
    """
    return map_outputs(jax.vmap(unsplit) if num_outer else unsplit, sums)


def _refuse_updates(old: Any, new: Any) -> None:
    found = named_leaves(new)
    updated = [path for path, leaf in named_leaves(old).items() if found[path] is not leaf]
    if updated:
        raise ModelError(
            f"the model updates variables when it is called: {', '.join(updated[:4])}"
            f"{', ...' if len(updated) > 4 else ''}. The stages of a pipeline run microbatches "
            "side by side and keep no order of updates.\n"
            "  Use a model without running statistics, or a mesh without stage."
        )


def _skip_idle(config: PipelineConfig, planned: Plan) -> bool:
    """Returns whether idle stages may skip their computation; see `pipeline.execute`."""
    if config.skip_idle is None:
        return not (planned.sends or platform() == "cpu" or axis_size("context") > 1)
    if config.skip_idle and planned.sends:
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
