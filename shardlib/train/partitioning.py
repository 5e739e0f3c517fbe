"""Who partitions the loss of a step: shardlib, or XLA by the constraints of the model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from shardlib.constrain import manual_axes
from shardlib.errors import ModelError, did_you_mean
from shardlib.mesh import entry_axes
from shardlib.partition import Placement
from shardlib.partitioner import entry
from shardlib.partitioner.analyze import Unsupported
from shardlib.partitioner.decided import undecided
from shardlib.partitioner.layout import Layout, from_spec
from shardlib.paths import path_string
from shardlib.train.batch import batch_shardings

Constrain = Literal["auto", "user"]
"""`auto`: shardlib partitions what the constraints of the model leave open. `user`: XLA does."""


def check_constrain(constrain: Any) -> None:
    """Raises `ModelError` for what is not a `Constrain`."""
    if constrain not in get_args(Constrain):
        raise ModelError(
            f"constrain={constrain!r} is not one of {', '.join(map(repr, get_args(Constrain)))}."
            f"{did_you_mean(str(constrain), get_args(Constrain))}\n"
            "  Leave it out: 'auto' lets shardlib partition what the model leaves open."
        )


@dataclasses.dataclass(frozen=True)
class Partition:
    """Who partitions a loss, and why."""

    by: Literal["shardlib", "XLA"]
    why: str


def gradients(loss: Any, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Returns `fn(*arguments)`, partitioned by shardlib where the model leaves layouts open.

    Args:
        loss: The `PartLoss`.
        fn: Returns `(grads, (sums, model_state))` of the loss of the arguments.
        arguments: `params, model_state, part, key`.
    """
    definition = loss.definition
    places = loss.gradients_at or definition.gradients

    def outputs(shape: Any) -> list[Layout | None]:
        grads, (sums, model_state) = shape
        return [
            *_placed(grads, places),
            *[from_spec((), 0)] * len(jax.tree.leaves(sums)),
            *_placed(model_state, definition.model_state),
        ]

    return _run(loss, fn, arguments, outputs)


def sums(loss: Any, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Returns the sums of a loss, without gradients; see `gradients`."""
    return _run(loss, fn, arguments, lambda shape: [None] * len(jax.tree.leaves(shape)))


def _run(loss: Any, fn: Any, arguments: tuple[Any, ...], outputs: Any) -> Any:
    scope = loss.definition.scope
    if loss.constrain == "user" or decide(loss, arguments).by == "XLA":
        return fn(*arguments)
    inputs, batch = input_layouts(loss, arguments)
    traced = entry.analyze(fn, arguments, scope, inputs, outputs, batch)
    return entry.execute(traced, scope, arguments)


def decide(loss: Any, arguments: tuple[Any, ...]) -> Partition:
    """Returns who partitions a loss: XLA, where the constraints of the model leave nothing open.

    Args:
        loss: The `PartLoss`.
        arguments: `params, model_state, part, key`; arrays or `ShapeDtypeStruct`s.
    """
    scope = loss.definition.scope
    sizes = {name: n for name, n in scope.sizes.items() if name not in manual_axes()}
    if all(n == 1 for n in sizes.values()):
        return Partition("XLA", "there is one device")
    if sizes.get("stage", 1) > 1 or "stage" in manual_axes():
        return Partition("XLA", "the layers are cut into stages")
    inputs, batch = input_layouts(loss, arguments)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), arguments)
    try:
        traced = entry.analyze(
            loss.__call__,
            abstract,
            scope,
            inputs,
            lambda shape: [None] * len(jax.tree.leaves(shape)),
            batch,
        )
    except Unsupported as error:
        return Partition("XLA", f"it holds {error}")
    open_ = undecided(traced.program)
    if open_ is None:
        return Partition("XLA", "its own constraints decide where every product lies")
    return Partition("shardlib", open_)


def input_layouts(loss: Any, arguments: tuple[Any, ...]) -> tuple[list[Layout], tuple[str, ...]]:
    """Returns where each leaf of the arguments of a loss lies, and the mesh axes of the batch."""
    definition = loss.definition
    params, model_state, part, key = arguments
    batch = [
        from_spec(sharding.spec, len(leaf.shape))
        for leaf, sharding in zip(
            jax.tree.leaves(part),
            jax.tree.leaves(batch_shardings(part, definition.scope, loss.batch_axes)),
            strict=True,
        )
    ]
    axes = dict.fromkeys(axis for layout in batch for axis in (layout.dims or ((),))[0])
    layouts = [
        *_placed(params, definition.params, stored=True),
        *_placed(model_state, definition.model_state),
        *batch,
        *[from_spec((), 0)] * len(jax.tree.leaves(key)),
    ]
    return layouts, tuple(axes)


def _placed(tree: Any, places: Mapping[str, Placement], **flags: bool) -> list[Layout]:
    """Returns where leaves lie by their placements, less the axes that a region around handles."""
    gone = manual_axes()
    layouts = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        entries = [entry_axes(entry) for entry in places[path_string(path)].spec]
        spec = [tuple(axis for axis in names if axis not in gone) for names in entries]
        layouts.append(from_spec(spec, len(leaf.shape), **flags))
    return layouts
