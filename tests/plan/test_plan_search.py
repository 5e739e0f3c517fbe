"""The search finds what trying everything finds, and loses to no published configuration."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest

from published import read_file
from shardlib.cost.layout import AXES, SHARDLIB, Layout
from shardlib.cost.transformer.memory import peak_memory
from shardlib.cost.transformer.step_time import step_time
from shardlib.cost.workload import NONE, Experts, Job, Remat, Transformer
from shardlib.hardware import parse_cluster
from shardlib.plan.problem import Choice
from shardlib.plan.search import candidates, capacity_bytes, of_layout, search
from shardlib.plan.settings import schedule
from shardlib.plan.workloads.transformer import POLICIES, TransformerWorkload

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.json"
DENSE = Transformer(8, 1024, 8, 2, 128, 4096, 32768)
ROUTED = dataclasses.replace(DENSE, experts=Experts(4, 2, 2048))


def small(name, memory_gib):
    """A cluster whose devices hold little, so that memory decides."""
    cluster = parse_cluster(name)
    chip = dataclasses.replace(
        cluster.chip, memory_bytes=memory_gib * 2**30 * cluster.chip.devices_per_chip
    )
    return dataclasses.replace(cluster, chip=chip)


def every_layout(model, batch, length, cluster):
    """All that shardlib can run, by rules written down here anew."""
    count = cluster.num_devices
    sides = [n for n in range(1, count + 1) if count % n == 0]
    for sizes in itertools.product(sides, repeat=6):
        stage, data, fsdp, expert, context, tensor = sizes
        shards = data * fsdp * expert
        if math.prod(sizes) != count or batch % shards or stage > model.layers:
            continue
        if model.layers % stage and model.embed % (stage * fsdp):
            continue
        if model.heads % tensor or model.vocab % tensor or model.embed % fsdp:
            continue
        if (length // 2) % context or (model.experts is None and expert > 1):
            continue
        hidden = [model.mlp] if model.experts is None else [model.experts.mlp]
        if any(width % tensor for width in hidden):
            continue
        if model.experts and model.experts.number % expert:
            continue
        crossed = math.gcd(cluster.num_slices, data)
        crossed *= math.gcd(cluster.num_slices // crossed, fsdp)
        if crossed != cluster.num_slices:
            continue
        shared = tensor > 1 and length % (context * tensor) == 0
        for zero, chunks, micro, offload in itertools.product(
            (3, 2, 1) if fsdp > 1 else (3,),
            (1, 2, 3, 4),
            range(1, batch // shards + 1),
            (False, True),
        ):
            if chunks > 1 and (stage == 1 or micro % stage or stage * chunks > model.layers):
                continue
            slots = math.ceil(model.layers / (stage * chunks)) * stage * chunks
            whole = model.layers % stage == 0  # Then chunks must be equal.
            if slots > model.layers * (1 if whole else 16 / 15):
                continue
            if (batch // shards) % micro or (zero == 2 and micro == 1):
                continue
            yield Layout(
                *sizes,
                cluster.num_slices,
                micro,
                chunks,
                sequence_parallel=shared,
                zero=zero,
                offload_optimizer=offload,
            )


def tried_everything(workload, cluster):
    """The best time of each mesh, every layout and every choice priced by itself."""
    best = {}
    job = workload.job
    for layout in every_layout(job.model, job.batch, job.length, cluster):
        for moments, chunks in itertools.product(workload.moments, workload.loss_chunks):
            bytes_of = {"loss_chunks": chunks, "moment_bytes": 8 if moments == "float32" else 6}
            for policy in workload.policies:
                base = dataclasses.replace(job, **bytes_of)
                for chosen in fitting(base, policy, layout, cluster):
                    seconds = step_time(chosen, layout, cluster).total
                    seconds *= 1.02 if moments == "bfloat16" else 1
                    mesh = layout.sizes
                    best[mesh] = min(best.get(mesh, math.inf), seconds)
    return sorted(best.values())


def fitting(job, policy, layout, cluster):
    """The job with each number of layers under a policy that fits."""
    remat, most = POLICIES[policy], job.model.layers
    if policy == "dots" and job.model.experts:
        kept = ("qkv", "attention", "out", "router", "shared_up", "shared_down")
        remat = Remat(frozenset(kept))
    pieces = layout.stage * layout.chunks
    capacity = capacity_bytes(cluster)
    whole = policy == "none" or most % pieces
    for layers in [None] if whole else range(pieces, most + 1, pieces):
        chosen = dataclasses.replace(job, remat=remat, remat_layers=layers)
        held = peak_memory(chosen, layout, cluster, SHARDLIB)
        if held.fits(capacity) and held.host <= capacity:
            yield chosen


@pytest.mark.mesh
@pytest.mark.rest("soak", keep=3)
@pytest.mark.parametrize(
    ("model", "name", "memory", "batch"),
    [
        pytest.param(DENSE, "8xh100", 80, 32, marks=pytest.mark.soak),
        (ROUTED, "4xa100-80", 6, 16),
        (DENSE, "6xh100", 5, 12),
        (DENSE, "2xv5e-4", 3.0, 16),
        (dataclasses.replace(DENSE, layers=15), "4xh100", 6, 16),
        (ROUTED, "v6e-8", 4.5, 8),
        (DENSE, "8xh100", 4.5, 32),
        (DENSE, "v5p-16", 3.2, 16),
    ],
)
def test_pruning_loses_nothing(model, name, memory, batch):
    cluster = small(name, memory)
    workload = TransformerWorkload(Job(model, 2048, batch), moments=("float32", "bfloat16"))
    expected = tried_everything(workload, cluster)
    found = search(workload, cluster, top=5)
    assert len(expected) >= 5
    seconds = [
        plan.seconds * (1.02 if plan.choice.moments == "bfloat16" else 1) for plan in found.plans
    ]
    assert seconds == pytest.approx(expected[:5], rel=1e-9)
    # A plan says what it is: priced anew, it costs as much and fits.
    for plan in found.plans:
        job = workload.chosen(plan.choice)
        assert step_time(job, plan.layout, cluster) == plan.time
        assert peak_memory(job, plan.layout, cluster) == plan.memory
        assert plan.memory.fits(capacity_bytes(cluster))


@pytest.mark.parametrize("model", [DENSE, ROUTED])
def test_candidates_are_what_can_be_run(model):
    cluster = parse_cluster("2xv5e-8")
    workload = TransformerWorkload(Job(model, 2048, 32))
    tried = {
        c.with_microbatches(count)
        for c in candidates(workload, cluster)
        for count in c.microbatches
    }
    assert tried == set(every_layout(model, 32, 2048, cluster))
    assert not [layout for layout in tried if workload.faults(layout)]


@pytest.mark.mesh
def test_bounds_hold():
    """No choice and no number of microbatches gets below a layout's bound."""
    cluster = parse_cluster("2xv5e-8")
    for model in (DENSE, ROUTED):
        workload = TransformerWorkload(Job(model, 2048, 32), moments=("float32", "bfloat16"))
        for candidate in list(candidates(workload, cluster))[::7]:
            first = candidate.with_microbatches(candidate.microbatches[0])
            bound = workload.bound(first, cluster, candidate.microbatches[-1])
            assert bound > 0
            for count in candidate.microbatches:
                layout = candidate.with_microbatches(count)
                times = [
                    workload.time(layout, c, cluster).total
                    for c in workload.choices(layout, cluster)
                ]
                assert bound <= workload.bound(layout, cluster, count) * (1 + 1e-12)
                assert workload.bound(layout, cluster, count) <= min(times) * (1 + 1e-12)


