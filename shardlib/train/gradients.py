"""The gradients of one step: what every schedule and every way of reducing computes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from shardlib.errors import ModelError
from shardlib.functional import call
from shardlib.losses import Mean
from shardlib.microbatch import accumulate
from shardlib.partition import Placement, pin
from shardlib.partitioner import Layout, from_spec
from shardlib.precision import Precision
from shardlib.train.batch import BatchAxes
from shardlib.train.partitioning import Constrain, LossPartitioner, placed_layouts
from shardlib.train.state import Definition

LossFn = Callable[[Any, Any, jax.Array], Any]
Sums = dict[str, Mean]

RESERVED_METRICS = frozenset({"loss", "grad_norm", "learning_rate", "pipeline_bubble", "skipped"})


class Gradients(NamedTuple):
    """What a batch adds to an optimizer step."""

    grads: Any
    """Gradients of the summed loss, `sums["loss"].total`: float32, placed as
    `Definition.gradients` says."""
    sums: Sums
    """The loss and all metrics as undivided means."""
    model_state: Any
    """The model state after the batch."""


class Engine(Protocol):
    """Computes the gradients of a batch, whole or in parts, here or over several stages.

    `first_index` is the index of its first part among all parts of the step.
    """

    def __call__(
        self,
        loss: "PartLoss",
        params: Any,
        model_state: Any,
        batch: Any,
        key: jax.Array,
        *,
        first_index: jax.Array | int = 0,
    ) -> Gradients: ...


@dataclasses.dataclass(frozen=True)
class PartLoss:
    """The loss of one part of a batch, as a function of arrays alone."""

    definition: Definition
    loss_fn: LossFn
    precision: Precision
    gradients_at: Mapping[str, Placement] | None = None
    """Where gradients are summed up; `Definition.gradients` when left out."""
    batch_axes: BatchAxes = dataclasses.field(default_factory=dict)
    """Logical axes of batch leaves by path, as in `make_train_step`."""
    constrain: Constrain = "user"
    """Who partitions the loss, as in `make_train_step`."""

    def __call__(
        self, params: Any, model_state: Any, part: Any, key: jax.Array
    ) -> tuple[Sums, Any]:
        """Returns the sums of a part, and the model state after it.

        Args:
            params: The trained parameters, in the dtype in which they are stored.
            model_state: What a forward pass updates.
            part: A batch, or a microbatch of it.
            key: The key of the part, from `part_key`.
        """
        model_key, loss_key = jax.random.split(key)
        batch = self.precision.cast_batch(part)

        def sums(model: Any) -> Sums:
            return loss_sums(self.loss_fn(model, batch, loss_key))

        module = self.definition.module
        return call(module, params, model_state, model_key, sums, precision=self.precision)

    def gradients(self, params: Any, model_state: Any, part: Any, key: jax.Array) -> Gradients:
        """Returns the gradients of one part."""

        def total(params: Any, *rest: Any) -> tuple[jax.Array, Any]:
            sums, new = self(params, *rest)
            return sums["loss"].total, (sums, new)

        grad = jax.grad(total, has_aux=True)
        arguments = params, model_state, part, key
        grads, (sums, new) = self.partitioner.run(grad, self, arguments, self._gradients_at)
        return Gradients(self.pin(grads), sums, new)

    @property
    def partitioner(self) -> LossPartitioner:
        return LossPartitioner(self.definition, self.batch_axes, self.constrain)

    def _gradients_at(self, shape: Any) -> list[Layout | None]:
        grads, (sums, new) = shape
        places = self.gradients_at or self.definition.gradients
        return [
            *placed_layouts(grads, places),
            *[from_spec((), 0)] * len(jax.tree.leaves(sums)),
            *placed_layouts(new, self.definition.model_state),
        ]

    def pin(self, grads: Any) -> Any:
        """Returns gradients in float32 where the rules want them.

        Without the constraint the gradients of scanned layers can lose the sharding of their
        layers.
        """
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        places = self.gradients_at or self.definition.gradients
        return pin(grads, places, self.definition.scope)


def part_key(key: jax.Array, index: jax.Array | int) -> jax.Array:
    """Returns the key of part `index` of a step, from the key of the step."""
    return jax.random.fold_in(key, index)


def accumulate_gradients(
    loss: PartLoss,
    params: Any,
    model_state: Any,
    batch: Any,
    key: jax.Array,
    *,
    microbatches: int = 1,
    first_index: jax.Array | int = 0,
) -> Gradients:
    """Returns the gradients of a batch computed in microbatches, one after the other.

    Args:
        loss: The loss.
        params: The trained parameters.
        model_state: What the first microbatch is given; each hands its own on to the next.
        batch: Pytree of arrays [b, ...].
        key: The key of the step.
        microbatches: Their number; it divides b.
        first_index: Index of the first microbatch among all parts of the step.

    Raises:
        ModelError: If the number of microbatches does not divide the batch.
    """

    def one(model_state: Any, part: Any, index: Any) -> tuple[Any, Any]:
        found = loss.gradients(params, model_state, part, part_key(key, first_index + index))
        return found.model_state, (found.grads, found.sums)

    model_state, (grads, sums) = accumulate(one, batch, microbatches, model_state)
    return Gradients(grads, sums, model_state)


def loss_sums(result: Any) -> Sums:
    """Returns what a loss function returned as one dict of `Mean`s, with the loss as `"loss"`.

    Raises:
        ModelError: If it is not a scalar or `Mean`, alone or with a dict of these.
    """
    is_pair = isinstance(result, tuple) and not isinstance(result, Mean)
    loss, aux = result if is_pair and len(result) == 2 else (result, {})
    if not isinstance(aux, Mapping):
        raise ModelError(
            f"the loss function returned {type(aux).__name__} beside the loss.\n"
            "  Return the loss, or (loss, {name: scalar or Mean})."
        )
    taken = sorted(RESERVED_METRICS & set(aux))
    if taken:
        raise ModelError(
            f"the loss function names a metric {', '.join(map(repr, taken))}, which the step "
            "reports itself.\n  Rename it."
        )
    return {name: _as_mean(name, value) for name, value in {**aux, "loss": loss}.items()}


def _as_mean(name: str, value: Any) -> Mean:
    if isinstance(value, Mean):
        total, weight = value
    else:
        total, weight = value, 1.0
    total, weight = jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32)
    if total.shape or weight.shape:
        raise ModelError(
            f"the loss function returned {name!r} of shape {total.shape or weight.shape}.\n"
            "  Reduce it to a scalar, or to Mean(total, weight) of two scalars."
        )
    return Mean(total, weight)
