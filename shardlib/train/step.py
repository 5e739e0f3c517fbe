"""One training step as one compiled program: loss, gradients, optimizer, metrics."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardlib.aggregate import Aggregate, Mean
from shardlib.constrain import use
from shardlib.errors import ModelError
from shardlib.functional import updated
from shardlib.loss_signature import called_by_position, check_arity
from shardlib.manual import axis_size
from shardlib.microbatch import split
from shardlib.partition import Placement
from shardlib.partitioner import Partition
from shardlib.paths import named_leaves
from shardlib.pipeline.config import PipelineConfig
from shardlib.pipeline.schedules import SCHEDULES, schedule_faults
from shardlib.precision import Precision
from shardlib.precision import precision as precision_named
from shardlib.train.batches import BatchAxes as BatchAxes
from shardlib.train.batches import (
    Program,
    host_arrays,
    input_shardings,
    refuse_shared,
)
from shardlib.train.batches import batch_shardings as batch_shardings
from shardlib.train.batches import structure as structure
from shardlib.train.checked import ProgramCheck
from shardlib.train.gradients import (
    Gradients,
    Inputs,
    LossFn,
    PartLoss,
    accumulate_gradients,
    loss_mean,
)
from shardlib.train.guards import SKIPPED, GuardsConfig
from shardlib.train.offload import update_offloaded
from shardlib.train.partitioning import Constrain, check_constrain
from shardlib.train.pipelined import pipelined_gradients, pipelined_groups
from shardlib.train.reduction import (
    Reduction,
    ReductionConfig,
    groups_apart,
    plan_reduction,
    reduced_gradients,
)
from shardlib.train.reported import Reported, reported_shardings
from shardlib.train.spikes import judge, keep_unless
from shardlib.train.state import TrainState, state_shardings
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
) -> "TrainStep":
    """Returns `step(state, batch, *inputs) -> (state, metrics)`, compiled at its first call.

    The step donates the state, runs on the mesh of the state, and leaves every leaf where it was.
    A batch is a pytree of arrays [batch, ...]: of NumPy, of JAX wherever they lie, or torch tensors
    on the CPU.

    `inputs` are pytrees of arrays and numbers that no microbatch divides: the parameters of a
    teacher, a target network, a weight of a loss that changes. They may change with each call
    without a new compilation, are neither trained nor donated, and keep their dtypes. What lies on
    the mesh is taken as it lies; other arrays are placed as parameters are, at each call, so place
    large ones once (`sl.shard`). A `TrainState` is such a pytree, and its `model` can be called in
    the loss. So two models train each other, as in a GAN, by two states and two steps:

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

    Several optimizers for parts of one model, and one loss, are one `optax.multi_transform`.

    Args:
        loss_fn: `loss_fn(model, batch, rng, *inputs)`, or `loss_fn(model, batch)`, returns the loss
            or `(loss, aux)`. The loss is a scalar, or a `Mean`, which stays exact when microbatches
            have unequal weights. `aux` is a dict, which may be nested, of what is reported as
            metrics: scalars and `Mean`s are averaged over the batch, `Sum`, `Max` and `Min` are
            what their names say, elementwise, and the rows of an `Output` come back as one array
            [batch, ...], sharded on the batch.
        microbatches: In how many parts the batch is computed, one after the other, with their
            gradients added in float32.
        precision: In which dtype the model is computed. Parameters are cast inside of the step, and
            floating arrays where the loss hands them to the model; the batch itself, what the model
            returns and so the loss are in float32. A batch that is handed to the model whole may
            hold targets, and is not cast.
        schedule: Learning rate by applied update, to report it; it changes nothing. Where the
            optimizer has a schedule, its own count of updates is what counts.
        batch_axes: Logical axes of batch leaves by path. A leaf that is not named has
            `("batch", None, ...)`.
        pipeline: The schedule of the stages, or its name; read where the mesh has `stage`.
        reduction: How gradients are summed over `data`; the compiler decides when left out.
        arranged: Whether batches come as `arrange_batch` lays them out, where the groups of
            `reduction` take unequal shares; else the step does it, at the cost of a copy.
        guards: Which updates are refused: those with a loss or gradient norm that is not finite, or
            a spike. A refused one leaves parameters, model state and optimizer state bit for bit as
            they were, learning-rate schedules too, which count updates; only `state.step` goes on,
            and with it dropout and data. None are refused when left out.
        constrain: Who decides where values of the loss lie. `"auto"`: the constraints of the model
            where they decide all of it, and else shardlib, which lowers the loss into one manual
            program, so that XLA's partitioner has no say. `"user"`: XLA's partitioner, which has
            been measured to return wrong gradients without a word (docs/xla_faults.md).
        allow_wrong_numbers: Codes of faults of the compiler, such as `"SL205"`, with which the step
            runs all the same. A step is checked when it is first called, and raises
            `WrongProgramError` where it would compute other numbers than one device.

    Returns:
        A callable with `lower(state, batch, *inputs)` for inspection. `metrics` holds float32
        scalars on the devices: `loss`, `grad_norm` (before clipping), with a schedule
        `learning_rate`, with guards `skipped` (1 for a refused update, else 0), and whatever is in
        `aux`.
        Read one of them now and then: XLA gives up on CPU devices with hundreds of steps in flight.

    Raises:
        ModelError: If an option is of a wrong kind, or `loss_fn` takes fewer than two arguments.
        ConfigError: If no precision has that name.
    """
    if not isinstance(microbatches, Integral) or microbatches < 1:
        raise ModelError(
            f"microbatches={microbatches!r} is not a positive whole number.\n"
            "  Use 1 for no splitting; fit_microbatches finds the fewest that fit into memory."
        )
    if not isinstance(reduction, ReductionConfig | None):
        raise ModelError(
            f"reduction is {reduction!r}, not a ReductionConfig.\n"
            "  Write it as ReductionConfig(dtype='bf16')."
        )
    if not isinstance(guards, GuardsConfig | None):
        raise ModelError(
            f"guards is {guards!r}, not a GuardsConfig.\n"
            "  Write it as GuardsConfig(nonfinite='skip')."
        )
    check_constrain(constrain)
    if isinstance(pipeline, str):
        if pipeline not in SCHEDULES:
            raise ModelError(schedule_faults(pipeline, stages=1, microbatches=1)[0])
        pipeline = PipelineConfig(schedule=pipeline)  # type: ignore[arg-type]
    return TrainStep(
        called_by_position(loss_fn),
        int(microbatches),
        precision_named(precision),
        schedule,
        dict(batch_axes or {}),
        pipeline,
        reduction or ReductionConfig(),
        arranged,
        guards if guards and guards.refuses else None,
        constrain,
        ProgramCheck(tuple(allow_wrong_numbers)),
    )


@dataclasses.dataclass(eq=False)
class TrainStep:
    """A compiled training step; see `make_train_step`."""

    loss_fn: LossFn
    microbatches: int
    precision: Precision
    schedule: Callable[[jax.Array], Any] | None
    batch_axes: BatchAxes
    pipeline: PipelineConfig
    reduction: ReductionConfig
    arranged: bool = False
    guards: GuardsConfig | None = None
    constrain: Constrain = "auto"
    check: ProgramCheck = dataclasses.field(default_factory=ProgramCheck)
    on_partition: Callable[[Partition], None] = lambda partition: None
    """Called whenever the step is traced, with who partitions the loss and why."""
    _programs: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __call__(
        self, state: TrainState, batch: Any, *inputs: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        refuse_donated(state)
        if inputs:
            refuse_shared(state, inputs)
        batch = self.arrange(state, batch)
        program = self._program(state, batch, inputs)
        self.check(program, (state, batch, *inputs), state.definition.scope.mesh)
        return program(state, batch, *inputs)

    def lower(self, state: TrainState, batch: Any, *inputs: Any) -> jax.stages.Lowered:
        """Lowers the step for arguments that may be abstract."""
        batch = self.arrange(state, batch)
        return self.program(state, batch, *inputs).lower(state, batch, *inputs)

    def arrange(self, state: TrainState, batch: Any) -> Any:
        """Returns a batch whose rows lie as groups of unequal speed need them."""
        config = self.reduction
        if self.arranged or not (config.group_microbatches or config.group_seconds):
            return batch
        reduction = self._reduction(state)
        if reduction is None or reduction.even:
            return batch
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch)):
            return jax.eval_shape(reduction.arrange, batch)
        return reduction.arrange(batch)

    def program(self, state: TrainState, batch: Any, *inputs: Any) -> Any:
        """Returns the jitted step for states, batches and inputs of this structure, rows as they
        lie.

        Raises:
            DataError: If the batch holds what is not an array [batch, ...].
            RuleError: If the mesh cannot share out the batch, or a microbatch of it.
            ModelError: If the state was made under another precision or other guards, or holds
                parameters that cannot be trained.
        """
        return self._program(state, batch, inputs).jitted

    def _program(self, state: TrainState, batch: Any, inputs: Inputs) -> Program:
        key = structure(state, batch, inputs)
        if key not in self._programs:
            self._programs[key] = self._jit(state, host_arrays(batch), inputs)
        return self._programs[key]

    def _jit(self, state: TrainState, batch: Any, inputs: Inputs) -> Program:
        scope = state.definition.scope
        placed = state_shardings(state)
        _check_trainable(state)
        _check_precision(self.precision, state)
        check_window(self.guards, state)
        check_arity(self.loss_fn, inputs)
        given = batch_shardings(batch, scope, self.batch_axes), *input_shardings(inputs, scope)
        # A microbatch must fall evenly on the devices too; refused here, before any tracing.
        reduction = self._reduction(state)
        microbatches = reduction.microbatches if reduction else self.microbatches
        parts = jax.eval_shape(lambda whole: split(whole, microbatches), batch)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
        batch_shardings(one, scope, self.batch_axes)

        def train_step(
            state: TrainState, batch: Any, *inputs: Any
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            new_state, found = self.apply(state, batch, inputs, given[1:])
            return new_state, Reported.of(found, divided=True)

        jitted = jax.jit(
            train_step,
            donate_argnums=0,
            in_shardings=(placed, *given),
            out_shardings=(placed, reported_shardings(given[0], scope)),
        )
        return Program(jitted, given)

    def apply(
        self, state: TrainState, batch: Any, inputs: Inputs = (), inputs_at: Any = ()
    ) -> tuple[TrainState, dict[str, Aggregate]]:
        """What the compiled program computes, as a function to be traced; its metrics are not
        divided yet. `inputs_at` are the shardings of the inputs."""
        definition = state.definition
        gradients = functools.partial(
            self._gradients, state, batch=batch, inputs=inputs, inputs_at=inputs_at
        )
        with use(definition.scope.mesh, definition.scope.rules):
            found = gradients(state.params)
            sums, model_state = found.sums, found.model_state
            grads, loss = _divided(found)
            grad_norm = optax.tree.norm(grads)
            good, window = None, state.spike_window
            if self.guards is not None:
                good, window = judge(self.guards, window, loss, grad_norm)
                model_state = keep_unless(good, model_state, state.model_state)

            def evaluate(params: Any) -> tuple[jax.Array, Any]:
                at_params = _divided(gradients(params))
                return at_params[1], at_params[0]

            params, opt_state = update_offloaded(
                lambda old: update(old, grads, loss, evaluate, good), state
            )
        one = jnp.float32(1.0)
        metrics = {**sums, "grad_norm": Mean(grad_norm, one)}
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

    def partition(self, state: TrainState, batch: Any, *inputs: Any) -> Partition:
        """Returns who partitions the loss of the step, `by`, and `why`; arguments may be abstract.

        Args:
            state, batch, inputs: Those of the step.
        """
        batch = self.arrange(state, batch)
        inputs_at = input_shardings(inputs, state.definition.scope)
        found: list[Partition] = []
        step = dataclasses.replace(self, on_partition=found.append)

        def traced(state: TrainState, batch: Any, *inputs: Any) -> Any:
            return step.apply(state, batch, inputs, inputs_at)

        jax.eval_shape(traced, state, host_arrays(batch), *inputs)
        return found[-1]

    def _loss(
        self, state: TrainState, inputs_at: Any, sums_at: Mapping[str, Placement] | None = None
    ) -> PartLoss:
        rest = sums_at, self.batch_axes, self.constrain, inputs_at, self.on_partition
        return PartLoss(state.definition, self.loss_fn, self.precision, *rest)

    def _gradients(
        self, state: TrainState, params: Any, batch: Any, inputs: Inputs, inputs_at: Any
    ) -> Gradients:
        """The gradients of a batch at parameters which need not be those of the state."""
        definition = state.definition
        key = jax.random.fold_in(state.rng, state.step)
        reduction = self._reduction(state)
        microbatches = reduction.inner_microbatches if reduction else self.microbatches
        # What is summed once goes straight to where it is used.
        is_one = reduction is None and microbatches == 1
        sums_at = definition.updates if is_one else definition.gradients
        loss = self._loss(state, inputs_at, sums_at)
        arguments = (loss, params, state.model_state, batch, key, inputs)
        if axis_size("stage") > 1:
            pipelined: Any = {"microbatches": microbatches, "config": self.pipeline}
            if reduction is None:
                return pipelined_gradients(*arguments, **pipelined)
            groups = functools.partial(pipelined_groups, **pipelined, axis=reduction.hops.axis)
        else:
            engine = functools.partial(accumulate_gradients, microbatches=microbatches)
            if reduction is None:
                return engine(*arguments)
            groups = functools.partial(groups_apart, engine, reduction=reduction)
        return reduced_gradients(groups, *arguments, reduction=reduction)


def _divided(found: Gradients) -> tuple[Any, jax.Array]:
    """Returns the gradients of the mean loss, and the mean loss."""
    loss = loss_mean(found.sums)
    scale = jnp.where(loss.weight == 0, 1.0, loss.weight)
    return jax.tree.map(lambda g: g / scale, found.grads), loss.value


def refuse_donated(state: Any) -> None:
    """Raises `ModelError` for a state that a step has taken already, on which XLA would crash."""
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise ModelError(
            "this state was given to a step before, which took its memory for the new one.\n"
            "  Go on with the state that the step returned: state, metrics = step(state, batch)."
        )


def _check_trainable(state: TrainState) -> None:
    wrong = [
        f"{path} ({leaf.dtype})"
        for path, leaf in named_leaves(state.params).items()
        if not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if wrong:
        raise ModelError(
            f"parameters that are not floating have no gradient: {', '.join(wrong)}.\n"
            "  Hold them in an nnx.Variable instead of an nnx.Param, or for linen in a collection "
            "of their own: self.variable('constants', ...)."
        )


def _check_precision(policy: Precision, state: TrainState) -> None:
    kept = state.definition.module.float32
    stored = jax.eval_shape(lambda params: policy.store(params, kept), state.params)
    dtypes = [x.dtype for x in jax.tree.leaves(state.params)]
    if dtypes != [x.dtype for x in jax.tree.leaves(stored)]:
        found = ", ".join(sorted(set(map(str, dtypes))))
        raise ModelError(
            f"the step's precision stores parameters in {jnp.dtype(policy.params)}, but those of "
            f"the state are in {found}.\n  Give init_state and make_train_step the same precision."
        )


def check_window(guards: GuardsConfig | None, state: TrainState) -> None:
    """Raises `ModelError` for a state that does not hold what the guards of its step need."""
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
    """Returns how many updates a schedule inside of the optimizer has counted: fewer than steps,
    where some were refused."""

    def counts(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    nodes = jax.tree.leaves(state.opt_state, is_leaf=counts)
    return next((node.count for node in nodes if counts(node)), state.step)
