"""Plans whose stages hold unequally many layers."""

import dataclasses

import pytest

from shardlib.cost.layout import SHARDLIB, Layout
from shardlib.cost.transformer import communication, computation
from shardlib.cost.transformer.memory import peak_memory
from shardlib.cost.transformer.step_time import step_time
from shardlib.cost.workload import Job
from shardlib.hardware import parse_cluster
from shardlib.plan.search import of_layout
from shardlib.plan.why_not import why_not
from shardlib.plan.workloads.named_models import named_model
from shardlib.plan.workloads.transformer import TransformerWorkload


def job(name="llama3-405b", batch=1024, **changes):
    named = named_model(name)
    return Job(dataclasses.replace(named.model, **changes), named.length, batch)


@pytest.mark.parametrize(("name", "stages"), [
    ("llama3-405b", (4, 8, 16, 32)), ("deepseek-v3", (4, 8, 16)),
])  # fmt: skip
def test_stages_are_offered_that_do_not_divide_the_layers(name, stages):
    workload = TransformerWorkload(job(name))
    assert {*stages} <= {*workload.degrees("stage", 1024)}
    layout = Layout(stage=16, fsdp=8, data=16)
    assert not workload.faults(layout)
    assert [*of_layout(workload, layout)]
    # Ranges of layers would differ between the stages.
    choices = workload.choices(layout, parse_cluster("2048xh100"))
    assert {choice.layers for choice in choices} == {None}


def test_few_slots_are_left_idle():
    workload = TransformerWorkload(job(layers=18))
    assert [*workload.degrees("stage", 32)] == [1, 2, 3, 6, 9, 18]
    assert workload.faults(Layout(stage=32)) == ["stage=32 exceeds the 18 layers"]
    assert workload.faults(Layout(stage=4, fsdp=2**13))[0] == (
        "stage=4 divides neither the 18 layers nor the embedding of 16384 on fsdp=8192"
    )
    cluster = parse_cluster("16xh100")
    assert why_not(workload, cluster, None, "stage=4,tensor=4").reasons == (
        "stage=4 leaves 10% of its layer slots idle",
    )


def test_a_step_waits_for_the_fullest_stage():
    """126 layers on 16 stages take as long as 128, with a lighter head stage and an exchange."""
    cluster = parse_cluster("2048xh100")
    layout = Layout(stage=16, fsdp=16, tensor=8, microbatches=32)
    found, even = (step_time(job(layers=n), layout, cluster) for n in (126, 128))
    assert found.imbalance > even.imbalance
    assert found.total - found.stage - found.waiting == pytest.approx(
        even.total - even.stage - even.waiting, rel=0.01
    )
    seen = computation.Device(job(), layout, SHARDLIB)
    params, gradients = communication.stage_exchange(
        seen, weights := communication.local_weights(seen)
    )
    layers = (weights.dense + weights.routed) * 128 / 126 / 16
    assert params.num_bytes == pytest.approx(2 * layers)
    assert gradients.num_bytes == pytest.approx(4 * layers)
    assert not communication.stage_exchange(
        computation.Device(job(layers=128), layout, SHARDLIB), weights
    )


def test_memory_is_that_of_the_fullest_stage_and_an_equal_part_of_the_state():
    cluster = parse_cluster("2048xh100")
    layout = Layout(stage=16, fsdp=16, tensor=8, microbatches=32)
    found, even = (peak_memory(job(layers=n), layout, cluster) for n in (126, 128))
    assert found.activations == even.activations
    assert found.gradients == pytest.approx(even.gradients)
    assert found.optimizer < even.optimizer
