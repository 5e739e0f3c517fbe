"""Regions of a program in which some mesh axes are handled by hand.

Inside of a region each device along its axes runs the code on its own shard, and what travels
between them is what the code sends: `jax.lax.psum`, `ppermute`, `all_to_all`. All other axes stay
with the compiler, and `constrain` goes on to work for them. Regions nest.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from shardlib.constrain import active, manual_axes
from shardlib.errors import MeshError

F = TypeVar("F", bound=Callable[..., Any])

# A failed check in XLA's sharding export, seen with jaxlib 0.12 and not with 0.10.
NESTS_IN_MESH_ORDER_ONLY = jax.__version_info__ >= (0, 11)


def axis_size(name: str) -> int:
    """Returns the devices along a mesh axis that is left to the compiler here.

    It is 1 for an axis that the mesh does not have, that a region around has taken already, and
    outside of `sl.use`.
    """
    scope = active()
    return 1 if scope is None else scope.sizes.get(name, 1)


def manual(fn: F, axes: tuple[str, ...], in_specs: Any, out_specs: Any) -> F:
    """Returns `fn` as a region that handles `axes` by hand.

    Args:
        fn: A function of pytrees of arrays; it sees one shard along `axes` of each.
        axes: Mesh axes of the active mesh.
        in_specs: A `PartitionSpec` for each argument, or a pytree of them, that names `axes` only.
            What is replicated in goes into the gradient as the sum over `axes`.
        out_specs: The same for the results. A result said to be replicated must be so.

    Raises:
        MeshError: Outside of `sl.use`, if an axis is not there or is manual already, or if a region
            around handles a later axis of the mesh and this jax cannot compile that.
    """
    scope = active()
    if scope is None:
        raise MeshError(
            f"no mesh is active, so none of its axes {', '.join(axes)} can be handled by hand.\n"
            "  Call this inside `with sl.use(mesh, rules):`."
        )
    free = [name for name in scope.sizes if name not in manual_axes()]
    absent = [name for name in axes if name not in free]
    if absent:
        raise MeshError(
            f"mesh axes {', '.join(absent)} cannot be handled by hand: they are not in the mesh, "
            f"or are already.\n  Choose among {', '.join(free) or 'none'}."
        )
    _check_order(list(scope.sizes), axes)
    return jax.shard_map(  # type: ignore[return-value]
        fn,
        mesh=scope.mesh_here,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=False,
    )


def _check_order(names: list[str], axes: tuple[str, ...]) -> None:
    """Refuses what would end the process: XLA wants nested manual axes in the order of the mesh."""
    first = min(map(names.index, axes))
    later = [name for name in manual_axes() if names.index(name) > first]
    if later and NESTS_IN_MESH_ORDER_ONLY:
        raise MeshError(
            f"a region over {', '.join(axes)} stands inside of one over {', '.join(later)}, which "
            f"comes later in the mesh; the compiler of jax {jax.__version__} ends the process "
            "there.\n"
            "  Handle all of them in one region, leave the outer one out (local SGD is one over "
            "data), or use jax 0.10."
        )
