"""The known faults of XLA's partitioner, as found in a compiled program."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from shardlib.explain.analysis.equations import Placed, equations
from shardlib.explain.hlo.provenance import Where, where_of
from shardlib.explain.hlo.replica_groups import KINDS
from shardlib.explain.hlo.text import Instruction, Module
from shardlib.explain.wrong_numbers.collectives import members_of
from shardlib.explain.wrong_numbers.interpret import Contradiction, HloReader, Start
from shardlib.explain.wrong_numbers.operations import numbers, window_of
from shardlib.explain.wrong_numbers.values import shapes_of

FAULTS: Mapping[str, str] = {
    "SL205": "rows change their order: operations read parts of different rows",
    "SL206": "a sum over devices counts one value several times",
    "SL207": "the gradient of a convolution with batch groups and a sharded batch",
    "SL208": "the gradient of a max-pool with overlapping windows along a sharded dim",
    "SL209": "a dynamic slice of a sharded dim that is not clamped",
    "SL210": "the gradient of a strided slice or window is sharded, but its operand is replicated",
}
"""Titles of the faults by code."""
_Note = TypeVar("_Note", Contradiction, Start)
_NUMPY_PAD = "jit(_pad)"
"""Part of the names of `jnp.pad` operations, which never pad between elements."""
_FIXES = {
    "SL205": "Constrain the output of the operation to the sharding of the batch, without the mesh "
    "axes of its contraction.",
    "SL206": "Split the batch over all mesh axes at this operation, or replicate its operands.",
    "SL207": "Replicate the batch at this operation, or call it inside a shard_map.",
    "SL208": "Constrain the operand of the pool so that its window dims are not sharded.",
    "SL209": "Clip the start to its range, or use jax 0.12, which fixes this.",
    "SL210": "Constrain the operand and the result of the operation to one sharding.",
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A place where a compiled program computes wrong numbers, or matches a known fault.

    Attributes:
        code: A key of `FAULTS`.
        what: Description of the fault and its array.
        where: The operation, its source line and its function.
        axes: Mesh axes of the fault. Empty if unknown.
    """

    code: str
    what: str
    where: Where
    axes: tuple[str, ...] = ()

    @property
    def fix(self) -> str:
        """One action that avoids the fault."""
        return _FIXES[self.code]

    def __str__(self) -> str:
        place = f"{self.where.source}: " if self.where.source else ""
        return f"{place}{self.code} {self.what}"


def faults_of(
    module: Module, reader: HloReader, mesh: Mapping[str, int], jaxpr: ClosedJaxpr | None = None
) -> Iterator[Fault]:
    """Yields the faults of a program that a reader has read, each code and place once."""
    traded = [
        one
        for instructions in module.computations.values()
        for one in instructions
        if one.opcode.removesuffix("-start") in KINDS
    ]
    faults = [
        *(_contradiction(module, reader, mesh, one) for one in _each(reader, Contradiction)),
        *_batch_groups(module, _implied(traded, "conv_general_dilated"), jaxpr),
        *_pools(module, _implied(traded, "select_and_scatter")),
        *_starts(module, reader, jaxpr),
    ]
    seen = set()
    for fault in sorted(faults, key=lambda fault: fault.code):
        if (fault.code, fault.where) not in seen:
            seen.add((fault.code, fault.where))
            yield fault


def _each(reader: HloReader, kind: type[_Note]) -> list[_Note]:
    """Returns the notes of a kind, one per instruction. A computation may run several times."""
    return list({n.instruction.name: n for n in reader.notes if isinstance(n, kind)}.values())


def _contradiction(
    module: Module, reader: HloReader, mesh: Mapping[str, int], contradiction: Contradiction
) -> Fault:
    origin = module.origin(contradiction.computation, contradiction.instruction)
    where = where_of(module, origin)
    name = where.name.rpartition("/")[2] or contradiction.instruction.opcode
    shape = f"[{','.join(map(str, contradiction.shape))}]"
    axes = _axes(reader, mesh, contradiction)
    over = f" over {'+'.join(axes)}" if axes else ""
    if contradiction.kind == "rows":
        what = f"{name} reads parts {shape} in two orders{over}: it combines different rows."
        return Fault("SL205", what, where, axes)
    what = f"the sum of {name}, parts {shape}, counts each value {contradiction.times} times{over}."
    return Fault("SL206", what, where, axes)


