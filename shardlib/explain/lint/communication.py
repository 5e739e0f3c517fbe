"""Checks of communication: resharding (SL201), repeated collectives (SL202), collectives along no
mesh axis (SL203), slow mesh axes (SL204) and miscompiled operations (SL205 to SL210)."""

import collections
import math
from collections.abc import Iterator, Mapping

from shardlib import humanize
from shardlib.explain.analysis.collectives import axes_text
from shardlib.explain.analysis.explicit import is_explicit
from shardlib.explain.hlo.origins import HloValue, reached
from shardlib.explain.hlo.provenance import Where, is_library
from shardlib.explain.hlo.text import Instruction, dims
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.subject import PlacedCollective, Subject, largest, times_a_step
from shardlib.explain.wrong_numbers import read

FAST_AXES = ("tensor", "context", "expert")
"""Preset axes whose collectives run several times in every layer."""


def resharded(subject: Subject) -> Iterator[Finding]:
    """Yields SL201: collectives that the compiler inserts to reshard a tensor."""
    lines: dict[tuple[str, Where], list[PlacedCollective]] = collections.defaultdict(list)
    for placed in subject.collectives:
        where = subject.where(placed)
        large = placed.bytes >= subject.limits.activation_bytes
        implied = where.name and not is_explicit(where.name)
        if large and implied and _changes_sharding(subject, placed, where):
            lines[placed.collective.kind, where].append(placed)
    for (kind, where), members in lines.items():
        first = max(members, key=lambda placed: placed.bytes).collective
        times = times_a_step(sum(placed.collective.count for placed in members))
        yield Finding.at(
            "SL201",
            where,
            f"{largest(first.shapes)} ({humanize.size(first.bytes)}) is resharded by {_a(kind)} "
            f"over {axes_text(first.mesh_axes)}{times}: no rule asks for it.",
            "Constrain the tensor to the same sharding before and after this line, or to the "
            "sharding of the rest of the layer.",
            sum(placed.collective.sent_bytes for placed in members),
        )


def _changes_sharding(subject: Subject, placed: PlacedCollective, where: Where) -> bool:
    collective, in_loss = placed.collective, subject.in_loss(where.name)
    # Users cannot add constraints inside a library's optimizer.
    if not in_loss and is_library(where.source):
        return False
    if collective.kind == "collective-permute":
        return bool(collective.mesh_axes is None or collective.mesh_axes)
    if collective.kind == "all-to-all":
        # GShard's constraints send tokens to experts on purpose.
        return collective.mesh_axes is None or set(collective.mesh_axes) != {"expert"}
    if collective.kind != "all-gather" or not collective.mesh_axes or not in_loss:
        return False
    # Only the arguments show which axes split the batch, and so which gathers are intended.
    if not subject.batch:
        return False
    if set(collective.mesh_axes) & {*subject.batch_axes, "context", "expert"}:
        return False
    # A gather by a constraint is intended, and SL103 covers logits.
    if where.name.endswith("sharding_constraint"):
        return False
    vocab, dim = subject.vocabularies, placed.gather_dim
    shapes = [shape for shape in map(dims, collective.shapes) if dim < len(shape)]
    if subject.is_parameter(placed):
        return "stage" not in collective.mesh_axes and not any(s[dim] in vocab for s in shapes)
    lengths = {size for leaf in subject.batch for size in leaf.shape[1:2]}
    intended = subject.rows | lengths | vocab
    return any(s[dim] not in intended and not subject.is_leaf_shape(s) for s in shapes)


def _a(kind: str) -> str:
    return f"an {kind}" if kind.startswith("a") else f"a {kind}"


