"""Check for mesh axes of frequent collectives that leave the fast domain (SL204)."""

import math
from collections.abc import Iterator

from shardlib import humanize
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.subject import Subject

FAST_AXES = ("tensor", "context", "expert")
"""Preset axes whose collectives run several times in every layer."""


def slow_axes(subject: Subject) -> Iterator[Finding]:
    """Yields SL204: an axis of frequent collectives that spans several NVLink domains or slices."""
    cluster = subject.cluster
    if cluster is None or cluster.chip is None:
        return
    chip = cluster.chip
    if chip.kind == "tpu":
        domain, name = cluster.num_devices // cluster.num_slices, "a slice"
        fast = chip.ici_bytes_per_second_per_link
    else:
        domain, name = min(cluster.devices_per_host, max(chip.nvlink_chips, 1)), "an NVLink domain"
        fast = chip.nvlink_bytes_per_second
    slow = cluster.network_bytes_per_second_per_device
    fast_axes = (*FAST_AXES, *_own_fast_axes(subject))
    sizes = list(subject.mesh.items())
    for position, (axis, size) in enumerate(sizes):
        reach = size * math.prod(other for _, other in sizes[position + 1 :])
        if axis not in fast_axes or size == 1 or domain % reach == 0:
            continue
        members = [
            c
            for c in subject.program.collectives
            if c.mesh_axes is not None and axis in c.mesh_axes
        ]
        sent = sum(c.sent_bytes for c in members)
        if not sent:
            continue
        speeds = f" at {slow / 1e9:.0f} GB/s" if slow else ""
        speeds += f" instead of {fast / 1e9:.0f} GB/s" if slow and fast else ""
        largest = max(members, key=lambda c: c.sent_bytes)
        yield Finding(
            "SL204",
            f"mesh/{axis}",
            f"{axis}={size} spans {reach} devices, but {name} of {cluster.name} has {domain}: "
            f"{humanize.size(sent)} a step cross the network{speeds}.",
            f"Make {axis} at most {_most(domain, reach // size)}, and another axis larger.",
            largest.source,
            largest.op_name,
            sent,
        )


def _own_fast_axes(subject: Subject) -> list[str]:
    """Returns the non-preset axes that shard only the state, as tensor parallelism does."""
    if not subject.batch:
        return []
    state = [leaf for leaf in subject.leaves if leaf.is_state]
    cut = {name for leaf in state for entry in leaf.spec or () for name in entry}
    return [name for name in subject.own_axes if name in cut and name not in subject.batch_axes]


def _most(domain: int, inner: int) -> int:
    """Returns the largest axis size that stays in a domain, around axes of `inner` devices."""
    return max((n for n in range(1, domain + 1) if domain % (n * inner) == 0), default=1)
