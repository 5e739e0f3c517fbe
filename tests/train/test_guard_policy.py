"""Guards on the host: their configs, and when a run goes back or ends."""

import dataclasses
import math

import pytest

from shardlib.errors import DivergedError
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


@pytest.mark.parametrize(
    ("make", "faults"),
    [
        (lambda: GuardsConfig(patience=0, max_rewinds=0), "patience .* 0\nmax_rewinds .* 0"),
        (
            lambda: SpikeConfig(threshold=math.inf, window=4, warmup=7),
            "threshold .* inf\nwindow .* 8, not 4\nwarmup .* 8, not 7",
        ),
    ],
)
def test_all_faults_of_a_config_at_once(make, faults):
    with pytest.raises(ValueError, match=faults):
        make()


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
    text = "step 10: .* samples 256 to 319, .* train.guards.max_rewinds allows.\n  Lower optimizer"
    with pytest.raises(DivergedError, match=text) as error:
        policy.saw(bad(10))
    assert error.value.step == 10


def test_stop_ends_at_once_but_bears_spikes():
    config = GuardsConfig(nonfinite="stop", spike=SpikeConfig(), patience=2)
    policy = fed(GuardPolicy(config, samples), [record(1, skipped=1.0)])
    assert policy.fault == "grad_norm is 1, a spike"
    with pytest.raises(
        DivergedError, match=r"(?s)step 2: grad_norm is inf on.*Inspect these samples"
    ):
        policy.saw(record(2, grad_norm=math.inf, skipped=1.0))


def test_faults_by_policy():
    spike = dataclasses.replace(GuardsConfig(), spike=SpikeConfig(metric="loss"))
    assert step_fault(spike, record(1, loss=812.25, skipped=1.0)) == "loss is 812.2, a spike"
    assert step_fault(spike, record(1, loss=812.25)) is None
    some = record(1, loss=NAN, skipped=0.25)
    assert step_fault(GuardsConfig(), some) == "loss is nan, in 25% of the groups"
