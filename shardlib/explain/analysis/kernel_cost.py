"""FLOPs and memory traffic of the instructions of a compiled program, on one device.

Bytes count the operands and results of each kernel: intermediate values of a fusion never reach
memory. If a kernel only reads a slice of an operand, the slice counts. If it updates a buffer in
place, the update counts. Source: XLA's `HloCostAnalysis`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from shardlib.explain.hlo.layouts import device_bytes
from shardlib.explain.hlo.text import Instruction, Module, dims, elements, result_shape

_NOTHING = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"),
        *("conditional", "after-all", "partition-id", "replica-id", "optimization-barrier"),
        *("async-update", "async-done", "async-start", "send-done", "recv-done", "copy-done"),
    )
)
_CUTS = ("dynamic-slice", "gather", "slice")
_CARRIES = ("bitcast", "convert", "copy", "reshape", "transpose")


@dataclasses.dataclass(frozen=True)
class KernelCosts:
    """FLOPs and bytes of the instructions of one program, per execution."""

    module: Module

    @functools.cached_property
    def kernels(self) -> tuple[tuple[str, Instruction], ...]:
        """The instructions that run as kernels of their own, with their computations."""
        inside = {
            name
            for instructions in self.module.computations.values()
            for instruction in instructions
            if instruction.opcode not in ("while", "conditional", "call")
            for name in instruction.called()
        }
        return tuple(
            (where, instruction)
            for where, instructions in self.module.computations.items()
            if where not in inside
            for instruction in instructions
            if instruction.opcode not in _NOTHING and not instruction.opcode.endswith("-done")
        )

    def bytes_of(self, computation: str, instruction: Instruction) -> int:
        """Returns the bytes of device memory that a kernel reads and writes."""
        if instruction.opcode in _NOTHING:
            return 0
        operands = [self._bytes(computation, name) for name in instruction.operand_names]
        result = self._size(instruction.shape)
        if instruction.opcode in _CUTS:
            return 2 * result + sum(operands[1:])
        if instruction.opcode == "dynamic-update-slice":
            return 2 * operands[1] + sum(operands[2:])
        if instruction.opcode == "scatter":
            return sum(operands[1:]) + operands[-1]
        if instruction.opcode == "fusion":
            return self._fusion_bytes(computation, instruction)
        if instruction.opcode.endswith("-start"):
            return sum(operands) + self._size(result_shape(instruction))
        return sum(operands) + result

    def _fusion_bytes(self, computation: str, fusion: Instruction) -> int:
        (called,) = fusion.called()[:1] or ("",)
        body = self.module.computations.get(called, ())
        parameters = {int(i.operands): i.name for i in body if i.opcode == "parameter"}
        updated, written = self._written(called, body, fusion)
        total = written
        for position, name in enumerate(fusion.operand_names):
            parameter = parameters.get(position, "")
            if parameter in updated:
                continue
            whole = self._bytes(computation, name)
            cut = self._cut(called, body, parameter)
            total += whole if cut is None else min(cut, whole)
        return total

    def _written(
        self, called: str, body: tuple[Instruction, ...], fusion: Instruction
    ) -> tuple[set[str], int]:
        """Returns the parameters that are updated in place, and the bytes written."""
        by_name = {instruction.name: instruction for instruction in body}
        root = self.module.root(called)
        if root is None:
            return set(), self._size(fusion.shape)
        ends = [root]
        if root.opcode == "tuple":
            ends = [by_name[name] for name in root.operand_names if name in by_name]
        updated, written = set(), 0
        for end in ends:
            while end.opcode in _CARRIES and end.operand_names[0] in by_name:
                end = by_name[end.operand_names[0]]
            if end.opcode != "dynamic-update-slice":
                written += self._size(end.shape)
                continue
            into, update = end.operand_names[:2]
            written += self._bytes(called, update)
            while into in by_name and by_name[into].opcode in _CARRIES:
                into = by_name[into].operand_names[0]
            updated.add(into)
        return updated, written

    def _cut(self, called: str, body: tuple[Instruction, ...], name: str) -> int | None:
        """Returns the bytes read of a parameter if only slices of it are read, else None."""
        total = 0
        for user in body:
            if name not in user.operand_names:
                continue
            if user.opcode in _CUTS and user.operand_names[0] == name:
                total += self._size(user.shape)
            elif user.opcode == "bitcast":
                inner = self._cut(called, body, user.name)
                if inner is None:
                    return None
                total += inner
            else:
                return None
        return total

    def flops_of(self, computation: str, instruction: Instruction) -> float:
        """Returns the FLOPs of the matmuls of an instruction, including matmuls in a fusion."""
        if instruction.opcode in ("dot", "convolution") or "gemm" in _target(instruction):
            return self._matmul(computation, instruction)
        if instruction.opcode not in ("fusion", "call", "async-start"):
            return 0.0
        return sum(
            self.flops_of(called, inner)
            for called in instruction.called()
            for inner in self.module.computations.get(called, ())
        )

    def _matmul(self, computation: str, instruction: Instruction) -> float:
        names = instruction.operand_names
        left, right = (dims(self._shape(computation, name)) for name in names[:2])
        result = dims(elements(instruction.shape)[0])
        out = math.prod(result)
        if instruction.opcode == "convolution":
            return 2.0 * out * _summed(instruction, left, right, result)
        text = instruction.attributes.get("lhs_contracting_dims", "")
        if not text:
            config = instruction.attributes.get("backend_config", "")
            match = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', config)
            text = match[1] if match else ""
        summed = [int(dim) for dim in re.findall(r"\d+", text)]
        return 2.0 * out * math.prod(left[dim] for dim in summed if dim < len(left))

    def _bytes(self, computation: str, name: str) -> int:
        return self._size(self._shape(computation, name))

    def _shape(self, computation: str, name: str) -> str:
        found = self.module.instruction(computation, name)
        return found.shape if found else ""

    def _size(self, shape: str) -> int:
        tiled = self.module.is_tiled
        return sum(device_bytes(leaf, tiled=tiled) for leaf in leaves(shape))


def leaves(shape: str) -> Iterator[str]:
    """Yields the arrays of a shape with their layouts."""
    if shape.startswith("("):
        for element in elements(shape):
            yield from leaves(element)
    elif shape:
        yield shape


def _target(instruction: Instruction) -> str:
    return instruction.attributes.get("custom_call_target", "")


def _summed(
    instruction: Instruction,
    left: tuple[int, ...],
    right: tuple[int, ...],
    out: tuple[int, ...],
) -> float:
    """Returns the number of products that a convolution sums for each element of its result.

    TPU programs write matmuls as convolutions whose spatial dims hold batches or several rows. Most
    steps of such a window meet padding, and only one product remains.
    """
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attributes.get("dim_labels", ""))
    if labels is None or (len(left), len(right), len(out)) != tuple(map(len, labels.groups())):
        return 0.0
    count = float(right[labels[2].index("i")])
    for mark in filter(str.isdigit, labels[2]):
        window = right[labels[2].index(mark)]
        read, written = left[labels[1].index(mark)], out[labels[3].index(mark)]
        is_batch = read == window == written
        count *= 1 if min(read, window) == 1 or (is_batch and written > 1) else window
    return count
