"""Achieved rates of one device of a chip: datasheet figures times fitted constants."""

import dataclasses
from collections.abc import Mapping
from typing import get_args

from shardlib.cost.machine.constants import constant
from shardlib.cost.machine.measured import Calibration, MeasuredCluster
from shardlib.cost.workload import Precision
from shardlib.errors import ConfigError
from shardlib.hardware import Cluster
from shardlib.hardware.chips import Chip

# Rates that `shardlib calibrate` does not measure, as orders of magnitude. The published runs lead
# to the same values for other chips (`constants`).
_MEASURED_FLASH = 0.6
"""Rate of fused attention, as a fraction of the matmul rate."""
_MEASURED_GROUPED = 0.75
"""Rate of matmuls that experts share unevenly, as a fraction of the matmul rate."""
_MEASURED_DISPATCH = 0.5
"""Rate at which rows are gathered to experts and back, as a fraction of the rate of passes over
memory."""
_MEASURED_HIDDEN = 0.5
"""Fraction of a collective that is hidden, where copies do not run on the compute units."""
_CPU_BLOCK = 128
"""Queries and keys of a block of fused attention."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Achieved rates of one device; bytes/s count one direction."""

    flops: float
    """FLOP/s of large matmuls."""
    flash_flops: float
    """FLOP/s of fused attention with heads of 128."""
    memory: float
    """Bytes/s of a pass over memory."""
    kernel_seconds: float
    tile: int
    """Multiple to which the dims of a matmul are padded."""
    lanes: int
    """Multiple to which the heads of fused attention are padded."""
    block: int
    """Queries and keys of a block of fused attention."""
    fill: float
    grouped: float
    dispatch: float
    """Bytes/s of rows gathered to experts and back."""
    hide_gather: float
    hide_tensor: float
    hide_data: float
    jitter: float
    skew: float
    exp_seconds: float = 0.0
    """Seconds of one exponential; 0 if it hides behind the pass over memory."""
    fresh_seconds: float = 0.0
    """Seconds per byte that a step requests from the system; 0 if the step keeps its memory."""


def rates_on(cluster: Cluster, precision: Precision, constants: Mapping[str, float]) -> Rates:
    """Returns the rates of one device of a cluster, measured if the cluster was measured.

    Raises:
        ConfigError: If the devices cannot multiply in this precision, or it was not measured.
    """
    if isinstance(cluster, MeasuredCluster):
        return _measured(cluster.measured, precision)
    assert cluster.chip is not None, "CPU devices have no rates, unless they were measured"
    return rates(cluster.chip, precision, constants)


def rates(chip: Chip, precision: Precision, constants: Mapping[str, float]) -> Rates:
    """Returns the rates of one device of a chip.

    Raises:
        ConfigError: If the chip cannot multiply in this precision.
    """
    peak = peak_flops(chip, precision)
    if peak is None:
        has = [known for known in get_args(Precision) if peak_flops(chip, known)]
        raise ConfigError(
            f"the {chip.full_name} has no matmul in {precision}.\n"
            f"  Choose one that it has ({', '.join(has)}), or another chip."
        )

    def get(name: str) -> float:
        return constant(constants, name, chip)

    memory = chip.memory_bytes_per_second / chip.devices_per_chip
    attended = chip.flops_per_device("fp16" if chip.bf16_flops is None else "bf16")
    if precision == "f32" or attended is None:
        attended = peak
    return Rates(
        flops=peak * min(get("matmul"), 1.0),
        flash_flops=attended * min(get("flash"), 1.0),
        memory=memory * min(get("memory"), 1.0),
        kernel_seconds=get("kernel_seconds"),
        tile=256 if chip.name in ("v6e", "tpu7x") else 128 if chip.kind == "tpu" else 64,
        lanes=128 if chip.kind == "tpu" else 1,
        block=512 if chip.kind == "tpu" else 128,
        fill=get("fill"),
        grouped=min(get("grouped"), 1.0),
        dispatch=memory * min(get("dispatch"), 1.0),
        hide_gather=min(get("hide_gather"), 1.0),
        hide_tensor=min(get("hide_tensor"), 1.0),
        hide_data=min(get("hide_data"), 1.0),
        jitter=get("jitter"),
        skew=get("skew"),
    )


def peak_flops(chip: Chip, precision: Precision) -> float | None:
    """Returns the peak FLOP/s of one device; None if the chip cannot multiply in this precision.

    By default JAX multiplies float32 on TPUs in one pass of bfloat16, and on GPUs since Ampere in
    TF32, at half the bfloat16 rate. Older GPUs have no bfloat16 either.
    """
    if precision != "f32":
        return chip.flops_per_device(precision)
    half = chip.flops_per_device("bf16")
    if half is None:
        return chip.f32_flops
    return half if chip.kind == "tpu" else half / 2


def _measured(calibration: Calibration, precision: Precision) -> Rates:
    """Returns the rates of one device while all devices are busy.

    Nothing is hidden on CPU devices, because the same cores copy and compute.

    Raises:
        ConfigError: If the precision was not measured.
    """
    fit = calibration.matmul.get(precision)
    if fit is None:
        raise ConfigError(
            f"matmuls in {precision} were not measured on this machine, only in "
            f"{', '.join(calibration.matmul)}.\n"
            "  Choose one of these, or measure again with `shardlib calibrate`."
        )
    shared = calibration.platform == "cpu"
    hidden = 0.0 if shared else _MEASURED_HIDDEN
    return Rates(
        flops=fit.flops,
        flash_flops=_MEASURED_FLASH * fit.flops,
        memory=calibration.memory.bytes_per_second,
        kernel_seconds=fit.seconds,
        tile=1,
        lanes=1,
        block=_CPU_BLOCK,
        fill=fit.fill,
        grouped=_MEASURED_GROUPED,
        dispatch=_MEASURED_DISPATCH * calibration.memory.bytes_per_second,
        hide_gather=hidden,
        hide_tensor=hidden,
        hide_data=hidden,
        jitter=0.0,
        skew=0.0,
        exp_seconds=calibration.exp_seconds if shared else 0.0,
        fresh_seconds=calibration.fresh_seconds if shared else 0.0,
    )
