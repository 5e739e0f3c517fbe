"""One training step as one compiled program: loss, gradients, optimizer, metrics."""

import dataclasses
import functools
from collections.abc import Callable
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.constrain import use
from shardlib.errors import ModelError
from shardlib.functional import updated
from shardlib.losses import Mean
from shardlib.manual import axis_size
from shardlib.microbatch import split
from shardlib.partition import pin
from shardlib.pipeline.config import PipelineConfig
from shardlib.pipeline.schedules import SCHEDULES, schedule_faults
from shardlib.precision import Precision
from shardlib.precision import precision as precision_named
from shardlib.train.batch import BatchAxes as BatchAxes
from shardlib.train.batch import batch_shardings as batch_shardings
from shardlib.train.checked import ProgramCheck
from shardlib.train.gated import gated_update
from shardlib.train.gradients import (
    Gradients,
    LossFn,
    PartLoss,
    accumulate_gradients,
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
from shardlib.train.spikes import judge, keep_unless
from shardlib.train.state import TrainState, state_shardings


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
    """Returns `step(state, batch) -> (state, metrics)`, compiled at its first call.

    The step donates the state, runs on the mesh of the state, and leaves every leaf where it was.

    Args:
        loss_fn: `loss_fn(model, batch, rng)` returns the loss or `(loss, aux)`. The loss is a
            scalar, or a `Mean`, which stays exact when microbatches have unequal weights; `aux` is
            a dict of scalars and `Mean`s, reported as metrics.
        microbatches: In how many parts the batch is computed, one after the other, with their
            gradients added in float32.
        precision: In which dtype the loss is computed. The parameters are cast inside of the step.
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
        A callable with `lower(state, batch)` for inspection. `metrics` holds float32 scalars on the
        devices: `loss`, `grad_norm` (before clipping), with a schedule `learning_rate`, with guards
        `skipped` (1 for a refused update, else 0), and whatever is in `aux`.
        Read one of them now and then: XLA gives up on CPU devices with hundreds of steps in flight.
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
        loss_fn,
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
    _programs: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        refuse_donated(state)
        batch = self.arrange(state, batch)
        program = self.program(state, batch)
        self.check(program, (state, batch), state.definition.scope.mesh)
        return program(state, batch)

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lowers the step for arguments that may be abstract."""
        batch = self.arrange(state, batch)
        return self.program(state, batch).lower(state, batch)

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

    def program(self, state: TrainState, batch: Any) -> Any:
        """Returns the jitted step for states and batches of this structure, rows as they lie.

        Raises:
            RuleError: If the mesh cannot share out the batch, or a microbatch of it.
            ModelError: If the state was made under another precision or other guards.
        """
        key = structure(state, batch)
        if key not in self._programs:
            self._programs[key] = self._jit(state, batch)
        return self._programs[key]

    def _jit(self, state: TrainState, batch: Any) -> Any:
        scope = state.definition.scope
        placed = state_shardings(state)
        replicated = NamedSharding(scope.mesh, PartitionSpec())
        _check_precision(self.precision, state)
        check_window(self.guards, state)
        batch_placed = batch_shardings(batch, scope, self.batch_axes)
        # A microbatch must fall evenly on the devices too; refused here, before any tracing.
        reduction = self._reduction(state)
        microbatches = reduction.microbatches if reduction else self.microbatches
        parts = jax.eval_shape(lambda whole: split(whole, microbatches), batch)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
        batch_shardings(one, scope, self.batch_axes)

        def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
            new_state, means = self.apply(state, batch)
            return new_state, {name: mean.value for name, mean in means.items()}

        return jax.jit(
            train_step,
            donate_argnums=0,
            in_shardings=(placed, batch_placed),
            out_shardings=(placed, replicated),
        )

    def apply(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Mean]]:
        """What the compiled program computes, as a function to be traced; its metrics are not
        divided yet."""
        definition = state.definition
        with use(definition.scope.mesh, definition.scope.rules):
            grads, sums, model_state = self._gradients(state, batch)
            weight = sums["loss"].weight
            grads = jax.tree.map(lambda g: g / jnp.where(weight == 0, 1.0, weight), grads)
            loss = sums["loss"].value
            grad_norm = optax.tree.norm(grads)
            good, window = None, state.spike_window
            if self.guards is not None:
                good, window = judge(self.guards, window, loss, grad_norm)
                model_state = keep_unless(good, model_state, state.model_state)
            params, opt_state = update_offloaded(lambda old: _update(old, grads, loss, good), state)
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

    def _gradients(self, state: TrainState, batch: Any) -> Gradients:
        definition = state.definition
        key = jax.random.fold_in(state.rng, state.step)
        reduction = self._reduction(state)
        microbatches = reduction.inner_microbatches if reduction else self.microbatches
        # What is summed once goes straight to where it is used.
        is_one = reduction is None and microbatches == 1
        sums_at = definition.updates if is_one else definition.gradients
        loss = PartLoss(
            definition, self.loss_fn, self.precision, sums_at, self.batch_axes, self.constrain
        )
        arguments = (loss, state.params, state.model_state, batch, key)
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


def refuse_donated(state: Any) -> None:
    """Raises `ModelError` for a state that a step has taken already, on which XLA would crash."""
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise ModelError(
            "this state was given to a step before, which took its memory for the new one.\n"
            "  Go on with the state that the step returned: state, metrics = step(state, batch)."
        )


def structure(state: TrainState, batch: Any) -> Any:
    """Returns what a program is made for: whose state, and the shapes of a batch."""
    leaves, treedef = jax.tree.flatten(batch)
    return state.definition, treedef, tuple(leaf.shape for leaf in leaves)


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


def _update(
    state: TrainState, grads: Any, loss: jax.Array, good: jax.Array | None
) -> tuple[Any, Any]:
    """Returns the parameters and optimizer state after an update, in the dtypes they had.

    `grads` are in float32 whatever the parameters are, and so is the arithmetic of the update. An
    optimizer that asks for the `value` of the loss gets it. Each device updates the part of a
    parameter whose optimizer state it holds. Where `good` is there and false, all stay as they are.
    """
    definition = state.definition
    optimizer = optax.with_extra_args_support(definition.optimizer)
    params = state.params
    is_apart = definition.scope.rules.opt_state is not None
    if is_apart:
        grads = pin(grads, definition.updates, definition.scope)
        params = pin(params, definition.updates, definition.scope)
    update = functools.partial(_optimize, optimizer, loss)
    if good is None:
        updates, opt_state = update(grads, state.opt_state, params)
    else:
        updates, opt_state = gated_update(update, good, grads, state.opt_state, params)
    with jax.numpy_dtype_promotion("standard"):
        new_params = optax.apply_updates(params, updates)
    if good is not None:
        new_params = keep_unless(good, new_params, params)
        if is_apart:
            # What is gathered is chosen before, so that no device holds both whole.
            new_params = pin(new_params, definition.updates, definition.scope)
    return new_params, opt_state


def _optimize(
    optimizer: Any, loss: jax.Array, grads: Any, opt_state: Any, params: Any
) -> tuple[Any, Any]:
    """Returns updates and optimizer state, the state in the dtypes it had."""
    # optax mixes dtypes freely, whatever the user's own code is held to.
    with jax.numpy_dtype_promotion("standard"):
        updates, new = optimizer.update(grads, opt_state, params, value=loss)
    return updates, jax.tree.map(lambda x, old: x.astype(old.dtype), new, opt_state)
