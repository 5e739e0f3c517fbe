"""Figures of a measured machine: fitted, kept, checked, and planned with."""

import dataclasses
import json

import numpy as np
import pytest

from shardlib.cost.layout import SHARDLIB, Software
from shardlib.cost.machine.fabric import links
from shardlib.cost.machine.fitting import fit_line, fit_matmul
from shardlib.cost.machine.kernels import matmul
from shardlib.cost.machine.measured import (
    COLLECTIVES,
    Calibration,
    Line,
    MatmulFit,
    Timed,
    load,
    measured_cluster,
    save,
    software_on,
)
from shardlib.cost.machine.rates import rates_on
from shardlib.cost.transformer.step_time import software_for
from shardlib.errors import ConfigError, MeshError
from shardlib.hardware import parse_cluster
from shardlib.plan import Job, Layout, Transformer, step_time

CPU = parse_cluster("cpu:8")
TINY = Transformer(4, 128, 4, 4, 32, 344, 1024)
JOB = Job(TINY, 256, 16, precision="f32", compute_bytes=4)


def calibration(**changes):
    line = Line(1e-4, 1e9, 0.1)
    figures = {
        "platform": "cpu",
        "device_kind": "cpu",
        "devices": 8,
        "hosts": 1,
        "cores": 2,
        "memory_bytes": 3e9,
        "versions": {"jax": "1"},
        "matmul": {"f32": MatmulFit(15e9, 8.0, 5e-6, 0.05)},
        "memory": Line(1e-6, 1e10, 0.02),
        "exp": Line(1e-6, 4e9, 0.03),
        "fresh": Line(1e-4, 2e9, 0.03),
        "collectives": {kind: {2: line, 4: line, 8: line} for kind in COLLECTIVES},
        "timed": (Timed("memory", (64,), 1e-5, 0.2), Timed("exp", (64,), 1e-5, 0.4)),
    }
    return Calibration(**(figures | changes))


def cluster(**changes):
    return measured_cluster(CPU, calibration(**changes))


def test_a_line_is_found_through_noise():
    rng = np.random.default_rng(0)
    sizes = [2**n for n in range(10, 26, 2)]
    noise = np.exp(rng.normal(0, 0.03, len(sizes)))
    points = [
        Timed("x", (size,), float((2e-4 + size / 3e9) * n), 0.0)
        for size, n in zip(sizes, noise, strict=True)
    ]
    line = fit_line(points)
    # The scatter of a mean of eight, three times over.
    assert line.seconds == pytest.approx(2e-4, rel=0.1)
    assert line.bytes_per_second == pytest.approx(3e9, rel=0.1)
    assert line.error < 0.06
    assert line(6e6, pieces=2) == pytest.approx(2 * line.seconds + 6e6 / line.bytes_per_second)


def test_matmuls_are_fitted_by_the_planners_own_kernel():
    memory = Line(0.0, 2e10, 0.0)
    known = calibration(matmul={"f32": MatmulFit(2e10, 20.0, 8e-6, 0.0)}, memory=memory)
    rates = rates_on(measured_cluster(CPU, known), "f32", {})
    shapes = [(s, s, s) for s in (16, 64, 256, 1024)] + [(512, 32, 1024), (2048, 1024, 64)]
    points = [Timed("matmul", (*s, 4), matmul(*s, width=4).seconds(rates), 0.0) for s in shapes]
    fit = fit_matmul(points, memory)
    assert fit.flops == pytest.approx(2e10, rel=0.02)
    assert fit.fill == pytest.approx(20.0, rel=0.2)
    assert fit.seconds == pytest.approx(8e-6, rel=0.05)
    assert fit.error < 0.01


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "deep" / "cpu-8.json"
    save(calibration(), path)
    assert dataclasses.asdict(load(path)) == dataclasses.asdict(calibration())
    record = json.loads(path.read_text())
    assert record["fit_error"] == 0.1
    assert load(path).spread == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda record: record.update(format=9), "its format is not 1"),
        (lambda record: record["memory"].update(bytes_per_second=-1), "memory is -1"),
        (lambda record: record["matmul"]["f32"].update(flops=0), "matmul.f32 is 0"),
        (lambda record: record.pop("memory"), "KeyError: 'memory'"),
        (lambda record: record["collectives"].pop("shift"), "it holds no shift"),
        (lambda record: record.update(matmul={}), "it holds no matmuls"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(tmp_path, change, what):
    path = tmp_path / "c.json"
    save(calibration(), path)
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == (
        f"{path} is not a readable calibration: {what}.\n  Measure again: shardlib calibrate"
    )


def test_another_machine_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"the calibration is of 8 devices of kind 'cpu', but(.|\n)*\n  Measure it: shardlib",
    ):
        measured_cluster(parse_cluster("cpu:4"), calibration())
    with pytest.raises(ConfigError, match="matmuls in bf16 were not measured"):
        rates_on(cluster(), "bf16", {})


def on_gpus(**changes):
    kind = "NVIDIA H100 80GB HBM3"
    bf16 = {"bf16": MatmulFit(6e14, 100.0, 5e-6, 0.05)}
    return calibration(platform="gpu", device_kind=kind, matmul=bf16, **changes)


def hosts(**changes):
    """Two hosts of eight, whose network is ten times slower."""
    near, far = Line(1e-5, 300e9, 0.1), Line(1e-4, 30e9, 0.1)
    tables = {
        "collectives": {kind: {2: near, 8: near, 16: far} for kind in COLLECTIVES},
        "across": {kind: {2: far, 4: far, 8: far, 16: far} for kind in COLLECTIVES},
    }
    return on_gpus(**({"devices": 16, "hosts": 2} | tables | changes))


