"""One training step as one compiled program: loss, gradients, optimizer, metrics."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from shardlib.errors import ModelError
from shardlib.functional import refuse_integer_params, updated
from shardlib.functional.precision import Precision
from shardlib.functional.precision import precision as precision_named
from shardlib.hardware.compiler_options import Value
from shardlib.losses.aggregate import Aggregate, Mean
from shardlib.losses.results import loss_mean
from shardlib.losses.signature import called_by_position, check_arity
from shardlib.partitioner import Partition
from shardlib.sharding.constrain import use
from shardlib.sharding.manual import axis_size
from shardlib.train.batches import BatchAxes as BatchAxes
from shardlib.train.batches import (
    axes_of_leaves,
    host_arrays,
    input_shardings,
    microbatch_shapes,
    structure,
)
from shardlib.train.batches import batch_shardings as batch_shardings
from shardlib.train.gradients import (
    Gradients,
    Inputs,
    LossArguments,
    LossFn,
    PartLoss,
    accumulate_gradients,
)
from shardlib.train.guards import SKIPPED, GuardsConfig, judge, keep_unless
from shardlib.train.offload import update_offloaded
from shardlib.train.partitioning import Constrain, check_constrain
from shardlib.train.pipeline.config import PipelineConfig
from shardlib.train.pipeline.gradients import pipelined_gradients, pipelined_groups
from shardlib.train.pipeline.schedules import SCHEDULES, schedule_faults
from shardlib.train.program import (
    JittedStep,
    PlacedProgram,
    ProgramCheck,
    Reported,
    check_state,
    refuse_donated,
    reported_shardings,
)
from shardlib.train.reduce.context_groups import with_context
from shardlib.train.reduce.reduction import (
    Reduction,
    ReductionConfig,
    groups_apart,
    plan_reduction,
    reduced_gradients,
)
from shardlib.train.reduce.sum_once import GradientSums, choose_sums
from shardlib.train.state import Definition, TrainState, state_shardings
from shardlib.train.update import update


def make_train_step(
    loss_fn: LossFn,
    *,
    microbatches: int = 1,
    precision: str | Precision = "f32",
    schedule: Callable[[jax.Array], Any] | None = None,
    batch_axes: BatchAxes | None = None,
    pipeline: PipelineConfig | str = "1f1b",
    reduction: ReductionConfig | None = None,
    arranged: bool = False,
    guards: GuardsConfig | None = None,
    constrain: Constrain = "auto",
    allow_wrong_numbers: tuple[str, ...] = (),
    compiler_options: Mapping[str, Value | None] | None = None,
) -> "TrainStep":
    """Returns `step(state, batch, *inputs) -> (state, metrics)`, compiled at its first call.

    `TrainStep` describes the states, batches, inputs and metrics of the step, and, as attributes,
    the options with all their values.

    Args:
        loss_fn: `loss_fn(model, batch, rng, *inputs)` or `loss_fn(model, batch)` returns the loss
            or `(loss, aux)`.
        microbatches: Number of parts of the batch, computed one after the other.
        precision: Compute dtype of the model, as a `Precision` or its name.
        schedule: Learning rate by applied update, for reporting only.
        batch_axes: Logical axes of batch leaves by path; by default `("batch", None, ...)`.
        pipeline: The pipeline schedule or its name, used if the mesh has `stage`.
        reduction: Reduction of gradients over `data`. If left out, they are summed once a step
            where that is proven to give the same numbers, else where the compiler decides.
        arranged: Whether batches are already laid out by `arrange_batch`.
        guards: Conditions under which updates are refused. If left out, every update is applied.
        constrain: The partitioner of the loss: `"auto"` or `"user"`.
        allow_wrong_numbers: Codes of compiler faults, such as `"SL205"`, that do not stop the step
            from running. A step is checked at its first call, and raises `WrongProgramError` if it
            would compute other numbers than one device.
        compiler_options: Options of XLA by name that replace or complete the defaults of the
            platform (`shardlib.hardware.compiler_options`). None removes a default. The first call
            of the step raises `ConfigError` for an option that the compiler refuses.

    Raises:
        ModelError: If an option has the wrong type, or `loss_fn` takes fewer than two arguments.
        RuleError: If `batch_axes` is not a dict of tuples.
        ConfigError: If the name of the precision is unknown.
    """
    return TrainStep(
        called_by_position(loss_fn),
        microbatches,
        precision_named(precision),
        schedule,
        axes_of_leaves(batch_axes),
        _pipeline_config(pipeline),
        reduction or ReductionConfig(),
        arranged,
        guards,
        constrain,
        check=ProgramCheck(tuple(allow_wrong_numbers)),
        compiler_options=dict(compiler_options or {}),
    )


def _pipeline_config(pipeline: PipelineConfig | str) -> PipelineConfig:
    if isinstance(pipeline, PipelineConfig):
        return pipeline
    if pipeline not in SCHEDULES:
        raise ModelError(schedule_faults(pipeline, stages=1, microbatches=1)[0])
    return PipelineConfig(schedule=pipeline)  # type: ignore[arg-type]


@dataclasses.dataclass(eq=False)
class TrainStep(JittedStep):
    """A compiled training step, `step(state, batch, *inputs) -> (state, metrics)`.

    The step donates the state, runs on the mesh of the state, and keeps the sharding of every leaf.
    A batch is a pytree of arrays [batch, ...]: NumPy arrays, JAX arrays with any sharding, or torch
    tensors on the CPU.

    `inputs` are pytrees of arrays and numbers that are not split into microbatches, such as the
    parameters of a teacher, a target network, or a changing loss weight. Their values may change
    between calls without recompilation. They are neither trained nor donated, and keep their
    dtypes. Arrays already on the mesh keep their sharding. Other arrays are placed like parameters
    at each call, so place large ones once (`sl.shard`). A `TrainState` is such a pytree, and the
    loss can call its `model`. Two models that train each other, as in a GAN, need two states and
    two steps:

    ```python
    def generator_loss(generator, batch, rng, critic):
        return -jnp.mean(critic.model(generator(batch["noise"])))

    def critic_loss(critic, batch, rng, generator):
        fake = generator.model(batch["noise"])
        return jnp.mean(critic(fake)) - jnp.mean(critic(batch["real"]))

    for batch in batches:
        critic, _ = critic_step(critic, batch, generator)
        generator, _ = generator_step(generator, batch, critic)
    ```

    To train parts of one model with different optimizers, use one `optax.multi_transform`.

    `metrics` holds float32 scalars on the devices: `loss`, `grad_norm` (before clipping),
    `learning_rate` (with a schedule), `skipped` (with guards; 1 for a refused update, else 0) and
    the metrics of `aux`. Read one of them regularly, because XLA fails on CPU devices with hundreds
    of steps in flight.
    """

    loss_fn: LossFn
    """Returns the loss or `(loss, aux)`. The loss is a scalar or a `Mean`, which stays exact if
    microbatches have unequal weights. `aux` is a dict of metrics and may be nested. Scalars and
    `Mean`s are averaged over the batch. `Sum`, `Max` and `Min` are reduced elementwise. The rows of
    an `Output` are returned as one array [batch, ...], sharded on the batch."""
    microbatches: int
    """Number of parts of the batch, computed one after the other. Their gradients are accumulated
    in float32."""
    precision: Precision
    """Compute dtype of the model. Parameters are cast inside the step, and floating arrays where
    the loss passes them to the model. The batch, the outputs of the model and the loss are in
    float32. A batch passed whole to the model may hold targets, and is not cast."""
    schedule: Callable[[jax.Array], Any] | None
    """Learning rate by applied update, for reporting only. If the optimizer has a schedule, its own
    count of updates is used."""
    batch_axes: BatchAxes
    """Logical axes of batch leaves by path. Leaves not listed have `("batch", None, ...)`."""
    pipeline: PipelineConfig
    """The pipeline schedule, used if the mesh has `stage`."""
    reduction: ReductionConfig
    """Reduction of gradients over `data`. With the defaults, they are summed once a step where that
    is proven to give the same numbers, else where the compiler decides."""
    arranged: bool = False
    """Whether batches are already laid out by `arrange_batch`, for groups of `reduction` with
    unequal shares. Otherwise the step lays them out, at the cost of a copy."""
    guards: GuardsConfig | None = None
    """Conditions under which updates are refused: a loss or gradient norm that is not finite, or a
    spike. A refused update leaves parameters, model state and optimizer state (with its
    learning-rate schedule, which counts updates) unchanged bit for bit. Only `state.step` advances,
    and with it dropout and data. None applies every update."""
    constrain: Constrain = "auto"
    """The partitioner of the loss. `"auto"`: the constraints of the model, if they determine every
    sharding. Otherwise shardlib lowers the loss into one manual program, so that XLA's partitioner
    does not take part. `"user"`: XLA's partitioner, which has been measured to return wrong
    gradients silently (docs/xla_faults.md)."""
    on_partition: Callable[[Partition], None] = lambda partition: None
    """Called whenever the step is traced, with the partitioner of the loss and the reason."""
    _sums: dict[Any, GradientSums] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.microbatches, Integral) or self.microbatches < 1:
            raise ModelError(
                f"microbatches={self.microbatches!r} is not a positive whole number.\n"
                "  Use 1 for no splitting; fit_microbatches finds the fewest that fit into memory."
            )
        self.microbatches = int(self.microbatches)
        if not isinstance(self.reduction, ReductionConfig):
            raise ModelError(
                f"reduction is {self.reduction!r}, not a ReductionConfig.\n"
                "  Write it as ReductionConfig(dtype='bf16')."
            )
        if not isinstance(self.guards, GuardsConfig | None):
            raise ModelError(
                f"guards is {self.guards!r}, not a GuardsConfig.\n"
                "  Write it as GuardsConfig(nonfinite='skip')."
            )
        if self.guards and not self.guards.refuses:
            self.guards = None
        check_constrain(self.constrain)

    def __call__(
        self, state: TrainState, batch: PyTree, *inputs: PyTree
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        check_state(state)
        refuse_donated(state, inputs)
        return self._run(state, batch, inputs)

    def arrange(self, state: TrainState, batch: PyTree) -> PyTree:
        """Returns the batch with its rows laid out for groups of unequal speed."""
        config = self.reduction
        if self.arranged or not (config.group_microbatches or config.group_seconds):
            return batch
        reduction = self._reduction(state)
        if reduction is None or reduction.even:
            return batch
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch)):
            return jax.eval_shape(reduction.arrange, batch)
        return reduction.arrange(batch)

    def _compile(self, state: TrainState, batch: PyTree, inputs: Inputs) -> PlacedProgram:
        scope = state.definition.scope
        placed = state_shardings(state)
        refuse_integer_params(state.params)
        _check_precision(self.precision, state)
        check_window(self.guards, state)
        check_arity(self.loss_fn, inputs)
        given = batch_shardings(batch, scope, self.batch_axes), *input_shardings(inputs, scope)
        # The devices must divide a microbatch too. This raises before any tracing.
        reduction = self._reduction(state)
        parts = reduction.microbatches if reduction else self.microbatches
        batch_shardings(microbatch_shapes(batch, parts), scope, self.batch_axes)

        def train_step(
            state: TrainState, batch: PyTree, *inputs: PyTree
        ) -> tuple[TrainState, Reported]:
            new_state, metrics = self.apply(state, batch, inputs, given[1:])
            return new_state, Reported.of(metrics, divided=True)

        return self._jitted(
            train_step,
            given,
            scope.mesh,
            donate_argnums=0,
            in_shardings=(placed, *given),
            out_shardings=(placed, reported_shardings(given[0], scope)),
        )

    def apply(
        self, state: TrainState, batch: PyTree, inputs: Inputs = (), inputs_at: PyTree = ()
    ) -> tuple[TrainState, dict[str, Aggregate]]:
        """Computes the step, for tracing inside a compiled program. The metrics are undivided.
        `inputs_at` are the shardings of the inputs."""
        definition = state.definition
        gradients = functools.partial(
            self._gradients, state, batch=batch, inputs=inputs, inputs_at=inputs_at
        )
        with use(definition.scope.mesh, definition.scope.rules):
            result = gradients(state.params)
            grads, loss = _divided(result)
            grad_norm = optax.tree.norm(grads)
            model_state = result.model_state
            good, window = None, state.spike_window
            if self.guards is not None:
                good, window = judge(self.guards, window, loss, grad_norm)
                model_state = keep_unless(good, model_state, state.model_state)

            def evaluate(params: PyTree) -> tuple[jax.Array, PyTree]:
                grads, loss = _divided(gradients(params))
                return loss, grads

            params, opt_state = update_offloaded(
                lambda old: update(old, grads, loss, evaluate, good), state
            )
        one = jnp.float32(1.0)
        metrics = {**result.sums, "grad_norm": Mean(grad_norm, one)}
        if self.schedule is not None:
            rate = jnp.asarray(self.schedule(_updates_before(state)), jnp.float32)
            metrics["learning_rate"] = Mean(rate, one)
        if good is not None:
            metrics[SKIPPED] = Mean(1.0 - good.astype(jnp.float32), one)
        new_state = TrainState(
            state.step + 1, params, model_state, opt_state, state.rng, definition, window
        )
        return new_state, metrics

    def _reduction(self, state: TrainState) -> Reduction | None:
        definition = state.definition
        return plan_reduction(
            self.reduction,
            definition.scope.mesh,
            microbatches=self.microbatches,
            params=definition.params,
            model_state=updated(definition.module, state.model_state),
        )

    def partition(self, state: TrainState, batch: PyTree, *inputs: PyTree) -> Partition:
        """Returns the partitioner of the loss (`by`), the reason (`why`), and the large operations
        that every device computes whole (`whole`)."""
        batch = self.arrange(state, batch)
        inputs_at = input_shardings(inputs, state.definition.scope)
        partitions: list[Partition] = []
        step = dataclasses.replace(self, on_partition=partitions.append)
        apply = functools.partial(step.apply, inputs_at=inputs_at)
        jax.eval_shape(apply, state, host_arrays(batch), inputs)
        return partitions[-1]

    def gradient_sums(self, state: TrainState, batch: PyTree, *inputs: PyTree) -> GradientSums:
        """Returns where the gradients are summed over `data` and `context`, and the reason."""
        definition = state.definition
        with use(definition.scope.mesh, definition.scope.rules):
            loss = self._loss(definition, input_shardings(inputs, definition.scope))
            batch = host_arrays(self.arrange(state, batch))
            given = state.params, state.model_state, batch, state.rng, inputs
            return self._sums_of(state, loss, LossArguments(*given))

    def _sums_of(self, state: TrainState, loss: PartLoss, arguments: LossArguments) -> GradientSums:
        """Returns where gradients are summed; decides once for each structure."""
        inputs, at = arguments.inputs, tuple(jax.tree.leaves(loss.inputs_at))
        shapes = tuple((jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(inputs))
        key = structure(state.definition, arguments.batch), jax.tree.structure(inputs), shapes, at
        if key not in self._sums:
            sums = self._sums_over_data(state, loss, arguments)
            if axis_size("context") > 1 and self.reduction.dtype != "compiler":
                sums = with_context(sums, loss, arguments, self.microbatches)
            self._sums[key] = sums
        return self._sums[key]

    def _sums_over_data(
        self, state: TrainState, loss: PartLoss, arguments: LossArguments
    ) -> GradientSums:
        reduction = self._reduction(state)
        if reduction is not None:
            return GradientSums(reduction, "summed over data once a step: train.reduction is set")
        if axis_size("data") == 1:
            return GradientSums(None, "not summed over data")
        if self.reduction != ReductionConfig():
            return GradientSums(None, "summed over data by the compiler: train.reduction is set")
        return choose_sums(loss, arguments, self.microbatches)

    def _loss(self, definition: Definition, inputs_at: PyTree) -> PartLoss:
        return PartLoss(
            definition,
            self.loss_fn,
            self.precision,
            batch_axes=self.batch_axes,
            constrain=self.constrain,
            inputs_at=inputs_at,
            on_partition=self.on_partition,
        )

    def _gradients(
        self, state: TrainState, params: PyTree, batch: PyTree, inputs: Inputs, inputs_at: PyTree
    ) -> Gradients:
        """Returns the gradients of a batch at `params`, which may differ from `state.params`."""
        loss = self._loss(state.definition, inputs_at)
        key = jax.random.fold_in(state.rng, state.step)
        arguments = LossArguments(params, state.model_state, batch, key, inputs)
        reduction = self._sums_of(state, loss, arguments).reduction
        microbatches = reduction.inner_microbatches if reduction else self.microbatches
        if reduction is None and microbatches == 1:
            # Gradients that are summed only once go straight to the placement of the update.
            loss = dataclasses.replace(loss, gradients_at=state.definition.updates)
        if axis_size("stage") > 1:
            pipelined: Any = {"microbatches": microbatches, "config": self.pipeline}
            engine = functools.partial(pipelined_gradients, **pipelined)
            groups = functools.partial(pipelined_groups, **pipelined)
        else:
            engine = functools.partial(accumulate_gradients, microbatches=microbatches)
            groups = functools.partial(groups_apart, engine)
        if reduction is None:
            return engine(loss, arguments)
        return reduced_gradients(groups, loss, arguments, reduction)


def _divided(summed: Gradients) -> tuple[PyTree, jax.Array]:
    """Returns the gradients of the mean loss, and the mean loss."""
    loss = loss_mean(summed.sums)
    scale = jnp.where(loss.weight == 0, 1.0, loss.weight)
    return jax.tree.map(lambda g: g / scale.astype(g.dtype), summed.grads), loss.value


def _check_precision(policy: Precision, state: TrainState) -> None:
    kept = state.definition.module.float32
    stored = jax.eval_shape(lambda params: policy.store(params, kept), state.params)
    dtypes = [x.dtype for x in jax.tree.leaves(state.params)]
    if dtypes != [x.dtype for x in jax.tree.leaves(stored)]:
        held = ", ".join(sorted(set(map(str, dtypes))))
        raise ModelError(
            f"the step's precision stores parameters in {jnp.dtype(policy.params)}, but the state "
            f"has {held}.\n  Give init_state and make_train_step the same precision."
        )


def check_window(guards: GuardsConfig | None, state: TrainState) -> None:
    """Raises `ModelError` if the spike window of a state does not match the guards of its step."""
    if guards is None or guards.spike is None:
        return
    window = state.spike_window
    held = 0 if window is None else window.values.shape[-1]
    if held != guards.spike.window:
        raise ModelError(
            f"the step looks for spikes among the latest {guards.spike.window} values, but the "
            f"state keeps {held or 'none'}.\n"
            "  Give init_state and make_train_step the same guards."
        )


def _updates_before(state: TrainState) -> jax.Array:
    """Returns the number of updates that the schedule of the optimizer counts, which leaves out
    refused ones; without a schedule, the number of steps."""
    kind = optax.ScaleByScheduleState
    nodes = jax.tree.leaves(state.opt_state, is_leaf=lambda node: isinstance(node, kind))
    counts: list[Any] = [node.count for node in nodes if isinstance(node, kind)]
    return counts[0] if counts else state.step
