"""Candidate layouts of a workload on a cluster."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from shardlib.cost.layout import Layout
from shardlib.cost.machine.fabric import outer_degree
from shardlib.hardware import Cluster
from shardlib.plan.problem import Workload

_ORDER = ("tensor", "context", "expert", "stage", "fsdp")
"""Axes whose degrees are enumerated; `data` takes the remaining devices."""
_MOST_CHUNKS = 4
"""Most chunks of layers on a stage: more chunks send proportionally more, and hardly shrink the
bubble."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout without its number of microbatches."""

    layout: Layout
    microbatches: Sequence[int]
    """Possible numbers of microbatches, ascending."""

    def with_microbatches(self, count: int) -> Layout:
        """Returns the layout with `count` microbatches."""
        return dataclasses.replace(self.layout, microbatches=count)

    def where(self, accepts: Callable[[Layout], bool]) -> "Candidate":
        """Returns the candidate restricted to the numbers of microbatches with an accepted
        layout."""
        counts = [n for n in self.microbatches if accepts(self.with_microbatches(n))]
        return dataclasses.replace(self, microbatches=counts)


def candidates(workload: Workload, cluster: Cluster) -> Iterator[Candidate]:
    """Yields every layout of all devices of a cluster, with its numbers of microbatches.

    Args:
        workload: Workload whose model and batch the degrees must divide.
        cluster: Cluster with its devices and slices. `data` crosses several slices, and so does
            `fsdp` if `data` is too small.
    """
    for sizes in meshes(workload, cluster):
        layout = Layout.of(sizes, cluster.num_slices)
        if not crosses_slices(layout):
            continue
        for variant in workload.variants(layout, cluster):
            yield from of_layout(workload, variant)


def of_layout(workload: Workload, layout: Layout) -> Iterator[Candidate]:
    """Yields a layout with every number of chunks, and the numbers of microbatches for each. With
    one microbatch ZeRO 2 is the same program as ZeRO 1, because no gradient sums are kept between
    microbatches."""
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
    """Returns whether the degrees of `data` and `fsdp` across slices multiply to the number of
    slices."""
    outer = math.prod(outer_degree(layout, axis) for axis in ("data", "fsdp"))
    return outer == layout.slices


def schedule(layout: Layout) -> str | None:
    """Returns the pipeline schedule of a layout by its config name; None without stages."""
    if layout.stage == 1:
        return None
    if layout.chunks > 1:
        return "interleaved"
    return "gpipe" if layout.microbatches < layout.stage else "1f1b"


def meshes(workload: Workload, cluster: Cluster) -> Iterator[dict[str, int]]:
    """Yields the degrees of every mesh of all devices that divides the model and the batch."""
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