def test_several_slices_are_crossed_by_data_then_fsdp():
    cluster = parse_cluster("2xv5e-16")
    workload = TransformerWorkload(Job(DENSE, 2048, 32))
    layouts = {c.layout for c in candidates(workload, cluster)}
    assert all(layout.slices == 2 for layout in layouts)
    # Neither stages nor tensor-parallel groups lie in two slices.
    assert all(layout.data % 2 == 0 or layout.fsdp % 2 == 0 for layout in layouts)
    assert {layout.data for layout in layouts} >= {1, 2, 4}
    # To gather parameters between slices is slow.
    within, across = (
        workload.time(layout, Choice(), cluster).total
        for layout in (Layout(data=2, fsdp=16, slices=2), Layout(fsdp=32, slices=2))
    )
    assert across > 1.02 * within


@pytest.mark.mesh
def test_large_clusters_are_quick_to_search():
    """What is priced is a small part of what can be run: 70B on 8,960 chips."""
    llama = Transformer(80, 8192, 64, 8, 128, 28672, 128256)
    found = search(TransformerWorkload(Job(llama, 8192, 2240)), parse_cluster("v5p-17920"))
    assert len(found.plans) == 5
    assert found.layouts > 2500
    assert found.priced < 1000
    assert found.plans[0].layout.num_devices == 8960


