"""Chips and their links: compute, memory and bandwidth, with sources.

All figures are vendor peaks of one *chip* unless the name says otherwise: dense FLOP/s and op/s
(vendors often print twice as much, with 2:4 sparsity), bytes, and bytes/s in *one direction*
(vendors mostly give NVLink and ICI as the sum of both). `Chip.unverified` lists figures that no
source confirmed.
"""

import dataclasses
from typing import Any, Literal

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Facts of one accelerator chip; `None` if the chip lacks the unit or link."""

    name: str
    """Short name in clusters, as in `v5p` or `a100-80`."""
    full_name: str
    kind: Literal["tpu", "gpu"]
    device_kinds: tuple[str, ...]
    """Exact values of `jax.Device.device_kind` for this chip."""
    bf16_flops: float | None
    """Peak FLOP/s of matrix multiplication in bfloat16, float32 accumulation."""
    fp16_flops: float | None
    fp8_flops: float | None
    int8_ops: float | None
    memory_bytes: float
    memory_bytes_per_second: float
    chips_per_host: int | None
    """Chips of a physical host; `None` if machines differ."""
    network_bytes_per_second_per_host: float | None
    """Data-center network of one host, one direction; `None` if machines differ."""
    sources: tuple[str, ...]
    devices_per_chip: int = 1
    """JAX devices per chip; each has an equal share of the figures."""
    ici_links: int = 0
    """Links to neighbours in the torus. One mesh axis along a ring uses two of them."""
    ici_bytes_per_second_per_link: float | None = None
    """Specified bandwidth of one link, one direction."""
    ici_achievable_bytes_per_second_per_link: float | None = None
    """Bandwidth of one link as measured by the scaling book, about a tenth lower."""
    torus_dims: int = 0
    max_chips: int | None = None
    """Number of chips in the largest slice."""
    nvlink_bytes_per_second: float | None = None
    """All NVLinks of one GPU together, one direction."""
    nvlink_chips: int = 1
    """Number of GPUs connected by NVLink."""
    network_bytes_per_second_per_chip: float | None = None
    """A chip's share of the network of its cloud machines, if machines differ."""
    f32_flops: float | None = None
    """Peak FLOP/s in float32 of a GPU without TF32; other GPUs multiply in TF32."""
    pcie_bytes_per_second: float | None = None
    unverified: tuple[str, ...] = ()

    @property
    def memory_bytes_per_device(self) -> float:
        """Memory of one JAX device in bytes."""
        return self.memory_bytes / self.devices_per_chip

    def flops_per_device(self, precision: Literal["bf16", "fp16", "fp8"] = "bf16") -> float | None:
        """Peak dense FLOP/s of one JAX device, or None if the chip lacks the format."""
        flops = getattr(self, f"{precision}_flops")
        return None if flops is None else flops / self.devices_per_chip


_CLOUD_DOCS = "https://docs.cloud.google.com/tpu/docs/"
_SCALING_BOOK = "How to Scale Your Model, ch. 2 (jax-ml/scaling-book, tpus.md, Feb 2025)"
_KINDS = "stanford-crfm/levanter, utils/flop_utils.py (device kinds)"
_THROUGHPUT = (
    "Lightning-AI/pytorch-lightning, fabric/utilities/throughput.py",
    "mosaicml/composer, callbacks/speed_monitor.py",
)
_TITAN = "pytorch/torchtitan, tools/utils.py, get_peak_flops"
_BEKMAN = "stas00/ml-engineering, compute/accelerator and network"
_GPU_NETWORKS = "https://docs.cloud.google.com/compute/docs/gpus/gpu-network-bandwidth"

