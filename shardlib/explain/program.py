"""What a compiled step sends between devices: its collectives, by mesh axis, bytes and source.

A partition of the program is the index of its device in `mesh.devices.flat`, so the groups of a
collective are subsets of mesh axes, or none at all: a group that matches no subset is what nobody
asked for in the sharding rules, and is flagged.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from shardlib.explain.hlo import (
    Instruction,
    Module,
    array_bytes,
    arrays,
    elements,
    parse,
)
from shardlib.mesh import mesh_sizes

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
)
# Communication that carries no groups: between slices (TPU) or with the host.
_UNREAD = ("send", "recv")

Groups = frozenset[frozenset[int]]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of the program.

    Attributes:
        kind: One of `KINDS`.
        mesh_axes: The axes it runs over, in mesh order; empty when each device is alone in its
            group; None when its groups are no subset of axes.
        bytes: Bytes of the whole buffer on one device in one execution: what an all-gather
            returns, a reduce-scatter takes, all others take and return.
        shapes: Arrays of that buffer as the program has them, such as `f32[4,8]`; of a
            reduce-scatter, of its result. Several when the compiler combined collectives.
        count: Executions in one run of the program, loop trips included.
        in_loop: Whether it stands inside of a loop.
        trips_known: Whether the trips of all loops around it are known; else `count` is a lower
            bound.
        op_name: The JAX name of what it came from, such as `jit(step)/while/body/dot_general`.
        source: `file:line` of the user's code, or empty.
        name: Name of the instruction in the program.
    """

    kind: str
    mesh_axes: tuple[str, ...] | None
    bytes: int
    shapes: tuple[str, ...]
    count: int
    in_loop: bool
    trips_known: bool
    op_name: str
    source: str
    name: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all executions."""
        return self.bytes * self.count


@dataclasses.dataclass(frozen=True)
class Total:
    """All collectives of one kind over the same axes; `bytes` sums their executions."""

    kind: str
    mesh_axes: tuple[str, ...] | None
    instructions: int
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """The collectives of a program. `str()` draws a table of totals by kind and axes.

    `unread` counts, by opcode, communication that has no groups to attribute: `send` and `recv`.
    """

    mesh: Mapping[str, int]
    collectives: tuple[Collective, ...]
    unread: Mapping[str, int]

    def totals(self, at_least_bytes: int = 0) -> list[Total]:
        """Returns totals by kind and axes, largest first.

        Args:
            at_least_bytes: Leaves out smaller collectives, such as those of single numbers (loss,
                norms).
        """
        grouped = collections.defaultdict(list)
        for collective in self.collectives:
            if collective.bytes >= at_least_bytes:
                grouped[collective.kind, collective.mesh_axes].append(collective)
        totals = [
            Total(
                kind,
                axes,
                len(members),
                sum(member.count for member in members),
                sum(member.total_bytes for member in members),
            )
            for (kind, axes), members in grouped.items()
        ]
        return sorted(totals, key=lambda total: -total.bytes)

    def unattributed(self) -> list[Collective]:
        """Returns the collectives whose groups are no subset of the mesh axes."""
        return [collective for collective in self.collectives if collective.mesh_axes is None]

    def __str__(self) -> str:
        header = ("collective", "mesh axes", "instructions", "executions", "MB on a device")
        rows = [header] + [
            (
                total.kind,
                axes_text(total.mesh_axes),
                str(total.instructions),
                str(total.count),
                f"{total.bytes / 1e6:.3f}",
            )
            for total in self.totals()
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        for collective in self.unattributed():
            lines.append(
                f"no subset of axes: {collective.kind} {' '.join(collective.shapes)} "
                f"x {collective.count} {collective.op_name} {collective.source}".rstrip()
            )
        if not all(collective.trips_known for collective in self.collectives):
            lines.append("some loops have unknown trip counts and count once")
        lines += [f"not attributed: {count} {opcode}" for opcode, count in self.unread.items()]
        return "\n".join(lines)


def collectives(compiled_or_text: Any, mesh: Any) -> list[Collective]:
    """Returns the collectives of a compiled program; see `read_program`."""
    return list(read_program(compiled_or_text, mesh).collectives)


def read_program(compiled_or_text: Any, mesh: Any) -> ProgramReport:
    """Reads the collectives out of a compiled program.

    On CPU there is no reduce-scatter: XLA writes an all-reduce and a slice, so that bytes of
    gradients read high there. Programs compiled for a GPU or TPU show what is sent.

    Args:
        compiled_or_text: `jax.stages.Compiled`, or the text that its `as_text()` returns.
        mesh: The mesh that the program was compiled for: a `Mesh`, an `AbstractMesh`, or a mapping
            of axis names to sizes.
    """
    is_text = isinstance(compiled_or_text, str)
    module = parse(compiled_or_text if is_text else compiled_or_text.as_text())
    sizes = dict(mesh) if isinstance(mesh, Mapping) else mesh_sizes(mesh)
    axes_by_groups = _axes_by_groups(sizes)
    found = [
        _collective(module, computation, instruction, kind, sizes, axes_by_groups)
        for computation, instruction, kind in _instructions(module)
    ]
    unread = collections.Counter(
        instruction.opcode
        for instructions in module.computations.values()
        for instruction in instructions
        if instruction.opcode in _UNREAD
    )
    return ProgramReport(sizes, tuple(c for c in found if c.count), dict(unread))


def axes_text(axes: tuple[str, ...] | None) -> str:
    """Returns mesh axes as a word: `data+fsdp`, `none` or `?`."""
    return "?" if axes is None else "+".join(axes) or "none"


def _instructions(module: Module) -> Iterable[tuple[str, Instruction, str]]:
    """Yields each collective once, with the computation that it stands in and its kind."""
    fused_channels = set()
    for computation, instructions in module.computations.items():
        callers = [instruction for _, instruction in module.callers.get(computation, [])]
        fused = any(caller.opcode == "fusion" for caller in callers)
        for instruction in instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            # On TPU the start and the end of an asynchronous fusion each hold the collective.
            channel = instruction.attributes.get("channel_id")
            if fused and channel is not None:
                if channel in fused_channels:
                    continue
                fused_channels.add(channel)
            names = (computation, *(caller.name for caller in callers))
            if kind == "all-reduce" and any(n.startswith("all-reduce-scatter") for n in names):
                kind = (
                    "reduce-scatter"  # of a TPU: an all-reduce fused with the slice of its result
                )
            yield computation, instruction, kind


def _collective(
    module: Module,
    computation: str,
    instruction: Instruction,
    kind: str,
    sizes: Mapping[str, int],
    axes_by_groups: Mapping[Groups, tuple[str, ...]],
) -> Collective:
    execution = module.execution(computation)
    result = _result_shape(instruction)
    size = array_bytes(result)
    if kind == "collective-permute":
        axes = _permuted_axes(instruction, sizes)
    else:
        groups = _groups(instruction, kind, math.prod(sizes.values()))
        axes = None if groups is None else axes_by_groups.get(groups)
        if instruction.opcode.startswith("reduce-scatter") and groups:
            size *= len(next(iter(groups)))
    metadata = instruction.attributes.get("metadata", "")
    op_name = re.search(r'op_name="([^"]*)"', metadata)
    return Collective(
        kind=kind,
        mesh_axes=axes,
        bytes=size,
        shapes=tuple(arrays(result)),
        count=execution.count,
        in_loop=execution.in_loop,
        trips_known=execution.trips_known,
        op_name=op_name[1] if op_name else "",
        source=module.source(instruction),
        name=instruction.name,
    )


def _result_shape(instruction: Instruction) -> str:
    """Returns the shape of what the collective returns, without what a start carries along.

    A start returns (operand, result, contexts ...), except that of an all-reduce: its results.
    """
    parts = elements(instruction.shape)
    starts = instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start"
    return parts[1] if starts and len(parts) > 1 else instruction.shape


def _axes_by_groups(sizes: Mapping[str, int]) -> dict[Groups, tuple[str, ...]]:
    """Returns, for every subset of axes larger than 1, the groups of devices along it."""
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    names = list(sizes)
    wide = [name for name in names if sizes[name] > 1]
    subsets = (s for n in range(len(wide) + 1) for s in itertools.combinations(wide, n))
    return {_along(ids, [names.index(name) for name in subset]): subset for subset in subsets}


def _along(ids: np.ndarray, dims: list[int]) -> Groups:
    """Returns the groups of ids that differ in `dims` only."""
    rest = [dim for dim in range(ids.ndim) if dim not in dims]
    rows = ids.transpose([*rest, *dims]).reshape(-1, math.prod(ids.shape[dim] for dim in dims))
    return _as_groups(rows.tolist())


def _as_groups(rows: Iterable[Iterable[int]]) -> Groups:
    return frozenset(frozenset(row) for row in rows)


def _groups(instruction: Instruction, kind: str, num_devices: int) -> Groups | None:
    """Returns the groups of partitions of a collective, or None for an unknown spelling."""
    text = instruction.attributes.get("replica_groups", "{}")
    everyone = _as_groups([range(num_devices)])
    # Without global ids, the ids are replicas, of which SPMD has one, and each group holds all
    # partitions; the exchanges name partitions all the same.
    per_replica = kind in ("all-reduce", "all-gather", "reduce-scatter")
    if per_replica and "use_global_device_ids" not in instruction.attributes:
        if text in ("{}", "{{0}}"):
            in_one_replica = "channel_id" in instruction.attributes
            return everyone if in_one_replica else _as_groups([i] for i in range(num_devices))
    elif text == "{}":
        return everyone
    if text.startswith("{{"):
        rows = re.findall(r"\{([\d,\s]*)\}", text[1:-1])
        return _as_groups([int(i) for i in row.split(",")] for row in rows if row.strip())
    if text.startswith("["):
        return _iota_groups(text)
    return _mesh_groups(text)


def _iota_groups(text: str) -> Groups | None:
    """Reads `[groups,members]<=[dims]T(permutation)`: an iota, reshaped, transposed, reshaped."""
    form = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if form is None:
        return None
    rows, dims = _ints(form[1]), _ints(form[2])
    ids = np.arange(math.prod(dims)).reshape(dims)
    if form[3]:
        ids = ids.transpose(_ints(form[3]))
    return _as_groups(ids.reshape(rows[0], -1).tolist()) if ids.size % rows[0] == 0 else None


def _mesh_groups(text: str) -> Groups | None:
    """Reads `mesh['a'=2,'b'=8], device_ids=(...) {'a','b':(2)4}`.

    `'b':(2)4` is the part of size 4 of axis b that two coarser parts stand before. The ids are a
    list, or a transposed iota `[dims]T(permutation)`; without them, an iota.
    """
    form = re.fullmatch(r"@?mesh[\[<](.*?)[\]>](?:,? device_ids=\((.*)\))? \{(.*)\}", text)
    if form is None:
        return None
    axes = re.findall(r"['\"]?([^'\",=]+)['\"]?=(\d+)", form[1])
    sizes = {name: int(size) for name, size in axes}
    ids = _device_ids(form[2], math.prod(sizes.values()))
    if ids is None:
        return None
    shape: list[int] = []
    grouped: list[int] = []
    named = re.findall(r"['\"]?([^'\",:]+)['\"]?(?::\((\d+)\)(\d+))?(?:,|$)", form[3])
    parts = {
        name: (int(before or 1), int(size or sizes.get(name, 1))) for name, before, size in named
    }
    if len(parts) < len(named):  # two parts of one axis
        return None
    if not set(parts) <= set(sizes):
        return None
    for name, size in sizes.items():
        before, width = parts.get(name, (size, 1))
        if name in parts:
            grouped.append(len(shape) + 1)
        shape += [before, width, size // (before * width)]
    return _along(ids.reshape(shape), grouped) if math.prod(shape) == ids.size else None


def _device_ids(text: str | None, count: int) -> np.ndarray | None:
    """Reads the order of devices in the mesh spelling."""
    if not text:
        return np.arange(count)
    form = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if form is None:
        ids = np.array(_ints(text))
    else:
        dims = _ints(form[1])
        ids = np.arange(math.prod(dims)).reshape(dims)
        ids = ids.transpose(_ints(form[2])) if form[2] else ids
    return ids.reshape(-1) if ids.size == count else None


def _permuted_axes(instruction: Instruction, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the axes along which senders and receivers differ."""
    pairs = re.findall(r"\{(\d+),(\d+)\}", instruction.attributes.get("source_target_pairs", ""))
    if not pairs:
        return None
    shape = tuple(sizes.values())
    ends = np.array([[int(a), int(b)] for a, b in pairs])
    if ends.max() >= math.prod(shape):
        return None
    coordinates = np.stack(np.unravel_index(ends, shape))
    moved = (coordinates[..., 0] != coordinates[..., 1]).any(axis=1)
    return tuple(name for name, moves in zip(sizes, moved, strict=True) if moves)


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
