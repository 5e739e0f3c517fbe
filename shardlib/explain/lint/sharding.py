"""Checks of shardings: replicated leaves (SL101), batches (SL102) and logits (SL103) that are whole
on every device, rematerialized tensors (SL104) and padded dims (SL105)."""

import collections
import math
import re
from collections.abc import Iterator

from shardlib import humanize
from shardlib.explain.analysis.collectives import axes_text
from shardlib.explain.analysis.kernel_cost import KernelCosts
from shardlib.explain.analysis.params import SECTIONS, ParamsReport
from shardlib.explain.hlo.provenance import Where, is_library, where_of
from shardlib.explain.hlo.text import Instruction, array_bytes, dims
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.subject import (
    BATCH_AXES,
    Argument,
    PlacedCollective,
    Subject,
    array_text,
    times_a_step,
)

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


def replicated_leaves(subject: Subject) -> Iterator[Finding]:
    """Yields SL101: leaves replicated against their rule, or unlike most leaves around them."""
    if subject.state is not None:
        yield from _against_rules(subject, subject.state)
    else:
        yield from _against_others(subject)


def _against_rules(subject: Subject, state: ParamsReport) -> Iterator[Finding]:
    """Yields the leaves that fell back from their rule because of their dim sizes.

    A leaf whose axis is missing in the mesh is replicated by choice.
    """
    fell_back = {row.path for row in state.rows if row.fell_back}
    for fault in state.faults(subject.limits.replicated_bytes):
        if fault.path in fell_back:
            yield Finding(
                "SL101",
                fault.path,
                f"{fault.path} ({humanize.size(fault.bytes_per_device)} on each device) is more "
                f"replicated than its rule wants: {fault.reason}.",
                "Choose a size and a mesh that divide, or accept the finding if it is meant.",
                subject.step_source,
                bytes=fault.bytes_per_device,
            )


def _against_others(subject: Subject) -> Iterator[Finding]:
    """Yields the replicated leaves of a group whose bytes are mostly sharded, without rules."""
    groups: dict[tuple[str, ...], list[Argument]] = collections.defaultdict(list)
    for leaf in subject.leaves:
        if leaf.is_state and leaf.spec is not None:
            groups[_group(leaf)].append(leaf)
    for leaves in groups.values():
        cut = sum(leaf.num_bytes for leaf in leaves if leaf.shards > 1)
        if 2 * cut < sum(leaf.num_bytes for leaf in leaves):
            continue
        used = {name for leaf in leaves for entry in leaf.spec or () for name in entry}
        axes = {name: n for name, n in subject.mesh.items() if n > 1 and name in used}
        for leaf in leaves:
            fits = [name for name, n in axes.items() if _divided(leaf, n) is not None]
            if leaf.shards == 1 and fits and leaf.num_bytes >= subject.limits.replicated_bytes:
                yield _replicated(subject, leaf, max(fits, key=axes.__getitem__))


def _replicated(subject: Subject, leaf: Argument, axis: str) -> Finding:
    size = subject.mesh[axis]
    dim = _divided(leaf, size)
    assert dim is not None
    return Finding(
        "SL101",
        leaf.path,
        f"{leaf.path} {array_text(leaf)} is replicated on every device, "
        f"{humanize.size(leaf.num_bytes)}, but most leaves around it are sharded over "
        f"{axis}={size}.",
        f"Shard its dim {dim} of {leaf.shape[dim]} over {axis!r}.",
        subject.step_source,
        bytes=leaf.num_bytes * (1 - 1 / size),
    )


def _group(leaf: Argument) -> tuple[str, ...]:
    """Returns the group of a leaf: its argument, or its section of a training state."""
    parts = leaf.path.split("/")
    return tuple(parts[: 2 if len(parts) > 1 and parts[1] in SECTIONS else 1])


def _divided(leaf: Argument, size: int) -> int | None:
    """Returns the largest dim that a mesh axis of this size divides."""
    fits = [dim for dim, length in enumerate(leaf.shape) if length % size == 0]
    return max(fits, key=lambda dim: leaf.shape[dim], default=None)


