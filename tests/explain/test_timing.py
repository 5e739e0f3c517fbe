"""Seconds of collectives by the links of a cluster, and what runs beside them."""

import math

import pytest

from shardlib.cost.machine.constants import committed
from shardlib.explain.analysis.collectives import Collective, ProgramReport, read_program
from shardlib.explain.analysis.timing import collective_times, rows
from shardlib.explain.hlo.text import parse
from shardlib.hardware import parse_cluster

# What the data sheets say, in bytes/s and one direction, and what calibration found one gets of it.
CONSTANTS = committed()
NVLINK, NIC = 450e9 * CONSTANTS["nvlink"], 50e9 * CONSTANTS["nic"]
HOP = CONSTANTS["hop_seconds"]
HOST_HOP = 7 * HOP  # See `cost.machine.fabric`.
MATMUL = 989.5e12 * CONSTANTS["matmul.hopper"]
MIB = 2**20


def collective(kind, axes, size, *, count=1, group=0, **rest):
    shapes = (f"bf16[{size // 2}]",)
    return Collective(
        kind, axes, size, shapes, count, count > 1, True, "jit(step)/dot", "model.py:3", "c",
        group, **rest,
    )  # fmt: skip


def one(cluster, mesh, *args, slices=None, **kwargs):
    report = ProgramReport(mesh, (collective(*args, **kwargs),), {}, slices=slices or {})
    (flow,) = collective_times(report, parse_cluster(cluster))
    return flow


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("all-gather", 7 / 8),
        ("reduce-scatter", 7 / 8),
        ("all-reduce", 14 / 8),
        ("all-to-all", 7 / 8),
    ],
)
def test_rings_in_an_nvlink_domain(kind, share):
    flow = one("8xh100", {"fsdp": 8}, kind, ("fsdp",), 64 * MIB, group=8, count=3)
    starts = 7 * HOP * (2 if kind == "all-reduce" else 1)
    assert flow.seconds == {"nvlink": pytest.approx(3 * (share * 64 * MIB / NVLINK + starts))}
    assert (flow.overlap, flow.overlappable) == ("unknown", None)
    assert flow.note == "the program is not available"


def test_each_axis_carries_what_the_faster_ones_leave():
    mesh = {"data": 4, "fsdp": 8}
    flow = one("4x8xh100", mesh, "all-reduce", ("data", "fsdp"), 64 * MIB, group=32)
    inside = 2 * (7 / 8 * 64 * MIB / NVLINK + 7 * HOP)
    # Over hosts in trees of depth 2, each device with its own NIC.
    across = 2 * (3 / 4 * 8 * MIB / NIC + 2 * HOST_HOP)
    assert flow.seconds == {"nvlink": pytest.approx(inside), "network": pytest.approx(across)}
    assert flow.total_seconds == pytest.approx(inside + across)


def test_slices_are_apart_from_what_is_within_them():
    mesh, ici = {"data": 2, "fsdp": 16}, 90e9 * CONSTANTS["ici"]
    outer = {"data": 2}
    inside = one("2xv5e:4x4", mesh, "all-gather", ("fsdp",), 64 * MIB, group=16, slices=outer)
    # Both dims of a 4x4 without wrap-around: one direction of each, 45 GB/s.
    assert inside.seconds == {"ici": pytest.approx(15 / 16 * 64 * MIB / ici + 6 * HOP)}
    between = one(
        "2xv5e:4x4", mesh, "all-reduce", ("data",), 4 * MIB, group=2, between_slices=True,
        slices=outer,
    )  # fmt: skip
    network = 25e9 / 8 * CONSTANTS["dcn"]
    assert between.seconds == {"network": pytest.approx(2 * (1 / 2 * 4 * MIB / network + 50e-6))}


@pytest.mark.parametrize(
    ("cluster", "alone", "both"),
    [
        ("v5e-8", {"fsdp": 8}, {"fsdp": 4, "tensor": 2}),
        ("v5p-64", {"fsdp": 32}, {"data": 2, "fsdp": 4, "tensor": 4}),
        ("2xv5e:4x4", {"data": 2, "fsdp": 16}, {"data": 2, "fsdp": 4, "tensor": 4}),
    ],
)
def test_axes_of_a_torus_together_are_one_axis(cluster, alone, both):
    """The program and its devices are the same."""
    outer = {"data": 2} if cluster.startswith("2x") else {}
    size = 32 if cluster == "v5p-64" else both["fsdp"] * both["tensor"]
    axes = tuple(both) if cluster == "v5p-64" else ("fsdp", "tensor")
    for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"):
        together = one(cluster, both, kind, axes, 64 * MIB, group=size, slices=outer)
        apart = one(cluster, alone, kind, ("fsdp",), 64 * MIB, group=size, slices=outer)
        assert together.seconds == apart.seconds
        assert set(together.seconds) == {"ici"}


