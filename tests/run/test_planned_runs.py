"""What a plan writes into a config is a run: every kind of choice, taken as it is."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from shardlib import run
from shardlib.cost.costs import Memory
from shardlib.cost.layout import Layout
from shardlib.cost.transformer.step_time import StepTime
from shardlib.errors import ModelError
from shardlib.hardware import parse_cluster
from shardlib.plan.problem import Choice, Plan
from shardlib.plan.settings import settings, to_overrides
from shardlib.run.plans.planning import choice_of, layout_of

STEPS, LAYERS, BATCH = 2, 4, 32
SHORT = (
    f"train.steps={STEPS}",
    "optimizer.warmup_steps=1",
    "train.sample_length=0",
    "checkpoint.enabled=false",
    "eval.every_steps=0",
    "model.dropout=0",
    f"model.num_layers={LAYERS}",
)
EXPERTS = "model.moe={num_experts: 4, experts_per_token: 2, mlp_dim: 32, balance: none}"
CPUS = parse_cluster("cpu:8")
# Sums in another order differ by float32 rounding, which two steps of training carry on.
RELATIVE = 1e-5


def planned(layout, choice):
    plan = Plan(CPUS, layout, choice, StepTime(), Memory())
    return settings(plan, LAYERS, batch=BATCH)


PLANS = {
    "ranges repeat from stage to stage": (
        Layout(stage=2, fsdp=4, microbatches=2),
        Choice("full", 1, pieces=2, loss_chunks=8),
    ),
    "the optimizer state waits on the host": (
        Layout(data=2, fsdp=2, context=2, microbatches=4, zero=1, offload_optimizer=True),
        Choice("none"),
    ),
    "replicas of experts sum once": (
        Layout(data=2, fsdp=2, expert=2, microbatches=4, zero=2),
        Choice("none"),
    ),
    "replicas of a pipeline sum once": (
        Layout(stage=2, data=2, tensor=2, microbatches=4, chunks=2, sequence_parallel=False),
        Choice("save:query,key,value"),
    ),
    "ZeRO 2 keeps parameters whole": (
        Layout(fsdp=4, tensor=2, microbatches=2, zero=2),
        Choice("dots", 3),
    ),
}


@pytest.fixture(scope="module")
def plain(lab, tmp_path_factory):
    """The losses on a plain mesh, by the overrides that say what is trained."""

    @functools.cache
    def of(*overrides):
        run_dir = tmp_path_factory.mktemp("plain") / "run"
        run.train(lab.config(run_dir, *SHORT, f"train.global_batch={BATCH}", *overrides))
        return losses_of(run_dir)

    return of


def losses_of(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.mesh
@pytest.mark.rest("soak", keep=3)
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_a_run(name, lab, tmp_path, plain):
    layout, choice = PLANS[name]
    model = (EXPERTS,) if layout.expert > 1 else ()
    keys = planned(layout, choice)
    config = lab.config(tmp_path / "run", *SHORT, *model, *to_overrides(keys))
    read = dataclasses.replace(
        layout_of(config, CPUS), offload_optimizer=config.train.offload_optimizer
    )
    assert planned(read, choice_of(config)) == keys
    run.train(config)
    np.testing.assert_allclose(losses_of(tmp_path / "run"), plain(*model), rtol=RELATIVE)


def test_ranges_of_layers_are_read_as_they_are_written(lab):
    def read(policy):
        return choice_of(lab.config("unused", "model.num_layers=8", f"model.remat={policy}"))

    for choice in (
        Choice("none"),
        Choice("full"),
        Choice("offload:layer_in,query", 3),
        Choice("full", 1, pieces=2),
        Choice("save:query,key", 1, pieces=4),
        Choice("dots", 1, pieces=4),
    ):
        assert read(choice.policy(8)) == choice
    assert Choice("full", 2, pieces=2).policy(8) == "0-1:full,2-3:none,4-5:full,6-:none"
    assert Choice("full", 2, pieces=2).summary(8) == "full in 2 of 4"
    assert Choice("full", 4, pieces=2).policy(8) == Choice("full", 4, pieces=2).summary(8) == "full"
    with pytest.raises(ModelError) as refused:
        read("0-1:full,2-3:dots,4-:none")
    assert str(refused.value) == (
        "the planner does not know the rematerialisation '0-1:full,2-3:dots,4-:none'"
    )
