"""Links of mesh axes: what wraps around, what a network adds, and what is not known."""

import math

import pytest

from shardlib.cost.layout import Layout
from shardlib.cost.machine import fabric
from shardlib.cost.machine.constants import committed
from shardlib.errors import MeshError
from shardlib.hardware import parse_cluster
from shardlib.plan import plan

IDEAL = committed() | {"ici": 1.0, "nvlink": 1.0, "nic": 1.0, "dcn": 1.0, "hop_seconds": 0.0}
NVLINK, NIC = 450e9, 50e9


def links(cluster, constants=IDEAL, **degrees):
    return fabric.links(parse_cluster(cluster), Layout(**degrees), constants)


@pytest.mark.parametrize(
    ("cluster", "wraps"),
    [
        ("v5p:4x4x4", True),
        ("v5p:4x4x8", True),
        ("v5p-32", False),
        ("v5p-64", False),
        ("v4-32", False),
        ("v4-128", True),
        ("tpu7x:2x4x4", False),
        ("tpu7x:4x4x4", True),
    ],
)
def test_only_whole_cubes_wrap_around(cluster, wraps):
    """Source: Google, "TPU v5p": slices of 4x4x4 and larger are tori; How to Scale Your Model,
    ch. 2: a 2x2x4 wraps nowhere."""
    link = links(cluster, tensor=4, data=parse_cluster(cluster).num_devices // 4)["tensor"]
    chip = parse_cluster(cluster).chip
    one = chip.ici_achievable_bytes_per_second_per_link or 0.9 * 100e9
    # Two devices of a chip of Ironwood come in pairs of sides.
    if chip.devices_per_chip == 1:
        assert link.bytes_per_second == one * (2 if wraps else 1)
    whole = links(cluster, fsdp=parse_cluster(cluster).num_devices)["fsdp"]
    cores = chip.devices_per_chip
    lines = sum(side > 1 for side in fabric.slice_shape(parse_cluster(cluster)))
    assert whole.bytes_per_second == pytest.approx(
        one / cores * (lines * (2 if wraps else 1) + (cores > 1))
    )


@pytest.mark.parametrize(
    ("cluster", "size", "crosses"),
    [
        ("gb200-nvl72", 72, False),
        ("2xgb200-nvl64", 64, False),
        ("2xgb200-nvl64", 128, True),
        ("64xb200", 64, True),
    ],
)
def test_nvlink_of_a_rack_joins_its_hosts(cluster, size, crosses):
    link = links(cluster, fsdp=size, data=parse_cluster(cluster).num_devices // size)["fsdp"]
    assert link.leaves_domain == crosses
    if not crosses:
        assert link.bytes_per_second == 900e9
    else:  # Within a domain, and then what is left over the network of 400 Gb/s.
        inner = parse_cluster(cluster).devices_per_domain
        seconds = (inner - 1) / (inner * 900e9) + (size // inner - 1) / (size * 50e9)
        assert link.gather(1e9) == pytest.approx((1e9 * seconds), rel=1e-9)


def test_a_long_side_of_a_v5e_wraps_alone():
    found = links("v5e:8x16", fsdp=8, tensor=16)
    assert (found["tensor"].bytes_per_second, found["fsdp"].bytes_per_second) == (90e9, 45e9)


def test_what_goes_to_the_next_device_takes_one_link():
    held = 1e9
    for size in (4, 16):
        ring = links("v5p-128", data=64 // size, context=size)["context"]
        assert ring.bytes_per_second >= 2 * 90e9
        assert ring.shift(held) == pytest.approx(held / 90e9)
    hosts = links("4x8xh100", data=2, context=16)["context"]
    assert hosts.shift(held) == pytest.approx(held / NIC)
    assert links("4x8xh100", data=4, context=8)["context"].shift(held) == pytest.approx(
        held / NVLINK
    )


def test_an_axis_that_leaves_the_domain_pays_for_both_networks():
    total = 1e9
    for hosts in (2, 4):
        found = links("8x8xh100", data=8 // hosts, tensor=8 * hosts)["tensor"]
        across = total * (hosts - 1) / (8 * hosts) / NIC
        assert found.gather(total) == pytest.approx(across + total * 7 / 8 / NVLINK)
        assert found.leaves_domain
    inside = links("8x8xh100", data=8, tensor=8)
    assert inside["tensor"].gather(total) == pytest.approx(total * 7 / 8 / NVLINK)
    assert not inside["tensor"].leaves_domain
    # One member a host: the network alone.
    assert inside["data"].gather(total) == pytest.approx(total * 7 / 8 / NIC)
    one_rail = fabric.links(
        parse_cluster("8x8xh100"), Layout(data=4, tensor=16), IDEAL, single_rail=True
    )["tensor"]
    assert one_rail.gather(total) == pytest.approx(total / 2 / NIC + total * 7 / 8 / NVLINK)


def test_the_start_over_hosts_is_that_of_a_tree():
    started = links("8x8xh100", IDEAL | {"hop_seconds": 1e-6}, data=2, tensor=32)["tensor"]
    assert started.seconds_per_collective == pytest.approx((7 + 7 * 2) * 1e-6)
    assert started.gather(1.0, 0.0) < 1e-9
    assert started.gather(1.0, 5.0) == pytest.approx(21e-6)


@pytest.mark.parametrize(("size", "leaving"), [(2, 1 / 2), (8, 7 / 8)])
def test_all_to_all_between_hosts(size, leaving):
    """With one member on a host all but a device's own part passes its NIC."""
    held = 1e9
    found = links("8x8xh100", data=8 // size, expert=size, tensor=8)["expert"]
    assert found.all_to_all(held) == pytest.approx(held * leaving / NIC)


@pytest.mark.parametrize(
    ("cluster", "degrees", "share"),
    [
        # A line of n is crossed by n / 4 of what each device holds, a ring by n / 8.
        ("v5e:4x8", {"fsdp": 8, "expert": 4}, 1.0),
        ("v5e-256", {"fsdp": 16, "expert": 16}, 2.0),
        ("v5e:2x4", {"fsdp": 4, "expert": 2}, 0.5),
    ],
)
def test_all_to_all_on_a_torus(cluster, degrees, share):
    found = links(cluster, **degrees)["expert"]
    assert found.all_to_all(1e9) == pytest.approx(share * 1e9 / 45e9)


def test_all_to_all_between_slices():
    found = fabric.links(parse_cluster("2xv5e-16"), Layout(data=1, fsdp=32, slices=2), IDEAL)[
        "fsdp"
    ]
    network = 25e9 / 8
    start = found.seconds_per_collective
    assert start == pytest.approx(50e-6)
    assert found.all_to_all(1e9) - start == pytest.approx(0.5e9 / network)
    expected = 1e9 / 32 / network + 1e9 * 15 / 16 / (2 * 45e9)
    assert found.gather(1e9) - start == pytest.approx(expected)


def test_gpus_without_nvlink_use_pcie_within_a_host():
    found = links("2x4xl4", data=2, tensor=4)
    assert found["tensor"].bytes_per_second == 31e9
    # 100 Gb/s for eight of them. Source: Google, "Networking and GPU machines".
    assert found["data"].bytes_per_second == pytest.approx(12.5e9 / 8)
    assert links("4x8xv100-32", data=4, tensor=8)["data"].bytes_per_second == 12.5e9 / 8


def test_hosts_of_unknown_networks_are_refused():
    with pytest.raises(
        MeshError,
        match=r"cluster '2x4xrtx4090': the speed of the network(.|\n)*\n  Plan for one host, as in",
    ):
        links("2x4xrtx4090", data=8)
    assert math.isfinite(links("4xrtx4090", data=4)["data"].bytes_per_second)


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("cluster", ["256x8xh100", "512x8xh100"])
def test_tensor_stays_within_the_nvlink_domain(cluster):
    """As published trainings of 70B models have it."""
    assert all(p.layout.tensor <= 8 for p in plan("llama3-70b", on=cluster).found.plans)
