"""What one device of a chip achieves: datasheet figures times fitted constants."""

import dataclasses
from collections.abc import Mapping
from typing import get_args

from shardlib.chips import Chip
from shardlib.errors import ConfigError
from shardlib.hardware import Cluster
from shardlib.plan.constants import constant
from shardlib.plan.measured import Calibration, MeasuredCluster
from shardlib.plan.workload import Precision

# What `shardlib calibrate` does not measure of a machine, as orders of magnitude; the published
# runs lead to the same for other chips (`constants`).
_MEASURED_FLASH = 0.6
"""Of the rate of matmuls, for fused attention."""
_MEASURED_GROUPED = 0.75
"""Of the rate of matmuls, where experts share one unevenly."""
_MEASURED_DISPATCH = 0.5
"""Of the rate of passes over memory, for rows gathered to experts and back."""
_MEASURED_HIDDEN = 0.5
"""Of collectives, where what copies is not what computes."""
_CPU_BLOCK = 128
"""Queries and keys of a block of fused attention."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """What one device achieves; bytes/s in one direction."""

    flops: float
    """FLOP/s of large matmuls."""
    flash_flops: float
    """FLOP/s of fused attention with heads of 128."""
    memory: float
    """Bytes/s of a pass over memory."""
    kernel_seconds: float
    tile: int
    """Dims of a matmul are padded to multiples of it."""
    lanes: int
    """Heads of fused attention likewise."""
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
    """Seconds of one exponential; 0 where it hides behind the pass over memory."""
    fresh_seconds: float = 0.0
    """Seconds of each byte that a step asks the system for; 0 where it keeps its memory."""


def rates_on(cluster: Cluster, precision: Precision, constants: Mapping[str, float]) -> Rates:
    """Returns the rates of one device of a cluster: measured ones where it was measured.

    Raises:
        ConfigError: If the devices cannot multiply in this precision, or were not measured in it.
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
    peak = _peak(chip, precision)
    if peak is None:
        has = [known for known in get_args(Precision) if _peak(chip, known)]
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


def _peak(chip: Chip, precision: Precision) -> float | None:
    """Peak FLOP/s of one device. By default JAX multiplies float32 on TPUs in one pass of bfloat16,
    and on GPUs since Ampere in TF32, at half the rate; those before have no bfloat16 either."""
    if precision != "f32":
        return chip.flops_per_device(precision)
    half = chip.flops_per_device("bf16")
    if half is None:
        return chip.f32_flops
    return half if chip.kind == "tpu" else half / 2


def _measured(calibration: Calibration, precision: Precision) -> Rates:
    """Returns what one device achieves while all are at work.

    Nothing is hidden on CPU devices: what copies is what computes.

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
