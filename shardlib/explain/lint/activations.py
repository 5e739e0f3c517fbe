"""Checks for gathered activations: rows of the batch (SL102) and logits (SL103)."""

import collections
import itertools
import math
from collections.abc import Iterator

import jax.numpy as jnp

from shardlib import humanize
from shardlib.explain.analysis.collectives import axes_text
from shardlib.explain.analysis.equations import equations
from shardlib.explain.hlo.provenance import Where
from shardlib.explain.hlo.text import array_bytes
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.shardings import dims
from shardlib.explain.lint.subject import Placed, Subject

DIFFERENTIATED = "jvp("
"""Part of the JAX names of a loss and its gradient, but not of an optimizer's update."""


def gathered_activations(subject: Subject) -> Iterator[Finding]:
    """Yields SL102 and SL103: activations gathered along their rows or along the vocabulary."""
    rows, vocab = _rows(subject), vocabularies(subject)
    found: dict[tuple[str, Where], list[tuple[str, Placed, bool]]] = collections.defaultdict(list)
    for placed in subject.collectives:
        collective = placed.collective
        if collective.kind != "all-gather" or not collective.mesh_axes:
            continue
        where = subject.where(placed)
        if placed.bytes < subject.limits.activation_bytes or not in_loss(subject, where.name):
            continue
        is_weight = is_parameter(subject, placed)
        dim = int(placed.instruction.attributes.get("dimensions", "{0}").strip("{}") or 0)
        for shape in collective.shapes:
            size = (*dims(shape), *[0] * dim)[dim]
            if array_bytes(shape) < subject.limits.activation_bytes:
                continue
            code = ""
            if size in vocab and not set(collective.mesh_axes) & {*subject.batch_axes, "context"}:
                code = "SL103"
            elif _splits_rows(subject, placed) and size in rows and not is_weight:
                code = "" if shape_of_leaf(subject, dims(shape)) else "SL102"
            if code:
                found[code, where].append((shape, placed, is_weight))
    for (code, where), members in found.items():
        yield _finding(code, where, members)


def _finding(code: str, where: Where, members: list[tuple[str, Placed, bool]]) -> Finding:
    shape, placed, is_weight = max(members, key=lambda member: array_bytes(member[0]))
    size = array_bytes(shape)
    count = sum(member[1].collective.count for member in members)
    total = sum(array_bytes(member[0]) * member[1].collective.count for member in members)
    axes = axes_text(placed.collective.mesh_axes)
    times = f", {count} times a step" if count > 1 else ""
    if code == "SL102":
        message = (
            f"{shape} ({humanize.size(size)}) is gathered over {axes}{times}: every device holds "
            "all the rows that the mesh splits."
        )
        fix = f"Constrain the activation so that its batch dim stays sharded over {axes}."
    else:
        what = "the weights of the logits" if is_weight else "logits"
        message = (
            f"{what}, {shape} ({humanize.size(size)}), are gathered over {axes}{times}: each "
            "device holds logits of the whole vocabulary."
        )
        fix = (
            f"Shard the logits over {axes} along the vocabulary, and compute the loss with "
            "reductions, as shardlib.losses does."
        )
    return Finding(code, where.place(), message, fix, where.source, where.name, total)


def _splits_rows(subject: Subject, placed: Placed) -> bool:
    """Whether a collective runs over a batch axis other than `expert`, which exchanges tokens."""
    axes = set(placed.collective.mesh_axes or ()) & set(subject.batch_axes)
    return bool(axes - {"expert"})


def _rows(subject: Subject) -> set[int]:
    """Returns the possible sizes of a dim of gathered rows: rows or tokens of a microbatch."""
    found: set[int] = set()
    for leaf in subject.batch:
        for size in (leaf.shape[0], math.prod(leaf.shape[:2])):
            found |= {size // parts for parts in range(1, size + 1) if size % parts == 0}
    return found - {1}


def rows_and_lengths(subject: Subject) -> set[int]:
    """Returns the possible sizes of a dim of gathered rows or positions."""
    lengths = {size for leaf in subject.batch for size in leaf.shape[1:2]}
    return _rows(subject) | lengths


def in_loss(subject: Subject, name: str) -> bool:
    """Whether an operation is part of a loss or its gradient. True if the program has neither."""
    return DIFFERENTIATED in name or DIFFERENTIATED not in subject.text


def is_parameter(subject: Subject, placed: Placed) -> bool:
    """Whether a collective reads only leaves of the state, moved or converted."""
    for value in subject.values.operands(placed.computation, placed.instruction):
        leaves = subject.arguments_of(value)
        if leaves is None or not leaves or not all(leaf.is_state for leaf in leaves):
            return False
    return True


def shape_of_leaf(subject: Subject, shape: tuple[int, ...]) -> bool:
    """Whether a leaf of the state, or one of its layers, has this shape. The leaf may be whole or
    sharded over some of its axes."""
    wanted = sorted(size for size in shape if size > 1)
    return wanted in subject.remembered("shapes of leaves", _shapes_of_leaves)


def _shapes_of_leaves(subject: Subject) -> list[list[int]]:
    found = []
    for leaf in subject.leaves:
        if not leaf.is_state:
            continue
        spec = leaf.spec or ((),) * len(leaf.shape)
        sizes = [
            [
                size // math.prod(subject.mesh.get(n, 1) for n in axes[:end])
                for end in range(len(axes) + 1)
            ]
            for size, axes in zip(leaf.shape, spec, strict=True)
        ]
        for start in (0, 1):
            for shape in itertools.product(*sizes[start:]):
                found.append(sorted(size for size in shape if size > 1))
    return found


def vocabularies(subject: Subject) -> set[int]:
    """Returns the sizes of dims with the logical axis `vocab`, else of tables used in lookups."""
    found = set()
    if subject.state is not None:
        for row in subject.state.rows:
            pairs = zip(row.logical_axes or (), row.shape, strict=False)
            found |= {size for name, size in pairs if name == "vocab"}
    if found or subject.jaxpr is None:
        return found
    for placed in equations(subject.jaxpr):
        if placed.equation.primitive.name == "gather":
            table, slices = placed.equation.invars[0].aval, placed.equation.params["slice_sizes"]
            is_table = table.ndim == 2 and jnp.issubdtype(table.dtype, jnp.floating)
            if is_table and tuple(slices) == (1, table.shape[1]):
                found.add(table.shape[0])
    return found
