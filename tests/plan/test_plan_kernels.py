"""Kernels against measured ones, and what must hold for any."""

import dataclasses

import pytest

from shardlib.cost.machine import kernels
from shardlib.cost.machine.constants import PRIORS, committed, constant, family_of
from shardlib.cost.machine.rates import rates
from shardlib.errors import ConfigError
from shardlib.hardware.chips import CHIPS


def measured_rates(chip, efficiency):
    """Rates of a chip whose largest matmul reaches a fraction of its peak."""
    constants = committed() | {f"matmul.{family_of(CHIPS[chip])}": efficiency}
    return rates(CHIPS[chip], "bf16", constants)


def test_matmuls_of_every_size_on_tpu7x():
    """Source: tpu-recipes, microbenchmarks/ironwood: bf16 n^3 on one of two devices of a chip."""
    achieved = measured_rates("tpu7x", 956.4 / 1153.5)
    sizes = (128, 256, 512, 1024, 2048, 4096, 16384, 32768)
    teraflops = (2.59, 18.3, 105.1, 349.7, 679.3, 892.9, 950.1, 956.4)
    for n, measured in zip(sizes, teraflops, strict=True):
        predicted = 2 * n**3 / kernels.matmul(n, n, n).seconds(achieved) / 1e12
        # Below 1024 the time is that of a launch, above that of the matrix unit.
        assert predicted == pytest.approx(measured, rel=0.25), n


def test_a_large_matmul_on_v6e():
    """Source: tpu-recipes, microbenchmarks: 827.5 of 918 TFLOP/s at 8192^3."""
    achieved = measured_rates("v6e", 0.92)
    predicted = 2 * 8192**3 / kernels.matmul(8192, 8192, 8192).seconds(achieved) / 1e12
    # The law of TPU7x, which has 3 times the memory bandwidth for each FLOP, is a little slow here.
    assert predicted == pytest.approx(827.5, rel=0.07)


def test_a_roofline_lies_between_the_slower_and_the_sum():
    for compute, memory in ((1.0, 0.0), (1.0, 0.3), (2.0, 2.0), (0.1, 5.0)):
        seconds = kernels.roofline(compute, memory)
        assert max(compute, memory) <= seconds <= compute + memory
        assert seconds == kernels.roofline(memory, compute)
    assert kernels.roofline(0.0, 0.0) == 0.0


def test_small_sums_cost_more_for_each_flop():
    achieved = measured_rates("a100-80", 0.8)
    per_flop = [
        kernels.matmul(65536, k, 4096).seconds(achieved) / k for k in (256, 1024, 4096, 16384)
    ]
    assert per_flop == sorted(per_flop, reverse=True)


def test_a_matrix_unit_pads():
    achieved = measured_rates("v6e", 0.8)
    whole, over = (kernels.matmul(65536, 4096, n).seconds(achieved) for n in (2048, 2049))
    # 9 tiles instead of 8, in what of it is computation.
    assert 1.09 < over / whole < 9 / 8


def test_fused_attention_pads_heads_on_a_matrix_unit_only():
    tpu, gpu = measured_rates("v5p", 0.9), measured_rates("h100", 0.7)
    for achieved, ratio in ((tpu, 2.0), (gpu, 1.0)):
        small, large = (kernels.FusedAttention(1e12, dim).seconds(achieved) for dim in (64, 128))
        assert small / large == ratio
    both = sum(
        kernels.FusedAttention(1e12, 128, backward=way).seconds(tpu) for way in (False, True)
    )
    assert both == pytest.approx(3.5e12 / tpu.flash_flops, rel=1e-12)


def test_scores_in_memory_cost_more_than_fused_ones():
    achieved = measured_rates("a100-80", 0.8)
    flops = 4 * 2048**2 * 128 * 16 * 4
    fused = kernels.FusedAttention(flops / 2, 128).seconds(achieved)
    written = kernels.UnfusedAttention(4, 2048, 16, 128).seconds(achieved)
    assert written > 3 * fused


def test_a_chip_without_the_precision():
    with pytest.raises(
        ConfigError, match=r"the T4 has no matmul in bf16\.\n  Choose one that it has"
    ):
        rates(CHIPS["t4"], "bf16", committed())


def test_every_chip_has_constants_and_stays_below_its_datasheet():
    constants = {name: prior.value for name, prior in PRIORS.items()}
    for chip in CHIPS.values():
        for values in (constants, committed()):
            precision = "bf16" if chip.bf16_flops else "fp16"
            found = rates(chip, precision, values)
            assert 0 < found.flops < (chip.flops_per_device(precision) or 0.0)
            assert 0 < found.memory < chip.memory_bytes_per_second
            # Of accelerators these hide, or do not exist.
            assert (found.exp_seconds, found.fresh_seconds) == (0.0, 0.0)
            assert all(value > 0 for value in dataclasses.astuple(found)[:-2])
    # A chip that no run was seen of is expected to do as its kind does.
    assert constant(constants, "matmul", CHIPS["l4"]) == constants["matmul.gpu"]


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("a100-80", 271.2e12),
        ("h100", 794.5e12),
        ("b200", 1745e12),
        ("v6e", 827.5e12),
        ("tpu7x", 956.4e12),
    ],
)
def test_steps_multiply_no_faster_than_the_best_matmul(name, largest):
    """Sources: stas00/ml-engineering, compute/accelerator; tpu-recipes, microbenchmarks."""
    assert rates(CHIPS[name], "bf16", committed()).flops < largest
