"""Step times: what must hold for any job, and how near they come to published runs."""

import dataclasses
import statistics
from pathlib import Path

import pytest

from published import fit_constants, read_file
from shardlib.cost.layout import Layout, Software
from shardlib.cost.machine.constants import PRIORS, committed
from shardlib.cost.transformer.step_time import step_time
from shardlib.cost.workload import DOTS, FULL, FULL_EAGER, NONE, Experts, Job, Remat, Transformer
from shardlib.errors import MeshError
from shardlib.hardware import parse_cluster

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.json"
LLAMA = Transformer(32, 4096, 32, 8, 128, 14336, 128256)
JOB = Job(LLAMA, 8192, 512)
CLUSTER = parse_cluster("64xh100")


def seconds(job=JOB, cluster="64xh100", software=None, **degrees):
    software = Software() if software is None else software
    return step_time(job, Layout(**degrees), parse_cluster(cluster), software).total


@pytest.fixture(scope="module")
def cases():
    return [case for case in read_file(DATA)[0] if not case.eight_bit]


def test_parts_add_up_and_name_the_bottleneck():
    found = step_time(
        JOB, Layout(stage=2, fsdp=16, tensor=2, microbatches=8), parse_cluster("64xh100")
    )
    assert found.total == pytest.approx(sum(found.parts.values()))
    assert all(part >= 0 for part in found.parts.values())
    assert found.bottleneck == "matmul"
    assert found.bubble > 0


def test_recomputation_costs_a_third_of_the_layers_work():
    kept, again = (
        step_time(dataclasses.replace(JOB, remat=remat), Layout(fsdp=64), CLUSTER, Software())
        for remat in (NONE, FULL_EAGER)
    )
    work = kept.matmul + kept.attention + kept.elementwise
    assert kept.recompute == 0
    assert again.recompute == pytest.approx(work / 3, rel=0.15)
    assert seconds(dataclasses.replace(JOB, remat=FULL), fsdp=64) < again.total


def test_steps_measured_on_one_gpu():
    """`benchmarks/gpu_train.py`: keeping everything is slower than recomputing all but matmuls,
    because a loop copies all that it keeps into stacks."""
    model = Transformer(24, 1536, 12, 4, 128, 4096, 32768)

    def predicted(chip, remat):
        return step_time(Job(model, 4096, 4, remat=remat), Layout(), parse_cluster(chip)).total

    matmuls = Remat(DOTS.kept - {"attention"})
    assert predicted("1xh100", NONE) == pytest.approx(0.2152, rel=0.1)
    assert predicted("1xh200", NONE) == pytest.approx(0.1959, rel=0.1)
    assert predicted("1xh100", matmuls) == pytest.approx(0.1948, rel=0.1)
    assert predicted("1xh100", DOTS) < predicted("1xh100", matmuls) < predicted("1xh100", NONE)


def test_stacks_of_a_pipeline_are_filled_when_its_chunks_run_again():
    job, layout = dataclasses.replace(JOB, batch=64), Layout(stage=8, microbatches=8)
    none, dots = (
        step_time(dataclasses.replace(job, remat=remat), layout, parse_cluster("8xh100"))
        for remat in (NONE, DOTS)
    )
    # `dots` computes elementwise operations a third time, and keeps less.
    assert none.elementwise == dots.elementwise
    assert none.recompute > dots.recompute


def test_slower_links_smaller_batches_and_older_software_cost_more():
    assert seconds(fsdp=64) < seconds(fsdp=64, software=Software(attention="unfused"))
    assert seconds(fsdp=64) < seconds(fsdp=64, software=Software(attention="flash1"))
    assert seconds(fsdp=64) < seconds(fsdp=64, software=Software(fusion="eager"))
    tensor = {"fsdp": 8, "tensor": 8}
    assert seconds(**tensor) < seconds(**tensor, software=Software(overlap_tensor=False))
    # A tensor axis that leaves the host.
    across = {"fsdp": 4, "tensor": 16}
    assert seconds(**across) > 1.2 * seconds(**tensor)
    small = dataclasses.replace(JOB, batch=64)
    assert seconds(small, fsdp=64) / 64 > seconds(fsdp=64) / 512


