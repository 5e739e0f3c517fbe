"""Seconds of a training step from physics, part by part."""

import dataclasses
import math
from collections.abc import Mapping

from shardlib.errors import MeshError
from shardlib.hardware import Cluster
from shardlib.plan import compute, fabric, memory, traffic
from shardlib.plan.compute import Passes
from shardlib.plan.constants import committed
from shardlib.plan.layout import SHARDLIB, Layout, Software
from shardlib.plan.rates import rates
from shardlib.plan.workload import Job

_PCIE = 31e9
"""Bytes/s to the host where the chip's is not known: PCIe 4.0 x16."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the busiest device; the parts add up to `total`."""

    matmul: float = 0.0
    """Weight matmuls of the layers, forward and backward."""
    attention: float = 0.0
    elementwise: float = 0.0
    """Norms, activations, residual sums: passes over memory."""
    head: float = 0.0
    """Logits and loss."""
    recompute: float = 0.0
    """What the backward pass computes again."""
    optimizer: float = 0.0
    tensor: float = 0.0
    """Collectives by mesh axis: what computation does not hide."""
    context: float = 0.0
    expert: float = 0.0
    fsdp: float = 0.0
    offload: float = 0.0
    """Activations on their way to the host and back."""
    data: float = 0.0
    stage: float = 0.0
    bubble: float = 0.0
    """Idle stages of the pipeline."""
    imbalance: float = 0.0
    """Stages that wait for the one with the head or with more layers."""
    waiting: float = 0.0
    """Devices that wait for the slowest host."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def bottleneck(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def step_time(
    job: Job,
    layout: Layout,
    cluster: Cluster,
    software: Software = SHARDLIB,
    constants: Mapping[str, float] | None = None,
) -> StepTime:
    """Returns the time of one training step.

    Args:
        job: Model, batch, precision and rematerialisation.
        layout: Degrees of the mesh; their product is the number of devices.
        cluster: Chips and their links.
        software: How the program runs.
        constants: By name, as `constants.committed()` returns them, which are the default.

    Raises:
        MeshError: If the layout does not fill the cluster.
        ConfigError: If the chip cannot multiply in the job's precision.
    """
    if layout.num_devices != cluster.num_devices or cluster.chip is None:
        raise MeshError(
            f"the layout {layout} is for {layout.num_devices} devices, but {cluster.name} has "
            f"{cluster.num_devices}.\n  Choose degrees whose product is {cluster.num_devices}, on "
            "a TPU or GPU cluster."
        )
    constants = committed() if constants is None else constants
    device = compute.Device(job, layout, software, rates(cluster.chip, job.precision, constants))
    links = fabric.links(cluster, layout, constants, single_rail=software.single_rail)
    return _assembled(device, links, cluster)


def _assembled(
    device: compute.Device, links: Mapping[str, fabric.Link], cluster: Cluster
) -> StepTime:
    layout, micro = device.layout, device.layout.microbatches
    layers = device.job.model.layers / layout.stage
    routed = device.job.model.routed_layers / layout.stage
    body = compute.layer(device, routed=False) * (layers - routed)
    if routed:
        body += compute.layer(device, routed=True) * routed
    head = compute.head(device)
    weights = traffic.local_weights(device)
    ending = Passes() if layout.stage > 1 else head
    attention = body.forward.attention + body.backward.attention
    moved = {
        "tensor": traffic.tensor_seconds(device, links["tensor"], layers, body.total),
        "context": traffic.context_seconds(device, links["context"], layers, attention),
        "expert": traffic.expert_seconds(device, links["expert"], routed, body.total),
        "fsdp": traffic.gather_seconds(device, links["fsdp"], weights, body + ending),
        "offload": _offload(device, cluster, layers, body),
    }
    turn = body.total + sum(moved.values())
    share = layout.fsdp * (layout.data * layout.expert if layout.shard_optimizer else 1)
    parts = {name: micro * seconds for name, seconds in moved.items()} | {
        "matmul": micro * (body.forward.matmul + body.backward.matmul),
        "attention": micro * attention,
        "elementwise": micro * (body.forward.elementwise + body.backward.elementwise),
        "head": micro * head.total / layout.stage,
        "recompute": micro * body.again.total,
        "optimizer": compute.optimizer(device, weights.total / share),
        "data": traffic.reduce_seconds(device, links, weights, body),
        "stage": traffic.stage_seconds(device, links["stage"]),
        "bubble": (layout.stage - 1) / layout.chunks * turn,
        "imbalance": micro * _imbalance(device, turn, head.total),
    }
    slowest = device.rates.jitter * math.sqrt(2 * math.log(cluster.num_hosts))
    slowest += device.rates.skew * math.log2(layout.slices)
    return StepTime(**parts, waiting=slowest * sum(parts.values()))


def _offload(
    device: compute.Device, cluster: Cluster, layers: float, body: compute.Passes
) -> float:
    """Exposed seconds of offloaded activations of one microbatch."""
    job, chip = device.job, cluster.chip
    if not job.remat.offloaded or chip is None:
        return 0.0
    _, host = memory.layer_activations(job, device.layout, device.software)
    held = host * job.remat_share * layers * device.tokens
    pcie = (chip.pcie_bytes_per_second or _PCIE) / chip.devices_per_chip
    return traffic.offload_seconds(device, held, pcie, body)


def _imbalance(device: compute.Device, turn: float, head: float) -> float:
    """Seconds by which the slowest stage exceeds the mean, for one microbatch."""
    layout = device.layout
    if layout.stage == 1:
        return 0.0
    parts = layout.stage * layout.chunks
    layers = device.job.model.layers
    uneven = turn * (math.ceil(layers / parts) * parts / layers - 1)
    ahead = 0.0 if device.software.balance_head else head * (1 - 1 / layout.stage)
    return max(uneven, ahead)
