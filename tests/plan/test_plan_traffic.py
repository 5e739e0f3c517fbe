"""Collectives: measured ones, and bytes against the closed forms of the literature."""

import dataclasses
import importlib
from pathlib import Path

import pytest

from shardlib.cost import pricing
from shardlib.cost.layout import Layout, Software
from shardlib.cost.machine import fabric
from shardlib.cost.machine.constants import committed
from shardlib.cost.machine.fabric import Link
from shardlib.cost.machine.rates import rates
from shardlib.cost.transformer import communication
from shardlib.cost.transformer.computation import Device
from shardlib.cost.workload import Experts, Job, Transformer
from shardlib.hardware import parse_cluster
from shardlib.hardware.chips import CHIPS

IDEAL = committed() | {"ici": 1.0, "nvlink": 1.0, "nic": 1.0, "dcn": 1.0, "hop_seconds": 0.0}
NO_OVERLAP = Software(
    overlap_tensor=False,
    overlap_expert=False,
    overlap_data=False,
    overlap_gather=False,
    exchanges_vectors=True,
)


def links(cluster, constants=IDEAL, **degrees):
    return fabric.links(parse_cluster(cluster), Layout(**degrees), constants)


def test_gathers_on_a_line_of_four_v5e():
    """Source: How to Scale Your Model, sharding, quiz 2: bf16[2048, 8192] and bf16[256, 256] over 4
    chips without wrap-around: by formula 560 us, measured 680 and 8 us."""
    large, small = 2048 * 8192 * 2, 256 * 256 * 2
    assert links("v5e:4x8", fsdp=8, tensor=4)["tensor"].gather(large) == pytest.approx(
        560e-6, rel=0.01
    )
    real = links("v5e:4x8", committed(), fsdp=8, tensor=4)["tensor"]
    assert real.gather(large) == pytest.approx(680e-6, rel=0.05)
    assert real.gather(small) == pytest.approx(8e-6, rel=0.15)


def test_a_closed_ring_carries_twice_and_more_dims_carry_more():
    v5e = 45e9
    assert links("v5e-256", fsdp=16, tensor=16)["tensor"].bytes_per_second == 2 * v5e
    assert links("v5e-256", fsdp=256)["fsdp"].bytes_per_second == 4 * v5e
    assert links("v5e-64", fsdp=8, tensor=8)["tensor"].bytes_per_second == v5e
    assert links("v5p:8x8x8", fsdp=512)["fsdp"].bytes_per_second == 6 * 90e9


def test_hosts_of_eight():
    nvlink, nic = 450e9, 50e9
    inside = links("64x8xh100", fsdp=64, tensor=8)
    assert inside["tensor"].bytes_per_second == nvlink
    # One member in each host: one NIC. All eight: as many, and then NVLink.
    assert inside["fsdp"].bytes_per_second == pytest.approx(nic)
    seconds = 63 / (512 * nic) + 7 / (8 * nvlink)
    assert links("64x8xh100", fsdp=512)["fsdp"].gather(1.0) == pytest.approx(seconds)
    single = fabric.links(parse_cluster("64x8xh100"), Layout(fsdp=512), IDEAL, single_rail=True)
    assert single["fsdp"].gather(1.0) == pytest.approx(63 / (64 * nic) + 7 / (8 * nvlink))


@pytest.mark.parametrize(("cluster", "measured"), [("8xh100", 320e9), ("8xb200", 640e9)])
def test_effective_bandwidth_within_a_host(cluster, measured):
    """Source: meta-pytorch/autoparallel, cost_models/nccl_cost_model.py."""
    link = links(cluster, committed(), fsdp=8)["fsdp"]
    assert link.bytes_per_second == pytest.approx(measured, rel=0.1)


def test_slices_exchange_over_the_data_centre():
    found = links("4xv5e-256", data=4, fsdp=256, slices=4)
    assert found["slices"].size == 4
    assert found["slices"].bytes_per_second == 25e9 / 8
    assert found["data"].size == 1
    assert found["fsdp"].size == 256


PLAIN = Transformer(4, 2048, 16, 8, 128, 8192, 32768)
SPARSE = dataclasses.replace(PLAIN, experts=Experts(number=8, per_token=2, mlp=8192))


def device(model=PLAIN, **degrees):
    job = Job(model, 1024, 32, compute_bytes=4, gradient_bytes=4)
    return Device(job, Layout(**degrees), NO_OVERLAP)


def seconds(seen, collectives, model=PLAIN):
    """Seconds on links that carry a byte a second, which are bytes."""
    cluster = parse_cluster("8xh100")
    found = rates(CHIPS["h100"], "bf16", committed())

    def slow(axes):
        return (Link(seen.layout.size(axes[0]), 1.0, 0.0, 1.0, 1.0),)

    machine = pricing.Machine(seen.layout, NO_OVERLAP, cluster, found, slow)
    return sum(one.count * machine.collective_seconds(one) for one in collectives)


def sums(seen):
    each, once = communication.replica_sums(seen, communication.local_weights(seen))
    assert not each
    return once


@pytest.fixture
def forms(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("closed_forms")


def closed(forms, mesh, model=PLAIN, zero=3):
    sizes = forms.Sizes(experts=model.experts.number if model.experts else 0)
    return forms.sent_bytes(sizes, forms.Strategy(mesh, zero=zero))


@pytest.mark.parametrize(
    ("mesh", "zero", "model", "collectives"),
    [
        ({"fsdp": 8}, 2, PLAIN, lambda d: communication.sharded_params(d, _weights(d))),
        ({"fsdp": 8}, 3, PLAIN, lambda d: communication.sharded_params(d, _weights(d))),
        ({"data": 4, "fsdp": 2}, 3, PLAIN, sums),
        ({"data": 2, "tensor": 4}, 3, PLAIN, lambda d: communication.tensor(d, PLAIN.layers)),
        # The same axis sums gradients.
        ({"context": 4}, 3, PLAIN, lambda d: communication.context(d, PLAIN.layers) + sums(d)),
        # The same axis sums the gradients of what is not routed.
        ({"expert": 4}, 3, SPARSE, lambda d: communication.expert(d, PLAIN.layers, 1) + sums(d)),
    ],
)
def test_bytes_by_axis(forms, mesh, zero, model, collectives):
    seen = device(model, zero=zero, **mesh)
    sizes = forms.Sizes(experts=model.experts.number if model.experts else 0)
    found = collectives(seen)
    expected = forms.sent_bytes(sizes, forms.Strategy(mesh, zero=zero))[found[0].axes[0]]
    if model is SPARSE:
        expected += 2 * 3 / 4 * (SPARSE.layers * 2048 * 8 / 4) * 4  # Of the router.
    assert seconds(seen, found) == pytest.approx(expected, rel=1e-12)


def _weights(seen):
    return communication.local_weights(seen)


def test_bytes_of_stages():
    seen = device(stage=4, tensor=2, microbatches=8)
    residual = 32 * 1024 / 8 * 2048 * 4 / 2
    assert seconds(seen, communication.stage_sends(seen)) == 2 * (8 + 3) * residual
