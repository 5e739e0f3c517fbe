"""Who partitions a loss: shardlib, or XLA by the constraints of the model."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from shardlib.constrain import manual_axes
from shardlib.errors import ModelError, PartitionError, did_you_mean
from shardlib.mesh import entry_axes
from shardlib.partition import Placement
from shardlib.partitioner import (
    Layout,
    Partition,
    analyze,
    execute,
    from_spec,
    trace,
    who_partitions,
)
from shardlib.paths import named_leaves
from shardlib.train.batches import BatchAxes, batch_shardings
from shardlib.train.state import Definition

_LOG = logging.getLogger(__name__)
Constrain = Literal["auto", "user"]
"""`auto`: shardlib partitions what the constraints of the model leave open. `user`: XLA does."""


def check_constrain(constrain: Any) -> None:
    """Raises `ModelError` for what is not a `Constrain`."""
    known = get_args(Constrain)
    if constrain not in known:
        raise ModelError(
            f"constrain={constrain!r} is not one of {', '.join(map(repr, known))}."
            f"{did_you_mean(str(constrain), known)}\n"
            "  Leave it out: 'auto' lets shardlib partition what the model leaves open."
        )


@dataclasses.dataclass(frozen=True)
class LossPartitioner:
    """Runs functions of `(params, model_state, part, key, inputs)` of one state, partitioned.

    Args:
        definition: What the state is the state of.
        batch_axes: Logical axes of batch leaves by path, as in `make_train_step`.
        constrain: Who partitions, as in `make_train_step`.
        inputs_at: The shardings of the leaves of `inputs`; those not named are whole.
    """

    definition: Definition
    batch_axes: BatchAxes
    constrain: Constrain
    inputs_at: Any = ()

    def run(
        self,
        fn: Callable[..., Any],
        forward: Callable[..., Any],
        arguments: tuple[Any, ...],
        outputs: Callable[[Any], list[Layout | None]] = lambda shape: _anywhere(shape),
    ) -> Any:
        """Returns `fn(*arguments)`.

        Args:
            fn: The function.
            forward: The loss alone, with no derivative: whether its layouts are decided is read
                from it.
            arguments: `params, model_state, part, key, inputs`.
            outputs: Where the leaves of the result go, from the abstract result; None for one that
                stays where it is computed.
        """
        if self.constrain == "user" or self.decide(forward, arguments).by == "XLA":
            return fn(*arguments)
        inputs, batch = self.layouts(arguments)
        scope = self.definition.scope
        try:
            laid = analyze(trace(fn, arguments), scope, inputs, outputs, batch)
        except PartitionError as error:
            # A derivative of the user's own can hold what the loss does not.
            _LOG.warning("XLA partitions the loss: %s", str(error).partition("\n")[0])
            return fn(*arguments)
        return execute(laid, scope, arguments)

    def decide(self, forward: Callable[..., Any], arguments: tuple[Any, ...]) -> Partition:
        """Returns who partitions a loss, and why; see `run`. Arguments may be abstract."""
        scope = self.definition.scope
        sizes = {name: n for name, n in scope.sizes.items() if name not in manual_axes()}
        if all(n == 1 for n in sizes.values()):
            return Partition("XLA", "nothing is left to cut here")
        if sizes.get("stage", 1) > 1 or "stage" in manual_axes():
            return Partition("XLA", "the layers are cut into stages")
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), arguments)
        traced = trace(forward, abstract)
        inputs, batch = self.layouts(arguments)
        return who_partitions(
            traced, lambda: analyze(traced, scope, inputs, _anywhere, batch).program
        )

    def layouts(self, arguments: tuple[Any, ...]) -> tuple[list[Layout], tuple[str, ...]]:
        """Returns where each leaf of the arguments lies, and the mesh axes of the batch."""
        params, model_state, part, key, inputs = arguments
        placed = batch_shardings(part, self.definition.scope, self.batch_axes)
        leaves = zip(jax.tree.leaves(part), jax.tree.leaves(placed), strict=True)
        batch = [from_spec(sharding.spec, len(leaf.shape)) for leaf, sharding in leaves]
        axes = dict.fromkeys(axis for layout in batch for axis in (layout.dims or ((),))[0])
        definition = self.definition
        frozen = definition.module.frozen.__contains__
        layouts = [
            *placed_layouts(params, definition.params, lambda path: True),
            *placed_layouts(model_state, definition.model_state, frozen),
            *batch,
            *[from_spec((), len(leaf.shape)) for leaf in jax.tree.leaves(key)],
            *self._input_layouts(inputs),
        ]
        return layouts, tuple(axes)

    def _input_layouts(self, inputs: Any) -> list[Layout]:
        leaves, placed = jax.tree.leaves(inputs), jax.tree.leaves(self.inputs_at)
        if len(placed) != len(leaves):
            return [from_spec((), jnp.ndim(leaf)) for leaf in leaves]
        pairs = zip(leaves, placed, strict=True)
        return [_layout(sharding.spec, jnp.ndim(leaf), stored=True) for leaf, sharding in pairs]


def placed_layouts(
    tree: Any, places: Mapping[str, Placement], stored: Callable[[str], bool] = lambda path: False
) -> list[Layout]:
    """Returns where leaves lie by their placements, less the axes that a region around handles.

    Args:
        tree: Arrays.
        places: Placements by path.
        stored: Which paths are of parameters, to be gathered where they are used.
    """
    return [
        _layout(places[path].spec, len(leaf.shape), stored(path))
        for path, leaf in named_leaves(tree).items()
    ]


def _layout(spec: Any, rank: int, stored: bool) -> Layout:
    gone = manual_axes()
    entries = [tuple(axis for axis in entry_axes(e) if axis not in gone) for e in spec]
    return from_spec(entries, rank, stored=stored)


def _anywhere(shape: Any) -> list[Layout | None]:
    return [None] * len(jax.tree.leaves(shape))
