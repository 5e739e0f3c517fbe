"""Gradients and sums of a batch over the stages of a pipeline.

Any loss will do whose model runs its layers by one `scan_layers`. The layers are shared out over
the mesh axis `stage`; embeddings run on the first stage, head and loss on the last, and what these
parameters' gradients add up to is summed over the stages once a step. Microbatches are those of
`accumulate_gradients`: the same examples and random keys, so the results are equal.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardlib.errors import ModelError
from shardlib.losses import Mean
from shardlib.manual import axis_size, manual
from shardlib.microbatch import split
from shardlib.partition import pin
from shardlib.paths import named_leaves
from shardlib.pipeline import exchange
from shardlib.pipeline.config import PipelineConfig
from shardlib.pipeline.cut import Loss, Plan, cut, plan
from shardlib.pipeline.execute import AXIS, Part, Pipeline
from shardlib.pipeline.schedules import (
    Schedule,
    forward_schedule,
    layer_faults,
    make_schedule,
)
from shardlib.pipeline.turns import ticks
from shardlib.train.gradients import Gradients, PartLoss, Sums, part_key

BUBBLE_METRIC = "pipeline_bubble"


def pipelined_gradients(
    loss: PartLoss,
    params: Any,
    model_state: Any,
    batch: Any,
    key: jax.Array,
    *,
    microbatches: int,
    config: PipelineConfig | None = None,
    first_index: jax.Array | int = 0,
) -> Gradients:
    """Returns the gradients of a batch, computed in microbatches by all stages at once.

    The result is that of `accumulate_gradients`, and among the sums `pipeline_bubble`: the fraction
    of their turns that the stages were idle, as counted while they ran.

    Args:
        loss: The loss; its model runs its layers by one `scan_layers`.
        params: The trained parameters, the layers split over `stage`.
        model_state: What the model keeps beside; no call may update it.
        batch: Pytree of arrays [b, ...].
        key: The key of the step.
        microbatches: Their number M; it divides b.
        config: The schedule; 1F1B when left out.
        first_index: Index of the first microbatch among all parts of the step.

    Raises:
        ModelError: If the model cannot be cut into stages, or the schedule does not fit layers,
            stages and microbatches; while tracing, before anything is compiled.
    """
    config = config or PipelineConfig()
    stages = _stages()
    schedule = make_schedule(
        config.schedule, stages=stages, microbatches=microbatches, chunks=config.chunks
    )
    job = _job(loss, params, model_state, batch, key, schedule, config)
    v = schedule.chunks

    def stage(tick: Any, layers: Any, *rest: Any) -> tuple[Any, ...]:
        tick = jax.tree.map(lambda column: column[:, 0], tick)
        if v > 1:
            layers = exchange.to_run(layers, AXIS, stages, v)
        pipeline, shared, batch = job.on_stage(layers, *rest)
        found = pipeline.gradients(tick, layers, shared, batch)
        grads = exchange.to_store(found.layers, AXIS, stages, v) if v > 1 else found.layers
        return job.pin(grads), found.shared, found.sums, found.turns

    over = PartitionSpec(AXIS)
    every = PartitionSpec()
    layer_grads, shared_grads, sums, turns = job.run(stage, first_index, (over, every, every, over))
    found = {**layer_grads, **shared_grads}
    grads = {
        path: found[path] if path in found else jnp.zeros(leaf.shape, jnp.float32)
        for path, leaf in named_leaves(params).items()
    }
    grads = jax.tree.unflatten(jax.tree.structure(params), grads.values())
    total = jnp.float32(stages * schedule.turns)
    idle = total - jnp.sum(turns).astype(jnp.float32)
    return Gradients(loss.pin(grads), {**sums, BUBBLE_METRIC: Mean(idle, total)}, model_state)


def pipelined_sums(
    loss: PartLoss,
    params: Any,
    model_state: Any,
    batch: Any,
    key: jax.Array,
    *,
    microbatches: int,
    config: PipelineConfig | None = None,
    first_index: jax.Array | int = 0,
) -> Sums:
    """Returns the sums of a batch without gradients, in M + S - 1 forward turns.

    The arguments are those of `pipelined_gradients`; the layers stay where they are stored,
    whatever the schedule of training, and any number of microbatches that divides b will do.

    Raises:
        ModelError: If the model cannot be cut into stages.
    """
    schedule = forward_schedule(stages=_stages(), microbatches=microbatches)
    job = _job(loss, params, model_state, batch, key, schedule, config or PipelineConfig())

    def stage(tick: Any, layers: Any, *rest: Any) -> Any:
        tick = jax.tree.map(lambda column: column[:, 0], tick)
        pipeline, shared, batch = job.on_stage(layers, *rest)
        return pipeline.sums(tick, layers, shared, batch)

    return job.run(stage, first_index, PartitionSpec())


@dataclasses.dataclass(frozen=True)
class _Job:
    """A batch to run over the stages."""

    loss: PartLoss
    params: Any
    model_state: Any
    batch: Any
    key: jax.Array
    schedule: Schedule
    layer_paths: frozenset[str]
    plan: Plan
    skip_idle: bool

    def run(self, stage: Callable[..., Any], first_index: Any, out_specs: Any) -> Any:
        """Calls `stage(ticks, layers, shared, model_state, batch, key, first_index)` on all."""
        leaves = named_leaves(self.params)
        layers = {path: x for path, x in leaves.items() if path in self.layer_paths}
        shared = {path: x for path, x in leaves.items() if path not in self.layer_paths}
        every = PartitionSpec()
        specs = (PartitionSpec(None, AXIS), PartitionSpec(AXIS), *[every] * 5)
        first = jnp.asarray(first_index, jnp.int32)
        args = (ticks(self.schedule), layers, shared, self.model_state, self.batch, self.key, first)
        return manual(stage, (AXIS,), specs, out_specs)(*args)

    def on_stage(
        self, layers: Any, shared: Any, model_state: Any, batch: Any, key: Any, first_index: Any
    ) -> tuple[Pipeline, Any, Any]:
        """Returns the pipeline of one stage, from arrays that it sees."""
        schedule = self.schedule
        per_chunk = self.plan.num_layers // (schedule.stages * schedule.chunks)
        loss = _loss(self.loss, self.params, model_state, key, first_index)
        parts = cut(loss, self.plan, layers, per_chunk)
        pipeline = Pipeline(parts, schedule, self.plan.num_layers, self.skip_idle, self.pin)
        return pipeline, shared, batch

    def pin(self, grads: dict[str, jax.Array]) -> dict[str, jax.Array]:
        definition = self.loss.definition
        return pin(grads, definition.gradients, definition.scope)


def _job(
    loss: PartLoss,
    params: Any,
    model_state: Any,
    batch: Any,
    key: jax.Array,
    schedule: Schedule,
    config: PipelineConfig,
) -> _Job:
    parts = jax.eval_shape(lambda batch: split(batch, schedule.microbatches), batch)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
    part = Part(one, jax.ShapeDtypeStruct((), jnp.int32))  # type: ignore[arg-type]
    layer_paths = frozenset(
        path
        for path, placement in loss.definition.params.items()
        if placement.spec and AXIS in _names(placement.spec[0])
    )
    planned = plan(
        _loss(loss, params, model_state, key, 0), named_leaves(params), layer_paths, part
    )
    faults = layer_faults(planned.num_layers, stages=schedule.stages, chunks=schedule.chunks)
    if faults:
        raise ModelError("\n".join(faults))
    skip_idle = _skip_idle(config, planned, loss)
    return _Job(loss, params, model_state, batch, key, schedule, layer_paths, planned, skip_idle)


def _loss(loss: PartLoss, params: Any, model_state: Any, key: jax.Array, first_index: Any) -> Loss:
    """The loss of a microbatch as a function of parameters by path."""
    paths, treedef = list(named_leaves(params)), jax.tree.structure(params)

    def run(leaves: Any, part: Part) -> tuple[jax.Array, Sums]:
        tree = jax.tree.unflatten(treedef, [leaves[path] for path in paths])
        sums, new = loss(tree, model_state, part.batch, part_key(key, first_index + part.index))
        _refuse_updates(model_state, new)
        return sums["loss"].total, sums

    return run


def _refuse_updates(old: Any, new: Any) -> None:
    found = named_leaves(new)
    updated = [path for path, leaf in named_leaves(old).items() if found[path] is not leaf]
    if updated:
        raise ModelError(
            f"the model updates variables when it is called: {', '.join(updated)}. The stages of a "
            "pipeline run microbatches side by side and keep no order of updates.\n"
            "  Use a model without running statistics, or a mesh without stage."
        )


def _skip_idle(config: PipelineConfig, planned: Plan, loss: PartLoss) -> bool:
    """Whether idle stages may skip what they would compute: see `pipeline.execute`."""
    mesh = loss.definition.scope.mesh
    if config.skip_idle is None:
        on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
        return not (planned.sends or on_cpu or axis_size("context") > 1)
    if config.skip_idle and planned.sends:
        raise ModelError(
            "idle stages cannot skip the computation: the model sends by collective-permute, as "
            "ring attention does, in which all stages meet.\n"
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


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
