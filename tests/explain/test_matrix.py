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


def test_a_gather_goes_around_the_ring_of_its_axis():
    sent = matrix({"data": 2, "fsdp": 2}, collective("all-gather", ("fsdp",), 100, 2, 3)).sent
    # (n - 1) / n of 100 bytes, three times, to the other one of the pair.
    expected = np.zeros((4, 4))
    for a, b in ((0, 1), (1, 0), (2, 3), (3, 2)):
        expected[a, b] = 150
    np.testing.assert_array_equal(sent, expected)


def test_an_axis_that_is_not_the_last_has_distant_neighbours():
    sent = matrix({"data": 2, "fsdp": 2}, collective("all-reduce", ("data",), 100, 2)).sent
    assert sent[0, 2] == sent[2, 0] == sent[1, 3] == sent[3, 1] == 100
    assert sent.sum() == 400


def test_an_exchange_sends_to_every_member_alike():
    sent = matrix({"expert": 4}, collective("all-to-all", ("expert",), 400, 4)).sent
    np.testing.assert_array_equal(sent, 100 * (1 - np.eye(4)))


def test_a_part_of_an_axis_is_a_ring_of_its_own():
    sent = matrix({"tensor": 4}, collective("all-gather", ("tensor",), 100, 2)).sent
    assert sent[0, 1] == sent[1, 0] == sent[2, 3] == sent[3, 2] == 50
    assert sent.sum() == 200


def test_slices_send_to_the_same_device_of_the_next_slice():
    across = collective("all-reduce", ("data",), 100, 2, between_slices=True)
    sent = matrix({"data": 4}, across, slices={"data": 2}).sent
    # Devices 0 and 1 are one slice, 2 and 3 the other.
    assert sent[0, 2] == sent[2, 0] == sent[1, 3] == sent[3, 1] == 100
    assert sent.sum() == 400
    within = collective("all-gather", ("data",), 100, 2)
    sent = matrix({"data": 4}, within, slices={"data": 2}).sent
    assert sent[0, 1] == sent[1, 0] == sent[2, 3] == sent[3, 2] == 50
    assert sent.sum() == 200


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
