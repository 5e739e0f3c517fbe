"""What each choice of a plan costs and holds, and on which devices there is one."""

import dataclasses

import pytest

from shardlib.cost.layout import SHARDLIB, Layout
from shardlib.cost.transformer.memory import peak_memory
from shardlib.cost.transformer.step_time import step_time
from shardlib.cost.workload import FULL, NONE, Experts, Job, Transformer
from shardlib.hardware import parse_cluster
from shardlib.plan.fixes import cheapest_fixes
from shardlib.plan.problem import Choice
from shardlib.plan.search import capacity_bytes, least_layers, search
from shardlib.plan.settings import settings, to_yaml
from shardlib.plan.workloads.transformer import POLICIES, TransformerWorkload

LLAMA = Transformer(32, 4096, 32, 8, 128, 14336, 128256)
JOB = Job(LLAMA, 8192, 512)
SMALL = Transformer(8, 1024, 8, 2, 128, 4096, 32768)
H100S = parse_cluster("64xh100")


def holding(name, memory_gib):
    """A cluster whose devices hold so much."""
    cluster = parse_cluster(name)
    chip = dataclasses.replace(cluster.chip, memory_bytes=memory_gib * 2**30)
    return dataclasses.replace(cluster, chip=chip)


def time(job=JOB, cluster=H100S, **layout):
    return step_time(job, Layout(**layout), cluster, SHARDLIB)


def memory(job=JOB, cluster=H100S, **layout):
    return peak_memory(job, Layout(**layout), cluster)


def test_offloaded_optimizer_state_goes_over_pcie_in_the_open():
    here = time(fsdp=64, microbatches=4)
    away = time(fsdp=64, microbatches=4, offload_optimizer=True)
    # Two moments of 4 bytes for each parameter, there and back at 63 GB/s.
    params = LLAMA.num_params / 64
    assert away.offload == pytest.approx(2 * 8 * params / 63e9)
    # The gradients are read for each of eight pieces, for the norm to clip by.
    assert away.optimizer > here.optimizer
    same = ("matmul", "attention", "fsdp", "recompute", "head")
    assert all(away.parts[part] == here.parts[part] for part in same)
    held, without = (
        memory(fsdp=64, microbatches=4, offload_optimizer=offloaded) for offloaded in (False, True)
    )
    assert held.optimizer == pytest.approx(8 * params)
    assert held.host == 0
    assert (without.optimizer, without.host) == (0, held.optimizer)
    assert without.total == pytest.approx(held.total - held.optimizer)


def test_a_piece_of_the_state_is_on_the_device_at_its_update():
    """Where nothing else is held, the update is the peak: whole gradients and a piece."""
    job = dataclasses.replace(JOB, batch=8, length=512, remat=FULL)
    held = memory(job, parse_cluster("8xh100"), fsdp=8, offload_optimizer=True, microbatches=1)
    assert held.activations == 0
    # An eighth, and one parameter at most: gate, up and down of all layers are 1.9 G each.
    largest = 32 * 4096 * 14336 / LLAMA.num_params
    assert held.optimizer == pytest.approx(2 * held.host * (1 / 8 + largest), rel=0.01)
    assert held.gradients == pytest.approx(4 * LLAMA.num_params / 8)


def test_zero_2_scatters_each_microbatch_and_gathers_once_a_step():
    times = {zero: time(fsdp=64, microbatches=8, zero=zero) for zero in (1, 2, 3)}
    held = {zero: memory(fsdp=64, microbatches=8, zero=zero) for zero in (1, 2, 3)}
    # Whole gradients are summed, which is twice the way but half the width; parameters gathered
    # forward and backward, for each microbatch, are most of all.
    assert times[2].fsdp < times[3].fsdp
    assert held[1].total > held[2].total > held[3].total
    assert held[2].params == held[1].params == pytest.approx(64 * held[3].params)
    # With one microbatch both are one program.
    assert time(fsdp=64, zero=1) == time(fsdp=64, zero=2)