_TPUS = (
    Chip(
        name="v4",
        full_name="TPU v4",
        kind="tpu",
        device_kinds=("TPU v4",),
        bf16_flops=275e12,
        fp16_flops=None,
        fp8_flops=None,
        int8_ops=275e12,
        memory_bytes=32 * _GIB,
        memory_bytes_per_second=1200e9,
        chips_per_host=4,
        network_bytes_per_second_per_host=25e9,
        ici_links=6,
        ici_bytes_per_second_per_link=50e9,
        ici_achievable_bytes_per_second_per_link=45e9,
        torus_dims=3,
        max_chips=4096,
        sources=(_CLOUD_DOCS + "v4", _SCALING_BOOK, _KINDS),
        unverified=("ici_bytes_per_second_per_link",),
    ),
    Chip(
        name="v5e",
        full_name="TPU v5e",
        kind="tpu",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        bf16_flops=197e12,
        fp16_flops=None,
        fp8_flops=None,
        int8_ops=393e12,
        memory_bytes=16e9,
        memory_bytes_per_second=819e9,
        chips_per_host=8,
        network_bytes_per_second_per_host=25e9,
        ici_links=4,
        ici_bytes_per_second_per_link=50e9,
        ici_achievable_bytes_per_second_per_link=45e9,
        torus_dims=2,
        max_chips=256,
        sources=(_CLOUD_DOCS + "v5e", _CLOUD_DOCS + "v6e (network)", _SCALING_BOOK, _KINDS),
    ),
    Chip(
        name="v5p",
        full_name="TPU v5p",
        kind="tpu",
        device_kinds=("TPU v5", "TPU v5p"),
        bf16_flops=459e12,
        fp16_flops=None,
        fp8_flops=459e12,
        int8_ops=918e12,
        memory_bytes=95 * _GIB,
        memory_bytes_per_second=2765e9,
        chips_per_host=4,
        network_bytes_per_second_per_host=25e9,
        ici_links=6,
        ici_bytes_per_second_per_link=100e9,
        ici_achievable_bytes_per_second_per_link=90e9,
        torus_dims=3,
        max_chips=8960,
        sources=(_CLOUD_DOCS + "v5p", _SCALING_BOOK, _KINDS),
    ),
    Chip(
        name="v6e",
        full_name="TPU v6e (Trillium)",
        kind="tpu",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        bf16_flops=918e12,
        fp16_flops=None,
        fp8_flops=918e12,
        int8_ops=1836e12,
        memory_bytes=32e9,
        memory_bytes_per_second=1600e9,
        chips_per_host=8,
        network_bytes_per_second_per_host=100e9,
        ici_links=4,
        ici_bytes_per_second_per_link=100e9,
        ici_achievable_bytes_per_second_per_link=90e9,
        torus_dims=2,
        max_chips=256,
        sources=(_CLOUD_DOCS + "v6e", _CLOUD_DOCS + "tpu7x", _SCALING_BOOK, _KINDS),
    ),
    Chip(
        name="tpu7x",
        full_name="TPU7x (Ironwood)",
        kind="tpu",
        device_kinds=("TPU7x",),
        bf16_flops=2307e12,
        fp16_flops=None,
        fp8_flops=4614e12,
        int8_ops=None,
        memory_bytes=192 * _GIB,
        memory_bytes_per_second=7380e9,
        chips_per_host=4,
        network_bytes_per_second_per_host=50e9,
        devices_per_chip=2,
        ici_links=6,
        ici_bytes_per_second_per_link=100e9,
        torus_dims=3,
        max_chips=9216,
        sources=(_CLOUD_DOCS + "tpu7x", _BEKMAN, "jax.experimental.mesh_utils (device kind)"),
    ),
)


def _gpu(name: str, full_name: str, device_kinds: tuple[str, ...], **facts: Any) -> Chip:
    """Returns a GPU with common defaults: no recorded int8 figure, PCIe 4.0 x16."""
    defaults: dict[str, Any] = {
        "fp8_flops": None,
        "int8_ops": None,
        "chips_per_host": None,
        "network_bytes_per_second_per_host": None,
        "pcie_bytes_per_second": 31e9,
    }
    return Chip(name, full_name, "gpu", device_kinds, **(defaults | facts))


_NVLINK_HOST = {"chips_per_host": 8, "nvlink_chips": 8}
_A100: dict[str, Any] = {
    "bf16_flops": 312e12,
    "fp16_flops": 312e12,
    "nvlink_bytes_per_second": 300e9,
    # DGX A100: 8 x 200 Gb/s. AWS p4d has a quarter of this.
    "network_bytes_per_second_per_host": 200e9,
    "sources": (*_THROUGHPUT, _TITAN, "glennklockwood.com, A100", _BEKMAN),
    "unverified": ("network_bytes_per_second_per_host",),
    **_NVLINK_HOST,
}
_HOPPER: dict[str, Any] = {
    "bf16_flops": 989.5e12,
    "fp16_flops": 989.5e12,
    "fp8_flops": 1979e12,
    "nvlink_bytes_per_second": 450e9,
    "network_bytes_per_second_per_host": 400e9,
    "pcie_bytes_per_second": 63e9,
    "sources": (*_THROUGHPUT, _TITAN, _BEKMAN),
    **_NVLINK_HOST,
}

