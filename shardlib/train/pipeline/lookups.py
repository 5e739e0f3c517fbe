"""Refusal of lookups at which the compiler of newer JAX ends the process.

Inside of a region over stages, XLA of jax 0.12 fails a check (`ExpandDeviceGroupsWithIota`) where
it partitions a gather along two mesh axes: one cuts the rows of the table, the other one the ids,
and there are at least as many ids as rows. `shardlib.nn.lookup` needs no such gather.
"""

import math
from collections.abc import Mapping

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from shardlib.errors import ModelError
from shardlib.jaxprs import Atom, Operation, flatten, is_literal
from shardlib.mesh import entry_axes
from shardlib.partitioner.program import source_of
from shardlib.sharding import manual
from shardlib.sharding.constrain import Scope, manual_axes

Axes = tuple[str, ...]

_KEEPS_ROWS = frozenset({"convert_element_type", "copy", "optimization_barrier"})


def refuse_lookups(program: ClosedJaxpr, specs: Mapping[int, PartitionSpec], scope: Scope) -> None:
    """Raises `ModelError` for a lookup that would end the process.

    Call it inside the region over stages.
    """
    if not manual.NESTS_IN_MESH_ORDER_ONLY:
        return
    flat = flatten(program.jaxpr)
    start = len(program.jaxpr.constvars)
    cuts: dict[Atom, Axes] = {flat.invars[start + at]: _rows(spec) for at, spec in specs.items()}
    free = {name for name, size in scope.sizes.items() if size > 1} - set(manual_axes())
    for operation in flat.operations:
        source = operation.invars[0] if operation.invars else None
        if source is None or is_literal(source):
            continue
        if operation.name == "sharding_constraint":
            cuts[operation.outvars[0]] = _rows(
                getattr(operation.params["sharding"], "spec", PartitionSpec())
            )
        elif operation.name in _KEEPS_ROWS:
            cuts[operation.outvars[0]] = cuts.get(source, ())
        elif operation.name == "gather" and _has_more_ids(operation):
            rows = free.intersection(cuts.get(source, ()))
            if rows and free - rows:
                raise ModelError(_text(operation, sorted(rows), sorted(free - rows)))


def _rows(spec: PartitionSpec) -> Axes:
    """Returns the mesh axes of the first dim."""
    return entry_axes(spec[0]) if len(spec) else ()


def _has_more_ids(operation: Operation) -> bool:
    """Returns whether rows of an array are looked up by at least as many ids as there are rows."""
    table, ids = (value.aval.shape for value in operation.invars)
    along = operation.params["dimension_numbers"].start_index_map
    return (
        0 in along and operation.params["slice_sizes"][0] == 1 and math.prod(ids[:-1]) >= table[0]
    )


def _text(operation: Operation, rows: list[str], others: list[str]) -> str:
    return (
        f"the lookup at {source_of(operation)} has at least as many ids as its table has rows, "
        f"which {', '.join(rows)} cuts; the compiler of jax {jax.__version__} ends the process "
        f"there if {', '.join(others)} cuts the ids inside of a pipeline.\n"
        "  Use shardlib.nn.lookup.lookup, more microbatches, a table whose rows are not cut, or "
        "jax 0.10."
    )
