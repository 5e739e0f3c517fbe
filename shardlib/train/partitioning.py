"""Who partitions a loss: shardlib, or XLA by the constraints of the model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from shardlib.constrain import Scope, manual_axes
from shardlib.errors import ModelError, did_you_mean
from shardlib.mesh import entry_axes
from shardlib.partition import Placement
from shardlib.partitioner import (
    Laid,
    Layout,
    Partition,
    Traced,
    analyze,
    execute,
    from_spec,
    trace,
    who_partitions,
)
from shardlib.paths import named_leaves
from shardlib.train.batches import BatchAxes, batch_shardings
from shardlib.train.state import Definition

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
        inputs_at: The shardings of the leaves of `inputs`.
    """

    definition: Definition
    batch_axes: BatchAxes
    constrain: Constrain
    inputs_at: Any = ()

    def run(
        self,
        fn: Callable[..., Any],
        arguments: tuple[Any, ...],
        outputs: Callable[[Any], list[Layout | None]] = lambda shape: _anywhere(shape),
    ) -> Any:
        """Returns `fn(*arguments)`.

        Args:
            fn: The function.
            arguments: `params, model_state, part, key, inputs`.
            outputs: Where the leaves of the result go, from the abstract result; None for one that
                stays where it is computed.
        """
        if self._beforehand() is not None:
            return fn(*arguments)
        traced = trace(fn, arguments)
        _, laid = self._decide(traced, arguments, outputs)
        return traced(arguments) if laid is None else execute(laid, self._scope, arguments)

    def decide(
        self,
        fn: Callable[..., Any],
        arguments: tuple[Any, ...],
        outputs: Callable[[Any], list[Layout | None]],
    ) -> Partition:
        """Returns who partitions a function, and why; see `run`. Arguments may be abstract."""
        beforehand = self._beforehand()
        if beforehand is not None:
            return beforehand
        return self._decide(trace(fn, arguments), arguments, outputs)[0]

    @property
    def _scope(self) -> Scope:
        return self.definition.scope

    def _beforehand(self) -> Partition | None:
        """Returns who partitions a loss if that does not depend on the loss."""
        if self.constrain == "user":
            return Partition("XLA", "constrain is 'user'")
        sizes = {name: n for name, n in self._scope.sizes.items() if name not in manual_axes()}
        if all(n == 1 for n in sizes.values()):
            return Partition("XLA", "nothing is left to cut here")
        if sizes.get("stage", 1) > 1 or "stage" in manual_axes():
            return Partition("XLA", "the layers are cut into stages")
        return None

    def _decide(
        self,
        traced: Traced,
        arguments: tuple[Any, ...],
        outputs: Callable[[Any], list[Layout | None]],
    ) -> tuple[Partition, Laid | None]:
        inputs, batch = self.layouts(arguments)
        return who_partitions(traced, lambda: analyze(traced, self._scope, inputs, outputs, batch))

    def layouts(self, arguments: tuple[Any, ...]) -> tuple[list[Layout], tuple[str, ...]]:
        """Returns where each leaf of the arguments lies, and the mesh axes of the batch."""
        params, model_state, part, key, inputs = arguments
        placed = batch_shardings(part, self._scope, self.batch_axes)
        leaves = zip(jax.tree.leaves(part), jax.tree.leaves(placed), strict=True)
        batch = [from_spec(sharding.spec, len(leaf.shape)) for leaf, sharding in leaves]
        axes = dict.fromkeys(axis for layout in batch for axis in (layout.dims or ((),))[0])
        further = zip(jax.tree.leaves(inputs), jax.tree.leaves(self.inputs_at), strict=True)
        definition = self.definition
        frozen = definition.module.frozen.__contains__
        layouts = [
            *placed_layouts(params, definition.params, lambda path: True),
            *placed_layouts(model_state, definition.model_state, frozen),
            *batch,
            *[from_spec((), len(leaf.shape)) for leaf in jax.tree.leaves(key)],
            *[_layout(sharding.spec, jnp.ndim(leaf), stored=True) for leaf, sharding in further],
        ]
        return layouts, tuple(axes)


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
