"""What one device of a chip achieves: datasheet figures times fitted constants."""

import dataclasses
from collections.abc import Mapping

from shardlib.chips import Chip
from shardlib.errors import ConfigError
from shardlib.plan.constants import constant
from shardlib.plan.workload import Precision


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


def rates(chip: Chip, precision: Precision, constants: Mapping[str, float]) -> Rates:
    """Returns the rates of one device of a chip.

    Raises:
        ConfigError: If the chip cannot multiply in this precision.
    """
    peak = chip.flops_per_device(precision)
    if peak is None:
        raise ConfigError(
            f"the {chip.full_name} has no matmul in {precision}.\n"
            "  Choose a precision that it has, or another chip."
        )

    def get(name: str) -> float:
        return constant(constants, name, chip)

    memory = chip.memory_bytes_per_second / chip.devices_per_chip
    attended = chip.flops_per_device("fp16" if chip.bf16_flops is None else "bf16") or peak
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