def test_axes_of_known_names_in_another_order_stand_in_that_order():
    mesh = {"tensor": 8, "fsdp": 8}
    outer = one("8x8xh100", mesh, "all-gather", ("tensor",), 64 * MIB, group=8)
    inner = one("8x8xh100", mesh, "all-gather", ("fsdp",), 64 * MIB, group=8)
    # Each device of a host has its own NIC, and trees over 8 hosts are 3 deep.
    assert outer.seconds == {"network": pytest.approx(7 / 8 * 64 * MIB / NIC + 3 * HOST_HOP)}
    assert inner.seconds == {"nvlink": pytest.approx(7 / 8 * 64 * MIB / NVLINK + 7 * HOP)}


@pytest.mark.parametrize(
    ("cluster", "axes", "note"),
    [
        ("cpu:8", ("fsdp",), "the links of cpu:8 are not known"),
        ("8xh100", None, "its groups match no mesh axes"),
    ],
)
def test_what_is_not_known_is_said(cluster, axes, note):
    flow = one(cluster, {"fsdp": 8}, "all-gather", axes, MIB, group=8)
    assert (flow.seconds, flow.total_seconds, flow.note) == ({}, None, note)
    (row,) = rows((flow,))
    assert (row.fabric, row.seconds, row.unknown, row.notes) == ("?", 0.0, 1, (note,))


GATHER = 7 / 8 * 2 * 4096**2 / NVLINK + 7 * HOP

# Cut from a program for 8 H100: a gather beside a matmul, one that the matmul waits for, and a sum
# that the runtime does not make asynchronous.
GPU = """HloModule jit_step, is_scheduled=true, num_partitions=8, \
entry_computation_layout={(bf16[512,4096]{1,0})->bf16[4096,4096]{1,0}}

ENTRY %main (p: bf16[512,4096], x: bf16[4096,4096]) -> bf16[4096,4096] {
  %p = bf16[512,4096]{1,0} parameter(0)
  %x = bf16[4096,4096]{1,0} parameter(1)
  %g1 = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%p), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %y = bf16[4096,4096]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d1 = bf16[4096,4096]{1,0} all-gather-done(%g1)
  %g2 = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%p), channel_id=2, \
replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %d2 = bf16[4096,4096]{1,0} all-gather-done(%g2)
  %z = bf16[4096,4096]{1,0} dot(%d1, %d2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %s = bf16[4096,4096]{1,0} all-reduce-start(%z), channel_id=3, replica_groups=[1,8]<=[8], \
use_global_device_ids=true, to_apply=%add, \
backend_config={"collective_backend_config":{"is_sync":true}}
  %e = bf16[4096,4096]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = bf16[4096,4096]{1,0} all-reduce-done(%s)
}
"""


def test_what_runs_beside_a_collective():
    module = parse(GPU)
    report = read_program(GPU, {"fsdp": 8})
    flows = collective_times(report, parse_cluster("8xh100"), module)
    by_name = {flow.collective.name: flow for flow in flows}
    matmul = 2 * 4096**3 / MATMUL
    assert by_name["g1"].total_seconds == pytest.approx(GATHER)
    assert by_name["g1"].overlap == "overlapped"
    assert by_name["g1"].overlappable == 1.0
    assert matmul > GATHER
    assert [(by_name[name].overlap, by_name[name].overlappable) for name in ("g2", "s")] == [
        ("blocking", 0.0), ("blocking", 0.0),
    ]  # fmt: skip
    assert by_name["g2"].total_seconds == pytest.approx(GATHER)
    first, second = rows(flows)
    assert (first.kind, first.mesh_axes, first.fabric, first.count) == (
        "all-reduce", ("fsdp",), "nvlink", 1,
    )  # fmt: skip
    assert (second.kind, second.count, second.overlaps) == (
        "all-gather", 2, ("overlapped", "blocking"),
    )  # fmt: skip
    assert second.hidden_seconds == pytest.approx(GATHER)
    assert math.isclose(second.sent_bytes, 2 * 7 / 8 * 2 * 4096**2)


