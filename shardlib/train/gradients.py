"""The loss of a part of a batch over arrays, its gradients, and their sums over microbatches."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
from jaxtyping import PyTree

from shardlib.functional import call
from shardlib.functional.boundary import boundary
from shardlib.functional.precision import Precision
from shardlib.losses.microbatch import accumulate, widened
from shardlib.losses.results import Sums, loss_mean, loss_sums, refuse_integer_loss
from shardlib.losses.signature import Inputs as Inputs
from shardlib.losses.signature import LossFn as LossFn
from shardlib.losses.signature import noting
from shardlib.partitioner import ValueLayout
from shardlib.sharding.partition import Placement, pin
from shardlib.train.partitioning import LossPartitioner, anywhere, placed_layouts


class LossArguments(NamedTuple):
    """The arrays from which a loss is computed."""

    params: PyTree
    """The trained parameters, in their storage dtype."""
    model_state: PyTree
    """The state that a forward pass updates."""
    batch: PyTree
    """A batch or a part of it, leaves [b, ...]."""
    key: jax.Array
    """The key of the step for a batch, the key from `part_key` for a part."""
    inputs: Inputs = ()
    """Extra inputs of the loss, the same for every part."""


class Gradients(NamedTuple):
    """The gradients, metrics and new model state from a batch."""

    grads: PyTree
    """Gradients of the summed loss, `sums["loss"].total`: float32, placed by
    `Definition.gradients`."""
    sums: Sums
    """The loss and all metrics as undivided means."""
    model_state: PyTree
    """The model state after the batch."""


@dataclasses.dataclass(frozen=True)
class PartLoss(LossPartitioner):
    """The loss of one part of a batch, as a function of arrays alone."""

    loss_fn: LossFn
    precision: Precision
    gradients_at: Mapping[str, Placement] | None = None
    """Placements in which gradients are accumulated; `Definition.gradients` if None."""

    def __call__(self, arguments: LossArguments) -> tuple[Sums, PyTree]:
        """Returns the sums of a part, and the model state after it."""
        model_key, loss_key = jax.random.split(arguments.key)
        return self._call(arguments, model_key, loss_key, is_differentiated=True)

    def _call(
        self,
        arguments: LossArguments,
        model_key: jax.Array,
        loss_key: jax.Array,
        *,
        is_differentiated: bool,
    ) -> tuple[Sums, PyTree]:
        params, model_state, batch, _, inputs = arguments
        part = self.precision.cast_batch(batch)

        def sums(model: Any) -> Sums:
            here = boundary(model, self.precision.compute, part)
            with here, noting(self.definition.module.name, part):
                result = self.loss_fn(model, part, loss_key, *inputs)
            if is_differentiated:
                refuse_integer_loss(result)
            return loss_sums(result, part)

        module = self.definition.module
        return call(module, params, model_state, model_key, sums, precision=self.precision)

    def gradients(self, arguments: LossArguments) -> Gradients:
        """Returns the gradients of one part."""

        def layouts(shape: PyTree) -> list[ValueLayout | None]:
            grads, (sums, new) = shape
            return [
                *placed_layouts(grads, self._places),
                *anywhere(sums),
                *placed_layouts(new, self.definition.model_state),
            ]

        grads, (sums, new) = self.run(self.derive, arguments, layouts)
        return Gradients(self.pin(grads), sums, new)

    def derive(self, params: PyTree, *rest: Any) -> tuple[PyTree, tuple[Sums, PyTree]]:
        """Returns the gradients of the `LossArguments` of one part, unplaced and in any dtype, with
        its sums and the model state after it."""

        def total(params: PyTree) -> tuple[jax.Array, tuple[Sums, PyTree]]:
            sums, new = self(LossArguments(params, *rest))
            return loss_mean(sums).total, (sums, new)

        return jax.grad(total, has_aux=True)(params)

    def sums(self, arguments: LossArguments) -> Sums:
        """Returns the sums of one part, with the same key for the model's streams and the loss."""

        def forward(*arguments: Any) -> Sums:
            part = LossArguments(*arguments)
            return self._call(part, part.key, part.key, is_differentiated=False)[0]

        return self.run(forward, arguments, anywhere)

    @property
    def _places(self) -> Mapping[str, Placement]:
        return self.gradients_at or self.definition.gradients

    def pin(self, grads: PyTree) -> PyTree:
        """Returns gradients in float32, or complex, constrained to their placements.

        Without the constraint, gradients of scanned layers can lose the sharding of their layers.
        """
        grads = jax.tree.map(widened, grads)
        return pin(grads, self._places, self.definition.scope)


Engine: TypeAlias = Callable[[PartLoss, LossArguments, jax.Array | int], Gradients]
"""`engine(loss, arguments, first_index)` computes the gradients of a batch, whole or in parts, on
one or more stages. `first_index` is the index of its first part among all parts of the step."""


def part_key(key: jax.Array, index: jax.Array | int) -> jax.Array:
    """Returns the key of part `index` of a step, from the key of the step."""
    return jax.random.fold_in(key, index)


def accumulate_gradients(
    loss: PartLoss,
    arguments: LossArguments,
    first_index: jax.Array | int = 0,
    *,
    microbatches: int = 1,
) -> Gradients:
    """Returns the gradients of a batch computed in microbatches, one after the other. Each passes
    its model state on to the next. `first_index` is the index of the first one among all parts of
    the step.

    Raises:
        ModelError: If the number of microbatches does not divide the batch.
    """
    params, model_state, batch, key, inputs = arguments

    def one(model_state: PyTree, part: PyTree, index: jax.Array) -> tuple[PyTree, PyTree]:
        own_key = part_key(key, first_index + index)
        result = loss.gradients(LossArguments(params, model_state, part, own_key, inputs))
        return result.model_state, (result.grads, result.sums)

    model_state, (grads, sums) = accumulate(one, batch, microbatches, model_state)
    return Gradients(grads, sums, model_state)
