"""What chips without a precision do instead, and where it is refused."""

import pytest

from shardlib.cost.machine.constants import PRIORS, committed, judged
from shardlib.cost.machine.rates import rates
from shardlib.errors import ConfigError
from shardlib.hardware import parse_cluster
from shardlib.hardware.capacity import capacity
from shardlib.hardware.chips import CHIPS
from shardlib.plan import plan
from shardlib.plan.search import capacity_bytes


@pytest.mark.parametrize(("name", "f32"), [("t4", 8.1e12), ("v100-32", 15.7e12)])
def test_gpus_before_ampere_multiply_float32_as_they_are(name, f32):
    share = committed()["matmul.gpu"]
    found = rates(CHIPS[name], "f32", committed())
    assert found.flops == pytest.approx(share * f32)
    assert found.flash_flops < found.flops
    assert rates(CHIPS[name], "fp16", committed()).flops == pytest.approx(
        share * CHIPS[name].fp16_flops
    )


def test_the_others_multiply_float32_in_tf32_or_bf16():
    for name, share in (("a100-80", 0.5), ("v5p", 1.0)):
        full, half = (rates(CHIPS[name], p, committed()).flops for p in ("f32", "bf16"))
        assert full == pytest.approx(share * half)


@pytest.mark.mesh
def test_old_gpus_can_be_planned():
    assert plan("gpt2", on="8xv100-32", precision="f32", top=1).best.seconds > 0
    with pytest.raises(
        ConfigError, match=r"the V100-SXM2 32GB has no matmul in bf16\.\n  Choose one that it has"
    ):
        plan("gpt2", on="8xv100-32")


@pytest.mark.parametrize("name", ["v5e-16", "v6e-16", "8xh100", "8xl4"])
def test_plans_fill_what_explain_calls_usable(name):
    cluster = parse_cluster(name)
    usable = capacity(cluster.chip)
    assert usable is not None
    assert capacity_bytes(cluster) == usable.usable_bytes


def test_constants_without_a_measurement_are_known():
    assert {"nic", "dcn", "jitter", "flash.tpu"} <= set(judged()) < set(PRIORS)
    assert "nvlink" not in judged()
