"""Evaluation: metrics of held-out batches, added up exactly."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.constrain import Scope, use
from shardlib.errors import RuleError
from shardlib.functional import call
from shardlib.losses import Mean
from shardlib.manual import axis_size
from shardlib.pipeline.config import PipelineConfig
from shardlib.precision import Precision
from shardlib.precision import precision as precision_named
from shardlib.train.checked import ProgramCheck
from shardlib.train.gradients import LossFn, PartLoss, loss_sums
from shardlib.train.loop import must_block
from shardlib.train.offload import fetch
from shardlib.train.partitioning import Constrain, LossPartitioner, check_constrain
from shardlib.train.pipelined import pipelined_sums
from shardlib.train.state import Definition, TrainState, state_shardings
from shardlib.train.step import BatchAxes, batch_shardings, structure


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
    """Returns `step(state, batch) -> sums`, which changes nothing.

    `sums` holds a `Mean` for the loss and for every metric, to be added over batches. `params_of`
    picks other parameters than the trained ones, such as their moving average. On a mesh with
    `stage` a batch goes through the stages in microbatches, as many as keep them busy; of
    `pipeline` only `skip_idle` is read, since without gradients there is one schedule. `constrain`
    and `allow_wrong_numbers` are those of `make_train_step`.
    """
    check_constrain(constrain)
    dtypes, axes = precision_named(precision), dict(batch_axes or {})
    check = ProgramCheck(tuple(allow_wrong_numbers))
    pipeline = pipeline or PipelineConfig()
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

    def __call__(self, state: TrainState, batch: Any) -> dict[str, Mean]:
        program = self.program(state, batch)
        self.check(program, (state, batch), state.definition.scope.mesh)
        return program(state, batch)

    def program(self, state: TrainState, batch: Any) -> Any:
        """Returns the jitted step for states and batches of this structure.

        Raises:
            RuleError: If the mesh cannot share out the batch.
        """
        key = structure(state, batch)
        if key not in self._programs:
            scope = state.definition.scope
            placed = (state_shardings(state), batch_shardings(batch, scope, self.batch_axes))
            replicated = NamedSharding(scope.mesh, PartitionSpec())
            self._programs[key] = jax.jit(self._sums, in_shardings=placed, out_shardings=replicated)
        return self._programs[key]

    def _sums(self, state: TrainState, batch: Any) -> dict[str, Mean]:
        definition, dtypes = state.definition, self.precision
        with use(definition.scope.mesh, definition.scope.rules):
            params = fetch(self.params_of(state))
            if axis_size("stage") > 1:
                return pipelined_sums(
                    PartLoss(definition, self.loss_fn, dtypes),
                    params,
                    state.model_state,
                    batch,
                    state.rng,
                    microbatches=_eval_microbatches(batch, definition.scope, self.batch_axes),
                    config=self.pipeline,
                )
            partitioner = LossPartitioner(definition, self.batch_axes, self.constrain)
            forward = self._forward(definition)
            arguments = params, state.model_state, batch, state.rng
            return partitioner.run(forward, forward, arguments)

    def _forward(self, definition: Definition) -> Callable[..., dict[str, Mean]]:
        dtypes, module = self.precision, definition.module

        def forward(params: Any, model_state: Any, batch: Any, key: jax.Array) -> dict[str, Mean]:
            batch = dtypes.cast_batch(batch)

            def sums(model: Any) -> dict[str, Mean]:
                return loss_sums(self.loss_fn(model, batch, key))

            return call(module, params, model_state, key, sums, precision=dtypes)[0]

        return forward


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
    step: Callable[[TrainState, Any], dict[str, Mean]], state: TrainState, batches: Iterable[Any]
) -> dict[str, float]:
    """Returns the weighted mean of each metric over batches.

    Args:
        step: What `make_eval_step` returns.
        state: The state to evaluate.
        batches: Held-out batches; padding weighs nothing.
    """
    totals: dict[str, Mean] | None = None
    for batch in batches:
        sums = step(state, batch)
        before, totals = totals, sums if totals is None else _add(totals, sums)
        # One batch is worked on while the next is read: with more, they would fill the devices.
        jax.block_until_ready(totals if must_block() else before)
    return {name: float(mean.value) for name, mean in jax.device_get(totals or {}).items()}


@jax.jit
def _add(totals: dict[str, Mean], sums: dict[str, Mean]) -> dict[str, Mean]:
    return jax.tree.map(jnp.add, totals, sums)
