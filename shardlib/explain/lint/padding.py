"""Check for dims that a matrix unit pads, such as heads and vocabularies (SL105)."""

import collections
import math
import re
from collections.abc import Iterator

from shardlib import humanize
from shardlib.explain.hlo.provenance import Where, is_library, where_of
from shardlib.explain.hlo.text import Instruction
from shardlib.explain.lint.activations import in_loss
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.shardings import dims
from shardlib.explain.lint.subject import Subject, each

LANES = 128
"""Columns of a TPU's matrix unit. Contracted dims and a result's last dim are padded to it.

Source: Cloud TPU documentation, "Performance guide": dims are padded to multiples of 128.
"""
ALIGNED = 8
"""Multiple that a GPU's tensor cores want for a dim: 16 bytes, or 8 bfloat16 numbers.

Source: NVIDIA, "Matrix Multiplication Background User's Guide", section 4.1.
"""
_LONG = 128
"""Shorter dims, such as a number of heads, are merged with others."""


def padded(subject: Subject) -> Iterator[Finding]:
    """Yields SL105: matmuls with dims padded on TPU, leaves with dims misaligned on GPU."""
    if subject.platform == "tpu":
        yield from _padded_matmuls(subject)
    elif subject.platform == "gpu":
        yield from _odd_leaves(subject)


def _padded_matmuls(subject: Subject) -> Iterator[Finding]:
    lines: dict[tuple[Where, int], list[tuple[Instruction, float, float]]]
    lines = collections.defaultdict(list)
    total = 0.0
    for computation, instruction in each(subject, ("convolution",)):
        sizes = _sizes(subject, computation, instruction)
        # The architecture fixes the channels of a convolution.
        if sizes is None or instruction.op_name.endswith("conv_general_dilated"):
            continue
        flops, contracted, last = sizes
        flops *= subject.module.execution(computation).count
        total += flops
        size = min((contracted, last), key=lambda n: n / _rounded(n))
        ratio = _rounded(contracted) * _rounded(last) / (contracted * last)
        where = where_of(subject.module, instruction)
        where = where._replace(name="", model_path="", phase="")
        # The user does not choose the sizes of an optimizer's own matmuls.
        chosen = in_loss(subject, instruction.op_name) and not is_library(where.source)
        if chosen and ratio >= 1 + subject.limits.padding_waste:
            lines[where, size].append((instruction, flops, ratio))
    for (where, size), members in lines.items():
        wasted = sum(flops * (ratio - 1) for _, flops, ratio in members)
        if wasted < subject.limits.flops_share * total:
            continue
        first = max(members, key=lambda member: member[1])[0]
        name = first.op_name
        yield Finding(
            "SL105",
            where_of(subject.module, first).place(first.name),
            f"a dim of {size} is padded to {_rounded(size)} in {len(members)} matmul"
            f"{'s' * (len(members) > 1)} of this line: {wasted / total:.0%} of the step's matmul "
            "FLOPs multiply zeros.",
            f"Choose a size that is a multiple of {LANES} on each device (for heads, fewer and "
            "larger ones), or a mesh that splits it less.",
            where.source,
            name,
        )


def _sizes(
    subject: Subject, computation: str, instruction: Instruction
) -> tuple[float, int, int] | None:
    """Returns the FLOPs of a matmul, its contracted size and the size of its last dims."""
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attributes.get("dim_labels", ""))
    operands = [subject.values.instruction(computation, name) for name in instruction.operand_names]
    if labels is None or len(operands) != 2 or None in operands:
        return None
    left, right = (dims(operand.shape) for operand in operands)  # type: ignore[union-attr]
    result = dims(instruction.shape)
    if (len(left), len(right), len(result)) != tuple(map(len, labels.groups())):
        return None
    contracted = left[labels[1].index("f")]
    last = result[labels[3].index("f")]
    rows = result[labels[3].index("b")]
    # A matmul over several dims has the remaining ones as spatial dims.
    for mark in filter(str.isdigit, labels[2]):
        window, written = right[labels[2].index(mark)], result[labels[3].index(mark)]
        read = left[labels[1].index(mark)]
        if read == 1 and window == written:
            last *= window
        elif written == 1 and window == read:
            contracted *= window
        else:
            rows *= written
    return 2.0 * rows * contracted * last, contracted, last


def _rounded(size: int) -> int:
    return -(-size // LANES) * LANES


def _odd_leaves(subject: Subject) -> Iterator[Finding]:
    for leaf in subject.leaves:
        held = leaf.num_bytes / leaf.shards(subject.mesh)
        large = leaf.is_state and len(leaf.shape) > 1 and held >= subject.limits.replicated_bytes
        if not large or leaf.category == "optimizer":
            continue
        spec = leaf.spec or ((),) * len(leaf.shape)
        for dim, (size, axes) in enumerate(zip(leaf.shape, spec, strict=True)):
            cut = math.prod(subject.mesh.get(name, 1) for name in axes)
            here = size // cut
            if here <= _LONG or here % ALIGNED == 0:
                continue
            among = f" over {'+'.join(axes)}={cut}" if cut > 1 else ""
            wanted = -(-size // (ALIGNED * cut)) * ALIGNED * cut
            yield Finding(
                "SL105",
                leaf.path,
                f"{leaf.path} has a dim {dim} of {size}{among}: {here} on a device is not a "
                f"multiple of {ALIGNED}, so {humanize.size(held)} are copied to padded rows before "
                "each matmul.",
                f"Pad it to {wanted}.",
                subject.step_source,
                bytes=held,
            )
