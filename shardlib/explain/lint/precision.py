"""Checks for float32 collectives (SL401) and matmuls (SL402) in a step of bfloat16 matmuls."""

import collections
from collections.abc import Iterator

from jax.extend.core import JaxprEqn

from shardlib import humanize
from shardlib.cost.traced.products import matmul_flops
from shardlib.explain.analysis.collectives import axes_text
from shardlib.explain.analysis.equations import Placed, equations
from shardlib.explain.analysis.explicit import is_explicit
from shardlib.explain.hlo.origins import HloValue
from shardlib.explain.hlo.provenance import Where, where_of_equation
from shardlib.explain.hlo.text import Instruction, array_bytes, dims
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.subject import PlacedCollective, Subject, array_text, largest
from shardlib.jaxprs import array_of

_HALF = frozenset({"bfloat16", "float16"})
_REDUCES = ("all-reduce", "reduce-scatter")
_Wide = tuple[PlacedCollective, tuple[str, ...]]
"""A collective and its arrays in float32."""
_CARRIES = ("bitcast", "copy", "reshape", "transpose", "get-tuple-element")


def wide_traffic(subject: Subject) -> Iterator[Finding]:
    """Yields SL401: float32 sums of activations, and float32 moves of bfloat16 values."""
    # A CPU has no native bfloat16 and sends everything in float32.
    if subject.platform == "cpu" or not computes_in_half(subject):
        return
    lines: dict[tuple[str, Where], list[_Wide]] = collections.defaultdict(list)
    for placed in subject.collectives:
        shapes = tuple(shape for shape in placed.collective.shapes if shape.startswith("f32"))
        if sum(map(array_bytes, shapes)) < subject.limits.activation_bytes:
            continue
        where = subject.where(placed)
        if placed.collective.kind in _REDUCES:
            wide = _is_activation(subject, where.name, shapes)
        else:
            # An explicit collective in float32 is meant to stay exact.
            gets_narrow = not is_explicit(where.name) and _gets_narrow(subject, placed)
            wide = gets_narrow or _was_narrow(subject, placed)
        if wide:
            lines[placed.collective.kind, where].append((placed, shapes))
    for (kind, where), members in lines.items():
        placed, shapes = max(members, key=lambda member: sum(map(array_bytes, member[1])))
        wasted = sum(_sent(member, wide) / 2 for member, wide in members)
        axes = axes_text(placed.collective.mesh_axes)
        yield Finding.at(
            "SL401",
            where,
            f"{kind} of {largest(shapes)} over {axes} is in float32 in a step of bfloat16 "
            f"matmuls: bfloat16 would save {humanize.size(wasted)} a step.",
            "Cast to bfloat16 before the collective: a parameter before it is gathered, an "
            "activation where it is computed (preferred_element_type).",
            wasted,
            otherwise=kind,
        )


def _sent(placed: PlacedCollective, shapes: tuple[str, ...]) -> float:
    whole = sum(map(array_bytes, placed.collective.shapes))
    return placed.collective.sent_bytes * sum(map(array_bytes, shapes)) / max(whole, 1)


def _is_activation(subject: Subject, name: str, shapes: tuple[str, ...]) -> bool:
    """Whether a sum is over activations. A sum of gradients may be in float32."""
    if is_explicit(name) or not subject.in_loss(name):
        return False
    large = [dims(s) for s in shapes if array_bytes(s) >= subject.limits.activation_bytes]
    return bool(large) and not any(
        subject.is_leaf_shape(shape) or subject.is_leaf_in_shards(shape) for shape in large
    )


def _was_narrow(subject: Subject, placed: PlacedCollective) -> bool:
    """Whether every operand of a collective was converted from bfloat16 or float16."""
    values = subject.operands(placed)
    return bool(values) and all(_is_widened(subject, value) for value in values)


