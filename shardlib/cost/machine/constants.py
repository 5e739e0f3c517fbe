"""Constants of the cost model: their priors and their calibrated values."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from shardlib.hardware.chips import Chip

FAMILIES = {
    "a100-40": "ampere",
    "a100-80": "ampere",
    "h100": "hopper",
    "h200": "hopper",
    "h800": "hopper",
    "h20": "hopper",
    "b200": "blackwell",
    "b300": "blackwell",
    "gb200": "blackwell",
    "gb300": "blackwell",
}
"""Chips that share constants. A chip that is not listed is a family of its own."""


@dataclasses.dataclass(frozen=True)
class Prior:
    """Expected value of a constant before any run is measured."""

    value: float
    spread: float
    """Standard deviation of the natural logarithm."""
    source: str


_MAMF = "largest measured matmul (stas00/ml-engineering, compute/accelerator)"
_RECIPES = "AI-Hypercomputer/tpu-recipes, microbenchmarks"
_BOOK = "How to Scale Your Model, ch. 3"
_JUDGED = "order of magnitude"

PRIORS: dict[str, Prior] = {
    # Fraction of peak that a large matmul reaches inside a step.
    "matmul.gpu": Prior(0.75, 0.10, _MAMF),
    "matmul.tpu": Prior(0.85, 0.10, _RECIPES),
    "matmul.ampere": Prior(0.80, 0.07, _MAMF),
    "matmul.hopper": Prior(0.68, 0.10, _MAMF + "; less under sustained power"),
    "matmul.blackwell": Prior(0.68, 0.10, _MAMF + "; less under sustained power"),
    "matmul.v5e": Prior(0.90, 0.07, _RECIPES),
    "matmul.v5p": Prior(0.90, 0.07, _RECIPES),
    "matmul.v6e": Prior(0.80, 0.10, _RECIPES),
    "matmul.tpu7x": Prior(0.80, 0.07, _RECIPES),
    # Fraction of peak that fused attention reaches on the pairs it computes, heads of 128, with
    # backward.
    "flash.gpu": Prior(0.45, 0.20, "Dao 2023, FlashAttention-2, figures 4-6"),
    "flash.ampere": Prior(0.57, 0.15, "Dao 2023, FlashAttention-2, figure 4: 180 of 312 TFLOP/s"),
    "flash.hopper": Prior(0.38, 0.20, "Shah et al. 2024, FlashAttention-3, figures 5 and 6"),
    "flash.tpu": Prior(0.40, 0.30, _JUDGED),
    # Fraction of memory bandwidth that a pass over an array reaches.
    "memory.gpu": Prior(0.80, 0.10, _JUDGED),
    "memory.tpu": Prior(0.83, 0.10, _RECIPES + ": 1360 of 1600 GB/s copied"),
    # Fraction of link bandwidth that large collectives reach.
    "nvlink": Prior(0.75, 0.15, "NVIDIA nccl-tests, bus bandwidth of 8 GPUs"),
    "nic": Prior(0.70, 0.25, _JUDGED),
    "ici": Prior(0.85, 0.10, _BOOK + ", quiz 2: 560 of 680 us"),
    "dcn": Prior(0.60, 0.30, _JUDGED),
    # Fraction of a collective that computation can hide.
    "hide_gather.gpu": Prior(0.70, 0.30, _JUDGED),
    "hide_gather.tpu": Prior(0.85, 0.10, _JUDGED),
    "hide_tensor.gpu": Prior(0.50, 0.30, _JUDGED),
    "hide_tensor.tpu": Prior(0.60, 0.30, _JUDGED),
    "hide_data": Prior(0.70, 0.25, _JUDGED),
    # Fraction of a step lost to waiting for the slowest host, per unit of sqrt(2 ln hosts).
    "jitter": Prior(0.010, 0.60, _JUDGED),
    # Fraction of a step lost to slices out of step, per doubling of their number.
    "skew": Prior(0.015, 0.60, _JUDGED),
    # Fraction of its rate that a matmul keeps when experts share it unevenly.
    "grouped": Prior(0.75, 0.20, _JUDGED),
    # Fraction of memory bandwidth reached when rows are gathered to experts and back.
    "dispatch": Prior(0.30, 0.50, _JUDGED),
    # Cost to start and store one tile of a matmul, in steps of its sum.
    "fill.gpu": Prior(128, 0.50, "one tile of 128 x 256 x 64 in flight, and its epilogue"),
    "fill.tpu": Prior(64, 0.50, "half the depth of a systolic array"),
    # Seconds.
    "kernel_seconds.gpu": Prior(5e-6, 0.4, "launch of a CUDA kernel"),
    "kernel_seconds.tpu": Prior(1.6e-6, 0.3, _RECIPES + ": matmul of 128^3"),
    "hop_seconds": Prior(2e-6, 0.5, _BOOK + ", quiz 2: 8 us over 4 chips"),
}


def judged() -> tuple[str, ...]:
    """Returns the names of the constants without a measurement before the fit."""
    return tuple(name for name, prior in PRIORS.items() if prior.source == _JUDGED)


def family_of(chip: Chip) -> str:
    """Returns the name under which the constants of a chip are fitted."""
    return FAMILIES.get(chip.name, chip.name)


def constant(constants: Mapping[str, float], name: str, chip: Chip) -> float:
    """Returns a constant of the chip's family, or of its kind, or of all chips, in this order."""
    for key in (f"{name}.{family_of(chip)}", f"{name}.{chip.kind}", name):
        if key in constants:
            return constants[key]
    raise KeyError(name)


@functools.cache
def committed() -> dict[str, float]:
    """Returns the constants calibrated on published runs, by name."""
    return {name: entry["value"] for name, entry in _record()["constants"].items()}


def fit_errors() -> dict[str, float]:
    """Returns the errors of predictions with the committed constants on published runs: median and
    90th percentile of the relative error, also for held-out families (`cv_`). `cv_interval` is the
    90% prediction interval, in which a family weighs as the square root of its runs."""
    return dict(_record()["fit"])


def _record() -> dict[str, Any]:
    return json.loads(
        resources.files("shardlib.cost.machine").joinpath("constants.json").read_text()
    )