def test_keeping_everything_computes_no_router_again():
    experts = Experts(8, 2, 14336)
    job = dataclasses.replace(JOB, model=dataclasses.replace(LLAMA, experts=experts))
    assert time(job, fsdp=8, expert=8, microbatches=8).recompute == 0
    assert "router" in NONE.kept


def test_ranges_repeat_from_stage_to_stage():
    cluster, layout = holding("8xh100", 6), Layout(stage=2, fsdp=4, microbatches=4)
    workload = TransformerWorkload(Job(SMALL, 2048, 64))
    capacity = capacity_bytes(cluster)
    choices = workload.choices(layout, cluster)
    assert {(c.layers, c.pieces) for c in choices if c.remat != "none"} == {(4, 2), (None, 1)}
    wide = dataclasses.replace(layout, chunks=2, microbatches=8)
    assert {c.pieces for c in workload.choices(wide, cluster)} == {1, 4}
    found = least_layers(workload, layout, Choice("full", 4, pieces=2), cluster, capacity)
    assert found is not None
    assert 0 < found.layers < 4
    assert found.num_layers == 2 * found.layers
    assert workload.chosen(found).remat_layers == found.num_layers
    first = found.layers
    assert found.policy(8) == (
        f"0-{first - 1}:full,{first}-3:none,4-{3 + first}:full,{4 + first}-:none"
    )


def test_what_waits_on_the_host_is_no_more_than_a_device_holds():
    workload, layout = TransformerWorkload(JOB), Layout(fsdp=64)
    choice = Choice("offload:layer_in", 32, loss_chunks=64)
    held = workload.memory(layout, choice, H100S)
    # 8 rows of 8192 tokens, 32 layers, 4096 numbers of two bytes.
    assert held.host == 8 * 8192 * 32 * 4096 * 2
    # The inputs of one layer are on their way back.
    assert held.activations == held.host / 32
    much = held.total * 1.1
    assert least_layers(workload, layout, choice, H100S, much) is not None
    rows = workload.with_batch(512 * 8)
    lots = rows.memory(layout, choice, H100S)
    assert lots.host > lots.total
    assert least_layers(rows, layout, choice, H100S, lots.total * 1.05) is None


def test_cpu_devices_have_no_other_memory_to_offload_to():
    cpus, workload = parse_cluster("cpu:8"), TransformerWorkload(Job(SMALL, 2048, 64))
    layout = Layout(fsdp=8)
    assert not any(c.remat.startswith("offload") for c in workload.choices(layout, cpus))
    assert not any(used.offload_optimizer for used in workload.variants(layout, cpus))
    on_gpus = {c.remat for c in workload.choices(layout, H100S)}
    assert on_gpus == set(POLICIES)
    assert any(used.offload_optimizer for used in workload.variants(layout, H100S))
    # A config that says so is taken at its word; without moments there is nothing to offload.
    must = dataclasses.replace(workload, offload_optimizer=(True,))
    assert all(used.offload_optimizer for used in must.variants(layout, H100S))
    plain = TransformerWorkload(Job(SMALL, 2048, 64, moment_bytes=0))
    assert not any(used.offload_optimizer for used in plain.variants(layout, H100S))


def test_state_is_offloaded_where_it_does_not_fit():
    """Six devices split no dim of this model but the batch over three, or heads over two."""
    workload, only = TransformerWorkload(Job(SMALL, 2048, 12)), Layout(data=6)
    here = dataclasses.replace(workload, offload_optimizer=(False,))
    sizes = (holding("6xh100", tenths / 10) for tenths in range(60, 4, -1))
    cluster = next(size for size in sizes if not search(here, size, keep=only).plans)
    plan = search(workload, cluster, keep=only).plans[0]
    assert plan.layout.offload_optimizer
    assert plan.time.offload > 0
    found = settings(plan, 8)
    assert found["train.offload_optimizer"] is True
    assert "\n  offload_optimizer: true\n" in to_yaml(found)
    # What does not fit is told so.
    layout = dataclasses.replace(plan.layout, offload_optimizer=False)
    fixes = cheapest_fixes(workload, layout, plan.choice, cluster)
    assert any(fix.settings.get("train.offload_optimizer") is True for fix in fixes)
