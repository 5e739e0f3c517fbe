"""Rows of the batch that change their order between two operations.

XLA's partitioner loses such an order, in chains of matmuls whose activations nobody constrains on a
mesh that splits the batch over two axes, and weights over one of these and another. It permutes
what one matmul reads and takes the result to be in the order of before: rows of one sample then
meet those of another, forward or backward, without a word. Measured on CPU devices with JAX 0.10.2
and 0.12: nearly all steps with such a permutation are wrong. Where layers are constrained there is
none.
"""

import collections
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardlib.explain.hlo import Instruction
from shardlib.explain.lint.activations import in_loss, is_parameter
from shardlib.explain.explicit import is_explicit
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.subject import Placed, Subject, largest
from shardlib.explain.params import bytes_text
from shardlib.explain.places import Where
from shardlib.explain.program import axes_text
from shardlib.explain.slices import permutation_of


def reordered(subject: Subject) -> Iterator[Finding]:
    """SL205: permutations that the compiler makes over axes of the batch alone, of any size."""
    found: dict[Where, list[Placed]] = collections.defaultdict(list)
    for placed in subject.collectives:
        where = subject.where(placed)
        if reorders_rows(subject, placed, where):
            found[where].append(placed)
    for where, members in found.items():
        first = max(members, key=lambda placed: placed.bytes).collective
        count = sum(placed.collective.count for placed in members)
        times = f", {count} times a step" if count > 1 else ""
        yield Finding(
            "SL205",
            where.place(first.kind),
            f"{largest(first.shapes)} ({bytes_text(first.bytes)}), rows of the batch, change their "
            f"order over {axes_text(first.mesh_axes)} between two operations{times}. The compiler "
            "is known to lose the way back and to multiply rows of different samples: the loss, or "
            "its gradients, can be wrong.",
            "Constrain the output of every layer to the sharding of the batch with sl.constrain, "
            "then compare with one device by sl.testing.assert_equivalent.",
            where.source,
            where.name,
            sum(placed.collective.sent_bytes for placed in members),
        )


def reorders_rows(subject: Subject, placed: Placed, where: Where) -> bool:
    """Whether the compiler takes rows from one order of the axes of the batch to another.

    A permutation that moves rows over other axes too, or shifts them, is another thing: it takes a
    tensor to another sharding, and back.
    """
    axes = placed.collective.mesh_axes or ()
    if placed.collective.kind != "collective-permute" or placed.collective.between_slices:
        return False
    if len(axes) < 2 or not set(axes) <= set(subject.batch_axes) or is_explicit(where.name):
        return False
    if where.name and not in_loss(subject, where.name):
        return False
    crossed = subject.program.slices
    sizes = {name: size // crossed.get(name, 1) for name, size in subject.mesh.items()}
    return _changes_order(placed.instruction, sizes, axes) and not is_parameter(subject, placed)


def _changes_order(instruction: Instruction, sizes: Mapping[str, int], axes: Sequence[str]) -> bool:
    """Whether each sender's block is the receiver's, once the axes are counted in another order."""
    pairs = instruction.attributes.get("source_target_pairs") or permutation_of(instruction) or ""
    ids = np.arange(math.prod(sizes.values()))
    receivers = ids.copy()
    for sender, receiver in re.findall(r"\{(\d+),(\d+)\}", pairs):
        receivers[int(sender)] = int(receiver)
    names, grid = list(sizes), ids.reshape(tuple(sizes.values()))
    rest = [dim for dim, name in enumerate(names) if name not in axes]
    orders = [
        grid.transpose([*rest, *map(names.index, order)]).ravel()
        for order in itertools.permutations(axes)
    ]
    return any(
        np.array_equal(receivers[before], after)
        for before, after in itertools.permutations(orders, 2)
    )
