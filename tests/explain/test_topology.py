"""Devices to compile for that are not there."""

import dataclasses
import os
import subprocess
import sys

import jax
import pytest

import shardlib as sl
from shardlib.errors import MeshError, MissingExtraError
from shardlib.explain.aot.topology import devices_of
from shardlib.hardware import CHIPS, chip_for, cluster_of, parse_cluster
from shardlib.hardware.xla_targets import TARGETS


@pytest.mark.parametrize(
    ("name", "hosts", "slices"),
    [
        ("v4-32", 4, 1),
        ("v5e-1", 1, 1),
        ("v5e-8", 1, 1),
        ("v5e-16", 4, 1),
        ("v5p-8", 1, 1),
        ("v5p-32", 4, 1),
        ("v5p:4x4x8", 32, 1),
        ("v5p-17920", 2240, 1),
        ("v6e-64", 16, 1),
        ("tpu7x:2x2x1", 1, 1),
        ("2xv5e-256", 128, 2),
    ],
)
def test_devices_of_tpu_slices(name, hosts, slices):
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    cluster = parse_cluster(name)
    devices = devices_of(cluster)
    assert len(devices) == cluster.num_devices
    assert {chip_for(device) for device in devices} == {cluster.chip}
    assert len({device.process_index for device in devices}) == hosts == cluster.num_hosts
    assert len({getattr(device, "slice_index", 0) for device in devices}) == slices
    assert sl.make_mesh("auto", devices=devices).size == len(devices)
    at_hand = cluster_of(devices)
    assert (at_hand.chip, at_hand.num_hosts, at_hand.num_slices) == (cluster.chip, hosts, slices)
    assert at_hand.devices_per_host == cluster.devices_per_host


@pytest.mark.parametrize("chip", [chip for chip in CHIPS.values() if chip.kind == "gpu"])
def test_devices_of_gpu_hosts(chip):
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra cuda")
    cluster = parse_cluster(f"2x4x{chip.name}")
    devices = devices_of(cluster)
    assert [device.process_index for device in devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {chip_for(device) for device in devices} == {chip}
    assert cluster_of(devices) == dataclasses.replace(cluster, name=f"8x{chip.name}")


def test_every_gpu_has_its_facts():
    assert set(TARGETS) == {chip.name for chip in CHIPS.values() if chip.kind == "gpu"}
    for name, target in TARGETS.items():
        # What CUDA reports is within a few percent of what is sold, in either unit.
        assert target.memory_bytes == pytest.approx(CHIPS[name].memory_bytes, rel=0.075)
        bandwidth = CHIPS[name].memory_bytes_per_second
        assert target.memory_bytes_per_second == pytest.approx(bandwidth, rel=0.05)


def test_cpu_devices_are_those_of_this_process():
    assert devices_of(parse_cluster("cpu:8")) == jax.devices("cpu")
    with pytest.raises(
        MeshError, match=r"cpu:9 needs 9 CPU devices, and JAX has started 8\.\n  Start with"
    ):
        devices_of(parse_cluster("cpu:9"))


@pytest.mark.parametrize(
    ("name", "modules", "what", "extra"),
    [
        ("v5p-128", ["libtpu"], "libtpu", "tpu"),
        ("8xh100", ["jax_cuda12_plugin", "jax_cuda13_plugin"], "the CUDA plugin of JAX", "cuda"),
    ],
)
def test_a_missing_compiler_is_named_with_what_installs_it(monkeypatch, name, modules, what, extra):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=f"compiling for {name} needs {what}.*{extra}]'"):
        devices_of(parse_cluster(name))


def test_a_slice_that_cannot_be():
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    with pytest.raises(MeshError, match=r"^cannot compile for v5e:3x4: INVALID_ARGUMENT: .*\n  \w"):
        devices_of(parse_cluster("v5e:3x4"))


TOLD = """
import os
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from shardlib.explain.aot.compile import compile_step
from shardlib.hardware import parse_cluster

before = dict(os.environ)
for name in ("v5e-8", "v5p-32"):
    cluster = parse_cluster(name)
    mesh = AbstractMesh((cluster.num_devices,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((64,), "float32", sharding=NamedSharding(mesh, P("data")))
    made = compile_step(jnp.sum, (x,), on=cluster, keep=False)
    print(made.compiled_for, "all-reduce" in made.text, dict(os.environ) == before)
"""


@pytest.mark.aot
@pytest.mark.parametrize("already", [{}, {"TPU_ACCELERATOR_TYPE": "v5litepod-8"}])
def test_what_libtpu_is_told_of_the_machine_is_told_to_no_one_else(already):
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    ours = ("TPU_", "ALLOW_MULTIPLE_LIBTPU_LOAD")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    printed = subprocess.run(
        [sys.executable, "-c", TOLD],
        env={**clean, "JAX_PLATFORMS": "cpu", **already},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert printed == "v5e-8 True True\nv5p-32 True True\n"