TOGETHER = """HloModule jit_step, is_scheduled=true, num_partitions=8

ENTRY %main (p: bf16[512,4096], x: bf16[4096,2048]) -> bf16[4096,4096] {
  %p = bf16[512,4096]{1,0} parameter(0)
  %x = bf16[4096,2048]{1,0} parameter(1)
  %g1 = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%p), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true
  %g2 = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%p), channel_id=2, \
replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true
  %y = bf16[4096,4096]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %d1 = bf16[4096,4096]{1,0} all-gather-done(%g1)
  %d2 = bf16[4096,4096]{1,0} all-gather-done(%g2)
  ROOT %z = bf16[4096,4096]{1,0} dot(%d1, %d2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_collectives_in_flight_together_share_what_runs_beside_them():
    report = read_program(TOGETHER, {"fsdp": 8})
    flows = collective_times(report, parse_cluster("8xh100"), parse(TOGETHER))
    by_name = {flow.collective.name: flow for flow in flows}
    matmul = 2 * 4096**2 * 2048 / MATMUL
    assert GATHER < matmul < 2 * GATHER
    assert {flow.overlap for flow in flows} == {"overlapped"}
    assert by_name["g1"].overlappable == 1.0
    assert by_name["g2"].overlappable == pytest.approx((matmul - GATHER) / GATHER)


# Cut from a program for v5e: a matmul inside of the second of three parts of a gather, one part of
# it in fast memory.
TPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

%started (p.1: bf16[512,4096]) -> bf16[4096,4096] {
  %p.1 = bf16[512,4096]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %g.1 = bf16[4096,4096]{1,0:T(8,128)(2,1)} all-gather(%p.1), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true
}

%computed (p.2: bf16[512,4096], x.2: bf16[4096,768]) -> (bf16[4096,4096], bf16[4096,4096]) {
  %p.2 = bf16[512,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %x.2 = bf16[4096,768]{1,0:T(8,128)(2,1)} parameter(1)
  %g.2 = bf16[4096,4096]{1,0:T(8,128)(2,1)S(1)} all-gather(%p.2), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true
  %y.2 = bf16[4096,4096]{1,0:T(8,128)(2,1)} dot(%x.2, %x.2), lhs_contracting_dims={1}, \
rhs_contracting_dims={1}
  ROOT %t.2 = (bf16[4096,4096], bf16[4096,4096]) tuple(%y.2, %g.2)
}

%ended (p.3: bf16[512,4096]) -> bf16[4096,4096] {
  %p.3 = bf16[512,4096]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %g.3 = bf16[4096,4096]{1,0:T(8,128)(2,1)} all-gather(%p.3), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true
}

ENTRY %main (p: bf16[512,4096], x: bf16[4096,768]) -> bf16[4096,4096] {
  %p = bf16[512,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %x = bf16[4096,768]{1,0:T(8,128)(2,1)} parameter(1)
  %g = bf16[4096,4096]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=2, \
replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true, \
frontend_attributes={async_collective_name="all-gather-start"}
  %async-collective-start = bf16[4096,4096]{1,0} fusion(%p), kind=kCustom, calls=%started
  %fusion = (bf16[4096,4096]{1,0}, bf16[4096,4096]{1,0}) fusion(%p, %x), kind=kOutput, \
calls=%computed
  %async-collective-done = bf16[4096,4096]{1,0} fusion(%p), kind=kCustom, calls=%ended
  ROOT %z = bf16[4096,4096]{1,0} dot(%g, %async-collective-done), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}
"""


def on_v5e(**options):
    report, cluster = read_program(TPU, {"fsdp": 8}), parse_cluster("v5e:2x4")
    flows = collective_times(report, cluster, parse(TPU), **options)
    return {flow.collective.name: flow for flow in flows}


def test_a_collective_in_parts_counts_once_and_hides_behind_its_middle_parts():
    flows = on_v5e()
    assert {name: flow.overlap for name, flow in flows.items()} == {
        "g": "blocking", "g.1": "overlapped",
    }  # fmt: skip
    matmul = 2 * 4096**2 * 768 / (197e12 * CONSTANTS["matmul.v5e"])
    assert matmul < flows["g.1"].total_seconds
    assert flows["g.1"].hidden_seconds == pytest.approx(matmul)
    assert flows["g"].hidden_seconds == 0.0


def test_what_a_program_without_a_schedule_hides_is_not_known():
    flows = on_v5e(scheduled=False).values()
    assert [(flow.overlap, flow.hidden_seconds) for flow in flows] == [("unscheduled", None)] * 2
    assert all(flow.total_seconds for flow in flows)