def excuse(case, fits):
    """Why a published configuration cannot be a plan; None when it could."""
    if not fits:
        return "it does not fit by the memory model"
    if case.layout.shard_optimizer:
        return "data cuts the optimizer state beside whole parameters in half precision"
    if "input" in case.job.remat.offloaded:
        return "inputs of layers wait in host memory"
    if "attention" in case.job.remat.kept and case.job.remat.kept != NONE.kept:
        return "what the attention kernel needs is kept without the rest"
    return None


@pytest.mark.mesh
def test_plans_are_as_fast_as_published_configurations():
    """The smallest cluster of each family, up to 128 chips; the benchmark has all rows."""
    cases = [case for case in read_file(DATA)[0] if not case.eight_bit]
    assert len(cases) > 200
    by_family = {}
    for case in sorted(cases, key=lambda c: c.cluster.num_devices):
        if case.cluster.num_devices <= 128:
            by_family.setdefault(case.family, case)
    slower = []
    for case in by_family.values():
        workload = TransformerWorkload(dataclasses.replace(case.job, remat=NONE))
        published = step_time(case.job, case.layout, case.cluster).total
        memory = peak_memory(case.job, case.layout, case.cluster)
        best = search(workload, case.cluster, top=1).plans[0]
        if best.seconds > published * (1 + 1e-9):
            fits = memory.fits(case.cluster.chip.memory_bytes_per_device)
            slower.append((case.id, excuse(case, fits)))
    assert len(by_family) >= 10
    assert all(reason for _, reason in slower), slower
    assert len(slower) <= 0.3 * len(by_family), slower


def test_microbatches_can_be_given():
    workload, cluster = TransformerWorkload(Job(DENSE, 2048, 32)), parse_cluster("8xh100")
    found = search(workload, cluster, accepts=lambda layout: layout.microbatches == 4)
    assert found.plans
    assert {plan.layout.microbatches for plan in found.plans} == {4}
    kept = search(workload, cluster, keep=Layout(fsdp=4, tensor=2))
    assert {tuple(p.layout.size(a) for a in AXES) for p in kept.plans} == {(1, 1, 4, 1, 1, 2)}


def test_schedules_by_microbatches_and_chunks():
    assert schedule(Layout(fsdp=4)) is None
    assert schedule(Layout(stage=4, microbatches=4)) == "1f1b"
    assert schedule(Layout(stage=4, microbatches=2)) == "gpipe"
    assert schedule(Layout(stage=4, microbatches=8, chunks=2)) == "interleaved"
    workload = TransformerWorkload(Job(DENSE, 2048, 32))
    chunked = {c.layout.chunks: list(c.microbatches) for c in of_layout(workload, Layout(stage=4))}
    assert chunked == {1: [1, 2, 4, 8, 16, 32], 2: [4, 8, 16, 32]}
