"""GPU target descriptions for compiling with XLA on a machine without the GPU.

Sources: `xla/backends/gpu/target_config/specs/*.txtpb` of openxla/xla, which hold the values that
CUDA reports for the A100, H100, H200, B200 and V100. For the others, the tables of "Compute
Capabilities" in NVIDIA's CUDA C++ Programming Guide (threads and shared memory of a multiprocessor)
and NVIDIA's data sheets and architecture papers (multiprocessors, L2 cache, clock), with the
memory as sold.
"""

import dataclasses

from shardlib.hardware.chips import Chip

_TOOLKIT = (12, 9)
_CUDNN = (9, 10)


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """Facts of one GPU, in CUDA's terms."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    fpus_per_multiprocessor: int
    threads_per_multiprocessor: int
    shared_memory_bytes: int
    """Shared memory of one multiprocessor."""
    block_shared_memory_bytes: int
    """Largest shared memory that one block may request."""
    memory_bytes_per_second: float
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    """Memory as CUDA reports it, or as sold if that is unknown."""


_KIB, _MIB = 2**10, 2**20
_A100 = GpuTarget((8, 0), 108, 64, 2048, 164 * _KIB, 163 * _KIB, 2.03904e12, 40 * _MIB, 1.41, 0)
_H100 = GpuTarget((9, 0), 132, 128, 2048, 228 * _KIB, 227 * _KIB, 3.35232e12, 50 * _MIB, 1.98, 0)
_B200 = GpuTarget(
    *((10, 0), 148, 128, 2048, 228 * _KIB, 227 * _KIB, 7.67232e12),
    *(132_644_864, 1.965, 191_514_411_008),
)

TARGETS: dict[str, GpuTarget] = {
    "a100-40": dataclasses.replace(
        _A100, memory_bytes_per_second=1.5552e12, memory_bytes=42_331_013_120
    ),
    "a100-80": dataclasses.replace(_A100, memory_bytes=85_100_068_864),
    "h100": dataclasses.replace(_H100, memory_bytes=84_942_979_072),
    "h200": dataclasses.replace(
        _H100, memory_bytes_per_second=4.8e12, memory_bytes=151_397_597_184
    ),
    "h800": dataclasses.replace(_H100, memory_bytes=84_942_979_072),
    "h20": dataclasses.replace(
        _H100, multiprocessors=78, memory_bytes_per_second=4.0e12, memory_bytes=96_000_000_000
    ),
    "b200": _B200,
    "b300": dataclasses.replace(
        _B200,
        compute_capability=(10, 3),
        memory_bytes_per_second=8.0e12,
        memory_bytes=270_000_000_000,
    ),
    "gb200": dataclasses.replace(
        _B200, multiprocessors=152, memory_bytes_per_second=8.0e12, memory_bytes=186_000_000_000
    ),
    "gb300": dataclasses.replace(
        _B200,
        compute_capability=(10, 3),
        multiprocessors=152,
        memory_bytes_per_second=8.0e12,
        memory_bytes=279_000_000_000,
    ),
    "v100-32": GpuTarget(
        *((7, 0), 80, 64, 2048, 96 * _KIB, 96 * _KIB, 0.898048e12, 6 * _MIB, 1.53, 34_072_559_616),
    ),
    "t4": GpuTarget(
        *((7, 5), 40, 64, 1024, 64 * _KIB, 64 * _KIB, 0.32e12, 4 * _MIB, 1.59, 16_000_000_000),
    ),
    "a10": GpuTarget(
        *((8, 6), 72, 128, 1536, 100 * _KIB, 99 * _KIB, 0.6e12, 6 * _MIB, 1.695, 24_000_000_000),
    ),
    "l4": GpuTarget(
        *((8, 9), 58, 128, 1536, 100 * _KIB, 99 * _KIB, 0.3e12, 48 * _MIB, 2.04, 24_000_000_000),
    ),
    "rtx4090": GpuTarget(
        *((8, 9), 128, 128, 1536, 100 * _KIB, 99 * _KIB, 1.008e12, 72 * _MIB, 2.52),
        24_000_000_000,
    ),
}
"""Targets by the name of the chip."""


def target_text(chip: Chip) -> str:
    """Returns the `GpuTargetConfigProto` of a chip as text.

    Raises:
        KeyError: If the chip is unknown here.
    """
    target = TARGETS[chip.name]
    major, minor = target.compute_capability
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * _KIB,
        "shared_memory_per_core": target.shared_memory_bytes,
        "threads_per_core_limit": target.threads_per_multiprocessor,
        "core_count": target.multiprocessors,
        "fpus_per_core": target.fpus_per_multiprocessor,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(target.memory_bytes_per_second),
        "l2_cache_size": target.l2_bytes,
        "clock_rate_ghz": target.clock_ghz,
        "device_memory_size": target.memory_bytes,
        "shared_memory_per_block_optin": target.block_shared_memory_bytes,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    lines = [f"  {name}: {value}" for name, value in info.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            "}",
            'platform_name: "CUDA"',
            f"dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}",
            f"runtime_version {{ major: {_TOOLKIT[0]} minor: {_TOOLKIT[1]} }}",
            f'device_description_str: "{chip.device_kinds[0]}"',
        ]
    )
