"""Manual regions within a program: parts that are already written for one device.

The specs of a region say where its operands and results lie. In the program of a device, which is
manual over all mesh axes, the region is its own body.
"""

from collections.abc import Iterator, Sequence

from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec

from shardlib.jaxprs import Operation, equations
from shardlib.mesh import entry_axes
from shardlib.partitioner.layout import Sizes, ValueLayout
from shardlib.sharding.constrain import manual_axes

REGION = "shard_map"
_SEES_MESH = ("sharding_constraint", "shard_map", "reshard")
"""Operations of a body that name mesh axes which are not manual in it."""


def is_region(operation: Operation) -> bool:
    """Returns whether an operation is a region whose body is the program of one device. With
    `check_vma` its values have types that hold in that region alone."""
    if operation.name != REGION or operation.params["check_vma"]:
        return False
    body = equations(operation.params["jaxpr"])
    return not any(equation.primitive.name in _SEES_MESH for equation, _ in body)


def region_fault(operation: Operation, sizes: Sizes) -> str | None:
    """Returns why the body of a region cannot run on each device of a mesh; None if it can. Along
    an axis that is not its own, all devices would compute the same."""
    params = operation.params
    there = {axis: n for axis, n in dict(params["mesh"].shape).items() if n > 1}
    here = {axis: n for axis, n in sizes.items() if n > 1}
    others = there.keys() - here.keys() - set(manual_axes())
    if others or any(there.get(axis) != n for axis, n in here.items()):
        return "a region over another mesh"
    # JAX 0.10 and 0.11 name this parameter differently.
    left = sorted(here.keys() - set(params.get("newly_manual_axes") or params["manual_axes"]))
    return partial_region(left) if left else None


def partial_region(left: Sequence[str]) -> str:
    """Returns what a region is of which XLA partitions some axes."""
    return f"a region that is not manual over {', '.join(left)}"


def region_layouts(
    operation: Operation, sizes: Sizes
) -> tuple[tuple[ValueLayout, ...], tuple[ValueLayout, ...]]:
    """Returns the layouts of the operands and of the results of a region."""
    params = operation.params
    operands = _layouts(params["in_specs"], operation.invars, sizes)
    return tuple(operands), tuple(_layouts(params["out_specs"], operation.outvars, sizes))


def body_of(operation: Operation) -> Jaxpr:
    """Returns the program that each device runs in a region."""
    return operation.params["jaxpr"]


def _layouts(specs: Sequence[PartitionSpec], values: Sequence, sizes: Sizes) -> Iterator:
    for spec, value in zip(specs, values, strict=True):
        rank = len(value.aval.shape)
        dims = [tuple(a for a in entry_axes(e) if sizes.get(a, 1) > 1) for e in spec]
        yield ValueLayout((*dims, *((),) * (rank - len(dims))))
