"""Who sends how much to whom."""

import numpy as np
import pytest

from shardlib.explain.analysis.collectives import Collective, ProgramReport
from shardlib.explain.analysis.matrix import communication_matrix


def collective(kind, axes, size, group_size, count=1, **rest):
    return Collective(
        kind, axes, size, ("f32[1]",), count, False, True, "", "", "c", group_size, **rest
    )


def matrix(mesh, *found, slices=None):
    return communication_matrix(ProgramReport(mesh, found, {}, slices=slices or {}))


RING = {
    # (n - 1) / n of 100 bytes, three times, to the other device of the pair.
    "last axis": ("data=2,fsdp=2", "fsdp", {"count": 3}, {}, [(0, 1), (2, 3)], 150),
    "first axis": ("data=2,fsdp=2", "data", {}, {}, [(0, 2), (1, 3)], 50),
    "part of an axis": ("data=1,fsdp=4", "fsdp", {}, {}, [(0, 1), (2, 3)], 50),
    # Devices 0 and 1 are one slice, 2 and 3 the other.
    "between slices": (
        *("data=4,fsdp=1", "data", {"between_slices": True}, {"data": 2}),
        *([(0, 2), (1, 3)], 50),
    ),
    "in slices": ("data=4,fsdp=1", "data", {}, {"data": 2}, [(0, 1), (2, 3)], 50),
}


@pytest.mark.parametrize(
    ("mesh", "axis", "rest", "slices", "pairs", "size"), RING.values(), ids=RING
)
def test_a_collective_goes_around_the_rings_of_its_groups(mesh, axis, rest, slices, pairs, size):
    sizes = {name: int(n) for name, n in (part.split("=") for part in mesh.split(","))}
    sent = matrix(sizes, collective("all-gather", (axis,), 100, 2, **rest), slices=slices).sent
    expected = np.zeros((4, 4))
    for a, b in pairs:
        expected[a, b] = expected[b, a] = size
    np.testing.assert_array_equal(sent, expected)


def test_an_exchange_sends_to_every_member_alike():
    sent = matrix({"expert": 4}, collective("all-to-all", ("expert",), 400, 4)).sent
    np.testing.assert_array_equal(sent, 100 * (1 - np.eye(4)))


def test_two_axes_that_cross_slices():
    across = collective("all-reduce", ("data", "fsdp"), 100, 4, between_slices=True)
    sent = matrix({"data": 2, "fsdp": 4}, across, slices={"data": 2, "fsdp": 2}).sent
    # Slices of two neighbours: the first devices of the four form one ring.
    ring = [0, 2, 4, 6]
    assert all(sent[a, b] == 150 for a, b in zip(ring, [*ring[1:], 0], strict=True))
    assert sent.sum() == 8 * 150


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all", "collective-permute"])
def test_many_devices_are_drawn_as_blocks_that_lose_nothing(kind):
    one = collective(kind, ("fsdp",), 256, 256)
    found = matrix({"data": 2, "fsdp": 256}, one)
    assert found.devices_per_block == 8
    assert found.sent.shape == (64, 64)
    np.testing.assert_allclose(found.sent.sum(), 512 * one.sent_bytes, rtol=1e-12)
    # Half of the blocks are of the other group.
    assert found.sent[:32, 32:].sum() == found.sent[32:, :32].sum() == 0


def test_what_follows_no_axis_is_counted_apart():
    found = matrix({"data": 4}, collective("all-gather", None, 80, 4))
    assert found.unplaced_bytes == 4 * 60
    assert not found.sent.any()
