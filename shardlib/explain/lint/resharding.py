"""Checks for implicit resharding (SL201) and for collectives along no mesh axis (SL203)."""

import collections
from collections.abc import Iterator

from shardlib import humanize
from shardlib.explain.analysis.collectives import axes_text
from shardlib.explain.analysis.explicit import is_explicit
from shardlib.explain.hlo.provenance import Where, is_library
from shardlib.explain.lint.activations import (
    in_loss,
    is_parameter,
    rows_and_lengths,
    shape_of_leaf,
    vocabularies,
)
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.shardings import dims
from shardlib.explain.lint.subject import Placed, Subject, largest


def resharded(subject: Subject) -> Iterator[Finding]:
    """Yields SL201: collectives that the compiler inserts to reshard a tensor."""
    found: dict[tuple[str, Where], list[Placed]] = collections.defaultdict(list)
    for placed in subject.collectives:
        where = subject.where(placed)
        large = placed.bytes >= subject.limits.activation_bytes
        implied = where.name and not is_explicit(where.name)
        if large and implied and _changes_sharding(subject, placed, where):
            found[placed.collective.kind, where].append(placed)
    for (kind, where), members in found.items():
        first = max(members, key=lambda placed: placed.bytes).collective
        count = sum(placed.collective.count for placed in members)
        times = f", {count} times a step" if count > 1 else ""
        yield Finding(
            "SL201",
            where.place(),
            f"{largest(first.shapes)} ({humanize.size(first.bytes)}) is resharded by {_a(kind)} "
            f"over {axes_text(first.mesh_axes)}{times}: no rule asks for it.",
            "Constrain the tensor to the same sharding before and after this line, or to the "
            "sharding of the rest of the layer.",
            where.source,
            where.name,
            sum(placed.collective.sent_bytes for placed in members),
        )


def _changes_sharding(subject: Subject, placed: Placed, where: Where) -> bool:
    collective, of_loss = placed.collective, in_loss(subject, where.name)
    # Users cannot add constraints inside a library's optimizer.
    if not of_loss and is_library(where.source):
        return False
    if collective.kind == "collective-permute":
        return bool(collective.mesh_axes is None or collective.mesh_axes)
    if collective.kind == "all-to-all":
        # GShard's constraints send tokens to experts on purpose.
        return collective.mesh_axes is None or set(collective.mesh_axes) != {"expert"}
    if collective.kind != "all-gather" or not collective.mesh_axes or not of_loss:
        return False
    # Only the arguments show which axes split the batch, and so which gathers are intended.
    if not subject.batch:
        return False
    if set(collective.mesh_axes) & {*subject.batch_axes, "context", "expert"}:
        return False
    # A gather by a constraint is intended, and SL103 covers logits.
    vocab = vocabularies(subject)
    if where.name.endswith("sharding_constraint"):
        return False
    dim = int(placed.instruction.attributes.get("dimensions", "{0}").strip("{}") or 0)
    sizes = rows_and_lengths(subject) | vocab
    if is_parameter(subject, placed):
        return "stage" not in collective.mesh_axes and not any(
            dim < len(dims(shape)) and dims(shape)[dim] in vocab for shape in collective.shapes
        )
    return any(
        dim < len(dims(shape))
        and dims(shape)[dim] not in sizes
        and not shape_of_leaf(subject, dims(shape))
        for shape in collective.shapes
    )


def _a(kind: str) -> str:
    return f"an {kind}" if kind.startswith("a") else f"a {kind}"


def unattributed(subject: Subject) -> Iterator[Finding]:
    """Yields SL203: collectives whose groups follow no subset of the mesh axes."""
    total = sum(c.sent_bytes for c in subject.program.collectives)
    strange = [p for p in subject.collectives if p.collective.mesh_axes is None]
    sent = sum(p.collective.sent_bytes for p in strange)
    if sent < subject.limits.traffic_bytes or sent < subject.limits.unread_share * total:
        return
    for placed in sorted(strange, key=lambda p: -p.collective.sent_bytes):
        collective = placed.collective
        if collective.sent_bytes < subject.limits.unread_share * sent:
            continue
        where = subject.where(placed)
        yield Finding(
            "SL203",
            where.place(collective.kind),
            f"{_a(collective.kind)} of {largest(collective.shapes)} "
            f"({humanize.size(collective.sent_bytes)} sent in a step) runs over groups of devices "
            f"that follow no mesh axes of {_mesh(subject)}: the compiler chose its own sharding.",
            "Constrain the inputs and outputs of this line to shardings over whole mesh axes.",
            where.source,
            where.name,
            collective.sent_bytes,
        )


def _mesh(subject: Subject) -> str:
    return ",".join(f"{name}={size}" for name, size in subject.mesh.items())
