"""Seconds of a training step from physics, part by part."""

import dataclasses
import math
from collections.abc import Mapping

from shardlib.cost.layout import SHARDLIB, Layout, Software
from shardlib.cost.machine import fabric
from shardlib.cost.machine.constants import committed
from shardlib.cost.machine.measured import MeasuredCluster, software_on
from shardlib.cost.machine.rates import rates_on
from shardlib.cost.transformer import communication_time, compute_time, gradient_reduction, memory
from shardlib.cost.transformer.compute_time import Passes
from shardlib.cost.workload import Job
from shardlib.errors import MeshError
from shardlib.hardware import Cluster

_ENDLESS = Passes(*(compute_time.Pass(math.inf) for _ in range(3)))
_PCIE = 31e9
"""Bytes/s to the host if the chip's bandwidth is not known: PCIe 4.0 x16."""
_STACK_PASSES = 5
"""Memory passes over what a loop over layers keeps, in programs of XLA for CPUs. The stack of all
layers is filled with zeros, the result of a layer is read and written into it, and the backward
pass reads and writes it once more. Read from compiled steps."""
_WEIGHT_PASSES = 7
"""Memory passes over the weights of layers in these programs. Each pass over the layers takes them
from their stack (read, write), and a stack of gradients is filled with zeros and then with the
gradients."""


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
    """Recomputation in the backward pass."""
    optimizer: float = 0.0
    tensor: float = 0.0
    """Exposed collectives over `tensor`; the other mesh axes have the same meaning."""
    context: float = 0.0
    expert: float = 0.0
    fsdp: float = 0.0
    offload: float = 0.0
    """Transfers of activations and optimizer state to the host and back."""
    data: float = 0.0
    stage: float = 0.0
    bubble: float = 0.0
    """Idle time of pipeline stages."""
    imbalance: float = 0.0
    """Time that stages wait for the stage with the head or with more layers."""
    waiting: float = 0.0
    """Time that devices wait for the slowest host."""

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
        layout: Degrees of the mesh axes; their product is the number of devices.
        cluster: Chips and their links.
        software: How the program runs.
        constants: Constants by name; default `constants.committed()`.

    Raises:
        MeshError: If the layout does not fill the cluster.
        ConfigError: If the chip cannot multiply in the job's precision.
    """
    known = cluster.chip is not None or isinstance(cluster, MeasuredCluster)
    if layout.num_devices != cluster.num_devices or not known:
        raise MeshError(
            f"the layout {layout} is for {layout.num_devices} devices, but {cluster.name} has "
            f"{cluster.num_devices}.\n  Choose degrees whose product is {cluster.num_devices}, on "
            "a TPU or GPU cluster."
        )
    constants = committed() if constants is None else constants
    software = software_on(cluster, software, context=layout.context)
    achieved = rates_on(cluster, job.precision, constants)
    device = compute_time.Device(job, layout, software, achieved)
    links = fabric.links(cluster, layout, constants, single_rail=software.single_rail)
    return assembled(device, links, cluster)


def host_link(cluster: Cluster) -> float | None:
    """Returns the bytes/s between one device and its host's memory, in one direction; None if host
    memory is the device's own memory, as on CPUs."""
    chip = cluster.chip
    return None if chip is None else (chip.pcie_bytes_per_second or _PCIE) / chip.devices_per_chip


def least_time(
    device: compute_time.Device,
    links: Mapping[str, fabric.Link],
    cluster: Cluster,
    most_microbatches: int,
) -> float:
    """Returns a lower bound of the seconds of a step with any rematerialisation, and with any
    number of microbatches from the layout's to `most_microbatches`.

    Collectives hide as much as they ever can. Splitting a batch further makes no kernel and no
    collective faster; it only shortens the bubble.
    """
    layout = device.layout
    found = assembled(device, links, cluster, patient=True)
    filled = 1 + found.waiting / max(found.total - found.waiting, 1e-30)
    idle = (1 - layout.microbatches / most_microbatches) * (found.bubble + found.stage)
    return found.total - filled * (idle + found.imbalance)


