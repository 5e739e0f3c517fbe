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
    """Number of GPUs connected by NVLink: all of a host, or all of a rack of hosts."""
    network_bytes_per_second_per_chip: float | None = None
    """A chip's share of the network of its cloud machines, if machines differ."""
    f32_flops: float | None = None
    """Peak FLOP/s in float32 of a GPU without TF32; other GPUs multiply in TF32."""
    pcie_bytes_per_second: float | None = None
    """Link of one GPU to its host, one direction: PCIe, or NVLink-C2C to a Grace CPU."""
    unverified: tuple[str, ...] = ()

    @property
    def memory_bytes_per_device(self) -> float:
        """Memory of one JAX device in bytes."""
        return self.memory_bytes / self.devices_per_chip

    def flops_per_device(
        self, precision: Literal["bf16", "fp16", "fp8", "int8"] = "bf16"
    ) -> float | None:
        """Peak dense FLOP/s, or op/s in int8, of one JAX device; None if the chip lacks the
        format."""
        flops = self.int8_ops if precision == "int8" else getattr(self, f"{precision}_flops")
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


def _tpu(
    name: str,
    full_name: str,
    device_kinds: tuple[str, ...],
    flops: tuple[float, float | None, float | None],
    memory: tuple[float, float],
    chips: tuple[int, int],
    network: float,
    ici: tuple[int, int, float],
    *sources: str,
    **facts: Any,
) -> Chip:
    """Returns a TPU.

    Args:
        name, full_name, device_kinds: As in `Chip`.
        flops: Peak TFLOP/s in bfloat16 and in float8, and Top/s in int8.
        memory: Bytes, and GB/s.
        chips: Chips of a host, and of the largest slice.
        network: GB/s of a host.
        ici: Dims of the torus, links of a chip, and GB/s of a link.
        sources: As in `Chip`.
        facts: Further fields of `Chip`. The scaling book measured 9/10 of a link's bandwidth.
    """
    bf16, fp8, int8 = (None if rate is None else rate * 1e12 for rate in flops)
    fields: dict[str, Any] = {
        "bf16_flops": bf16,
        "fp16_flops": None,
        "fp8_flops": fp8,
        "int8_ops": int8,
        "memory_bytes": memory[0],
        "memory_bytes_per_second": memory[1] * 1e9,
        "chips_per_host": chips[0],
        "max_chips": chips[1],
        "network_bytes_per_second_per_host": network * 1e9,
        "torus_dims": ici[0],
        "ici_links": ici[1],
        "ici_bytes_per_second_per_link": ici[2] * 1e9,
        "ici_achievable_bytes_per_second_per_link": 0.9 * ici[2] * 1e9,
    }
    return Chip(name, full_name, "tpu", device_kinds, **(fields | facts), sources=sources)


def _gpu(
    name: str,
    full_name: str,
    device_kind: str,
    flops: tuple[float | None, float, float | None],
    memory: tuple[float, float],
    pcie: float,
    *sources: str,
    **facts: Any,
) -> Chip:
    """Returns a GPU.

    Args:
        name, full_name, device_kind: As in `Chip`.
        flops: Peak TFLOP/s in bfloat16, float16 and float8.
        memory: GB, and GB/s.
        pcie: GB/s to the host.
        sources: As in `Chip`.
        facts: Further fields of `Chip`.
    """
    bf16, fp16, fp8 = (None if rate is None else rate * 1e12 for rate in flops)
    fields: dict[str, Any] = {
        "bf16_flops": bf16,
        "fp16_flops": fp16,
        "fp8_flops": fp8,
        "int8_ops": None,
        "memory_bytes": memory[0] * 1e9,
        "memory_bytes_per_second": memory[1] * 1e9,
        "chips_per_host": None,
        "network_bytes_per_second_per_host": None,
        "pcie_bytes_per_second": pcie * 1e9,
    }
    return Chip(name, full_name, "gpu", (device_kind,), **(fields | facts), sources=sources)


def _host_of_eight(nvlink: float, network: float) -> dict[str, Any]:
    """Returns the facts of eight GPUs joined by NVLink, in GB/s of a GPU and of the host."""
    return {
        "chips_per_host": 8,
        "nvlink_chips": 8,
        "nvlink_bytes_per_second": nvlink * 1e9,
        "network_bytes_per_second_per_host": network * 1e9,
    }


