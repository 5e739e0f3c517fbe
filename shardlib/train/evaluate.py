"""Evaluation of held-out batches, with exact sums of metrics."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from shardlib.errors import DataError, ModelError, RuleError
from shardlib.functional.precision import Precision
from shardlib.functional.precision import precision as precision_named
from shardlib.hardware.compiler_options import Value
from shardlib.losses.aggregate import Aggregate, is_output, join
from shardlib.losses.results import Sums
from shardlib.losses.signature import called_by_position, check_arity
from shardlib.runtime.distributed import must_block
from shardlib.sharding.constrain import Scope, use
from shardlib.sharding.manual import axis_size
from shardlib.train.batches import (
    BatchAxes,
    axes_of_leaves,
    batch_shardings,
    input_shardings,
    microbatch_shapes,
)
from shardlib.train.gradients import Inputs, LossArguments, LossFn, PartLoss
from shardlib.train.offload import fetch
from shardlib.train.partitioning import Constrain, check_constrain
from shardlib.train.pipeline.config import PipelineConfig
from shardlib.train.pipeline.gradients import pipelined_sums
from shardlib.train.program import (
    JittedStep,
    PlacedProgram,
    ProgramCheck,
    Reported,
    check_state,
    refuse_donated,
    reported_shardings,
)
from shardlib.train.state import Definition, TrainState, state_shardings

Score = Callable[[Mapping[str, np.ndarray]], dict[str, float]]
"""Metrics of a whole evaluation from what the loss returns for its rows; see `evaluate`."""


def make_eval_step(
    loss_fn: LossFn,
    *,
    precision: str | Precision = "f32",
    batch_axes: BatchAxes | None = None,
    params_of: Callable[[TrainState], PyTree] = lambda state: state.params,
    pipeline: PipelineConfig | None = None,
    constrain: Constrain = "auto",
    allow_wrong_numbers: tuple[str, ...] = (),
    compiler_options: Mapping[str, Value | None] | None = None,
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
    return EvalStep(
        called_by_position(loss_fn),
        precision_named(precision),
        axes_of_leaves(batch_axes),
        params_of,
        pipeline or PipelineConfig(),
        constrain,
        check=ProgramCheck(tuple(allow_wrong_numbers)),
        compiler_options=dict(compiler_options or {}),
    )


@dataclasses.dataclass(eq=False)
class EvalStep(JittedStep):
    """A compiled evaluation step; see `make_eval_step`."""

    loss_fn: LossFn
    precision: Precision
    batch_axes: BatchAxes
    params_of: Callable[[TrainState], PyTree]
    pipeline: PipelineConfig
    constrain: Constrain = "auto"

    def __call__(self, state: TrainState, batch: PyTree, *inputs: PyTree) -> dict[str, Aggregate]:
        check_state(state)
        refuse_donated(state, ())
        return self._run(state, batch, inputs)

    def _compile(self, state: TrainState, batch: PyTree, inputs: Inputs) -> PlacedProgram:
        scope = state.definition.scope
        check_arity(self.loss_fn, inputs)
        given = batch_shardings(batch, scope, self.batch_axes), *input_shardings(inputs, scope)

        def sums(state: TrainState, batch: PyTree, *inputs: PyTree) -> Reported:
            with use(scope.mesh, scope.rules):
                params = fetch(self.params_of(state))
                arguments = LossArguments(params, state.model_state, batch, state.rng, inputs)
                return Reported.of(
                    self._sums(state.definition, arguments, given[1:]), divided=False
                )

        return self._jitted(
            sums,
            given,
            scope.mesh,
            in_shardings=(state_shardings(state), *given),
            out_shardings=reported_shardings(given[0], scope),
        )

    def _sums(self, definition: Definition, arguments: LossArguments, inputs_at: PyTree) -> Sums:
        loss = PartLoss(
            definition,
            self.loss_fn,
            self.precision,
            batch_axes=self.batch_axes,
            constrain=self.constrain,
            inputs_at=inputs_at,
        )
        if axis_size("stage") == 1:
            return loss.sums(arguments)
        parts = _eval_microbatches(arguments.batch, definition.scope, self.batch_axes)
        return pipelined_sums(loss, arguments, microbatches=parts, config=self.pipeline)


def _eval_microbatches(batch: PyTree, scope: Scope, batch_axes: BatchAxes) -> int:
    """Returns the largest number of microbatches, at most four per stage, that fits batch and
    mesh."""
    for parts in range(4 * axis_size("stage"), 1, -1):
        with contextlib.suppress(RuleError, ModelError):
            batch_shardings(microbatch_shapes(batch, parts), scope, batch_axes)
            return parts
    return 1


def evaluate(
    step: Callable[..., dict[str, Aggregate]],
    state: TrainState,
    batches: Iterable[PyTree],
    *inputs: PyTree,
    score: Score | None = None,
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
        batches: Held-out batches; padding has weight 0.
        inputs: Extra inputs of the loss.
        score: `score(rows)` returns metrics of all batches from the `losses.Output`s of the loss:
            NumPy arrays [rows of all batches, ...] by name, in the order of the batches and equal
            in every process. Its metrics are added to the metrics of the loss.

    Raises:
        ModelError: If the step trains, or the loss returns arrays, which do not reduce to one
            number, and no score takes them.
        DataError: If there are no batches, or `batches` is a single batch.
    """
    _check_arguments(step, batches)
    totals: dict[str, Aggregate] | None = None
    rows: list[dict[str, np.ndarray]] = []
    for batch in batches:
        sums = step(state, batch, *inputs)
        if score is not None:
            outputs = {name: x.value for name, x in sums.items() if is_output(x)}
            sums = {name: x for name, x in sums.items() if name not in outputs}
            rows.append(_on_host(outputs))
        if totals is None:
            _refuse_arrays(sums)
        before, totals = totals, sums if totals is None else _join(totals, sums)
        # The next batch is read while one is computed. More in flight would fill device memory.
        jax.block_until_ready(totals if must_block() else before)
    if totals is None:
        raise DataError(
            "evaluate was given no batches, so there is nothing to average.\n"
            "  Pass at least one; an iterator that was read to its end must be made anew."
        )
    metrics = {name: float(x.value) for name, x in jax.device_get(totals).items()}
    if score is None or not rows[0]:
        return metrics
    return metrics | score(
        {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
    )


def _check_arguments(step: Callable[..., Any], batches: Iterable[PyTree]) -> None:
    if isinstance(step, JittedStep) and not isinstance(step, EvalStep):
        raise ModelError(
            "evaluate was given a training step, which would change the state.\n"
            "  Pass a step from make_eval_step(loss_fn)."
        )
    if isinstance(batches, Mapping):
        raise DataError(
            "evaluate was given one batch in place of several.\n"
            "  Pass an iterable of batches, such as [batch]."
        )


def _on_host(outputs: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Returns whole arrays, of which this process may hold some rows alone."""
    if not all(x.is_fully_addressable for x in outputs.values()):
        mesh = next(iter(outputs.values())).sharding.mesh  # type: ignore[attr-defined]
        outputs = _replicated(mesh)(outputs)
    return jax.device_get(outputs)


@functools.cache
def _replicated(mesh: Mesh) -> Callable[[PyTree], PyTree]:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


_join = jax.jit(join)


def _refuse_arrays(sums: dict[str, Aggregate]) -> None:
    wrong = [name for name, x in sums.items() if is_output(x) or jax.numpy.shape(x.value)]
    if wrong:
        raise ModelError(
            f"the loss returns arrays: {', '.join(wrong)}; evaluate returns one number per metric."
            "\n"
            "  Call the evaluation step batch by batch, pass a score for outputs, or evaluate a "
            "loss without them."
        )
