"""Checks for loop-invariant collectives (SL202) and loops of unknown trip count (SL503)."""

from collections.abc import Iterator

from shardlib import humanize
from shardlib.explain.analysis.collectives import axes_text
from shardlib.explain.hlo.provenance import Where, where_of
from shardlib.explain.hlo.text import Instruction
from shardlib.explain.lint.activations import is_parameter
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.subject import Placed, Subject, each, largest
from shardlib.explain.lint.values import Value


def repeated(subject: Subject) -> Iterator[Finding]:
    """Yields SL202: collectives in a loop whose operand no iteration changes."""
    if not subject.leaves:
        return
    found = {}
    bodies = {loop.attributes["body"].lstrip("%"): loop for _, loop in each(subject, ("while",))}
    for placed in subject.collectives:
        lifted = _in_body(subject, placed, bodies)
        if lifted is None or placed.collective.count < 2:
            continue
        body, operands = lifted
        loop = bodies[body]
        kept = subject.values.unchanged(loop)
        if not all(subject.values.is_invariant(body, kept, value) for value in operands):
            continue
        trips = subject.module.trips(loop) or placed.collective.count
        wasted = placed.collective.sent_bytes * (1 - 1 / trips)
        if wasted < subject.limits.traffic_bytes or trips < 2:
            continue
        # Gathering a parameter again for each microbatch trades traffic for memory.
        if is_parameter(subject, placed) and _slices(subject, body, kept) == {"batch"}:
            continue
        where = subject.where(placed)
        found.setdefault(where, _repeated(placed, where, trips, wasted))
    yield from found.values()


def _repeated(placed: Placed, where: Where, trips: int, wasted: float) -> Finding:
    collective = placed.collective
    return Finding(
        "SL202",
        where.place(collective.kind),
        f"{collective.kind} of {largest(collective.shapes)} over "
        f"{axes_text(collective.mesh_axes)} runs in each of {trips} iterations of a loop on a "
        f"value that no iteration changes: {humanize.size(wasted)} sent for nothing.",
        f"Compute it once before the loop, and pass it in: {humanize.size(collective.bytes)} on "
        "each device.",
        where.source,
        where.name,
        wasted,
    )


def _in_body(
    subject: Subject, placed: Placed, bodies: dict[str, Instruction]
) -> tuple[str, list[Value]] | None:
    """Returns the innermost loop body around a collective, and the operands in that body."""
    where = placed.computation
    operands = subject.values.operands(where, placed.instruction)
    while where not in bodies:
        callers = subject.module.callers.get(where, [])
        if not callers:
            return None
        numbers = sorted({n for value in operands for n in _reads(subject, value)})
        where, caller = callers[0]
        passed = subject.values.operands(where, caller)
        operands = [passed[number] for number in numbers if number < len(passed)]
    return where, operands


def _reads(subject: Subject, value: Value) -> set[int]:
    """Returns the numbers of the computation's parameters that a value depends on."""
    found, seen, pending = set(), set(), [value.name]
    while pending:
        name = pending.pop()
        instruction = subject.values.instruction(value.computation, name)
        if name in seen or instruction is None:
            continue
        seen.add(name)
        if instruction.opcode == "parameter":
            found.add(int(instruction.operands))
        pending += instruction.operand_names
    return found


def _slices(subject: Subject, body: str, kept: frozenset[int]) -> set[str]:
    """Returns `state` and `batch` if each iteration of a loop slices an array of that kind."""
    found: set[str] = set()
    for instruction in subject.module.computations[body]:
        if instruction.opcode == "get-tuple-element":
            index = int(instruction.attributes["index"])
            source = subject.values.instruction(body, instruction.operand_names[0])
            if index in kept and source is not None and source.opcode == "parameter":
                value = Value(body, source.name, index)
                if _is_sliced(subject, body, instruction.name):
                    leaves = subject.arguments_of(value) or []
                    found |= {"state" if leaf.is_state else "batch" for leaf in leaves}
    return found


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
            inner = subject.values.parameter(called, names.index(name))
            if inner is not None and _is_sliced(subject, called, inner):
                return True
    return False


def uncounted(subject: Subject) -> Iterator[Finding]:
    """Yields SL503: loops with collectives and an unknown trip count."""
    for _, loop in each(subject, ("while",)):
        if subject.module.trips(loop) is not None:
            continue
        inside = [c for c in subject.collectives if _is_within(subject, c.computation, loop)]
        if not inside:
            continue
        where = where_of(subject.module, loop)
        sent = sum(placed.collective.sent_bytes for placed in inside)
        yield Finding(
            "SL503",
            where.place("while"),
            f"a loop with {len(inside)} collective{'s' * (len(inside) > 1)} "
            f"({humanize.size(sent)} sent in an iteration) has an unknown trip count: its traffic "
            "is counted once.",
            "Write it as jax.lax.scan or fori_loop with a fixed trip count.",
            where.source,
            where.name,
            sent,
        )


def _is_within(subject: Subject, computation: str, loop: Instruction) -> bool:
    """Whether a computation runs in the body or condition of a loop."""
    pending, seen = [computation], set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for where, caller in subject.module.callers.get(name, []):
            if caller.name == loop.name:
                return True
            pending.append(where)
    return False
