"""Exact arithmetic, for each device, on the integers that locate a device on the mesh.

A partitioned program finds its parts by its partition id: it looks up an offset in a table, or
computes it. These integers are few and small, so they are followed exactly.
"""

import re

import numpy as np

from shardlib.explain.hlo.text import Instruction
from shardlib.explain.wrong_numbers.values import LARGEST, Context, SpmdValue, shapes_of

_COMPARE = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
_TWO = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_SHIFTS = {
    "shift-left": np.left_shift,
    "shift-right-logical": np.right_shift,
    "shift-right-arithmetic": np.right_shift,
}


def constant(context: Context, instruction: Instruction) -> SpmdValue | None:
    """Returns the value of a small integer constant, or None for any other constant."""
    dtype = instruction.shape.partition("[")[0]
    shape = (shapes_of(instruction.shape) or [()])[0]
    text = instruction.operands
    if len(text) > 8 * LARGEST or dtype[:1] not in ("s", "u", "p"):
        return None
    numbers = [_number(part) for part in re.findall(r"-?\d+|true|false", text)]
    if len(numbers) != int(np.prod(shape, dtype=np.int64)):
        return None
    return context.known(np.array(numbers, np.int64).reshape(1, *shape), shape)


def _number(text: str) -> int:
    return int(text) if text not in ("true", "false") else int(text == "true")


def computed(
    context: Context, instruction: Instruction, operands: list[SpmdValue]
) -> SpmdValue | None:
    """Returns the result of an operation on known integers, or None if it is unknown."""
    if not operands or any(operand.numbers is None for operand in operands):
        return None
    shape = (shapes_of(instruction.shape) or [()])[0]
    arrays = [context.numbers(operand) for operand in operands]
    if instruction.shape[:1] not in ("s", "u", "p") or np.prod(shape, dtype=np.int64) > LARGEST:
        return None
    array = _array(instruction, [a for a in arrays if a is not None], shape, context)
    return None if array is None else context.known(array, shape)


def _array(
    instruction: Instruction,
    arrays: list[np.ndarray],
    shape: tuple[int, ...],
    context: Context,
) -> np.ndarray | None:
    opcode = instruction.opcode
    if opcode in _TWO:
        return _TWO[opcode](*arrays)
    if opcode in _SHIFTS:
        return _SHIFTS[opcode](arrays[0], np.clip(arrays[1], 0, 62))
    if opcode in ("divide", "remainder"):
        divisor = np.where(arrays[1] == 0, 1, arrays[1])
        quotient = np.trunc(arrays[0] / divisor).astype(np.int64)
        return quotient if opcode == "divide" else arrays[0] - quotient * divisor
    if opcode == "compare":
        return _COMPARE[instruction.attributes["direction"]](*arrays)
    if opcode == "select":
        return np.where(arrays[0] != 0, arrays[1], arrays[2])
    if opcode == "clamp":
        return np.minimum(np.maximum(arrays[1], arrays[0]), arrays[2])
    if opcode in ("convert", "copy"):
        return arrays[0]
    if opcode in ("negate", "not"):
        is_bool = instruction.shape.startswith("pred")
        return (1 - arrays[0]) if opcode == "not" and is_bool else -arrays[0] - (opcode == "not")
    if opcode in ("bitcast", "reshape"):
        return arrays[0].reshape(len(arrays[0]), *shape)
    if opcode == "broadcast" and not arrays[0][0].shape:
        return np.broadcast_to(arrays[0].reshape(-1, *[1] * len(shape)), (len(arrays[0]), *shape))
    if opcode == "dynamic-slice" and arrays[0].ndim == 2:
        return _looked_up(arrays[0], arrays[1], shape[0], context.vectors.devices)
    return None


def _looked_up(table: np.ndarray, start: np.ndarray, size: int, devices: int) -> np.ndarray:
    starts = np.clip(np.broadcast_to(start.reshape(-1), (devices,)), 0, table.shape[1] - size)
    rows = np.broadcast_to(table, (devices, table.shape[1]))
    return np.stack([row[at : at + size] for row, at in zip(rows, starts, strict=True)])
