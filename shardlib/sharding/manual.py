"""Manual regions: parts of a program in which some mesh axes are manual.

Inside a region each device along its axes runs the code on its own shard. The code itself does all
communication between them: `jax.lax.psum`, `ppermute`, `all_to_all`. The compiler handles all other
axes, and `constrain` still works for them. Regions nest.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from shardlib.errors import MeshError
from shardlib.sharding.constrain import active, manual_axes

F = TypeVar("F", bound=Callable[..., Any])

_LANES = 128  # of a register of a TPU
_COLUMNS = 8 * _LANES
_MANY_CHIPS = 32
_MOST_FACTOR = 131
# A failed check in XLA's sharding export, seen with jaxlib 0.12 and not with 0.10.
NESTS_IN_MESH_ORDER_ONLY = jax.__version_info__ >= (0, 11)


def axis_size(name: str) -> int:
    """Returns the number of devices along a mesh axis that is automatic here.

    It is 1 for an axis that the mesh does not have or that an outer region has made manual, and
    outside of `sl.use`.
    """
    scope = active()
    return 1 if scope is None else scope.sizes.get(name, 1)


def manual(fn: F, axes: tuple[str, ...], in_specs: Any, out_specs: Any) -> F:
    """Returns `fn` as a region in which `axes` are manual.

    Args:
        fn: A function of pytrees of arrays; it sees one shard of each along `axes`.
        axes: Mesh axes of the active mesh.
        in_specs: A `PartitionSpec` for each argument, or a pytree of them, that names `axes` only.
            The gradient of a replicated input is summed over `axes`.
        out_specs: The same for the results. A result declared replicated must be replicated.

    Raises:
        MeshError: Outside of `sl.use`, if an axis is not in the mesh or is manual already, or if an
            outer region covers a later axis of the mesh and this jax cannot compile that.
    """
    scope = active()
    if scope is None:
        raise MeshError(
            f"no mesh is active, so its axes {', '.join(axes)} cannot be manual.\n"
            "  Call this inside `with sl.use(mesh, rules):`."
        )
    free = [name for name in scope.sizes if name not in manual_axes()]
    absent = [name for name in axes if name not in free]
    if absent:
        raise MeshError(
            f"mesh axes {', '.join(absent)} cannot be manual: they are not in the mesh, or are "
            f"manual already.\n  Choose among {', '.join(free) or 'none'}."
        )
    _check_order(axes)
    return jax.shard_map(  # type: ignore[return-value]
        fn,
        mesh=scope.mesh_here,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=False,
    )


def sum_to_parts(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Returns this device's part along `dim` of the sum over a mesh axis, in a manual region.

    It is `psum_scatter` in two hops, over groups of about the square root of all n devices. They
    send (n - 1) / n of `x` together, as one hop would. Of one hop over all chips of a slice XLA for
    TPUs (libtpu 0.0.42) makes an all-reduce, which sends twice as much.
    """
    ids = _two_hops(axis)
    for groups in (ids.T, ids):
        x = jax.lax.psum_scatter(
            x, axis, scatter_dimension=dim, tiled=True, axis_index_groups=groups.tolist()
        )
    return x


def summed_columns(size: int, chips: int) -> list[slice]:
    """Returns the columns of each array that `sum_to_parts` should get in place of one with `size`
    columns, of which the first dim is cut over `chips`.

    It is one array, unless a prime above 131 divides the registers of a row: of sums of such rows
    libtpu 0.0.42 makes all-reduces, for 128,256 columns over 16 chips of v5p and 64 of v5e, but not
    over 16 of v5e, and not for 128,000. Then the first array holds a multiple of 1,024 columns, and
    the second the rest.
    """
    if not _has_large_factor(size) or (chips < _MANY_CHIPS and _on_v5e()):
        return [slice(None)]
    multiples = range(size // _COLUMNS * _COLUMNS, 0, -_COLUMNS)
    most = next((most for most in multiples if not _has_large_factor(most)), 0)
    return [slice(most), slice(most, size)] if most else [slice(None)]


def _on_v5e() -> bool:
    scope = active()
    if scope is None or not isinstance(scope.mesh, Mesh):
        return False
    return scope.mesh.devices.flat[0].device_kind == "TPU v5 lite"


def _has_large_factor(size: int) -> bool:
    """Returns whether a prime above 131 divides the registers of a row."""
    registers, rest = divmod(size, _LANES)
    for prime in range(2, _MOST_FACTOR + 1):
        while registers and registers % prime == 0:
            registers //= prime
    return rest == 0 and registers > 1


def gather_parts(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Returns the parts along `dim` of all devices of a mesh axis, in a manual region.

    It is `all_gather` in two hops, over groups as in `sum_to_parts`. They receive (n - 1) / n of
    the result together, as one hop would. Of one hop over all 64 or more chips of a slice of TPU v4
    or v5p, libtpu 0.0.42 makes an all-reduce, which sends twice as much.
    """
    ids = _two_hops(axis)
    for groups in (ids, ids.T):
        x = jax.lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=groups.tolist())
    return x


def _two_hops(axis: str) -> np.ndarray:
    """Returns the positions along a mesh axis as a matrix, whose rows are the groups of one hop and
    whose columns are the groups of the other hop."""
    n = jax.lax.axis_size(axis)
    inner = max(k for k in range(1, math.isqrt(n) + 1) if n % k == 0)
    return np.arange(n).reshape(n // inner, inner)


def can_nest(axes: tuple[str, ...]) -> bool:
    """Returns whether a region over these mesh axes compiles within the regions around it."""
    return not (NESTS_IN_MESH_ORDER_ONLY and _open_behind(axes))


def _open_behind(axes: tuple[str, ...]) -> list[str]:
    """Returns the manual axes that come later in the mesh than the first of `axes`."""
    scope = active()
    names = [] if scope is None else list(scope.sizes)
    first = min(map(names.index, axes), default=0)
    return [name for name in manual_axes() if names.index(name) > first]


def _check_order(axes: tuple[str, ...]) -> None:
    """Rejects nesting that would crash the process: XLA needs manual axes in mesh order."""
    if not can_nest(axes):
        raise MeshError(
            f"a region over {', '.join(axes)} is inside one over "
            f"{', '.join(_open_behind(axes))}, which comes "
            f"later in the mesh; the compiler of jax {jax.__version__} ends the process there.\n"
            "  Handle all of them in one region, leave the outer one out (local SGD is one over "
            "data), or use jax 0.10."
        )
