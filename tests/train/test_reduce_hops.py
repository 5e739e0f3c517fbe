"""Sums along an axis in hops, and where a slow network cuts it."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.mesh import abstract_mesh
from shardlib.train.reduce import hierarchical as reduce_hops
from shardlib.train.reduce.hierarchical import Hops, outer_degree, sum_leaves


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A stand-in with the attributes of a real device."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"


def gpus(hosts, per_host):
    return [Gpu(n, n // per_host) for n in range(hosts * per_host)]


@pytest.mark.parametrize(
    ("mesh", "hosts", "per_host", "expected"),
    [
        ("data=4x2,tensor=2", 4, 4, 4),
        ("data=8,tensor=2", 1, 16, 1),
        ("data=4,tensor=4", 4, 4, 4),
        ("stage=2x1,data=2x4", 4, 4, 2),
        ("fsdp=2x1,data=8", 2, 8, 1),
    ],
)
def test_hosts_cut_an_axis_into_runs(mesh, hosts, per_host, expected):
    assert outer_degree(sl.make_mesh(mesh, devices=gpus(hosts, per_host)), "data") == expected


def test_nothing_cuts_the_axes_of_cpus_and_of_no_devices():
    assert outer_degree(sl.make_mesh("data=2x4"), "data") == 1
    assert outer_degree(abstract_mesh("data=2x4", 8), "data") == 1


@pytest.mark.parametrize("hops", [Hops("data", 8), Hops("data", 4, 2), Hops("data", 1, 8)])
def test_pieces_go_to_the_device_of_their_place(hops):
    mesh = sl.make_mesh("data=8")
    x = np.random.default_rng(0).standard_normal((8, 24, 3)).astype(np.float32)

    def region(x):
        return sum_leaves([x[0]], [0], hops)[0]

    total = jax.shard_map(region, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)
    np.testing.assert_allclose(total, x.sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.mesh
@pytest.mark.parametrize("inner_bf16", [False, True])
@pytest.mark.parametrize("large", [4, 2**20])
def test_arrays_of_any_size_come_back_whole(monkeypatch, inner_bf16, large):
    monkeypatch.setattr(reduce_hops, "_LARGE", large)
    hops = Hops("data", 2, 4, inner_bf16, True)
    mesh = sl.make_mesh("data=8")
    # Small integers, which bfloat16 holds exactly, in shapes that eight devices do not divide.
    shapes = [(3, 5), (), (7,), (0, 4), (2, 1, 3)]
    leaves = [np.random.default_rng(1).integers(-8, 8, (8, *s)).astype(np.float32) for s in shapes]

    def region(leaves):
        return sum_leaves([x[0] for x in leaves], [None] * len(leaves), hops)

    sums = jax.shard_map(region, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)(
        leaves
    )
    for total, leaf in zip(sums, leaves, strict=True):
        np.testing.assert_array_equal(total, leaf.sum(0))