def _axes(
    reader: HloReader, mesh: Mapping[str, int], contradiction: Contradiction
) -> tuple[str, ...]:
    """Returns the mesh axes that the rows are split over, or along which a summand is the same."""
    vectors = reader.context.vectors
    if math.prod(mesh.values()) != vectors.devices:
        return ()
    grids = [vectors[number].reshape(tuple(mesh.values())) for number in contradiction.vectors]
    varies = [any(np.ptp(grid, axis=n).any() for grid in grids) for n in range(len(mesh))]
    if contradiction.kind == "rows":
        return tuple(name for name, differs in zip(mesh, varies, strict=True) if differs)
    kind = contradiction.instruction.opcode.removesuffix("-start")
    members = members_of(contradiction.instruction, kind, vectors.devices)
    assert members is not None
    groups = members.groups.min(axis=1)[members.own].reshape(tuple(mesh.values()))
    return tuple(
        name
        for n, name in enumerate(mesh)
        if not varies[n] and not np.ptp(groups, axis=n).any() and mesh[name] > 1
    )


def _implied(collectives: Sequence[Instruction], suffix: str) -> list[Instruction]:
    """Returns the collectives that the compiler inserted for a JAX operation."""
    return [one for one in collectives if one.op_name.endswith(f"/{suffix}")]


def _batch_groups(
    module: Module, traded: list[Instruction], jaxpr: ClosedJaxpr | None
) -> Iterator[Fault]:
    traded = [one for one in traded if "transpose(" in one.op_name]
    grouped = [
        placed
        for placed in (_equations(jaxpr, "conv_general_dilated") if traded else ())
        if placed.equation.params["batch_group_count"] > 1 and "transpose(" not in placed.name
    ]
    for one in traded if grouped else ():
        groups = grouped[0].equation.params["batch_group_count"]
        what = f"the gradient of a convolution with {groups} batch groups is sharded."
        yield Fault("SL207", what, where_of(module, one))


def _pools(module: Module, halos: list[Instruction]) -> Iterator[Fault]:
    """Yields SL208: a window of at least twice its stride along a dim with halo exchanges."""
    windows = [
        one
        for instructions in (module.computations.values() if halos else ())
        for one in instructions
        if one.opcode == "select-and-scatter"
        or (one.opcode == "reduce-window" and one.shape.startswith("("))
    ]
    for window in windows:
        sizes, strides = window_of(window)
        whole = shapes_of(window.shape)[0]
        wide = [n for n, size in enumerate(sizes) if size > 1 and size >= 2 * strides[n]]
        for halo in halos:
            shape = shapes_of(halo.shape)[0]
            if len(shape) == len(whole) and any(shape[n] < whole[n] for n in wide):
                size, stride = sizes[wide[0]], strides[wide[0]]
                what = (
                    f"the gradient of a max-pool of window {size} and stride {stride} is sharded "
                    "along the window: contributions across the edge are lost."
                )
                yield Fault("SL208", what, where_of(module, halo))


def _starts(module: Module, reader: HloReader, jaxpr: ClosedJaxpr | None) -> Iterator[Fault]:
    starts = _each(reader, Start)
    is_pad = any(start.instruction.op_name.endswith("/pad") for start in starts)
    padded = _interior(jaxpr) if is_pad else set()
    for start in starts:
        name = start.instruction.op_name
        if "shard_map" in name:
            continue
        rank = len(numbers(start.instruction, "dynamic_slice_sizes"))
        if start.is_data and name.endswith("/dynamic_slice") and jax.__version_info__ < (0, 12):
            what = (
                "a slice with a data-dependent start is sharded: a start past the end is not "
                "clamped."
            )
            yield Fault("SL209", what, where_of(module, start.instruction))
        elif (
            start.cuts_whole
            and name.endswith("/pad")
            and _NUMPY_PAD not in name
            and padded & {(rank, d) for d in start.dims}
        ):
            what = (
                "the gradient of a strided slice or window is sharded, but its operand is "
                "replicated: its elements end up in wrong positions."
            )
            yield Fault("SL210", what, where_of(module, start.instruction))


def _interior(jaxpr: ClosedJaxpr | None) -> set[tuple[int, int]]:
    """Returns the rank and dim of each array dim that a program pads between elements."""
    padded = set()
    for placed in _equations(jaxpr, "pad"):
        config: Sequence[tuple[int, int, int]] = placed.equation.params["padding_config"]
        padded |= {(len(config), dim) for dim, (_, _, inner) in enumerate(config) if inner > 0}
    return padded


def _equations(jaxpr: ClosedJaxpr | None, primitive: str) -> list[Placed]:
    if jaxpr is None:
        return []
    return [one for one in equations(jaxpr) if one.equation.primitive.name == primitive]
