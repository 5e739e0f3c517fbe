"""The state of local SGD groups and its shardings."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from shardlib.errors import RuleError
from shardlib.sharding.partition import Placement
from shardlib.train.reduce.hierarchical import kept_dim
from shardlib.train.reduce.reduction import AXIS
from shardlib.train.state import Definition, TrainState, state_shardings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalSGDState:
    """The parameters of the last synchronization, and the current state of each group."""

    params: PyTree
    """Parameters of the last synchronization, float32, placed like parameters."""
    momentum: PyTree
    """Momentum of the outer optimizer, float32, placed like parameters."""
    groups: TrainState
    """State of all groups. Each leaf of `params`, `model_state`, `opt_state` and `spike_window` is
    an array [groups, ...] sharded over `data`. All groups share `step` and `rng`."""

    @property
    def step(self) -> jax.Array:
        """Number of steps that each group has taken."""
        return self.groups.step

    @property
    def definition(self) -> Definition:
        """The definition of the groups' states."""
        return self.groups.definition


def local_shardings(state: LocalSGDState) -> LocalSGDState:
    """Returns the sharding of every leaf, as a tree of the same structure."""
    definition = state.definition
    mesh = definition.scope.mesh
    one = state_shardings(replace_own(state.groups, lambda x: x))

    def split(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(over_groups(mesh) or (None,)), *sharding.spec))

    return LocalSGDState(one.params, one.params, replace_own(one, split))


def check_whole(definition: Definition) -> None:
    """Raises `RuleError` for leaves that are sharded over the groups or are in host memory."""
    for section in ("params", "model_state", "opt_state"):
        places: Mapping[str, Placement] = getattr(definition, section)
        paths = [path for path, p in places.items() if kept_dim(p.spec, AXIS) is not None]
        if paths:
            raise RuleError(
                f"{section}: {', '.join(paths[:4])}{', ...' if len(paths) > 4 else ''} sharded "
                f"over {AXIS}, but local SGD groups hold whole arrays.\n"
                "  Use rules that shard them over fsdp."
            )
        kinds = {p.memory_kind for p in places.values()} - {None}
        if kinds:
            raise RuleError(
                f"{section} is in {', '.join(map(str, kinds))} memory, which local SGD does not "
                "support.\n  Leave train.offload_optimizer out."
            )


def over_groups(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the leading PartitionSpec entry of arrays [groups, ...], empty without that axis."""
    return (AXIS,) if AXIS in mesh.axis_names else ()


def repeat(x: jax.Array, count: int) -> jax.Array:
    """Returns an array repeated for each group, [count, ...]."""
    return jnp.broadcast_to(x[None], (count, *x.shape))


def replace_own(state: TrainState, fn: Callable[[Any], Any]) -> TrainState:
    """Returns a state with a function applied to the leaves that each group has separately."""
    names = ("params", "model_state", "opt_state", "spike_window")
    return dataclasses.replace(
        state, **{name: jax.tree.map(fn, getattr(state, name)) for name in names}
    )
