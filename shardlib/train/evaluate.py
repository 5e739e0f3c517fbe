"""Evaluation of held-out batches, with exact sums of metrics."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

from shardlib.errors import ModelError, RuleError
from shardlib.functional.precision import Precision
from shardlib.functional.precision import precision as precision_named
from shardlib.losses.aggregate import Aggregate, is_output, join
from shardlib.losses.signature import called_by_position, check_arity
from shardlib.runtime.distributed import must_block
from shardlib.sharding.constrain import Scope, use
from shardlib.sharding.manual import axis_size
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
from shardlib.train.offload import fetch
from shardlib.train.partitioning import Constrain, check_constrain
from shardlib.train.pipeline.config import PipelineConfig
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
    """Returns `step(state, batch, *inputs) -> sums`, which does not change the state.

    Losses, batches, inputs and arguments of the same name work as in `make_train_step`. `sums`
    holds a `Mean` for the loss. For every metric it holds the `Mean`, `Sum`, `Max`, `Min` or
    `Output` that the loss reports, whose `value` is the metric. `evaluate` joins them over batches.
    `params_of` selects other parameters than the trained ones, such as their moving average. On a
    mesh with `stage`, a batch is split into enough microbatches to keep the stages busy. Only
    `skip_idle` of `pipeline` is read, because there is one schedule without gradients.
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
            DataError: If a leaf of the batch is not an array [batch, ...].
            RuleError: If the mesh does not divide the batch.
            ModelError: If the loss takes a different number of inputs.
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
    """Returns the largest number of microbatches, at most four per stage, that fits batch and
    mesh."""
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
    """Returns each metric over all batches: weighted means, and exact sums, maxima and minima.

    ```python
    step = sl.make_eval_step(loss_fn)
    for name, value in sl.evaluate(step, state, batches).items():
        print(f"{name}: {value:.4f}")
    ```

    Args:
        step: The step from `make_eval_step`.
        state: The state to evaluate.
        batches: Held-out batches; padding has weight 0. Without any, the result is empty.
        inputs: Extra inputs of the loss.

    Raises:
        ModelError: If the loss returns arrays, which do not reduce to one number.
    """
    totals: dict[str, Aggregate] | None = None
    for batch in batches:
        sums = step(state, batch, *inputs)
        if totals is None:
            _refuse_arrays(sums)
        before, totals = totals, sums if totals is None else _join(totals, sums)
        # The next batch is read while one is computed. More in flight would fill device memory.
        jax.block_until_ready(totals if must_block() else before)
    return {name: float(found.value) for name, found in jax.device_get(totals or {}).items()}


_join = jax.jit(join)


def _refuse_arrays(sums: dict[str, Aggregate]) -> None:
    wrong = [name for name, x in sums.items() if is_output(x) or jax.numpy.shape(x.value)]
    if wrong:
        raise ModelError(
            f"the loss returns arrays: {', '.join(wrong)}; evaluate returns one number per metric."
            "\n"
            "  Call the evaluation step batch by batch, or evaluate a loss without them."
        )