_GPUS = (
    _gpu(
        "a100-40",
        "A100-40GB SXM",
        ("NVIDIA A100-SXM4-40GB",),
        memory_bytes=40e9,
        memory_bytes_per_second=1555e9,
        **_A100,
    ),
    _gpu(
        "a100-80",
        "A100-80GB SXM",
        ("NVIDIA A100-SXM4-80GB",),
        memory_bytes=80e9,
        memory_bytes_per_second=2039e9,
        **_A100,
    ),
    _gpu(
        "h100",
        "H100 SXM",
        ("NVIDIA H100 80GB HBM3",),
        memory_bytes=80e9,
        memory_bytes_per_second=3350e9,
        **_HOPPER,
    ),
    _gpu(
        "h200",
        "H200 SXM",
        ("NVIDIA H200",),
        memory_bytes=141e9,
        memory_bytes_per_second=4800e9,
        **_HOPPER,
    ),
    _gpu(
        "b200",
        "B200 SXM (HGX)",
        ("NVIDIA B200",),
        bf16_flops=2250e12,
        fp16_flops=2250e12,
        fp8_flops=4500e12,
        memory_bytes=180e9,
        memory_bytes_per_second=8000e9,
        nvlink_bytes_per_second=900e9,
        network_bytes_per_second_per_host=400e9,
        pcie_bytes_per_second=63e9,
        sources=(_TITAN, "glennklockwood.com, B200", _BEKMAN),
        unverified=("pcie_bytes_per_second",),
        **_NVLINK_HOST,
    ),
    _gpu(
        "l4",
        "L4",
        ("NVIDIA L4",),
        bf16_flops=121e12,
        fp16_flops=121e12,
        fp8_flops=242e12,
        memory_bytes=24e9,
        memory_bytes_per_second=300e9,
        # Google G2: 100 Gb/s for 8 GPUs, and a proportional share for fewer.
        network_bytes_per_second_per_chip=12.5e9 / 8,
        sources=(_THROUGHPUT[0], _GPU_NETWORKS, "grokipedia.com, NVIDIA L4 vs L40S"),
        unverified=("network_bytes_per_second_per_chip",),
    ),
    _gpu(
        "a10",
        "A10",
        ("NVIDIA A10",),
        bf16_flops=125e12,
        fp16_flops=125e12,
        memory_bytes=24e9,
        memory_bytes_per_second=600e9,
        sources=(_THROUGHPUT[1], "sysrqmts.com, A10 PCIe"),
    ),
    _gpu(
        "t4",
        "T4",
        ("Tesla T4",),
        bf16_flops=None,
        fp16_flops=65e12,
        f32_flops=8.1e12,
        memory_bytes=16e9,
        memory_bytes_per_second=320e9,
        pcie_bytes_per_second=16e9,
        # Google N1: 100 Gb/s for 4 GPUs.
        network_bytes_per_second_per_chip=12.5e9 / 4,
        sources=(*_THROUGHPUT, _GPU_NETWORKS, "sysrqmts.com, T4", "NVIDIA T4 datasheet"),
        unverified=("network_bytes_per_second_per_chip",),
    ),
    _gpu(
        "v100-32",
        "V100-SXM2 32GB",
        ("Tesla V100-SXM2-32GB",),
        bf16_flops=None,
        fp16_flops=125e12,
        f32_flops=15.7e12,
        memory_bytes=32e9,
        memory_bytes_per_second=900e9,
        nvlink_bytes_per_second=150e9,
        pcie_bytes_per_second=16e9,
        sources=(
            *_THROUGHPUT,
            _BEKMAN,
            "cli99/llm-analysis, v100-sxm-32gb.json",
            _GPU_NETWORKS,
            "NVIDIA V100 datasheet",
        ),
        unverified=("network_bytes_per_second_per_host",),
        # Google N1, AWS p3dn and Azure NDv2: 100 Gb/s. A DGX-1 has four times that.
        **(_NVLINK_HOST | {"network_bytes_per_second_per_host": 12.5e9}),
    ),
    _gpu(
        "rtx4090",
        "RTX 4090",
        ("NVIDIA GeForce RTX 4090",),
        bf16_flops=165.2e12,
        fp16_flops=165.2e12,
        fp8_flops=330.3e12,
        memory_bytes=24e9,
        memory_bytes_per_second=1008e9,
        sources=("waredb.com, GeForce RTX 4090",),
    ),
)

CHIPS: dict[str, Chip] = {chip.name: chip for chip in (*_TPUS, *_GPUS)}
"""Every known chip by its short name."""