def test_bubbles_shrink_with_microbatches_and_chunks():
    def bubble(**changes):
        layout = Layout(stage=4, fsdp=16, **changes)
        return step_time(JOB, layout, CLUSTER).bubble

    assert bubble(microbatches=8) / bubble(microbatches=16) == pytest.approx(2, rel=0.05)
    assert bubble(microbatches=8) / bubble(microbatches=8, chunks=2) == pytest.approx(2, rel=1e-9)


def test_experts_cost_what_a_token_passes_and_their_traffic():
    sparse = dataclasses.replace(LLAMA, experts=Experts(8, 2, 14336))
    job = dataclasses.replace(JOB, model=sparse)
    layout = Layout(fsdp=8, expert=8)
    dense, routed = (step_time(j, layout, CLUSTER) for j in (JOB, job))
    # Two experts a token: about twice the MLP, which is three quarters of the matmuls.
    assert 1.6 < routed.matmul / dense.matmul < 2.6
    assert dense.expert == 0 < routed.expert


def test_a_layout_that_does_not_fill_the_cluster():
    with pytest.raises(
        MeshError,
        match=r"the layout fsdp=4 is for 4 devices, but 8xh100 has(.|\n)*\n  Choose sizes whose",
    ):
        step_time(JOB, Layout(fsdp=4), parse_cluster("8xh100"))


def test_devices_whose_speed_is_not_known():
    with pytest.raises(
        MeshError, match=r"cluster .cpu:8.: the speed and memory .*\n  Run `shardlib calibrate`"
    ):
        step_time(JOB, Layout(fsdp=8), parse_cluster("cpu:8"))


def test_published_runs(cases):
    errors = [fit_constants.error(case, committed()) for case in cases]
    sizes = sorted(map(abs, errors))
    assert len(cases) >= 200
    assert statistics.median(sizes) < 0.03
    assert fit_constants.percentile(sizes, 0.9) < 0.09
    # Also where nothing was fitted: from datasheets alone.
    expected = {name: prior.value for name, prior in PRIORS.items()}
    sizes = sorted(abs(fit_constants.error(case, expected)) for case in cases)
    assert statistics.median(sizes) < 0.08
    assert fit_constants.percentile(sizes, 0.9) < 0.18


@pytest.mark.docs
def test_constants_are_what_calibration_gives(cases):
    start = committed()
    assert set(start) == set(PRIORS)
    moved = fit_constants.calibrate(cases, start, rounds=2).constants
    for name, value in start.items():
        # It stops where further rounds move by less than a hundredth of the standard error.
        assert moved[name] == pytest.approx(value, rel=5e-3), name


@pytest.mark.mesh
def test_families_left_out_are_predicted(cases):
    """One family of each kind; the benchmark does all."""
    asked = [c for c in cases if c.family in ("tpu_recipes_ironwood", "megatron_seqsel_a100")]
    errors = fit_constants.cross_validate(asked, cases, committed())
    assert len(errors) == len(asked) >= 10
    assert statistics.median(map(abs, errors.values())) < 0.12


def test_offloading_costs_what_the_host_link_cannot_hide():
    kept = Remat(frozenset({"qkv"}))
    away = dataclasses.replace(kept, offloaded=frozenset({"qkv", "input"}))
    on, off = (
        step_time(dataclasses.replace(JOB, remat=remat), Layout(fsdp=64), CLUSTER)
        for remat in (kept, away)
    )
    assert on.offload == 0
    # 8 sequences of 8192 tokens, 32 layers, (6144 + 4096) x 2 bytes, there and back at 63 GB/s.
    seconds = 2 * 8 * 8192 * 32 * (6144 + 4096) * 2 / 63e9
    assert (1 - committed()["hide_gather.gpu"]) * seconds == pytest.approx(off.offload)