def assembled(
    device: compute_time.Device,
    links: Mapping[str, fabric.Link],
    cluster: Cluster,
    *,
    patient: bool = False,
) -> StepTime:
    """Returns the time of a step of a device, from its computation and communication.

    Args:
        device: Device with its rates.
        links: Link of each mesh axis.
        cluster: Cluster with its hosts and their links to devices.
        patient: Whether to assume enough computation to hide every collective.
    """
    layout, micro = device.layout, device.layout.microbatches
    layers = device.job.model.layers / layout.stage
    routed = device.job.model.routed_layers / layout.stage
    body = compute_time.layer(device, routed=False) * (layers - routed)
    if routed:
        body += compute_time.layer(device, routed=True) * routed
    if device.reruns:
        body = dataclasses.replace(body, again=body.again + body.forward)
    head = compute_time.head(device)
    weights = communication_time.local_weights(device)
    ending = Passes() if layout.stage > 1 else head
    attention = body.forward.attention + body.backward.attention
    alongside = body if not patient else _ENDLESS
    moved = {
        "tensor": communication_time.tensor_seconds(
            device, links["tensor"], layers, alongside.total
        ),
        "context": communication_time.context_seconds(
            device, links["context"], layers, math.inf if patient else attention
        ),
        "expert": communication_time.expert_seconds(
            device, links["expert"], routed, alongside.total
        ),
        "fsdp": communication_time.gather_seconds(
            device, links["fsdp"], weights, alongside + ending
        ),
        "offload": _offload(device, cluster, layers, alongside),
    }
    turn = body.total + sum(moved.values())
    reduced = (
        gradient_reduction.reduce_seconds
        if device.software.sums_each
        else communication_time.reduce_seconds
    )
    share = layout.fsdp * (layout.data * layout.expert if layout.shard_optimizer else 1)
    updated = weights.total / share
    parts = {name: micro * seconds for name, seconds in moved.items()} | {
        "offload": micro * moved["offload"] + _state_offload(device, cluster, updated),
        "matmul": micro * (body.forward.matmul + body.backward.matmul),
        "attention": micro * attention,
        "elementwise": micro * (body.forward.elementwise + body.backward.elementwise)
        + (0.0 if patient else _own_memory(device, cluster)),
        "head": micro * head.total / (layout.stage if device.software.skip_idle else 1),
        "recompute": micro * body.again.total,
        "optimizer": compute_time.optimizer(device, updated)
        + communication_time.orthogonalize_seconds(device, links),
        "data": reduced(device, links, weights, alongside),
        "stage": communication_time.stage_seconds(device, links["stage"]),
        "bubble": _bubble(device, turn, head.total),
        "imbalance": micro * _imbalance(device, turn, body, head.total),
    }
    slowest = device.rates.jitter * math.sqrt(2 * math.log(cluster.num_hosts))
    slowest += device.rates.skew * math.log2(layout.slices)
    return StepTime(**parts, waiting=slowest * sum(parts.values()))


def _own_memory(device: compute_time.Device, cluster: Cluster) -> float:
    """Returns the seconds in which CPU devices receive the memory of a step from the system, and
    copy kept activations, weights and gradients of layers into stacks and out of them."""
    if cluster.platform != "cpu":
        return 0.0
    held = memory.peak_memory(device.job, device.layout, cluster, device.software)
    asked = held.total - held.params - held.optimizer - held.runtime
    turns = device.layout.microbatches * device.layout.chunks
    weights = communication_time.local_weights(device)
    copied = _STACK_PASSES * held.activations * turns
    copied += _WEIGHT_PASSES * (weights.dense + weights.routed) * device.job.compute_bytes * turns
    return device.rates.fresh_seconds * asked + copied / device.rates.memory


def _bubble(device: compute_time.Device, turn: float, head: float) -> float:
    """Returns the seconds of turns that a stage does not have. If stages compute all turns, the
    turns before the first and after the last microbatch cost as much as any, including the head."""
    layout = device.layout
    if device.software.skip_idle:
        return (layout.stage - 1) / layout.chunks * turn
    return 2 * (layout.stage - 1) / layout.chunks * (turn + head)


def _offload(
    device: compute_time.Device, cluster: Cluster, layers: float, body: compute_time.Passes
) -> float:
    """Returns the exposed seconds of offloading activations of one microbatch."""
    job, pcie = device.job, host_link(cluster)
    if not job.remat.offloaded or pcie is None:
        return 0.0
    _, host = memory.layer_activations(job, device.layout, device.software)
    held = host * job.remat_share * layers * device.tokens
    return communication_time.offload_seconds(device, held, pcie, body)


def _state_offload(device: compute_time.Device, cluster: Cluster, params: float) -> float:
    """Returns the seconds to move the optimizer state of `params` parameters from the host and
    back. Each piece is fetched, updated and sent back before the next one, after the gradients are
    computed, so that nothing overlaps with it. See `shardlib.train.offload`."""
    pcie = host_link(cluster)
    if not device.layout.offload_optimizer or pcie is None:
        return 0.0
    return 2 * params * device.job.moment_bytes / pcie


def _imbalance(device: compute_time.Device, turn: float, body: Passes, head: float) -> float:
    """Returns the seconds by which the slowest stage exceeds the mean, for one microbatch."""
    layout = device.layout
    if layout.stage == 1 or not device.software.skip_idle:
        return 0.0
    parts = layout.stage * layout.chunks
    layers = device.job.model.layers
    uneven = turn * (math.ceil(layers / parts) * parts / layers - 1)
    ahead = 0.0 if device.software.balance_head else head * (1 - 1 / layout.stage)
    if device.reruns:  # All chunks but the last run again.
        ahead -= body.forward.total / layout.chunks
    return max(uneven, ahead)
