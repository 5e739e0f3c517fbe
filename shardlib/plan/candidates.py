"""Every layout of a cluster that a workload could be run on."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from shardlib.hardware import Cluster
from shardlib.plan.fabric import outer_degree
from shardlib.plan.layout import Layout
from shardlib.plan.problem import Workload

_ORDER = ("tensor", "context", "expert", "stage", "fsdp")
"""Axes whose degrees are enumerated; `data` takes the devices that remain."""
_MOST_CHUNKS = 4
"""Chunks of layers on a stage: more send as much more, and their bubble hardly shrinks."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout with its numbers of microbatches yet to be chosen."""

    layout: Layout
    microbatches: Sequence[int]
    """What may be chosen, ascending."""

    def with_microbatches(self, count: int) -> Layout:
        """Returns the layout with that many microbatches."""
        return dataclasses.replace(self.layout, microbatches=count)

    def where(self, accepts: Callable[[Layout], bool]) -> "Candidate":
        """Returns the candidate with those numbers of microbatches whose layout is accepted."""
        counts = [n for n in self.microbatches if accepts(self.with_microbatches(n))]
        return dataclasses.replace(self, microbatches=counts)


def candidates(workload: Workload, cluster: Cluster) -> Iterator[Candidate]:
    """Yields every layout of all devices of a cluster, each with its microbatches.

    Args:
        workload: For what its model and batch divide by.
        cluster: For its devices and slices. Several slices are crossed by `data`, and by `fsdp`
            where `data` is too small.
    """
    for sizes in meshes(workload, cluster):
        layout = Layout.of(sizes, cluster.num_slices)
        if not crosses_slices(layout):
            continue
        for variant in workload.variants(layout, cluster):
            yield from of_layout(workload, variant)


def of_layout(workload: Workload, layout: Layout) -> Iterator[Candidate]:
    """Yields a layout with every number of chunks, and of microbatches with it. With one microbatch
    ZeRO 2 is the program of ZeRO 1: there are no sums to keep meanwhile."""
    group = workload.batch // layout.batch_shards
    counts = [n for n in range(2 if layout.zero == 2 else 1, group + 1) if group % n == 0]
    if counts:
        yield Candidate(layout, counts)
    if layout.stage == 1:
        return
    counts = [n for n in counts if n % layout.stage == 0]
    for chunks in range(2, _MOST_CHUNKS + 1):
        if counts and workload.num_layers % (layout.stage * chunks) == 0:
            yield Candidate(dataclasses.replace(layout, chunks=chunks), counts)


def crosses_slices(layout: Layout) -> bool:
    """Whether the axes that may cross slices make up their number."""
    outer = math.prod(outer_degree(layout, axis) for axis in ("data", "fsdp"))
    return outer == layout.slices


def schedule(layout: Layout) -> str | None:
    """Returns the schedule of a layout's pipeline by its name in a config; None without stages."""
    if layout.stage == 1:
        return None
    if layout.chunks > 1:
        return "interleaved"
    return "gpipe" if layout.microbatches < layout.stage else "1f1b"


def meshes(workload: Workload, cluster: Cluster) -> Iterator[dict[str, int]]:
    """Yields the degrees of every mesh of all devices that the model and the batch divide by."""
    num_devices = cluster.num_devices
    allowed = {axis: workload.degrees(axis, num_devices) for axis in (*_ORDER, "data")}
    data = frozenset(allowed["data"])

    def extend(
        position: int, left: int, rows: int, sizes: dict[str, int]
    ) -> Iterator[dict[str, int]]:
        if position == len(_ORDER):
            if left in data and rows % left == 0:
                yield {**sizes, "data": left}
            return
        axis = _ORDER[position]
        splits_rows = axis in ("fsdp", "expert")
        for degree in allowed[axis]:
            if degree > left:
                break
            if left % degree == 0 and not (splits_rows and rows % degree):
                rest = rows // degree if splits_rows else rows
                yield from extend(position + 1, left // degree, rest, {**sizes, axis: degree})

    yield from extend(0, num_devices, workload.batch, {})
