"""Evaluation: metrics of held-out batches, added up exactly."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

from shardlib.aggregate import Aggregate, is_output, join
from shardlib.constrain import Scope, use
from shardlib.errors import ModelError, RuleError
from shardlib.loss_signature import called_by_position, check_arity
from shardlib.manual import axis_size
from shardlib.pipeline.config import PipelineConfig
from shardlib.precision import Precision
from shardlib.precision import precision as precision_named
from shardlib.train.batches import (
    BatchAxes,
    Program,
    batch_shardings,
    host_arrays,
    input_shardings,
    structure,
)
from shardlib.train.checked import ProgramCheck
from shardlib.train.gradients import Inputs, LossFn, PartLoss
from shardlib.train.loop import must_block
from shardlib.train.offload import fetch
from shardlib.train.partitioning import Constrain, check_constrain
from shardlib.train.pipelined import pipelined_sums
from shardlib.train.reported import Reported, reported_shardings
from shardlib.train.state import TrainState, state_shardings


def make_eval_step(
    loss_fn: LossFn,
    *,
    precision: str | Precision = "f32",
    batch_axes: BatchAxes | None = None,
    params_of: Callable[[TrainState], Any] = lambda state: state.params,
    pipeline: PipelineConfig | None = None,
    constrain: Constrain = "auto",
    allow_wrong_numbers: tuple[str, ...] = (),
) -> "EvalStep":
    """Returns `step(state, batch, *inputs) -> sums`, which changes nothing.

    Arguments of the same name, losses, batches and inputs are those of `make_train_step`. `sums`
    holds a `Mean` for the loss, and for every metric the `Mean`, `Sum`, `Max`, `Min` or `Output`
    that the loss reports, whose `value` is the metric; `evaluate` joins them over batches.
    `params_of`
    picks other parameters than the trained ones, such as their moving average. On a mesh with
    `stage` a batch goes through the stages in microbatches, as many as keep them busy; of
    `pipeline` only `skip_idle` is read, since without gradients there is one schedule. `constrain`
    and `allow_wrong_numbers` are those of `make_train_step`.
    """
    check_constrain(constrain)
    dtypes, axes = precision_named(precision), dict(batch_axes or {})
    check = ProgramCheck(tuple(allow_wrong_numbers))
    pipeline = pipeline or PipelineConfig()
    loss_fn = called_by_position(loss_fn)
    return EvalStep(loss_fn, dtypes, axes, params_of, pipeline, constrain, check)


@dataclasses.dataclass(eq=False)
class EvalStep:
    """A compiled evaluation step; see `make_eval_step`."""

    loss_fn: LossFn
    precision: Precision
    batch_axes: BatchAxes
    params_of: Callable[[TrainState], Any]
    pipeline: PipelineConfig
    constrain: Constrain = "auto"
    check: ProgramCheck = dataclasses.field(default_factory=ProgramCheck)
    _programs: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __call__(self, state: TrainState, batch: Any, *inputs: Any) -> dict[str, Aggregate]:
        program = self._program(state, batch, inputs)
        self.check(program, (state, batch, *inputs), state.definition.scope.mesh)
        return program(state, batch, *inputs)

    def program(self, state: TrainState, batch: Any, *inputs: Any) -> Any:
        """Returns the jitted step for states, batches and inputs of this structure.

        Raises:
            DataError: If the batch holds what is not an array [batch, ...].
            RuleError: If the mesh cannot share out the batch.
            ModelError: If the loss takes another number of inputs.
        """
        return self._program(state, batch, inputs).jitted

    def _program(self, state: TrainState, batch: Any, inputs: Inputs) -> Program:
        key = structure(state, batch, inputs)
        if key not in self._programs:
            self._programs[key] = self._jit(state, host_arrays(batch), inputs)
        return self._programs[key]

    def _jit(self, state: TrainState, batch: Any, inputs: Inputs) -> Program:
        scope = state.definition.scope
        check_arity(self.loss_fn, inputs)
        given = batch_shardings(batch, scope, self.batch_axes), *input_shardings(inputs, scope)

        def sums(state: TrainState, batch: Any, *inputs: Any) -> dict[str, Aggregate]:
            return self._sums(state, batch, inputs, given[1:])

        jitted = jax.jit(
            sums,
            in_shardings=(state_shardings(state), *given),
            out_shardings=reported_shardings(given[0], scope),
        )
        return Program(jitted, given)

    def _sums(
        self, state: TrainState, batch: Any, inputs: Inputs, inputs_at: Any
    ) -> dict[str, Aggregate]:
        definition = state.definition
        loss = PartLoss(
            definition,
            self.loss_fn,
            self.precision,
            batch_axes=self.batch_axes,
            constrain=self.constrain,
            inputs_at=inputs_at,
        )
        with use(definition.scope.mesh, definition.scope.rules):
            params = fetch(self.params_of(state))
            if axis_size("stage") > 1:
                sums = pipelined_sums(
                    loss,
                    params,
                    state.model_state,
                    batch,
                    state.rng,
                    inputs,
                    microbatches=_eval_microbatches(batch, definition.scope, self.batch_axes),
                    config=self.pipeline,
                )
            else:
                sums = loss.sums(params, state.model_state, batch, state.rng, inputs)
        return Reported.of(sums, divided=False)


def _eval_microbatches(batch: Any, scope: Scope, batch_axes: BatchAxes) -> int:
    """The most microbatches, up to four for each stage, into which mesh and batch divide."""
    for parts in range(4 * axis_size("stage"), 1, -1):
        one = jax.tree.map(
            lambda x, n=parts: jax.ShapeDtypeStruct((x.shape[0] // n, *x.shape[1:]), x.dtype), batch
        )
        if any(x.shape[0] % parts for x in jax.tree.leaves(batch)):
            continue
        with contextlib.suppress(RuleError):
            batch_shardings(one, scope, batch_axes)
            return parts
    return 1


def evaluate(
    step: Callable[..., dict[str, Aggregate]],
    state: TrainState,
    batches: Iterable[Any],
    *inputs: Any,
) -> dict[str, float]:
    """Returns each metric over all batches: means are weighted, sums, maxima and minima exact.

    Args:
        step: What `make_eval_step` returns.
        state: The state to evaluate.
        batches: Held-out batches; padding weighs nothing.
        inputs: What the loss reads besides each batch.

    Raises:
        ModelError: If the loss returns arrays, which are no number for all batches.
    """
    totals: dict[str, Aggregate] | None = None
    for batch in batches:
        sums = step(state, batch, *inputs)
        if totals is None:
            _refuse_arrays(sums)
        before, totals = totals, sums if totals is None else _join(totals, sums)
        # One batch is worked on while the next is read: with more, they would fill the devices.
        jax.block_until_ready(totals if must_block() else before)
    return {name: float(found.value) for name, found in jax.device_get(totals or {}).items()}


_join = jax.jit(join)


def _refuse_arrays(sums: dict[str, Aggregate]) -> None:
    wrong = [name for name, x in sums.items() if is_output(x) or jax.numpy.shape(x.value)]
    if wrong:
        raise ModelError(
            f"the loss returns arrays: {', '.join(wrong)}; evaluate gives one number a metric.\n"
            "  Call the evaluation step batch by batch, or evaluate a loss without them."
        )