def unattributed(subject: Subject) -> Iterator[Finding]:
    """Yields SL203: collectives whose groups follow no subset of the mesh axes."""
    total = sum(c.sent_bytes for c in subject.program.collectives)
    strange = [p for p in subject.collectives if p.collective.mesh_axes is None]
    sent = sum(p.collective.sent_bytes for p in strange)
    if sent < subject.limits.traffic_bytes or sent < subject.limits.unread_share * total:
        return
    mesh = ",".join(f"{name}={size}" for name, size in subject.mesh.items())
    for placed in sorted(strange, key=lambda p: -p.collective.sent_bytes):
        collective = placed.collective
        if collective.sent_bytes < subject.limits.unread_share * sent:
            continue
        yield Finding.at(
            "SL203",
            subject.where(placed),
            f"{_a(collective.kind)} of {largest(collective.shapes)} "
            f"({humanize.size(collective.sent_bytes)} sent in a step) runs over groups of devices "
            f"that follow no mesh axes of {mesh}: the compiler chose its own sharding.",
            "Constrain the inputs and outputs of this line to shardings over whole mesh axes.",
            collective.sent_bytes,
            otherwise=collective.kind,
        )


def repeated(subject: Subject) -> Iterator[Finding]:
    """Yields SL202: collectives in a loop whose operand no iteration changes."""
    if not subject.leaves:
        return
    findings: dict[Where, Finding] = {}
    loops = subject.module.each("while")
    bodies = {loop.attributes["body"].lstrip("%"): loop for _, loop in loops}
    for placed in subject.collectives:
        collective = placed.collective
        body, operands = _in_body(subject, placed, bodies)
        if not body or collective.count < 2:
            continue
        loop = bodies[body]
        kept = subject.values.unchanged(loop)
        if not all(subject.values.is_invariant(kept, value) for value in operands):
            continue
        trips = subject.module.trips(loop) or collective.count
        wasted = collective.sent_bytes * (1 - 1 / trips)
        if wasted < subject.limits.traffic_bytes or trips < 2:
            continue
        # Gathering a parameter again for each microbatch trades traffic for memory.
        if subject.is_parameter(placed) and _slices(subject, body, kept) == {"batch"}:
            continue
        where = subject.where(placed)
        finding = Finding.at(
            "SL202",
            where,
            f"{collective.kind} of {largest(collective.shapes)} over "
            f"{axes_text(collective.mesh_axes)} runs in each of {trips} iterations of a loop on a "
            f"value that no iteration changes: {humanize.size(wasted)} sent for nothing.",
            f"Compute it once before the loop, and pass it in: {humanize.size(collective.bytes)} "
            "on each device.",
            wasted,
            otherwise=collective.kind,
        )
        findings.setdefault(where, finding)
    yield from findings.values()


def _in_body(
    subject: Subject, placed: PlacedCollective, bodies: Mapping[str, Instruction]
) -> tuple[str, list[HloValue]]:
    """Returns the innermost loop body around a collective, and the operands in that body."""
    where, operands = placed.computation, subject.operands(placed)
    while where not in bodies:
        callers = subject.module.callers.get(where, [])
        if not callers:
            return "", []
        numbers = sorted({n for value in operands for n in _reads(subject, value)})
        where, caller = callers[0]
        passed = subject.values.operands(where, caller)
        operands = [passed[number] for number in numbers if number < len(passed)]
    return where, operands


def _reads(subject: Subject, value: HloValue) -> set[int]:
    """Returns the numbers of the computation's parameters that a value depends on."""
    where, module = value.computation, subject.module

    def operands(name: str) -> tuple[str, ...]:
        instruction = module.instruction(where, name)
        return () if instruction is None else instruction.operand_names

    read = [module.instruction(where, name) for name in reached([value.name], operands)]
    return {int(one.operands) for one in read if one is not None and one.opcode == "parameter"}


