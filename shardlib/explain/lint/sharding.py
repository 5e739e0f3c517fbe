"""Checks for replicated leaves (SL101) and batches (SL102), and for rematerialization (SL104)."""

import collections
import math
import re
from collections.abc import Iterator

from shardlib import humanize
from shardlib.explain.analysis.params import ParamsReport
from shardlib.explain.hlo.provenance import Where, where_of
from shardlib.explain.hlo.text import Instruction, array_bytes
from shardlib.explain.lint.arguments import Argument
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.subject import BATCH_AXES, Subject, array_text

_SECTIONS = ("params", "model_state", "opt_state")


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
                "Choose a size and a mesh that divide, or write None among the rule's alternatives "
                "if it is meant.",
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
        cut = sum(leaf.num_bytes for leaf in leaves if leaf.shards(subject.mesh) > 1)
        if 2 * cut < sum(leaf.num_bytes for leaf in leaves):
            continue
        used = {name for leaf in leaves for entry in leaf.spec or () for name in entry}
        axes = [name for name, size in subject.mesh.items() if size > 1 and name in used]
        for leaf in leaves:
            fits = [(name, dim) for name in axes if (dim := _divided(leaf, subject.mesh[name]))]
            if leaf.shards(subject.mesh) > 1 or not fits:
                continue
            if leaf.num_bytes >= subject.limits.replicated_bytes:
                yield _whole(subject, leaf, *max(fits, key=lambda fit: subject.mesh[fit[0]]))


def _whole(subject: Subject, leaf: Argument, name: str, dim: int) -> Finding:
    size = subject.mesh[name]
    return Finding(
        "SL101",
        leaf.path,
        f"{leaf.path} {array_text(leaf)} is replicated on every device, "
        f"{humanize.size(leaf.num_bytes)}, but most leaves around it are sharded over "
        f"{name}={size}.",
        f"Shard its dim {dim - 1} of {leaf.shape[dim - 1]} over {name!r}.",
        subject.step_source,
        bytes=leaf.num_bytes * (1 - 1 / size),
    )


def _group(leaf: Argument) -> tuple[str, ...]:
    """Returns the group of a leaf: its argument, or its section of a training state."""
    parts = leaf.path.split("/")
    return tuple(parts[: 2 if len(parts) > 1 and parts[1] in _SECTIONS else 1])


def _divided(leaf: Argument, size: int) -> int:
    """Returns the largest dim that a mesh axis of this size divides, counted from 1, or 0."""
    dims = [dim for dim, length in enumerate(leaf.shape) if length % size == 0]
    return 1 + max(dims, key=lambda dim: leaf.shape[dim], default=-1)


def whole_batch(subject: Subject) -> Iterator[Finding]:
    """Yields SL102: a batch whose rows no mesh axis splits, so replicas compute the same."""
    axes = _row_axes(subject)
    known = [leaf for leaf in subject.batch if leaf.spec is not None]
    if not axes or any(name in axes for leaf in known for name in leaf.spec[0]):  # type: ignore[index]
        return
    # An array that is not named as a batch may be a key or a table.
    large = subject.limits.activation_bytes
    known = [leaf for leaf in known if leaf.category == "batch" or leaf.num_bytes >= large]
    if not known:
        return
    leaf = max(known, key=lambda leaf: leaf.num_bytes)
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


def rematerialized(subject: Subject) -> Iterator[Finding]:
    """Yields SL104: tensors that the partitioner's warnings say it gathers and shards again."""
    for key, count in collections.Counter(_rematerialized(subject)).items():
        shape, way, where, whole = key
        times = f" ({count} times)" if count > 1 else ""
        yield Finding(
            "SL104",
            where.place(shape),
            f"{shape} on each device is gathered to {humanize.size(whole)} and sharded again{way}"
            f"{times}: the compiler found no direct way between the two shardings.",
            "Constrain the tensor to a sharding between the two, one mesh axis at a time. For "
            "table[ids], shard only one dim of the table.",
            where.source,
            where.name,
            whole * count,
        )


def _rematerialized(subject: Subject) -> Iterator[tuple[str, str, Where, int]]:
    """Yields the shape, shardings, place and bytes of the whole tensor of each warning."""
    for line in subject.warnings.splitlines():
        if "nvoluntary full rematerialization" not in line:
            continue
        _, _, text = line.partition("HLO operation")
        named = re.search(r"%?([\w.\-]+) = ([a-z0-9]+\[[\d,]*\])", text)
        metadata = re.search(r"metadata=\{(.*)\}", text)
        operation = Instruction(
            "", "", "", "", {"metadata": f"{{{metadata[1]}}}" if metadata else ""}
        )
        way = re.search(r"sharding (\{.*?\}) to (\{.*?\}) ", line)
        shape = named[2] if named else "a tensor"
        tiles = re.search(r"devices=\[([\d,]+)\]", way[1]) if way else None
        shards = math.prod(map(int, tiles[1].split(","))) if tiles else 1
        if way and "last_tile_dim_replicate" in way[1] and tiles:
            shards //= int(tiles[1].rpartition(",")[2])
        yield (
            shape,
            f", from {way[1]} to {way[2]}" if way else "",
            where_of(subject.module, operation),
            array_bytes(shape) * shards,
        )
