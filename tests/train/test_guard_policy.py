"""Guards on the host: their configs, and when a run goes back or ends."""

import dataclasses
import json
import math
import re

import pytest

from shardlib.errors import DivergedError
from shardlib.train.config import TrainConfig
from shardlib.train.guards import GuardPolicy, GuardsConfig, Rewind, SpikeConfig, step_fault
from shardlib.train.loop import StepRecord

NAN = math.nan


def record(step, loss=2.0, grad_norm=1.0, skipped=0.0):
    metrics = {"loss": loss, "grad_norm": grad_norm, "skipped": skipped}
    return StepRecord(step, metrics, 0.1, 0.1, 0.0)


def bad(step):
    return record(step, loss=NAN, grad_norm=NAN, skipped=1.0)


def samples(step):
    return 32 * (step - 1), 32 * step


def fed(policy, records):
    for one in records:
        policy.saw(one)
    return policy


def test_a_run_refuses_what_is_not_finite_unless_it_says_otherwise():
    assert TrainConfig().guards == GuardsConfig(nonfinite="skip", spike=None)
    assert TrainConfig().guards.refuses
    assert not GuardsConfig(nonfinite="off").refuses
    assert GuardsConfig(nonfinite="off", spike=SpikeConfig()).refuses


@pytest.mark.parametrize(
    ("make", "faults"),
    [
        (
            lambda: GuardsConfig(patience=0, max_rewinds=0),
            "patience must be at least 1, not 0\n"
            "max_rewinds must be at least 1, not 0; rewind=false never goes back",
        ),
        (
            lambda: SpikeConfig(threshold=math.inf, window=4, warmup=7),
            "threshold must be positive, not inf\n"
            "window must be at least 8, not 4\n"
            "warmup must be at least 8, not 7",
        ),
    ],
)
def test_all_faults_of_a_config_at_once(make, faults):
    with pytest.raises(ValueError, match=f"^{re.escape(faults)}$"):
        make()


def test_a_streak_ends_with_a_step_that_is_applied():
    policy = fed(GuardPolicy(GuardsConfig(patience=3), samples), [record(1), bad(2), bad(3)])
    assert (policy.healthy, policy.rewind) == (False, None)
    assert policy.fault == "loss is nan and grad_norm is nan"
    fed(policy, [record(4), bad(5), bad(6)])
    assert (policy.healthy, policy.rewind) == (False, None)
    fed(policy, [record(7)])
    assert policy.healthy


def test_patience_leads_back_and_rewinds_are_used_up():
    policy = GuardPolicy(GuardsConfig(patience=2, max_rewinds=2), samples)
    for _ in range(2):
        fed(policy, [record(8), bad(9), bad(10)])
        asked = Rewind(10, 320, "loss is nan and grad_norm is nan")
        assert policy.rewind == asked
        fed(policy, [record(11), bad(12), bad(13)])  # On their way by then.
        assert (policy.healthy, policy.rewind) == (False, asked)
        fed(policy, [record(14)])
        assert (policy.healthy, policy.rewind) == (False, asked)
        policy.rewound()
        assert (policy.healthy, policy.rewind) == (True, None)
    policy.saw(bad(9))
    with pytest.raises(DivergedError) as error:
        policy.saw(bad(10))
    assert error.value.step == 10
    assert str(error.value) == (
        "step 10: loss is nan and grad_norm is nan; all 2 updates from step 9 on were refused on "
        "samples 256 to 319, and it went back 2 times before, as often as "
        "train.guards.max_rewinds allows.\n"
        "  Lower optimizer.learning_rate, or begin anew without these samples."
    )


def resumed(policy, since):
    """What goes on from a checkpoint: it knows of no sample before."""

    def later(step):
        assert step > since
        return samples(step)

    there = GuardPolicy(policy.config, later)
    there.resume(json.loads(json.dumps(policy.state())))
    return there


def test_a_resumed_run_counts_on():
    config = GuardsConfig(patience=3, max_rewinds=1)
    policy = fed(GuardPolicy(config, samples), [bad(4), bad(5), bad(6)])
    policy.rewound()
    policy = resumed(fed(policy, [bad(3), bad(4)]), 4)
    assert not policy.healthy
    with pytest.raises(DivergedError) as error:
        policy.saw(bad(5))
    assert str(error.value).splitlines()[0] == (
        "step 5: loss is nan and grad_norm is nan; all 3 updates from step 3 on were refused on "
        "samples 64 to 159, and it went back 1 times before, as often as "
        "train.guards.max_rewinds allows."
    )


def test_a_run_resumed_before_it_went_back_goes_back():
    policy = fed(GuardPolicy(GuardsConfig(patience=1), samples), [bad(4), record(5)])
    assert not policy.healthy
    assert resumed(policy, 5).rewind == policy.rewind == Rewind(4, 128, policy.rewind.why)


def test_without_rewinds_patience_is_the_end():
    policy = GuardPolicy(GuardsConfig(patience=2, rewind=False), samples)
    policy.saw(bad(1))
    with pytest.raises(DivergedError) as error:
        policy.saw(bad(2))
    assert str(error.value) == (
        "step 2: loss is nan and grad_norm is nan; all 2 updates from step 1 on were refused on "
        "samples 0 to 63, and train.guards.rewind is off.\n"
        "  Lower optimizer.learning_rate, or begin anew without these samples."
    )


def test_stop_ends_at_once_but_bears_spikes():
    config = GuardsConfig(nonfinite="stop", spike=SpikeConfig(), patience=2)
    policy = fed(GuardPolicy(config, samples), [record(1, skipped=1.0)])
    assert policy.fault == "grad_norm is 1, a spike"
    with pytest.raises(DivergedError) as error:
        policy.saw(record(2, grad_norm=math.inf, skipped=1.0))
    assert str(error.value) == (
        "step 2: grad_norm is inf on samples 32 to 63; train.guards.nonfinite is stop.\n"
        "  Inspect these samples, or set train.guards.nonfinite=skip to continue without their "
        "update."
    )


def test_faults_by_policy():
    spike = dataclasses.replace(GuardsConfig(), spike=SpikeConfig(metric="loss"))
    assert step_fault(spike, record(1, loss=812.25, skipped=1.0)) == "loss is 812.2, a spike"
    assert step_fault(spike, record(1, loss=812.25)) is None
    some = record(1, loss=NAN, skipped=0.25)
    assert step_fault(GuardsConfig(), some) == "loss is nan, in 25% of the groups"


def test_without_guards_there_is_nothing_to_see():
    policy = GuardPolicy(GuardsConfig(nonfinite="off"), samples)
    policy.saw(StepRecord(1, {"loss": NAN}, 0.1, None, 0.0))
    assert policy.healthy
