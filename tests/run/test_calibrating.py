"""The machine at hand is measured; what was measured is found again by its cluster."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import pytest

from shardlib.cost.machine.measured import COLLECTIVES, Line, MatmulFit, MeasuredCluster, load, save
from shardlib.errors import ConfigError, MeshError
from shardlib.hardware import parse_cluster
from shardlib.plan import Job, Layout, Transformer, step_time
from shardlib.run.plans import calibrating

pytestmark = pytest.mark.mesh


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two devices, measured in passing by the command: loops of a fraction of a millisecond.

    In a process of its own, which may choose how many devices the CPU stands for.
    """
    cache = tmp_path_factory.mktemp("cache")
    script = (
        "import shardlib.run.plans.calibrating as c\n"
        "whole = c.calibrate\n"
        "c.calibrate = lambda on: whole(on, rounds=3, target_seconds=1e-4)\n"
        "c._UNSTEADY = float('inf')\n"  # Loops so short tell little.
        "from shardlib.cli import main\n"
        "main(['calibrate', '--on', 'cpu:2', '--json'])\n"
    )
    environment = {name: x for name, x in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**environment, "SHARDLIB_CACHE": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    path = cache / "calibration" / "cpu-2.json"  # Where `plan` looks.
    assert json.loads(done.stdout) == json.loads(path.read_text())
    return load(path)


def test_every_figure_is_measured(measured):
    assert (measured.platform, measured.devices) == ("cpu", 2)
    assert set(measured.matmul) == {"f32", "bf16"}
    assert set(measured.collectives) == set(COLLECTIVES)
    assert all(set(by_size) == {2} for by_size in measured.collectives.values())
    assert measured.versions["jax"] == jax.__version__
    names = {one.what for one in measured.timed}
    assert {"matmul f32", "memory", "exp", "fresh", "all_reduce over 2", "shift over 2"} < names
    assert all(one.seconds > 0 for one in measured.timed)
    # No processor of today multiplies faster, nor any as slowly.
    assert 1e7 < measured.matmul["f32"].flops < 1e13


def test_what_was_measured_beside_other_work_is_refused(measured):
    steady = dataclasses.replace(
        measured,
        matmul={"f32": MatmulFit(1e10, 8.0, 1e-6, 0.05)},
        memory=Line(1e-6, 1e10, 0.02),
        exp=Line(1e-6, 1e10, 0.5),
        fresh=Line(1e-6, 1e10, 0.02),
        collectives={kind: {2: Line(1e-6, 1e9, 0.1)} for kind in COLLECTIVES},
    )
    calibrating.check_steady(steady)
    shift = {**steady.collectives, "shift": {2: Line(1e-6, 1e9, 0.61)}}
    busy = dataclasses.replace(steady, memory=Line(1e-6, 1e17, 0.997), collectives=shift)
    fault = r"too busy .*memory by 100%, shift over 2 by 61%; nothing .*\n  Run it again"
    with pytest.raises(ConfigError, match=fault):
        calibrating.check_steady(busy)


def test_a_cluster_finds_its_calibration(measured, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path))
    cpu = parse_cluster("cpu:2")
    with pytest.raises(ConfigError) as caught:
        calibrating.as_measured(cpu)
    assert str(caught.value) == (
        "the speed of cpu:2 is unknown: plans for CPU devices need a calibration.\n"
        "  Measure them first: shardlib calibrate --on cpu:2"
    )
    assert calibrating.cluster_at_hand(measured) == cpu
    path = calibrating.calibration_path(cpu)
    assert path == tmp_path / "calibration" / "cpu-2.json"
    save(measured, path)
    found = calibrating.as_measured(cpu)
    assert isinstance(found, MeasuredCluster)
    job = Job(Transformer(2, 64, 4, 4, 16, 256, 512), 64, 16, precision="f32", compute_bytes=4)
    assert step_time(job, Layout(data=2, sequence_parallel=False), found).total > 0
    # Chips are planned with their datasheets where they were not measured.
    h100s = parse_cluster("8xh100")
    assert calibrating.as_measured(h100s) is h100s


def test_devices_of_several_hosts_are_measured_across_them_too():
    """Groups of an outer axis have no neighbours: the host of each device is that of its group."""
    devices = jax.devices()[:4]
    trials = list(calibrating._trials(devices, "cpu", hosts=2))
    names = {trial.what for trial in trials}
    for kind in COLLECTIVES:
        assert {f"{kind} over 2", f"{kind} across 2", f"{kind} across 4"} <= names
    assert not any("across" in t.what for t in calibrating._trials(devices[:2], "cpu", hosts=1))
    near, apart = (
        next(t for t in trials if t.what == f"shift {how} 2") for how in ("over", "across")
    )
    assert [
        near.run(1)[1].sharding.mesh.devices.tolist(),
        apart.run(1)[1].sharding.mesh.devices.tolist(),
    ] == [
        [devices[:2], devices[2:]],
        [devices[::2], devices[1::2]],
    ]


def test_calibrations_are_kept_by_hosts(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path))
    names = [
        calibrating.calibration_path(parse_cluster(name)).name
        for name in ("8xh100", "2x4xh100", "2x8xh100", "4x4xh100", "cpu:8", "v5p-128")
    ]
    assert names == [
        "h100-8.json",
        "h100-2x4.json",
        "h100-2x8.json",
        "h100-4x4.json",
        "cpu-8.json",
        "v5p-16x4.json",
    ]


def test_what_is_not_at_hand_is_not_measured():
    with pytest.raises(MeshError) as caught:
        calibrating.calibrate("8xh100")
    assert str(caught.value) == (
        "8xh100 is not available: there are 8 devices of kind 'cpu'.\n"
        "  Run this on the machine itself, or leave --on out to measure these devices."
    )
    with pytest.raises(ConfigError, match="rounds=2 are too few to tell a spread"):
        calibrating.calibrate(rounds=2)
