"""Collectives of a compiled step, by mesh axis, bytes and source.

A partition of the program is the index of its device in `mesh.devices.flat`, so the groups of a
collective should follow a subset of the mesh axes. Groups that match no subset do not come from the
sharding rules and are flagged.
"""

import collections
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping

import jax
from jax.sharding import AbstractMesh, Mesh

from shardlib import humanize
from shardlib.cost.machine.fabric import sent_share
from shardlib.explain.hlo.allreduce_uses import Fate, fates
from shardlib.explain.hlo.provenance import Phase, came_from
from shardlib.explain.hlo.replica_groups import (
    KINDS,
    Groups,
    groups_of_axes,
    permuted_axes,
    permuted_pairs,
    read_groups,
)
from shardlib.explain.hlo.slices import (
    Slices,
    permutation_of,
    received_shapes,
    rendezvous_of,
    slices_of,
    transfer_kind,
)
from shardlib.explain.hlo.text import (
    Instruction,
    Module,
    array_bytes,
    arrays,
    elements,
    parse,
    result_shape,
    split,
)
from shardlib.mesh import mesh_sizes
from shardlib.tables import Report, Table

Program = str | Module | jax.stages.Compiled
AnyMesh = Mesh | AbstractMesh | Mapping[str, int]
# Communication without groups: between slices (TPU) or with the host.
_TRANSFERS = ("send", "recv")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of the program.

    Attributes:
        kind: One of `KINDS`.
        mesh_axes: The mesh axes that it runs over, in mesh order, or the single axis that it runs
            over a part of; empty if each device is alone in its group; None for any other groups.
        bytes: Bytes of the whole buffer on one device in one execution: the result of an
            all-gather, the operand of a reduce-scatter, and the operand or equal result of all
            others. For a ragged exchange it is the smaller of operand and receive buffer, since
            the mean over devices cannot exceed it.
        shapes: Arrays of that buffer as in the program, such as `f32[4,8]`; for a reduce-scatter,
            arrays of its result. Combined collectives have several.
        count: Executions in one run of the program, loop trips included.
        in_loop: Whether it is inside of a loop.
        trips_known: Whether the trip counts of all loops around it are known; else `count` is a
            lower bound.
        op_name: The JAX name of its origin, such as `jit(step)/while/body/dot_general`.
        source: `file:line` of the user's code that it came from, else of its first reader, else
            empty.
        name: Name of the instruction in the program.
        group_size: Devices in one group; 0 if its groups cannot be read.
        fates: The use of each array of an all-reduce; see `allreduce_uses.Fate`. Empty for others.
        between_slices: Whether it runs between TPU slices, over the data-centre network.
        model_path: The part of the model that `source` is in, such as `layers[*]/mlp/up`; see
            `provenance`.
        phase: The pass of its origin: see `cost.costs.Pass`; empty if unknown.
        senders: Devices that send in a permutation; 0 for others.
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
    group_size: int = 0
    fates: tuple[Fate, ...] = ()
    between_slices: bool = False
    model_path: str = ""
    phase: Phase = ""
    senders: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all executions."""
        return self.bytes * self.count

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends in all executions, by ring algorithms; see `sent_share`."""
        return self.total_bytes * sent_share(self.kind, self.group_size)

    @property
    def folded_bytes(self) -> float:
        """`sent_bytes` after the rewrites of a compiler for accelerators.

        An all-reduce of which each device uses only its part becomes a reduce-scatter. A sum of
        all-reduces becomes one all-reduce.
        """
        if not self.fates:
            return self.sent_bytes
        shares = {
            "whole": sent_share("all-reduce", self.group_size),
            "sliced": sent_share("reduce-scatter", self.group_size),
            "added": 0.0,
        }
        parts = zip(self.shapes, self.fates, strict=True)
        return self.count * sum(array_bytes(shape) * shares[fate] for shape, fate in parts)


