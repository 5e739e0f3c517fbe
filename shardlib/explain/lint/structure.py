"""Checks of a program: host calls (SL501), unrolled layers (SL502) and loops of unknown trip count
(SL503)."""

import collections
from collections.abc import Iterator

from shardlib import humanize
from shardlib.cost.costs import pass_of
from shardlib.cost.traced.products import matmul_flops
from shardlib.explain.analysis.equations import Placed, equations
from shardlib.explain.hlo.origins import reached
from shardlib.explain.hlo.provenance import Where, where_of, where_of_equation
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.subject import Subject

_HOST = ("infeed", "outfeed")


def host_calls(subject: Subject) -> Iterator[Finding]:
    """Yields SL501: callbacks and transfers that make devices wait for Python or the host."""
    calls: dict[tuple[str, Where], int] = collections.Counter()
    for placed in equations(subject.jaxpr) if subject.jaxpr is not None else ():
        what = placed.equation.primitive.name
        if what.endswith("_callback") or what == "debug_print" or what in _HOST:
            name = "/".join(filter(None, (placed.name, what)))
            calls[what, where_of_equation(placed.equation, name)] += placed.times
    for (what, where), times in (calls or _host_instructions(subject)).items():
        often = f"{times} times" if times > 1 else "once"
        yield Finding.at(
            "SL501",
            where,
            f"{what} runs {often} in a step: devices wait for the host.",
            "Return the value as a metric of the step, and read it outside.",
            otherwise=what,
        )


def _host_instructions(subject: Subject) -> dict[tuple[str, Where], int]:
    calls: dict[tuple[str, Where], int] = collections.Counter()
    for computation, instruction in subject.module.each("custom-call", "send", "recv", *_HOST):
        target = instruction.attributes.get("custom_call_target", "").strip('"')
        between_slices = "megascale" in instruction.attributes.get("frontend_attributes", "")
        if instruction.opcode == "custom-call" and "callback" not in target:
            continue
        if instruction.opcode in ("send", "recv"):
            host = instruction.attributes.get("is_host_transfer") == "true"
            if between_slices or not host:
                continue
        what = target or instruction.opcode
        where = where_of(subject.module, instruction)
        calls[what, where] += subject.module.execution(computation).count
    return calls


def unrolled(subject: Subject) -> Iterator[Finding]:
    """Yields SL502: a matmul of one line that the program repeats many times without a loop."""
    if subject.jaxpr is None:
        return
    lines: dict[Where, list[tuple[Placed, float]]] = collections.defaultdict(list)
    alike: dict[tuple[Where, tuple[tuple[int, ...], ...]], int] = collections.Counter()
    for placed in equations(subject.jaxpr):
        flops = matmul_flops(placed.equation)
        first = pass_of(placed.name, "forward") == "forward"
        if flops is None or not first or placed.times > 1 or placed.in_kernel:
            continue
        line = where_of_equation(placed.equation)
        shapes = tuple(variable.aval.shape for variable in placed.equation.invars)
        alike[line, shapes] += 1
        lines[line].append((placed, flops))
    most: dict[Where, int] = collections.Counter()
    for (line, _), count in alike.items():
        most[line] = max(most[line], count)
    unrolled = {at: n for at, n in most.items() if n >= subject.limits.unrolled and at.source}
    if not unrolled:
        return
    # One finding covers all layers, at the line with the most FLOPs.
    line = max(unrolled, key=lambda at: sum(flops for _, flops in lines[at]))
    placed = lines[line][0][0]
    name = "/".join(filter(None, (placed.name, placed.equation.primitive.name)))
    others = f", and {len(unrolled) - 1} more lines like it" if len(unrolled) > 1 else ""
    yield Finding.at(
        "SL502",
        line._replace(name=name),
        f"the matmul of this line appears {unrolled[line]} times in the program with the same "
        f"shapes{others}: it is compiled as often, and its layers cannot be told apart.",
        "Stack the layers and scan over them, as shardlib.nn.stack.scan_layers does.",
    )


def uncounted(subject: Subject) -> Iterator[Finding]:
    """Yields SL503: loops with collectives and an unknown trip count."""
    for _, loop in subject.module.each("while"):
        inside = [c for c in subject.collectives if loop.name in _callers(subject, c.computation)]
        if subject.module.trips(loop) is not None or not inside:
            continue
        where = where_of(subject.module, loop)
        sent = sum(placed.collective.sent_bytes for placed in inside)
        yield Finding.at(
            "SL503",
            where,
            f"a loop with {len(inside)} collective{'s' * (len(inside) > 1)} "
            f"({humanize.size(sent)} sent in an iteration) has an unknown trip count: its traffic "
            "is counted once.",
            "Write it as jax.lax.scan or fori_loop with a fixed trip count.",
            sent,
            otherwise="while",
        )


def _callers(subject: Subject, computation: str) -> set[str]:
    """Returns the names of the instructions that run a computation, directly or not."""
    callers = subject.module.callers
    around = reached([computation], lambda name: [where for where, _ in callers.get(name, [])])
    return {caller.name for name in around for _, caller in callers.get(name, [])}
