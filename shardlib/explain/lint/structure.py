"""Checks for host calls in a step (SL501) and for unrolled layers (SL502)."""

import collections
from collections.abc import Iterator
from typing import Any

from shardlib.cost.traced.products import matmul_flops
from shardlib.explain.analysis.equations import Placed, equations
from shardlib.explain.hlo.provenance import Where, where_of, where_of_equation
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.subject import Subject, each

_HOST = ("infeed", "outfeed")


def host_calls(subject: Subject) -> Iterator[Finding]:
    """Yields SL501: callbacks and transfers that make devices wait for Python or the host."""
    found: dict[tuple[str, Where], int] = collections.Counter()
    for placed in equations(subject.jaxpr) if subject.jaxpr is not None else ():
        what = placed.equation.primitive.name
        if what.endswith("_callback") or what == "debug_print" or what in _HOST:
            name = "/".join(filter(None, (placed.name, what)))
            found[what, where_of_equation(placed.equation, name)] += placed.times
    if not found:
        found = _host_instructions(subject)
    for (what, where), times in found.items():
        often = f"{times} times" if times > 1 else "once"
        yield Finding(
            "SL501",
            where.place(what),
            f"{what} runs {often} in a step: devices wait for the host.",
            "Return the value as a metric of the step, and read it outside.",
            where.source,
            where.name,
        )


def _host_instructions(subject: Subject) -> dict[tuple[str, Where], int]:
    found: dict[tuple[str, Where], int] = collections.Counter()
    for computation, instruction in each(subject, ("custom-call", "send", "recv", *_HOST)):
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
        found[what, where] += subject.module.execution(computation).count
    return found


def unrolled(subject: Subject) -> Iterator[Finding]:
    """Yields SL502: a matmul of one line that the program repeats many times without a loop."""
    if subject.jaxpr is None:
        return
    lines: dict[Where, list[tuple[Placed, float]]] = collections.defaultdict(list)
    alike: dict[tuple[Where, Any], int] = collections.Counter()
    for placed in equations(subject.jaxpr):
        flops = matmul_flops(placed.equation)
        again = "transpose(" in placed.name or "rematted_computation" in placed.name
        if flops is None or again or placed.times > 1 or placed.in_kernel:
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
    yield Finding(
        "SL502",
        line._replace(name=name).place(),
        f"the matmul of this line appears {unrolled[line]} times in the program with the same "
        f"shapes{others}: it is compiled as often, and its layers cannot be told apart.",
        "Stack the layers and scan over them, as shardlib.nn.stack.scan_layers does.",
        line.source,
        name,
    )