def _slices(subject: Subject, body: str, kept: frozenset[int]) -> set[str]:
    """Returns `state` and `batch` if each iteration of a loop slices an array of that kind."""
    kinds: set[str] = set()
    for instruction in subject.module.computations[body]:
        if instruction.opcode != "get-tuple-element":
            continue
        index = int(instruction.attributes["index"])
        source = subject.module.instruction(body, instruction.operand_names[0])
        if index not in kept or source is None or source.opcode != "parameter":
            continue
        if _is_sliced(subject, body, instruction.name):
            leaves = subject.arguments_of(HloValue(body, source.name, index)) or []
            kinds |= {"state" if leaf.is_state else "batch" for leaf in leaves}
    return kinds


def _is_sliced(subject: Subject, computation: str, name: str) -> bool:
    """Whether a value of a computation is read by a dynamic slice."""
    for instruction in subject.module.computations[computation]:
        names = instruction.operand_names
        if name not in names:
            continue
        if instruction.opcode == "dynamic-slice":
            return names[0] == name
        if instruction.opcode in ("bitcast", "copy"):
            if _is_sliced(subject, computation, instruction.name):
                return True
        elif instruction.opcode == "fusion":
            called = instruction.called()[0]
            inner = subject.module.parameter(called, names.index(name))
            if inner is not None and _is_sliced(subject, called, inner.name):
                return True
    return False


def slow_axes(subject: Subject) -> Iterator[Finding]:
    """Yields SL204: an axis of frequent collectives that spans several slices, NVLink domains or
    hosts without NVLink."""
    cluster = subject.cluster
    if cluster is None or cluster.chip is None:
        return
    chip = cluster.chip
    if chip.kind == "tpu":
        domain, name = cluster.num_devices // cluster.num_slices, "a slice"
        fast = chip.ici_bytes_per_second_per_link
    else:
        domain, fast = cluster.devices_per_domain, chip.nvlink_bytes_per_second
        name = "an NVLink domain" if fast else "a host"
        fast = fast or chip.pcie_bytes_per_second
    slow = cluster.network_bytes_per_second_per_device
    fast_axes = (*FAST_AXES, *_own_fast_axes(subject))
    inner = math.prod(subject.mesh.values())
    for axis, size in subject.mesh.items():
        reach, inner = inner, inner // size
        if axis not in fast_axes or size == 1 or domain % reach == 0:
            continue
        members = [c for c in subject.program.collectives if axis in (c.mesh_axes or ())]
        sent = sum(c.sent_bytes for c in members)
        if not sent:
            continue
        speeds = f" at {humanize.bandwidth(slow)}" if slow else ""
        speeds += f" instead of {humanize.bandwidth(fast)}" if slow and fast else ""
        largest_one = max(members, key=lambda c: c.sent_bytes)
        fits = [n for n in range(1, domain + 1) if domain % (n * inner) == 0]
        yield Finding(
            "SL204",
            f"mesh/{axis}",
            f"{axis}={size} spans {reach} devices, but {name} of {cluster.name} has {domain}: "
            f"{humanize.size(sent)} a step cross the network{speeds}.",
            f"Make {axis} at most {max(fits, default=1)}, and another axis larger.",
            largest_one.source,
            largest_one.op_name,
            sent,
        )


def _own_fast_axes(subject: Subject) -> list[str]:
    """Returns the non-preset axes that shard only the state, as tensor parallelism does."""
    if not subject.batch:
        return []
    state = [leaf for leaf in subject.leaves if leaf.is_state]
    cut = {name for leaf in state for entry in leaf.spec or () for name in entry}
    return [name for name in subject.own_axes if name in cut and name not in subject.batch_axes]


def miscompiled(subject: Subject) -> Iterator[Finding]:
    """Yields SL205 to SL210: miscompiled operations of any size, which `explain.wrong_numbers`
    finds."""
    specs = {number: leaf.spec for number, leaf in subject.by_number.items() if leaf.spec}
    for fault in read(subject.module, subject.mesh, subject.jaxpr, specs):
        yield Finding.at(
            fault.code,
            fault.where,
            f"{fault.what[:-1]}: the loss or its gradients are wrong.",
            f"{fault.fix} Then compare with one device with sl.testing.assert_equivalent.",
        )
