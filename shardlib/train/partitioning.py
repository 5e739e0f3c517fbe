"""Who partitions a loss: shardlib, or XLA by the constraints of the model."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from shardlib.constrain import manual_axes
from shardlib.errors import ModelError, PartitionError, did_you_mean
from shardlib.mesh import entry_axes
from shardlib.partition import Placement
from shardlib.partitioner import Layout, Partition, analyze, execute, from_spec, undecided
from shardlib.paths import path_string
from shardlib.train.batch import BatchAxes, batch_shardings
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
    """Runs functions of `(params, model_state, part, key)` of one state, partitioned.

    Args:
        definition: What the state is the state of.
        batch_axes: Logical axes of batch leaves by path, as in `make_train_step`.
        constrain: Who partitions, as in `make_train_step`.
    """

    definition: Definition
    batch_axes: BatchAxes
    constrain: Constrain

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
            arguments: `params, model_state, part, key`.
            outputs: Where the leaves of the result go, from the abstract result; None for one that
                stays where it is computed.
        """
        if self.constrain == "user" or self.decide(forward, arguments).by == "XLA":
            return fn(*arguments)
        inputs, batch = self.layouts(arguments)
        scope = self.definition.scope
        return execute(analyze(fn, arguments, scope, inputs, outputs, batch), scope, arguments)

    def decide(self, forward: Callable[..., Any], arguments: tuple[Any, ...]) -> Partition:
        """Returns who partitions a loss, and why; see `run`. Arguments may be abstract."""
        scope = self.definition.scope
        sizes = {name: n for name, n in scope.sizes.items() if name not in manual_axes()}
        if all(n == 1 for n in sizes.values()):
            return Partition("XLA", "nothing is left to cut here")
        if sizes.get("stage", 1) > 1 or "stage" in manual_axes():
            return Partition("XLA", "the layers are cut into stages")
        inputs, batch = self.layouts(arguments)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), arguments)
        try:
            traced = analyze(forward, abstract, scope, inputs, _anywhere, batch)
        except PartitionError as error:
            return Partition("XLA", str(error).splitlines()[0])
        why = undecided(traced.program)
        if why is None:
            return Partition("XLA", "the constraints of the model decide where each product lies")
        return Partition("shardlib", why)

    def layouts(self, arguments: tuple[Any, ...]) -> tuple[list[Layout], tuple[str, ...]]:
        """Returns where each leaf of the arguments lies, and the mesh axes of the batch."""
        params, model_state, part, key = arguments
        placed = batch_shardings(part, self.definition.scope, self.batch_axes)
        leaves = zip(jax.tree.leaves(part), jax.tree.leaves(placed), strict=True)
        batch = [from_spec(sharding.spec, len(leaf.shape)) for leaf, sharding in leaves]
        axes = dict.fromkeys(axis for layout in batch for axis in (layout.dims or ((),))[0])
        layouts = [
            *placed_layouts(params, self.definition.params, self.definition.params),
            *placed_layouts(
                model_state, self.definition.model_state, self.definition.module.frozen
            ),
            *batch,
            *[from_spec((), len(leaf.shape)) for leaf in jax.tree.leaves(key)],
        ]
        return layouts, tuple(axes)


def placed_layouts(
    tree: Any, places: Mapping[str, Placement], stored: Collection[str] = ()
) -> list[Layout]:
    """Returns where leaves lie by their placements, less the axes that a region around handles.

    `stored` are the paths of parameters, which are gathered where they are used.
    """
    gone = manual_axes()
    layouts = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        entries = [entry_axes(entry) for entry in places[path_string(path)].spec]
        spec = [tuple(axis for axis in names if axis not in gone) for names in entries]
        is_stored = path_string(path) in stored
        layouts.append(from_spec(spec, len(leaf.shape), stored=is_stored))
    return layouts


def _anywhere(shape: Any) -> list[Layout | None]:
    return [None] * len(jax.tree.leaves(shape))