def _rack(network: float) -> dict[str, Any]:
    """Returns the facts of 72 Blackwell GPUs joined by NVLink across 18 hosts of 4, with GB/s of
    the network of a GPU."""
    return {
        "chips_per_host": 4,
        "nvlink_chips": 72,
        "nvlink_bytes_per_second": 900e9,
        "network_bytes_per_second_per_host": 4e9 * network,
        "unverified": ("pcie_bytes_per_second",),
    }


_A100_FLOPS, _HOPPER_FLOPS = (312, 312, None), (989.5, 989.5, 1979)
_A100_SOURCES = (*_THROUGHPUT, _TITAN, "glennklockwood.com, A100", _BEKMAN)
_HOPPER_SOURCES = (*_THROUGHPUT, _TITAN, _BEKMAN)
# DGX A100: 8 x 200 Gb/s. AWS p4d has a quarter of this.
_A100_HOST = _host_of_eight(300, 200) | {"unverified": ("network_bytes_per_second_per_host",)}
_HOPPER_HOST = _host_of_eight(450, 400)
# Google N1, AWS p3dn and Azure NDv2: 100 Gb/s. A DGX-1 has four times that.
_V100_HOST = _host_of_eight(150, 12.5) | {"unverified": ("network_bytes_per_second_per_host",)}


def _cloud_share(gpus: int) -> dict[str, Any]:
    """Returns the network of a GPU in Google's machines, whose `gpus` GPUs share 100 Gb/s; fewer
    GPUs have a proportional share."""
    return {
        "network_bytes_per_second_per_chip": 12.5e9 / gpus,
        "unverified": ("network_bytes_per_second_per_chip",),
    }


