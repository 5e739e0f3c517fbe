"""The gradients of one step, the interface of all schedules and reductions."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from shardlib.errors import ModelError
from shardlib.functional import call
from shardlib.functional.boundary import boundary
from shardlib.functional.precision import Precision
from shardlib.losses.aggregate import Aggregate, Max, Mean, Min, Output, Sum
from shardlib.losses.microbatch import accumulate
from shardlib.losses.signature import Inputs as Inputs
from shardlib.losses.signature import LossFn as LossFn
from shardlib.partitioner import Layout, Partition
from shardlib.sharding.partition import Placement, pin
from shardlib.train.batches import BatchAxes
from shardlib.train.partitioning import Constrain, LossPartitioner, anywhere, placed_layouts
from shardlib.train.state import Definition

Sums = dict[str, Aggregate]

RESERVED_METRICS = frozenset({"loss", "grad_norm", "learning_rate", "pipeline_bubble", "skipped"})


class Gradients(NamedTuple):
    """The gradients, metrics and new model state from a batch."""

    grads: Any
    """Gradients of the summed loss, `sums["loss"].total`: float32, placed by
    `Definition.gradients`."""
    sums: Sums
    """The loss and all metrics as undivided means."""
    model_state: Any
    """The model state after the batch."""


class Engine(Protocol):
    """A function that computes the gradients of a batch, whole or in parts, on one or more stages.

    `first_index` is the index of the first part of the batch among all parts of the step.
    """

    def __call__(
        self,
        loss: "PartLoss",
        params: Any,
        model_state: Any,
        batch: Any,
        key: jax.Array,
        inputs: Inputs = (),
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
    """Placements in which gradients are accumulated; `Definition.gradients` if None."""
    batch_axes: BatchAxes = dataclasses.field(default_factory=dict)
    """Logical axes of batch leaves by path, as in `make_train_step`."""
    constrain: Constrain = "user"
    """The partitioner of the loss, as in `make_train_step`."""
    inputs_at: Any = ()
    """The shardings of the leaves of `inputs`."""
    on_partition: Callable[[Partition], None] = lambda partition: None
    """Called while the loss is traced, with the partitioner and the reason for choosing it."""

    def __call__(
        self, params: Any, model_state: Any, part: Any, key: jax.Array, inputs: Inputs = ()
    ) -> tuple[Sums, Any]:
        """Returns the sums of a part, and the model state after it.

        Args:
            params: The trained parameters, in their storage dtype.
            model_state: The state that a forward pass updates.
            part: A batch or a microbatch.
            key: The key of the part, from `part_key`.
            inputs: Extra inputs of the loss.
        """
        keys = jax.random.split(key)
        return self.call(params, model_state, part, (keys[0], keys[1]), inputs)

    def call(
        self,
        params: Any,
        model_state: Any,
        part: Any,
        keys: tuple[jax.Array, jax.Array],
        inputs: Inputs = (),
    ) -> tuple[Sums, Any]:
        """Returns the same as `__call__`, from two keys.

        Args:
            params, model_state, part, inputs: As in `__call__`.
            keys: The key of the model's random streams, and the key for the loss.
        """
        part = self.precision.cast_batch(part)

        def sums(model: Any) -> Sums:
            with boundary(model, self.precision.compute, part):
                result = self.loss_fn(model, part, keys[1], *inputs)
            return loss_sums(result, part)

        module = self.definition.module
        return call(module, params, model_state, keys[0], sums, precision=self.precision)

    def gradients(
        self, params: Any, model_state: Any, part: Any, key: jax.Array, inputs: Inputs = ()
    ) -> Gradients:
        """Returns the gradients of one part."""

        arguments = params, model_state, part, key, inputs
        grads, (sums, new) = self.partitioner.run(self._grad, arguments, self._gradients_at)
        return Gradients(self.pin(grads), sums, new)

    def _grad(self, params: Any, *rest: Any) -> Any:
        def total(params: Any) -> tuple[jax.Array, Any]:
            sums, new = self(params, *rest)
            return loss_mean(sums).total, (sums, new)

        return jax.grad(total, has_aux=True)(params)

    def sums(
        self, params: Any, model_state: Any, part: Any, key: jax.Array, inputs: Inputs = ()
    ) -> Sums:
        """Returns the sums of one part, with the same key for the model's streams and the loss."""

        def forward(params: Any, model_state: Any, part: Any, key: Any, inputs: Any) -> Sums:
            return self.call(params, model_state, part, (key, key), inputs)[0]

        arguments = params, model_state, part, key, inputs
        return self.partitioner.run(forward, arguments, anywhere)

    @property
    def partitioner(self) -> LossPartitioner:
        """Runs functions of the state's parameters, partitioned."""
        return LossPartitioner(
            self.definition, self.batch_axes, self.constrain, self.inputs_at, self.on_partition
        )

    def _gradients_at(self, shape: Any) -> list[Layout | None]:
        grads, (sums, new) = shape
        places = self.gradients_at or self.definition.gradients
        return [
            *placed_layouts(grads, places),
            *[None] * len(jax.tree.leaves(sums)),
            *placed_layouts(new, self.definition.model_state),
        ]

    def pin(self, grads: Any) -> Any:
        """Returns gradients in float32, constrained to their placements.

        Without the constraint, gradients of scanned layers can lose the sharding of their layers.
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
    inputs: Inputs = (),
    *,
    microbatches: int = 1,
    first_index: jax.Array | int = 0,
) -> Gradients:
    """Returns the gradients of a batch computed in microbatches, one after the other.

    Args:
        loss: The loss.
        params: The trained parameters.
        model_state: The model state for the first microbatch. Each microbatch passes its own on to
            the next.
        batch: Pytree of arrays [b, ...].
        key: The key of the step.
        inputs: Extra inputs of the loss, the same for every microbatch.
        microbatches: Number of microbatches; divides b.
        first_index: Index of the first microbatch among all parts of the step.

    Raises:
        ModelError: If the number of microbatches does not divide the batch.
    """

    def one(model_state: Any, part: Any, index: Any) -> tuple[Any, Any]:
        key_of_part = part_key(key, first_index + index)
        found = loss.gradients(params, model_state, part, key_of_part, inputs)
        return found.model_state, (found.grads, found.sums)

    model_state, (grads, sums) = accumulate(one, batch, microbatches, model_state)
    return Gradients(grads, sums, model_state)


def loss_mean(sums: Sums) -> Mean:
    """Returns the loss from the sums."""
    mean = sums["loss"]
    assert isinstance(mean, Mean)
    return mean


def loss_sums(result: Any, part: Any) -> Sums:
    """Returns the result of a loss function as one dict, with the loss as `"loss"`.

    Names in nested dicts are joined with slashes.

    Args:
        result: The loss, or `(loss, aux)`.
        part: The batch of the loss, for the number of rows of an `Output`.

    Raises:
        ModelError: If the result has another form. The message names every fault of the metrics.
    """
    loss, aux = result, {}
    if isinstance(result, tuple) and not isinstance(result, Aggregate) and len(result) == 2:
        loss, aux = result
    if not isinstance(aux, Mapping):
        raise ModelError(
            f"the loss function returned the loss and {type(aux).__name__}, not a dict.\n"
            "  Return the loss, or (loss, {name: scalar or Mean})."
        )
    flat = _flat(aux)
    names = [name for name, _ in flat]
    taken = sorted(RESERVED_METRICS & set(names))
    if taken:
        raise ModelError(
            f"the loss function names a metric {', '.join(map(repr, taken))}, which the step "
            "reports itself.\n  Rename it."
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ModelError(
            f"the loss function names {', '.join(map(repr, twice))} twice, once inside of a nested "
            "dict.\n  Rename one of the two."
        )
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(part) if leaf.shape}
    return {**{name: _aggregate(name, x, rows) for name, x in flat}, "loss": _loss(loss)}


def _flat(aux: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in aux.items():
        path = f"{prefix}{name}"
        found += _flat(value, f"{path}/") if isinstance(value, Mapping) else [(path, value)]
    return found


def _loss(value: Any) -> Mean:
    if isinstance(value, Sum | Max | Min | Output):
        raise ModelError(
            f"the loss is a {type(value).__name__}, which is not differentiated.\n"
            "  Return a scalar, or Mean(total, weight) of two scalars."
        )
    return _as_mean("loss", value)


def _aggregate(name: str, value: Any, rows: set[int]) -> Aggregate:
    if isinstance(value, Output):
        array = jnp.asarray(value.value)
        if not array.shape or array.shape[0] not in rows:
            raise ModelError(
                f"the loss function returned the output {name!r} of shape {array.shape}, but the "
                f"batch has {' or '.join(map(str, sorted(rows)))} rows here.\n"
                "  Return an array [rows, ...]; report other arrays as Sum, Max or Min."
            )
        return Output(array)
    if isinstance(value, Sum | Max | Min):
        array = jnp.asarray(value.value)
        if array.dtype == jnp.bool:
            array = array.astype(jnp.int32)
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        return type(value)(array.astype(jnp.float32) if is_float else array)
    return _as_mean(name, value)


def _as_mean(name: str, value: Any) -> Mean:
    pair = value if isinstance(value, Mean) else (value, 1.0)
    try:
        total, weight = (jnp.asarray(x, jnp.float32) for x in pair)
    except (TypeError, ValueError):
        raise ModelError(
            f"the loss function returned {name!r} as {type(value).__name__}, which is not a "
            "number.\n  Return a scalar or a Mean; leave out other values."
        ) from None
    if total.shape or weight.shape:
        raise ModelError(
            f"the loss function returned {name!r} of shape {total.shape or weight.shape}.\n"
            "  Reduce it to a scalar, or to Mean(total, weight) of two scalars"
            + ("." if name == "loss" else "; return rows as Output(array).")
        )
    return Mean(total, weight)
