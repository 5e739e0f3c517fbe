"""The optimizer state in the memory of the hosts between updates.

An update needs the optimizer state, forward and backward pass do not. `offload_optimizer` gives it
a place in the hosts' memory, sharded as before, and `update_offloaded` fetches it piece by piece
once the gradients are there: a piece is on the devices while its parameters are updated, and no two
pieces are there at a time. The arithmetic of the update, and so its result, stays the same.

Source of the idea: Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training",
which also runs the update on the host; here it stays on the devices, for any optimizer.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.host_memory import HOST, check_host_memory
from shardlib.partition import Placement, shardings
from shardlib.paths import named_leaves
from shardlib.train.state import TrainState

_PIECES = 8
"""About how many pieces an optimizer state is fetched in; the program grows with their number."""

_OF = "of "


def offload_optimizer(abstract: TrainState) -> TrainState:
    """Returns an abstract state whose optimizer state is in the hosts' memory.

    What belongs to a parameter and has its shape, or the shape of some of its dims, moves; counters
    and other single numbers stay on the devices. `materialize`, checkpoints and steps follow the
    placements of the state that they are given.

    Args:
        abstract: What `abstract_state` returns.

    Raises:
        MeshError: If the devices cannot reach their hosts' memory.
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


def fetch(tree: Any) -> Any:
    """Returns a tree with every leaf in the devices' memory, inside of a compiled program."""
    return jax.device_put(tree, jax.memory.Space.Device)


def update_offloaded(
    update: Callable[[TrainState], tuple[Any, Any]], state: TrainState
) -> tuple[Any, Any]:
    """Returns the parameters and the optimizer state after an update, each where it was.

    Each piece is an update of everything, of which one part is asked for: the compiler leaves out
    the rest, unless the optimizer really needs it for that part. It stands in a loop that runs once
    because that is the one order that a compiler has to keep: left to itself, XLA copies the
    whole optimizer state to the devices before the forward pass, barriers or not.

    Args:
        update: `update(state) -> (params, opt_state)`, of a state that is on the devices, in the
            dtypes that they had. It is traced once for every piece, and what it needs of all
            gradients, such as the norm to clip by, is computed for every piece: that reads them
            `_PIECES` times, from memory that is far faster than the link to the host.
        state: The state before; where nothing is in host memory `update` is just called.
    """
    owners = _owners(state.definition.opt_state)
    if not owners:
        return update(state)
    params, params_def = jax.tree.flatten(state.params)
    moments, moments_def = jax.tree.flatten(state.opt_state)
    names = list(named_leaves(state.params))
    owner_of = [owners.get(path) for path in named_leaves(state.opt_state)]
    moments = [_to_host(x) if owner else x for x, owner in zip(moments, owner_of, strict=True)]

    def updated(params: list[Any], moments: list[Any]) -> tuple[list[Any], list[Any]]:
        new = update(
            dataclasses.replace(
                state,
                params=jax.tree.unflatten(params_def, params),
                opt_state=jax.tree.unflatten(moments_def, fetch(moments)),
            )
        )
        return jax.tree.leaves(new[0]), jax.tree.leaves(new[1])

    # What is not in host memory: counters, and parameters without optimizer state.
    new_params, new_moments = updated(params, moments)
    # One, but no compiler can know.
    trips = jnp.asarray(state.step >= 0, jnp.int32)
    for piece in _pieces(state.definition.opt_state, owners):
        of_params = [i for i, name in enumerate(names) if name in piece]
        of_moments = [i for i, owner in enumerate(owner_of) if owner in piece]

        def body(
            carry: Any, of_params: list[int] = of_params, of_moments: list[int] = of_moments
        ) -> Any:
            trip, some_params, some_moments = carry
            found = updated(
                _with(params, of_params, some_params), _with(moments, of_moments, some_moments)
            )
            some_params = [found[0][i] for i in of_params]
            return trip + 1, some_params, [_to_host(found[1][i]) for i in of_moments]

        start = ([params[i] for i in of_params], [moments[i] for i in of_moments])
        trips, some_params, some_moments = jax.lax.while_loop(
            lambda carry, trips=trips: carry[0] < trips, body, (jnp.int32(0), *start)
        )
        new_params = _with(new_params, of_params, some_params)
        new_moments = _with(new_moments, of_moments, some_moments)
    return (
        jax.tree.unflatten(params_def, new_params),
        jax.tree.unflatten(moments_def, new_moments),
    )


def _to_host(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Host)


def _with(leaves: list[Any], indices: list[int], values: list[Any]) -> list[Any]:
    """Returns a copy of `leaves` with some replaced."""
    changed = list(leaves)
    for index, value in zip(indices, values, strict=True):
        changed[index] = value
    return changed


def _owners(placements: Mapping[str, Placement]) -> dict[str, str]:
    """Returns the parameter that each optimizer leaf in host memory belongs to, by path."""
    return {
        path: placement.origin.removeprefix(_OF)
        for path, placement in placements.items()
        if placement.memory_kind == HOST
    }


def _pieces(placements: Mapping[str, Placement], owners: Mapping[str, str]) -> list[set[str]]:
    """Returns the parameters whose optimizer state is fetched together, piece by piece."""
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