# fmt: off
_CHIPS = (
    _tpu("v3", "TPU v3", ("TPU v3",), (123, None, None), (32 * _GIB, 900), (4, 1024), 12.5,
         (2, 4, 82), _CLOUD_DOCS + "v3",
         'Jouppi et al. 2020, "A Domain-Specific Supercomputer for Training DNNs" (links)',
         devices_per_chip=2, ici_achievable_bytes_per_second_per_link=None,
         unverified=("network_bytes_per_second_per_host",)),
    _tpu("v4", "TPU v4", ("TPU v4",), (275, None, 275), (32 * _GIB, 1200), (4, 4096), 25,
         (3, 6, 50), _CLOUD_DOCS + "v4", _SCALING_BOOK, _KINDS,
         unverified=("ici_bytes_per_second_per_link",)),
    _tpu("v5e", "TPU v5e", ("TPU v5 lite", "TPU v5e"), (197, None, 393), (16e9, 819), (8, 256), 25,
         (2, 4, 50), _CLOUD_DOCS + "v5e", _CLOUD_DOCS + "v6e (network)", _SCALING_BOOK, _KINDS),
    _tpu("v5p", "TPU v5p", ("TPU v5", "TPU v5p"), (459, 459, 918), (95 * _GIB, 2765), (4, 8960), 25,
         (3, 6, 100), _CLOUD_DOCS + "v5p", _SCALING_BOOK, _KINDS),
    _tpu("v6e", "TPU v6e (Trillium)", ("TPU v6 lite", "TPU v6e"), (918, 918, 1836), (32e9, 1600),
         (8, 256), 100, (2, 4, 100), _CLOUD_DOCS + "v6e", _CLOUD_DOCS + "tpu7x", _SCALING_BOOK,
         _KINDS),
    _tpu("tpu7x", "TPU7x (Ironwood)", ("TPU7x",), (2307, 4614, None), (192 * _GIB, 7380), (4, 9216),
         50, (3, 6, 100), _CLOUD_DOCS + "tpu7x", _BEKMAN,
         "jax.experimental.mesh_utils (device kind)", devices_per_chip=2,
         ici_achievable_bytes_per_second_per_link=None),
    _gpu("a100-40", "A100-40GB SXM", "NVIDIA A100-SXM4-40GB", _A100_FLOPS, (40, 1555), 31,
         *_A100_SOURCES, **_A100_HOST),
    _gpu("a100-80", "A100-80GB SXM", "NVIDIA A100-SXM4-80GB", _A100_FLOPS, (80, 2039), 31,
         *_A100_SOURCES, **_A100_HOST),
    _gpu("h100", "H100 SXM", "NVIDIA H100 80GB HBM3", _HOPPER_FLOPS, (80, 3350), 63,
         *_HOPPER_SOURCES, **_HOPPER_HOST),
    _gpu("h200", "H200 SXM", "NVIDIA H200", _HOPPER_FLOPS, (141, 4800), 63, *_HOPPER_SOURCES,
         **_HOPPER_HOST),
    _gpu("h800", "H800 SXM", "NVIDIA H800", _HOPPER_FLOPS, (80, 3350), 63,
         "DeepSeek-AI 2024, DeepSeek-V3, sec. 3.1 (NVLink in a node, InfiniBand between them)",
         "volcengine/verl, utils/flops_counter.py", unverified=("nvlink_bytes_per_second",),
         **_host_of_eight(200, 400)),
    _gpu("h20", "H20 SXM", "NVIDIA H20", (148, 148, 296), (96, 4000), 63,
         "volcengine/verl, utils/flops_counter.py", "zangshuxian.com, H20 and H100",
         unverified=("nvlink_bytes_per_second", "network_bytes_per_second_per_host"),
         **_host_of_eight(450, 400)),
    _gpu("b200", "B200 SXM (HGX)", "NVIDIA B200", (2250, 2250, 4500), (180, 8000), 63, _TITAN,
         "glennklockwood.com, B200", _BEKMAN, unverified=("pcie_bytes_per_second",),
         **_host_of_eight(900, 400)),
    _gpu("b300", "B300 SXM (HGX)", "NVIDIA B300 SXM6 AC", (2250, 2250, 4500), (270, 8000), 63,
         "glennklockwood.com, B300", "NVIDIA HGX B300 specifications",
         "verda.com, GB300 NVL72: GPU architecture (memory)",
         unverified=("pcie_bytes_per_second",), **_host_of_eight(900, 800)),
    _gpu("gb200", "GB200 NVL72", "NVIDIA GB200", (2500, 2500, 5000), (186, 8000), 225,
         "NVIDIA GB200 NVL72 datasheet: 72 GPUs, 360 PFLOP/s in bf16 with sparsity, 13.4 TB, "
         "576 TB/s, NVLink 130 TB/s", "NVIDIA DGX GB200 (ConnectX-7, 400 Gb/s a GPU)",
         **_rack(50)),
    _gpu("gb300", "GB300 NVL72", "NVIDIA GB300", (2500, 2500, 5000), (279, 8000), 225,
         "NVIDIA GB300 NVL72 datasheet: 360 PFLOP/s in bf16 with sparsity, 20 TB, 576 TB/s",
         "docs.nvidia.com/enterprise-reference-architectures/nvl72-ai-factory (ConnectX-8)",
         "verda.com, GB300 NVL72: GPU architecture", **_rack(100)),
    _gpu("l4", "L4", "NVIDIA L4", (121, 121, 242), (24, 300), 31, _THROUGHPUT[0], _GPU_NETWORKS,
         "grokipedia.com, NVIDIA L4 vs L40S", **_cloud_share(8)),
    _gpu("a10", "A10", "NVIDIA A10", (125, 125, None), (24, 600), 31, _THROUGHPUT[1],
         "sysrqmts.com, A10 PCIe"),
    _gpu("t4", "T4", "Tesla T4", (None, 65, None), (16, 320), 16, *_THROUGHPUT, _GPU_NETWORKS,
         "sysrqmts.com, T4", "NVIDIA T4 datasheet", f32_flops=8.1e12, **_cloud_share(4)),
    _gpu("v100-32", "V100-SXM2 32GB", "Tesla V100-SXM2-32GB", (None, 125, None), (32, 900), 16,
         *_THROUGHPUT, _BEKMAN, "cli99/llm-analysis, v100-sxm-32gb.json", _GPU_NETWORKS,
         "NVIDIA V100 datasheet", f32_flops=15.7e12, **_V100_HOST),
    _gpu("rtx4090", "RTX 4090", "NVIDIA GeForce RTX 4090", (165.2, 165.2, 330.3), (24, 1008), 31,
         "waredb.com, GeForce RTX 4090"),
)
# fmt: on

CHIPS: dict[str, Chip] = {chip.name: chip for chip in _CHIPS}
"""Every known chip by its short name."""