@dataclasses.dataclass(frozen=True)
class Total:
    """All collectives of one kind over the same axes; `bytes` is the total of all executions."""

    kind: str
    mesh_axes: tuple[str, ...] | None
    instructions: int
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class ProgramReport(Report):
    """The collectives of a program. `str()` draws a table of totals by kind and axes.

    `unread` counts communication without groups, `send` and `recv`, by opcode. `unread_bytes` is
    the bytes that it sends from one device, loop trips included. `slices` is the number of TPU
    slices that each axis crosses; omitted axes cross none.
    """

    mesh: Mapping[str, int]
    collectives: tuple[Collective, ...]
    unread: Mapping[str, int]
    unread_bytes: int = 0
    slices: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def totals(self, at_least_bytes: int = 0) -> list[Total]:
        """Returns totals by kind and axes, largest first.

        Args:
            at_least_bytes: Smaller collectives are left out, such as scalars (loss, norms).
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
        """Returns the collectives whose groups match no subset of the mesh axes."""
        return [collective for collective in self.collectives if collective.mesh_axes is None]

    @property
    def unattributed_bytes(self) -> float:
        """Bytes that a device sends over groups that match no subset of the mesh axes."""
        return sum(collective.sent_bytes for collective in self.unattributed())

    @property
    def unattributed_share(self) -> float:
        """Share of the bytes sent by a device that cannot be attributed to mesh axes."""
        sent = sum(collective.sent_bytes for collective in self.collectives) + self.unread_bytes
        return (self.unattributed_bytes + self.unread_bytes) / sent if sent else 0.0

    def parts(self) -> Iterator[Table | str]:
        columns = ("collective", "mesh axes", "instructions>", "executions>", "on a device>")
        rows = [
            (
                total.kind,
                axes_text(total.mesh_axes),
                str(total.instructions),
                str(total.count),
                humanize.size(total.bytes),
            )
            for total in self.totals()
        ]
        yield Table("collectives of a program", columns, rows)
        yield from self.unknowns()

    def unknowns(self) -> Iterator[str]:
        """Yields a line for everything that mesh axes and counts do not cover."""
        for c in self.unattributed():
            what = f"{c.kind} {' '.join(c.shapes)} x {c.count}, {humanize.size(c.sent_bytes)} sent"
            yield f"follows no mesh axes: {what} {c.source}".rstrip()
        if self.unread:
            what = ", ".join(f"{count} {name}" for name, count in self.unread.items())
            yield f"not read: {what}, {humanize.size(self.unread_bytes)} sent"
        if not all(collective.trips_known for collective in self.collectives):
            yield "some loops have unknown trip counts and count once"


def collectives(program: Program, mesh: AnyMesh) -> list[Collective]:
    """Returns the collectives of a compiled program; see `read_program`."""
    return list(read_program(program, mesh).collectives)


def read_program(program: Program, mesh: AnyMesh) -> ProgramReport:
    """Returns the collectives of a compiled program.

    The CPU compiler emits an all-reduce and a slice instead of a reduce-scatter, so its gradient
    bytes are too high. `Collective.folded_bytes` corrects for this. Programs compiled for a GPU or
    TPU show the actual traffic.

    Args:
        program: `jax.stages.Compiled`, its `as_text()`, or that text parsed by `parse`.
        mesh: The mesh that the program was compiled for: a `Mesh`, an `AbstractMesh`, or a mapping
            of axis names to sizes.
    """
    if isinstance(program, Module):
        module = program
    else:
        module = parse(program if isinstance(program, str) else program.as_text() or "")
    sizes = dict(mesh) if isinstance(mesh, Mapping) else mesh_sizes(mesh)
    slices = slices_of(mesh, sizes, module)
    axes_by_groups = groups_of_axes(slices.inner)
    instructions = list(_instructions(module))
    fates_of = _fates(module, instructions, math.prod(slices.inner.values()))
    collectives = [
        dataclasses.replace(
            _collective(module, computation, instruction, kind, slices.inner, axes_by_groups),
            fates=fates_of.get((computation, instruction.name), ()),
        )
        for computation, instruction, kind in instructions
    ]
    transfers, unread, unread_bytes = _transfers(module, slices)
    crossed = {name: count for name, count in slices.outer.items() if count > 1}
    return ProgramReport(
        sizes,
        tuple(c for c in (*collectives, *transfers) if c.count),
        dict(unread),
        unread_bytes,
        crossed,
    )


def _transfers(module: Module, slices: Slices) -> tuple[list[Collective], Counter[str], int]:
    """Returns the collectives that the compiler has written as sends and receives.

    These are collectives between TPU slices and permutations of GPUs. The other results are the
    number of all other transfers by opcode, and the bytes that they send.
    """
    read: list[Collective] = []
    unread, unread_bytes = Counter[str](), 0
    received = received_shapes(module)
    for computation, instruction in module.each(*_TRANSFERS):
        sends, shape = instruction.opcode == "send", elements(instruction.shape)[0]
        pairs, kind = permutation_of(instruction), transfer_kind(instruction)
        if pairs is None and kind is None:
            unread[instruction.opcode] += 1
            unread_bytes += sends * array_bytes(shape) * module.execution(computation).count
        elif sends and kind is not None:
            whole = received.get(rendezvous_of(instruction), shape)
            whole = whole if kind == "all-gather" else shape
            collective = _described(module, computation, instruction, kind, whole)
            places = {"mesh_axes": slices.axes or None, "group_size": slices.count}
            read.append(dataclasses.replace(collective, between_slices=True, **places))
        elif sends:
            attributes = {**instruction.attributes, "source_target_pairs": pairs or ""}
            kind = "collective-permute"
            permutation = dataclasses.replace(
                instruction, attributes=attributes, shape=shape, opcode=kind
            )
            read.append(_collective(module, computation, permutation, kind, slices.inner, {}))
    return read, unread, unread_bytes


def axes_text(axes: tuple[str, ...] | None) -> str:
    """Returns mesh axes as text: `data+fsdp`, `none` or `?`."""
    return "?" if axes is None else "+".join(axes) or "none"


def _instructions(module: Module) -> Iterator[tuple[str, Instruction, str]]:
    """Yields the computation, instruction and kind of each collective, once."""
    fused_pairs = set()
    for computation, instructions in module.computations.items():
        callers = [instruction for _, instruction in module.callers.get(computation, [])]
        fused = any(caller.opcode == "fusion" for caller in callers)
        for instruction in instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            names = (computation, *(caller.name for caller in callers))
            if kind == "all-reduce" and any(n.startswith("all-reduce-scatter") for n in names):
                # On TPU: an all-reduce fused with the slice of its result.
                yield computation, instruction, "reduce-scatter"
                continue
            # On TPU the start and the end of an asynchronous fusion each hold the collective.
            # All collectives that a program calls by name have the same channel.
            # Their results may lie in different memories, which only the layout says.
            pair = (
                instruction.attributes.get("channel_id"),
                kind,
                tuple(arrays(instruction.shape)),
            )
            if fused and pair[0] is not None:
                if pair in fused_pairs:
                    continue
                fused_pairs.add(pair)
            yield computation, instruction, kind


def _fates(
    module: Module, instructions: list[tuple[str, Instruction, str]], num_devices: int
) -> dict[tuple[str, str], tuple[Fate, ...]]:
    """Returns the fates of the arrays of all-reduces, with equal groups analysed together."""
    alike = collections.defaultdict(list)
    for computation, instruction, kind in instructions:
        if kind == "all-reduce" and instruction.opcode == kind:
            groups = read_groups(instruction, kind, num_devices)
            size = len(next(iter(groups))) if groups else 1
            alike[groups].append((computation, instruction, size))
    return {key: fate for group in alike.values() for key, fate in fates(module, group).items()}


def _collective(
    module: Module,
    computation: str,
    instruction: Instruction,
    kind: str,
    sizes: Mapping[str, int],
    axes_by_groups: Mapping[Groups, tuple[str, ...]],
) -> Collective:
    result = result_shape(instruction)
    size, devices, senders = array_bytes(result), 0, 0
    if kind == "collective-permute":
        axes, senders = permuted_axes(instruction, sizes), len(permuted_pairs(instruction))
    else:
        groups = read_groups(instruction, kind, math.prod(sizes.values()))
        axes = None if groups is None else axes_by_groups.get(groups)
        devices = len(next(iter(groups))) if groups else 0
        if kind == "ragged-all-to-all":
            size = min(size, _offered_bytes(module, computation, instruction) or size)
        if instruction.opcode.startswith("reduce-scatter"):
            size *= max(devices, 1)
    described = _described(module, computation, instruction, kind, result)
    return dataclasses.replace(
        described, mesh_axes=axes, bytes=size, group_size=devices, senders=senders
    )


def _described(
    module: Module, computation: str, instruction: Instruction, kind: str, shape: str
) -> Collective:
    """Returns a collective whose buffer has a shape, without its devices."""
    execution = module.execution(computation)
    where = came_from(module, computation, instruction)
    return Collective(
        kind=kind,
        mesh_axes=None,
        bytes=array_bytes(shape),
        shapes=tuple(arrays(shape)),
        count=execution.count,
        in_loop=execution.in_loop,
        trips_known=execution.trips_known,
        op_name=where.name,
        source=where.source,
        name=instruction.name,
        model_path=where.model_path,
        phase=where.phase,
    )


def _offered_bytes(module: Module, computation: str, instruction: Instruction) -> int:
    """Returns the bytes of the first operand; 0 if its shape is unknown."""
    name = split(instruction.operands)[0].rpartition("%")[2]
    shapes = {i.name: i.shape for i in module.computations[computation]}
    return array_bytes(shapes.get(name, ""))