def whole_batch(subject: Subject) -> Iterator[Finding]:
    """Yields SL102: a batch whose rows no mesh axis splits, so replicas compute the same."""
    axes = _row_axes(subject)
    leaves = [leaf for leaf in subject.batch if leaf.spec is not None]
    if not axes or any(name in axes for leaf in leaves for name in leaf.spec[0]):  # type: ignore[index]
        return
    # An array that is not named as a batch may be a key or a table.
    large = subject.limits.activation_bytes
    leaves = [leaf for leaf in leaves if leaf.category == "batch" or leaf.num_bytes >= large]
    leaf = max(leaves, key=lambda leaf: leaf.num_bytes, default=None)
    if leaf is None:
        return
    copies = math.prod(subject.mesh[name] for name in axes)
    named = "+".join(axes)
    yield Finding(
        "SL102",
        leaf.path,
        f"{leaf.path} {array_text(leaf)} is replicated on all {copies} devices along {named}: "
        "they all compute the same.",
        f"Shard its dim 0 of {leaf.shape[0]} over {named}.",
        subject.step_source,
        bytes=leaf.num_bytes * (1 - 1 / copies),
    )


def _row_axes(subject: Subject) -> list[str]:
    """Returns the mesh axes that should split the rows: the preset batch axes, or the axes that
    split nothing else if the mesh has no preset batch axis."""
    if any(name in subject.mesh for name in BATCH_AXES):
        return [name for name in BATCH_AXES if subject.mesh.get(name, 1) > 1]
    used = {
        name
        for leaf in subject.leaves
        for entry in (leaf.spec or ())[0 if leaf.is_state else 1 :]
        for name in entry
    }
    return [name for name in subject.own_axes if name not in used]


def gathered_activations(subject: Subject) -> Iterator[Finding]:
    """Yields SL102 and SL103: activations gathered along their rows or along the vocabulary."""
    lines: dict[tuple[str, Where], list[tuple[str, PlacedCollective, bool]]]
    lines = collections.defaultdict(list)
    for placed in subject.collectives:
        axes, large = set(placed.collective.mesh_axes or ()), subject.limits.activation_bytes
        if placed.collective.kind != "all-gather" or not axes or placed.bytes < large:
            continue
        where = subject.where(placed)
        if not subject.in_loss(where.name):
            continue
        is_weight = subject.is_parameter(placed)
        # The axis `expert` exchanges tokens.
        splits_rows = bool(axes & set(subject.batch_axes) - {"expert"})
        for shape in placed.collective.shapes:
            if array_bytes(shape) < large:
                continue
            size = (*dims(shape), *[0] * placed.gather_dim)[placed.gather_dim]
            code = ""
            if size in subject.vocabularies and not axes & {*subject.batch_axes, "context"}:
                code = "SL103"
            elif splits_rows and size in subject.rows and not is_weight:
                code = "" if subject.is_leaf_shape(dims(shape)) else "SL102"
            if code:
                lines[code, where].append((shape, placed, is_weight))
    for (code, where), members in lines.items():
        yield _gathered(code, where, members)


def _gathered(
    code: str, where: Where, members: list[tuple[str, PlacedCollective, bool]]
) -> Finding:
    shape, placed, is_weight = max(members, key=lambda member: array_bytes(member[0]))
    counts = [(array_bytes(shape), placed.collective.count) for shape, placed, _ in members]
    axes = axes_text(placed.collective.mesh_axes)
    over = f"gathered over {axes}{times_a_step(sum(count for _, count in counts))}"
    size = humanize.size(array_bytes(shape))
    if code == "SL102":
        message = (
            f"{shape} ({size}) is {over}: every device holds all the rows that the mesh splits."
        )
        fix = f"Constrain the activation so that its batch dim stays sharded over {axes}."
    else:
        what = "the weights of the logits" if is_weight else "logits"
        message = (
            f"{what}, {shape} ({size}), are {over}: each device holds logits of the whole "
            "vocabulary."
        )
        fix = (
            f"Shard the logits over {axes} along the vocabulary, and compute the loss with "
            "reductions, as shardlib.losses does."
        )
    return Finding.at(code, where, message, fix, sum(size * count for size, count in counts))


def rematerialized(subject: Subject) -> Iterator[Finding]:
    """Yields SL104: tensors that the partitioner's warnings say it gathers and shards again."""
    for key, count in collections.Counter(_rematerialized(subject)).items():
        shape, way, where, whole = key
        times = f" ({count} times)" if count > 1 else ""
        yield Finding.at(
            "SL104",
            where,
            f"{shape} on each device is gathered to {humanize.size(whole)} and sharded again{way}"
            f"{times}: the compiler found no direct way between the two shardings.",
            "Constrain the tensor to a sharding between the two, one mesh axis at a time. For "
            "table[ids], shard only one dim of the table.",
            whole * count,
            otherwise=shape,
        )


