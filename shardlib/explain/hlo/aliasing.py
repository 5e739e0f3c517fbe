"""Aliasing of results and operands: memory that an instruction shares, or may share.

Source: `HloAliasAnalysis` and `HloDataflowAnalysis::CanShareOperandBufferWithUser` of XLA.
"""

import re
from collections.abc import Iterator, Mapping

from shardlib.explain.hlo.text import Instruction, Module

ELEMENTWISE = frozenset(
    (
        *("abs", "add", "and", "atan2", "bitcast", "cbrt", "ceil", "clamp", "compare", "complex"),
        *("convert", "copy", "cosine", "divide", "erf", "exponential", "exponential-minus-one"),
        *("floor", "imag", "is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum"),
        *("multiply", "negate", "not", "or", "popcnt", "power", "real", "reduce-precision"),
        *("remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left"),
        *("shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt", "subtract"),
        *("tan", "tanh", "xor"),
    )
)


def in_place(module: Module, instruction: Instruction) -> list[tuple[int, int]]:
    """Returns the pairs of output and operand that share memory."""
    opcode = instruction.opcode
    if opcode in ("dynamic-update-slice", "scatter"):
        return [(0, 0)]
    if aliasing := instruction.attributes.get("output_to_operand_aliasing"):
        pairs = re.findall(r"\{(\d*)[\d, ]*\}: \((\d+), \{\}", aliasing)
        return [(int(output or 0), int(operand)) for output, operand in pairs]
    if opcode != "fusion" or not (called := instruction.called()):
        return []
    return list(_updated(module, called[0]))


def _updated(module: Module, fused: str) -> Iterator[tuple[int, int]]:
    """Yields output and parameter of each in-place update that a fused computation returns."""
    by_name = {i.name: i for i in module.computations.get(fused, ())}
    root = module.root(fused)
    results = [root] if root else []
    if root and root.opcode == "tuple":
        results = [by_name[name] for name in root.operand_names if name in by_name]
    for output, root in enumerate(results):
        update = _unmoved(root, by_name)
        if update is not None and update.opcode in ("dynamic-update-slice", "scatter"):
            target = _unmoved(_first_operand(update, by_name), by_name)
            if target is not None and target.opcode == "parameter":
                yield output, int(target.operands)


def _unmoved(
    instruction: Instruction | None, by_name: Mapping[str, Instruction]
) -> Instruction | None:
    """Returns what an instruction copies or converts, or the instruction itself."""
    while instruction is not None and instruction.opcode in ("bitcast", "copy", "convert"):
        instruction = _first_operand(instruction, by_name)
    return instruction


def _first_operand(
    instruction: Instruction, by_name: Mapping[str, Instruction]
) -> Instruction | None:
    names = instruction.operand_names
    return by_name.get(names[0]) if names else None


def shareable(module: Module, instruction: Instruction, outputs: int) -> list[tuple[int, int]]:
    """Returns the pairs of operand and output that may share memory, element by element."""
    # An all-reduce receives into its operand; on CPU the runtime sums into memory of its own.
    if instruction.opcode == "all-reduce-start" or (
        instruction.opcode == "all-reduce" and module.is_tiled
    ):
        return [(n, n) for n in range(outputs)]
    operands: tuple[int, ...] = ()
    if instruction.opcode in ELEMENTWISE and instruction.opcode != "copy":
        operands = tuple(range(len(instruction.operand_names)))
    elif instruction.opcode == "fusion" and (called := instruction.called()):
        config = instruction.attributes.get("backend_config", "")
        if "aliasing_operands" in config:
            return _declared(config, len(instruction.operand_names))
        operands = _elementwise_parameters(module.computations.get(called[0], ()))
    return [(operand, output) for operand in operands for output in range(outputs)]


def _declared(config: str, operands: int) -> list[tuple[int, int]]:
    """Returns the pairs that a TPU fusion declares; output numbers continue after the operands."""
    text = config.partition('"aliasing_operands":')[2].partition("]}]}")[0]
    groups = [
        [int(index) for index in re.findall(r"\d+", group)]
        for group in re.findall(r'"indices":\[([^\]]*)', text)
    ]
    return [
        (operand, output - operands)
        for group in groups
        for operand in group
        for output in group
        if operand < operands <= output
    ]


def _elementwise_parameters(fused: tuple[Instruction, ...]) -> tuple[int, ...]:
    """Returns the parameters that reach the results only through elementwise operations."""
    through: dict[str, bool] = {}
    users: dict[str, list[Instruction]] = {}
    for instruction in fused:
        for name in instruction.operand_names:
            users.setdefault(name, []).append(instruction)
    for instruction in reversed(fused):
        readers = users.get(instruction.name, [])
        through[instruction.name] = all(
            reader.opcode == "tuple"
            or (reader.opcode in ELEMENTWISE and through.get(reader.name, False))
            for reader in readers
        )
    return tuple(int(i.operands) for i in fused if i.opcode == "parameter" and through[i.name])
