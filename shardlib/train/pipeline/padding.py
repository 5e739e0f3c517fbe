"""Exchange between stored layers and the slots of stages, for layers that `stage` does not divide.

An array cannot be sharded unevenly. The parameters of such layers are therefore stored in L layers
with `stage` on another dim (`Choice.moved_to`), so that a training state has the same shapes on
every mesh, and every device holds an equal part of it. For the step, an all-to-all over `stage`
gives each stage its own layers in `StageCut.slots` slots per chunk. An idle slot holds a copy of
the layer before it, so that what is computed and discarded stays finite. The gradients go back the
same way. A step makes two exchanges: the parameters in the compute dtype, and their gradients in
float32.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

from shardlib.mesh import entry_axes
from shardlib.nn.stages import StageCut
from shardlib.sharding.constrain import Scope, manual_axes
from shardlib.sharding.manual import manual
from shardlib.sharding.partition import Placement
from shardlib.train.pipeline.execute import AXIS

Layers: TypeAlias = Mapping[str, Shaped[Array, "layers ..."]]
Exchange: TypeAlias = Callable[[jax.Array, int], jax.Array]
"""`exchange(x, dim)` of one leaf, whose dim `dim` is sharded over `stage` when stored."""


def to_slots(
    leaves: Layers, places: Mapping[str, Placement], stage_cut: StageCut, scope: Scope
) -> dict[str, jax.Array]:
    """Returns layers [L, ...] in slots [S v n, ...], sharded over `stage`, then by stage and chunk.
    Layers and placements are by path; the placements have `stage` on a dim other than the first."""
    rows = _rows_of_slots(stage_cut)

    def exchange(x: jax.Array, dim: int) -> jax.Array:
        return jax.lax.all_to_all(_taken(x, 0, rows), AXIS, 0, dim, tiled=True)

    return _run(exchange, leaves, places, scope, group=(), to_slots=True)


def from_slots(
    leaves: Layers,
    places: Mapping[str, Placement],
    stage_cut: StageCut,
    scope: Scope,
    group: tuple[str, ...] = (),
) -> dict[str, jax.Array]:
    """Returns layers [S v n, ...] as stored, the inverse of `to_slots`. Layers and placements are
    by path. Layers have a leading dim of groups if there is a mesh axis `group` that shards them.
    """
    slots = {row: slot for slot, row in reversed([*enumerate(_rows_of_slots(stage_cut))])}
    order, first = [slots[layer] for layer in range(stage_cut.num_layers)], len(group)

    def exchange(x: jax.Array, dim: int) -> jax.Array:
        x = jax.lax.all_to_all(x, AXIS, first + dim, first, tiled=True)
        return _taken(x, first, order)

    return _run(exchange, leaves, places, scope, group=group, to_slots=False)


def _rows_of_slots(stage_cut: StageCut) -> list[int]:
    """Returns the layer in each slot, stage by stage and in a stage chunk by chunk; in an idle slot
    the layer before it."""
    places = [
        chunk * stage_cut.stages + stage
        for stage in range(stage_cut.stages)
        for chunk in range(stage_cut.chunks)
    ]
    return [
        stage_cut.firsts[place] + min(slot, stage_cut.counts[place] - 1)
        for place in places
        for slot in range(stage_cut.slots)
    ]


def _taken(x: jax.Array, dim: int, rows: Sequence[int]) -> jax.Array:
    """Returns rows of a dim, by slices of consecutive rows."""
    parts, first = [], 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            parts.append(jax.lax.slice_in_dim(x, rows[first], rows[at - 1] + 1, axis=dim))
            first = at
    return jnp.concatenate(parts, dim)


def _run(
    exchange: Exchange,
    leaves: Layers,
    places: Mapping[str, Placement],
    scope: Scope,
    *,
    group: tuple[str, ...],
    to_slots: bool,
) -> dict[str, jax.Array]:
    """Runs an exchange of each leaf over all mesh axes, so that other axes keep their shards."""
    if not leaves:
        return {}
    gone = manual_axes()
    stored, slotted, dims = {}, {}, {}
    for path in leaves:
        spec = [tuple(n for n in entry_axes(e) if n not in gone) for e in places[path].spec]
        dims[path] = next(dim for dim, names in enumerate(spec) if AXIS in names)
        stored[path] = PartitionSpec(*group, *(names or None for names in spec))
        spec = [(AXIS,), *(tuple(n for n in names if n != AXIS) for names in spec[1:])]
        slotted[path] = PartitionSpec(*group, *(names or None for names in spec))

    def region(leaves: Layers) -> dict[str, jax.Array]:
        return {path: exchange(x, dims[path]) for path, x in leaves.items()}

    before, after = (stored, slotted) if to_slots else (slotted, stored)
    axes = tuple(name for name in scope.sizes if name not in gone)
    return manual(region, axes, (before,), after)(dict(leaves))