def _rematerialized(subject: Subject) -> Iterator[tuple[str, str, Where, int]]:
    """Yields the shape, shardings, place and bytes of the whole tensor of each warning."""
    for line in subject.warnings.splitlines():
        if "nvoluntary full rematerialization" not in line:
            continue
        _, _, text = line.partition("HLO operation")
        named = re.search(r"%?([\w.\-]+) = ([a-z0-9]+\[[\d,]*\])", text)
        metadata = re.search(r"metadata=\{(.*)\}", text)
        attributes = {"metadata": f"{{{metadata[1]}}}" if metadata else ""}
        where = where_of(subject.module, Instruction("", "", "", "", attributes))
        way = re.search(r"sharding (\{.*?\}) to (\{.*?\}) ", line)
        shape = named[2] if named else "a tensor"
        tiles = re.search(r"devices=\[([\d,]+)\]", way[1]) if way else None
        shards = math.prod(map(int, tiles[1].split(","))) if tiles else 1
        if way and "last_tile_dim_replicate" in way[1] and tiles:
            shards //= int(tiles[1].rpartition(",")[2])
        shardings = f", from {way[1]} to {way[2]}" if way else ""
        yield shape, shardings, where, array_bytes(shape) * shards


def padded(subject: Subject) -> Iterator[Finding]:
    """Yields SL105: matmuls with dims padded on TPU, leaves with dims misaligned on GPU."""
    if subject.platform == "tpu":
        yield from _padded_matmuls(subject)
    elif subject.platform == "gpu":
        yield from _odd_leaves(subject)


def _padded_matmuls(subject: Subject) -> Iterator[Finding]:
    lines: dict[tuple[Where, int], list[tuple[Instruction, float, float]]]
    lines = collections.defaultdict(list)
    total, costs = 0.0, KernelCosts(subject.module)
    for computation, instruction in subject.module.each("convolution"):
        sizes = _sizes(subject, computation, instruction)
        # The architecture fixes the channels of a convolution.
        if sizes is None or instruction.op_name.endswith("conv_general_dilated"):
            continue
        contracted, last = sizes
        flops = costs.flops_of(computation, instruction)
        flops *= subject.module.execution(computation).count
        total += flops
        size = min((contracted, last), key=lambda n: n / _rounded(n))
        ratio = _rounded(contracted) * _rounded(last) / (contracted * last)
        where = where_of(subject.module, instruction)
        where = where._replace(name="", model_path="", phase="")
        # The user does not choose the sizes of an optimizer's own matmuls.
        chosen = subject.in_loss(instruction.op_name) and not is_library(where.source)
        if chosen and ratio >= 1 + subject.limits.padding_waste:
            lines[where, size].append((instruction, flops, ratio))
    for (_, size), members in lines.items():
        wasted = sum(flops * (ratio - 1) for _, flops, ratio in members)
        if wasted < subject.limits.flops_share * total:
            continue
        first = max(members, key=lambda member: member[1])[0]
        yield Finding.at(
            "SL105",
            where_of(subject.module, first),
            f"a dim of {size} is padded to {_rounded(size)} in {len(members)} matmul"
            f"{'s' * (len(members) > 1)} of this line: {wasted / total:.0%} of the step's matmul "
            "FLOPs multiply zeros.",
            f"Choose a size that is a multiple of {LANES} on each device (for heads, fewer and "
            "larger ones), or a mesh that splits it less.",
            otherwise=first.name,
        )


def _sizes(subject: Subject, computation: str, instruction: Instruction) -> tuple[int, int] | None:
    """Returns the contracted size of a matmul, and the size of its last dims."""
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attributes.get("dim_labels", ""))
    operands = [subject.module.instruction(computation, name) for name in instruction.operand_names]
    if labels is None or len(operands) != 2 or None in operands:
        return None
    left, right = (dims(operand.shape) for operand in operands)  # type: ignore[union-attr]
    result = dims(instruction.shape)
    if (len(left), len(right), len(result)) != tuple(map(len, labels.groups())):
        return None
    contracted = left[labels[1].index("f")]
    last = result[labels[3].index("f")]
    # A matmul over several dims has the remaining ones as spatial dims.
    for mark in filter(str.isdigit, labels[2]):
        window, written = right[labels[2].index(mark)], result[labels[3].index(mark)]
        read = left[labels[1].index(mark)]
        if read == 1 and window == written:
            last *= window
        elif written == 1 and window == read:
            contracted *= window
    return contracted, last


def _rounded(size: int) -> int:
    return -(-size // LANES) * LANES


def _odd_leaves(subject: Subject) -> Iterator[Finding]:
    for leaf in subject.leaves:
        held = leaf.bytes_per_device
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
