"""Offload of the optimizer state to host memory between updates.

An update needs the optimizer state, but the forward and backward passes do not. `offload_optimizer`
places it in host memory with the same sharding. `update_offloaded` fetches it piece by piece once
the gradients are computed. A piece is on the devices while its parameters are updated, one piece at
a time. The arithmetic of the update, and so its result, does not change.

Source of the idea: Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training",
which also runs the update on the host. Here it runs on the devices, for any optimizer.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from shardlib.paths import named_leaves
from shardlib.sharding.host_memory import HOST, check_host_memory
from shardlib.sharding.partition import Placement, shardings
from shardlib.train.state import TrainState

_PIECES = 8
"""Approximate number of pieces of an optimizer state. The program grows with it."""

_OF = "of "

Leaves = list[jax.Array]


def offload_optimizer(abstract: TrainState) -> TrainState:
    """Returns an abstract state whose optimizer state is in host memory.

    Arrays that belong to a parameter and have its shape, or the shape of some of its dims, move to
    the host. Counters and other scalars stay on the devices. `materialize`, checkpoints and steps
    follow the placements of the given state.

    Args:
        abstract: The state from `abstract_state`.

    Raises:
        MeshError: If the devices cannot access host memory.
    """
    definition = abstract.definition
    mesh = definition.scope.mesh
    check_host_memory(mesh, "an optimizer state in host memory")
    placements = {
        path: dataclasses.replace(placement, memory_kind=HOST) if _moves(placement) else placement
        for path, placement in definition.opt_state.items()
    }
    opt_state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract.opt_state,
        shardings(abstract.opt_state, placements, mesh),
    )
    definition = dataclasses.replace(definition, opt_state=placements)
    return dataclasses.replace(abstract, opt_state=opt_state, definition=definition)


def _moves(placement: Placement) -> bool:
    return placement.origin.startswith(_OF) and math.prod(placement.shape) > 1


def fetch(tree: PyTree) -> PyTree:
    """Returns a tree with every leaf in device memory, inside a compiled program."""
    return jax.device_put(tree, jax.memory.Space.Device)


def update_offloaded(
    update: Callable[[TrainState], tuple[PyTree, PyTree]], state: TrainState
) -> tuple[PyTree, PyTree]:
    """Returns the parameters and optimizer state after an update, with unchanged placements.

    Each piece traces the update of everything and uses one part of the result. The compiler removes
    the rest, unless the optimizer needs it for that part. Each piece is in a loop that runs once,
    because a loop is the only order that the compiler must keep. Otherwise XLA copies the whole
    optimizer state to the devices before the forward pass, even with barriers.

    Args:
        update: `update(state) -> (params, opt_state)` for a state on the devices, with unchanged
            dtypes. It is traced once per piece. Values that depend on all gradients, such as the
            norm for clipping, are recomputed for every piece. This reads the gradients `_PIECES`
            times, from memory that is far faster than the link to the host.
        state: The state before the update. If nothing is in host memory, `update` is simply called.
    """
    owners = _owners(state.definition.opt_state)
    if not owners:
        return update(state)
    owner_of = [owners.get(path) for path in named_leaves(state.opt_state)]
    params, params_def = jax.tree.flatten(state.params)
    moments, moments_def = jax.tree.flatten(state.opt_state)
    moments = [_to_host(x) if owner else x for x, owner in zip(moments, owner_of, strict=True)]

    def updated(params: Leaves, moments: Leaves) -> tuple[Leaves, Leaves]:
        before = dataclasses.replace(
            state,
            params=params_def.unflatten(params),
            opt_state=moments_def.unflatten(fetch(moments)),
        )
        new_params, new_moments = update(before)
        return jax.tree.leaves(new_params), jax.tree.leaves(new_moments)

    # Leaves that are not in host memory: counters, and parameters without optimizer state.
    new = updated(params, moments)
    # Always one, but the compiler cannot know it.
    trips = jnp.asarray(state.step >= 0, jnp.int32)
    for piece in _pieces(state.definition.opt_state, owners):
        of_params = [i for i, name in enumerate(named_leaves(state.params)) if name in piece]
        of_moments = [i for i, owner in enumerate(owner_of) if owner in piece]
        trips, piece_params, piece_moments = _update_piece(
            updated, (params, moments), (of_params, of_moments), trips
        )
        new = _with(new[0], of_params, piece_params), _with(new[1], of_moments, piece_moments)
    return params_def.unflatten(new[0]), moments_def.unflatten(new[1])


def _update_piece(
    updated: Callable[[Leaves, Leaves], tuple[Leaves, Leaves]],
    leaves: tuple[Leaves, Leaves],
    indices: tuple[list[int], list[int]],
    trips: jax.Array,
) -> tuple[jax.Array, Leaves, Leaves]:
    """Updates the parameters and moments at some indices, in a loop of `trips` trips."""
    starts = [[some[i] for i in at] for some, at in zip(leaves, indices, strict=True)]

    def body(carry: tuple[jax.Array, Leaves, Leaves]) -> tuple[jax.Array, Leaves, Leaves]:
        trip, *values = carry
        params, moments = updated(*map(_with, leaves, indices, values))
        new = [params[i] for i in indices[0]], [_to_host(moments[i]) for i in indices[1]]
        return trip + 1, *new

    start = jnp.int32(0), starts[0], starts[1]
    return jax.lax.while_loop(lambda carry: carry[0] < trips, body, start)


def _to_host(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Host)


def _with(leaves: Leaves, indices: list[int], values: Leaves) -> Leaves:
    """Returns a copy of `leaves` with the given indices replaced."""
    changed = list(leaves)
    for index, value in zip(indices, values, strict=True):
        changed[index] = value
    return changed


def _owners(placements: Mapping[str, Placement]) -> dict[str, str]:
    """Returns the parameter that owns each optimizer leaf in host memory, by path."""
    return {
        path: placement.origin.removeprefix(_OF)
        for path, placement in placements.items()
        if placement.memory_kind == HOST
    }


def _pieces(placements: Mapping[str, Placement], owners: Mapping[str, str]) -> list[set[str]]:
    """Returns the pieces, sets of parameters whose optimizer state is fetched together."""
    num_bytes: dict[str, int] = {}
    for path, owner in owners.items():
        num_bytes[owner] = num_bytes.get(owner, 0) + placements[path].num_bytes
    least = sum(num_bytes.values()) / _PIECES
    pieces: list[set[str]] = []
    filled = least
    for owner, size in num_bytes.items():
        if filled >= least:
            pieces.append(set())
            filled = 0
        pieces[-1].add(owner)
        filled += size
    return pieces