def _is_widened(subject: Subject, value: HloValue) -> bool:
    for _ in range(16):
        instruction = subject.module.instruction(value.computation, value.name)
        if instruction is None:
            return False
        if instruction.opcode == "fusion":
            called = instruction.called()[0]
            root = subject.module.root(called)
            if root is None:
                return False
            value = HloValue(called, root.name)
        elif instruction.opcode == "convert":
            (name,) = instruction.operand_names
            before = subject.module.instruction(value.computation, name)
            return before is not None and before.shape.startswith(("bf16", "f16"))
        elif instruction.opcode in _CARRIES:
            value = HloValue(value.computation, instruction.operand_names[0])
        else:
            return False
    return False


def _gets_narrow(subject: Subject, placed: PlacedCollective) -> bool:
    """Whether every use of a collective's result converts it to bfloat16 or float16."""
    instructions = subject.module.computations[placed.computation]
    done = [placed.instruction]
    if placed.instruction.opcode.endswith("-start"):
        done = [i for i in instructions if placed.instruction.name in i.operand_names]
    uses = [use for one in done for use in _uses(subject, placed.computation, one)]
    return bool(uses) and all(
        use.opcode == "convert" and use.shape.startswith(("bf16", "f16")) for use in uses
    )


def _uses(subject: Subject, computation: str, instruction: Instruction) -> Iterator[Instruction]:
    """Yields the instructions that read a value, through moves and fusions."""
    for user, position in subject.module.users(computation, instruction.name):
        if user.opcode in _CARRIES:
            yield from _uses(subject, computation, user)
        elif user.opcode == "fusion":
            called = user.attributes["calls"].lstrip("%")
            if parameter := subject.module.parameter(called, position):
                yield from _uses(subject, called, parameter)
        else:
            yield user


def computes_in_half(subject: Subject) -> bool:
    """Whether most matmul FLOPs of a step multiply bfloat16 or float16."""
    flops = _matmuls(subject)
    half = sum(f for p, f in flops if not _HALF.isdisjoint(_dtypes(p.equation)))
    return half > 0.5 * sum(f for _, f in flops)


def wide_matmuls(subject: Subject) -> Iterator[Finding]:
    """Yields SL402: matmuls of two float32 operands in a step that computes in bfloat16.

    Two kinds are not reported. Products of two activations, such as attention scores, are float32
    where they must be exact. Gradients of a float32 sum of bfloat16 products are float32.
    """
    if not computes_in_half(subject):
        return
    matmuls = _matmuls(subject)
    total = sum(flops for _, flops in matmuls)
    lines: dict[Where, list[tuple[Placed, float]]] = collections.defaultdict(list)
    for placed, flops in matmuls:
        if _dtypes(placed.equation) == {"float32"} and not _has_batch_dims(placed.equation):
            lines[where_of_equation(placed.equation)].append((placed, flops))
    for line, members in lines.items():
        share = sum(flops for _, flops in members) / total
        forward = [member for member in members if "transpose(" not in member[0].name]
        if share < subject.limits.flops_share or not forward:
            continue
        placed, _ = max(forward, key=lambda member: member[1])
        left, right = (array_text(v.aval) for v in placed.equation.invars[:2])
        name = f"{placed.name}/{placed.equation.primitive.name}"
        yield Finding.at(
            "SL402",
            line._replace(name=name),
            f"{left} times {right} multiplies float32 in a step of bfloat16 matmuls, "
            f"{share:.0%} of its FLOPs with its gradients: at half the rate or less.",
            "Cast both operands to bfloat16, and pass preferred_element_type=float32 where the sum "
            "needs it.",
        )


def _has_batch_dims(equation: JaxprEqn) -> bool:
    if equation.primitive.name != "dot_general":
        return False
    _, (batch, _) = equation.params["dimension_numbers"]
    return bool(batch)


def _matmuls(subject: Subject) -> list[tuple[Placed, float]]:
    if subject.jaxpr is None:
        return []
    pairs = ((placed, matmul_flops(placed.equation)) for placed in equations(subject.jaxpr))
    return [(p, flops * p.times * p.devices) for p, flops in pairs if flops and not p.in_kernel]


def _dtypes(matmul: JaxprEqn) -> set[str]:
    return {array_of(variable).dtype.name for variable in matmul.invars[:2]}
