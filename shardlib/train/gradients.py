"""The loss of a part of a batch over arrays, its gradients, and their sums over microbatches."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from shardlib.errors import ModelError
from shardlib.functional import call
from shardlib.functional.boundary import boundary
from shardlib.functional.precision import Precision
from shardlib.losses.aggregate import Aggregate, Max, Mean, Min, Output, Sum
from shardlib.losses.microbatch import accumulate, widened
from shardlib.losses.signature import Inputs as Inputs
from shardlib.losses.signature import LossFn as LossFn
from shardlib.losses.signature import noting
from shardlib.partitioner import ValueLayout
from shardlib.sharding.partition import Placement, pin
from shardlib.train.partitioning import LossPartitioner, anywhere, placed_layouts

Sums = dict[str, Aggregate]

RESERVED_METRICS = frozenset({"loss", "grad_norm", "learning_rate", "pipeline_bubble", "skipped"})


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
                _refuse_integers(result)
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


def _refuse_integers(result: object) -> None:
    """Raises `ModelError` for a loss of integers: its gradient would be 0 everywhere."""
    loss = result[0] if type(result) is tuple and result else result
    dtype = getattr(loss.total if isinstance(loss, Mean) else loss, "dtype", None)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ModelError(
            f"the loss is {dtype.name}, which has no gradient.\n"
            "  Return a float computed from the outputs of the model, and counts as metrics."
        )


def loss_mean(sums: Sums) -> Mean:
    """Returns the loss from the sums."""
    mean = sums["loss"]
    assert isinstance(mean, Mean)
    return mean


def loss_sums(result: object, part: PyTree) -> Sums:
    """Returns the result of a loss function as one dict, with the loss as `"loss"`.

    Names in nested dicts are joined with slashes. `part` is the batch of the loss, for the number
    of rows of an `Output`.

    Raises:
        ModelError: If the result has another form. The message names every fault of the metrics.
    """
    loss, aux = result, {}
    if isinstance(result, tuple) and not isinstance(result, Aggregate) and len(result) == 2:
        loss, aux = result
    if type(result) is tuple and len(result) != 2:
        raise ModelError(
            f"the loss function returned a tuple of {len(result)}.\n"
            "  Return the loss, or (loss, {name: scalar or Mean})."
        )
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
    """Returns the values of nested dicts with their names joined by slashes."""
    flat: list[tuple[str, Any]] = []
    for name, value in aux.items():
        path = f"{prefix}{name}"
        flat += _flat(value, f"{path}/") if isinstance(value, Mapping) else [(path, value)]
    return flat


def _loss(value: object) -> Mean:
    if isinstance(value, Sum | Max | Min | Output):
        raise ModelError(
            f"the loss is a {type(value).__name__}, which is not differentiated.\n"
            "  Return a scalar, or Mean(total, weight) of two scalars."
        )
    return _as_mean("loss", value)


def _aggregate(name: str, value: object, rows: set[int]) -> Aggregate:
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


def _as_mean(name: str, value: object) -> Mean:
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