def test_axes_that_cross_hosts_use_what_was_measured_across_them():
    gpus = measured_cluster(parse_cluster("2x8xh100"), hosts())
    found = links(gpus, Layout(data=2, tensor=8), {})
    assert found["tensor"].all_reduce(3e9) == pytest.approx(1e-5 + 0.01)
    assert found["data"].all_reduce(3e9) == pytest.approx(1e-4 + 0.1)
    found = links(gpus, Layout(data=2, fsdp=2, tensor=4), {})
    # Two groups of four on each host: fsdp stays within it.
    assert found["fsdp"].gather(3e9) == pytest.approx(1e-5 + 0.01)
    assert found["data"].gather(3e9) == pytest.approx(1e-4 + 0.1)
    assert links(gpus, Layout(fsdp=16), {})["fsdp"].gather(3e9) == pytest.approx(1e-4 + 0.1)


def test_gpus_of_other_hosts_are_refused(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"the calibration is of 16 devices of kind 'NVIDIA(.|\n)*\n  Measure it: shardlib",
    ):
        measured_cluster(parse_cluster("4x4xh100"), hosts())
    path = tmp_path / "h100.json"
    save(hosts(), path)
    assert dataclasses.asdict(load(path)) == dataclasses.asdict(hosts())
    save(hosts(across={}), path)
    with pytest.raises(ConfigError, match="it holds no all_reduce across hosts; it holds no"):
        load(path)


def test_cpu_devices_are_planned_only_when_measured():
    with pytest.raises(MeshError, match=r"not known\.\n  Run `shardlib calibrate`"):
        step_time(JOB, Layout(data=8), CPU)
    found = step_time(JOB, Layout(data=8, sequence_parallel=False), cluster())
    assert found.total == pytest.approx(sum(found.parts.values()))
    # 6 FLOPs for each of 4096 tokens and 3.1 M weights, in eight parts at 15 GFLOP/s.
    assert found.matmul == pytest.approx(6 * 4096 * 4 * 4 * 128**2 * 3.02 / 8 / 15e9, rel=0.5)


def test_nothing_is_hidden_on_shared_cores():
    fsdp = step_time(JOB, Layout(fsdp=8, sequence_parallel=False), cluster())
    slow = {kind: {8: Line(1e-3, 1e9, 0.1)} for kind in COLLECTIVES}
    later = step_time(JOB, Layout(fsdp=8, sequence_parallel=False), cluster(collectives=slow))
    # 7 arrays of 4 layers forward and backward and two tables are gathered one by one; sums are
    # one collective for each layer and one for the rest.
    assert later.fsdp - fsdp.fsdp == pytest.approx((2 * 28 + 2 + 5) * 9e-4, rel=1e-6)


def test_sums_are_not_scattered_on_cpu():
    lines = {kind: {8: Line(1e-9, 1e9, 0.1)} for kind in COLLECTIVES}
    lines["reduce_scatter"] = {8: Line(1e-9, 1e12, 0.1)}
    link = links(cluster(collectives=lines), Layout(data=8), {})["data"]
    assert link.reduce_scatter(1e6) == link.all_reduce(1e6) == pytest.approx(1e-3)
    on_gpu = calibration(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", collectives=lines)
    gpus = measured_cluster(parse_cluster("8xh100"), on_gpu)
    assert links(gpus, Layout(data=8), {})["data"].reduce_scatter(1e6) == pytest.approx(1.001e-6)


def test_attention_on_hopper_is_that_of_cudnn():
    hopper = parse_cluster("8xh100")
    measured = calibration(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")

    job_16 = dataclasses.replace(JOB, precision="bf16", compute_bytes=2)

    def attention(on=hopper, job=job_16, software=SHARDLIB, **axes):
        return software_for(job, Layout(**axes), on, software).attention

    assert attention() == "cudnn"
    assert attention(context=2) == "flash"
    assert attention(measured_cluster(hopper, measured)) == "flash"
    assert attention(parse_cluster("8xa100-80")) == "flash"
    assert attention(software=Software(attention="flash1")) == "flash1"
    # What `shardlib.nn.attention` leaves to other kernels.
    wide = dataclasses.replace(TINY, head_dim=256)
    for job in (dataclasses.replace(job_16, model=wide), JOB):
        assert attention(job=job) == "flash"


def test_idle_stages_of_virtual_devices_compute():
    assert software_on(CPU, Software()) == Software(attention="unfused", skip_idle=False)
    assert software_on(parse_cluster("8xh100"), Software()) == Software()
    layout = Layout(stage=4, data=2, microbatches=8, sequence_parallel=False)
    found = step_time(JOB, layout, cluster())
    # 6 of 14 ticks are idle, and each costs what the 8 others do.
    work = found.matmul + found.attention + found.head + found.recompute
    assert found.bubble == pytest.approx(6 / 8 * work, rel=0.2)
    assert found.imbalance == 0


def test_an_orthogonalising_optimizer_costs_what_is_not_cut():
    muon = dataclasses.replace(JOB, newton_schulz_steps=5)
    whole, cut = (
        step_time(muon, Layout(**sizes, sequence_parallel=False), cluster()).optimizer
        - step_time(JOB, Layout(**sizes, sequence_parallel=False), cluster()).optimizer
        for sizes in ({"data": 8}, {"fsdp": 8})
    )
    # Four layers of four 128 x 128 and three 128 x 344: 2 m m n, 2 m m m and 2 m m n FLOPs.
    flops = 5 * 4 * (4 * 6 * 128**3 + 3 * (4 * 128**2 * 344 + 2 * 128**3))
    assert whole == pytest.approx(flops / 15e9, rel=0.35)
    assert cut < whole
