"""The state of groups that train apart, and where it lies."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.errors import RuleError
from shardlib.partition import Placement
from shardlib.train.reduce_groups import kept_dim
from shardlib.train.reduction import AXIS
from shardlib.train.state import Definition, TrainState, state_shardings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalSGDState:
    """What all groups last agreed on, and where each of them is now."""

    params: Any
    """The agreed parameters, float32, placed as parameters are."""
    momentum: Any
    """The momentum of the outer optimizer, float32, alike."""
    groups: TrainState
    """`params`, `model_state`, `opt_state` and `spike_window` hold an array [groups, ...] for each
    of their leaves, split over `data`; `step` and `rng` are common to all."""

    @property
    def step(self) -> jax.Array:
        """Steps that each group has taken."""
        return self.groups.step

    @property
    def definition(self) -> Definition:
        """What the states of the groups are states of."""
        return self.groups.definition


def local_shardings(state: LocalSGDState) -> LocalSGDState:
    """Returns the sharding of every leaf of the groups, as a tree of their structure."""
    definition = state.definition
    mesh = definition.scope.mesh
    one = state_shardings(replace_own(state.groups, lambda x: x))

    def split(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(over_groups(mesh) or (None,)), *sharding.spec))

    return LocalSGDState(one.params, one.params, replace_own(one, split))


def check_whole(definition: Definition) -> None:
    """Raises `RuleError` for what is split over the groups, or is in the hosts' memory."""
    for section in ("params", "model_state", "opt_state"):
        places: Mapping[str, Placement] = getattr(definition, section)
        paths = [path for path, p in places.items() if kept_dim(p.spec, AXIS) is not None]
        if paths:
            raise RuleError(
                f"{section}: {', '.join(paths[:4])}{', ...' if len(paths) > 4 else ''} split over "
                f"{AXIS}, but groups that train apart hold all of them.\n"
                "  Use rules that split them over fsdp."
            )
        kinds = {p.memory_kind for p in places.values()} - {None}
        if kinds:
            raise RuleError(
                f"{section} is in {', '.join(map(str, kinds))} memory, from where groups that "
                "train apart cannot take it.\n  Leave train.offload_optimizer out."
            )


def over_groups(mesh: Any) -> tuple[str, ...]:
    """Returns the first entry of the spec of arrays [groups, ...], if the mesh has their axis."""
    return (AXIS,) if AXIS in mesh.axis_names else ()


def repeat(x: jax.Array, count: int) -> jax.Array:
    """Returns an array [count, ...] of one that all groups have."""
    return jnp.broadcast_to(x[None], (count, *x.shape))


def replace_own(state: TrainState, fn: Callable[[Any], Any]) -> TrainState:
    """Applies a function to what each group has of its own."""
    names = ("params", "model_state", "opt_state", "spike_window")
    return dataclasses.replace(
        state, **{name: jax.tree.map(fn, getattr(state, name)) for name in names}
    )
