"""Costs of a training step from published dimensions, and its seconds."""

import dataclasses
from collections.abc import Mapping

from shardlib.cost import pricing
from shardlib.cost.costs import Costs, StepTime, Work
from shardlib.cost.layout import SHARDLIB, Layout, Software
from shardlib.cost.machine import fabric
from shardlib.cost.machine.constants import committed
from shardlib.cost.machine.kernels import Stream
from shardlib.cost.machine.measured import check_known, prices_cudnn, software_on
from shardlib.cost.machine.rates import rates_on
from shardlib.cost.transformer import communication, computation, memory
from shardlib.cost.workload import Job
from shardlib.errors import MeshError
from shardlib.hardware import Cluster
from shardlib.nn.attention import resolve_backend

_STACK_PASSES = {"cpu": 5, "gpu": 3}
"""Memory passes over what a loop over layers keeps, in addition to the operations that make and
read it, in programs of XLA. The stack of all layers is filled with zeros, and the result of a layer
is read and written into it; CPUs read and write it once more in the backward pass, where GPUs read
the stack in place. TPUs make the result in place, too. Read from compiled steps."""
_WEIGHT_PASSES = 7
"""Memory passes over the weights of layers in these programs. Each pass over the layers takes them
from their stack (read, write), and a stack of gradients is filled with zeros and then with the
gradients."""


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
        MeshError: If the layout does not fill the cluster, or its chip is unknown.
        ConfigError: If the chip cannot multiply in the job's precision.
    """
    check_known(cluster)
    if layout.num_devices != cluster.num_devices:
        raise MeshError(
            f"the layout {layout} is for {layout.num_devices} devices, but {cluster.name} has "
            f"{cluster.num_devices}.\n  Choose sizes whose product is {cluster.num_devices}."
        )
    constants = committed() if constants is None else constants
    software = software_for(job, layout, cluster, software)
    rates = rates_on(cluster, job.precision, constants)
    links = fabric.links(cluster, layout, constants, single_rail=software.single_rail)
    links_of = pricing.by_axis(links, cluster)
    machine = pricing.Machine(layout, software, cluster, rates, links_of)
    return pricing.step_time(costs(job, machine), machine)


def costs(job: Job, machine: pricing.Machine, *, keeping: bool = True) -> Costs:
    """Returns the costs of a step of one device. `keeping` counts the memory traffic that depends
    on what is kept: into and out of stacks, and of memory that CPU devices receive."""
    layout, cluster = machine.layout, machine.cluster
    device = computation.Device(job, layout, machine.software, machine.rates.block)
    layers, routed = job.model.layers / layout.stage, job.model.routed_layers / layout.stage
    work = []
    if layers > routed:
        work += computation.layers(device, routed=False, count=layers - routed)
    if routed:
        work += computation.layers(device, routed=True, count=routed)
    if keeping and copies_into_stacks(cluster, machine.software):
        work.append(_stacked(device, cluster, layers))
    weights = communication.local_weights(device)
    share = layout.fsdp * (layout.data * layout.expert if layout.shard_optimizer else 1)
    updated = weights.trained(job).total / share
    update = computation.optimizer(device, updated)
    if keeping and cluster.platform == "cpu":
        update.append(_own_memory(device, cluster, weights))
    each, once = communication.replica_sums(device, weights)
    once += communication.orthogonalize(device)
    if layout.tensor > 1:
        each += communication.tensor(device, layers)
    if layout.context > 1:
        each += communication.context(device, layers)
    if layout.expert > 1:
        hosts = machine.links_of(("expert",))[0].domains
        each += communication.expert(device, routed, hosts)
    if layout.fsdp > 1:
        each += communication.sharded_params(device, weights)
    if layout.stage > 1:
        once += communication.stage_sends(device)
        once += communication.stage_exchange(device, weights)
    if pricing.host_link(cluster) is not None:
        each += communication.offload(_offloaded(device, layers))
        once += communication.state_offload(device, updated)
    work += computation.head(device)
    return Costs(work, each, update, once, job.model.layers)


def _offloaded(device: computation.Device, layers: float) -> float:
    """Returns the bytes of activations of one microbatch that a device offloads."""
    job = device.job
    if not job.remat.offloaded:
        return 0.0
    _, host = memory.layer_activations(job, device.layout, device.software)
    return host * job.remat_share * layers * device.tokens


def software_for(job: Job, layout: Layout, cluster: Cluster, software: Software) -> Software:
    """Returns software as it runs a job on a cluster. The attention of shardlib is cuDNN's on
    Hopper where `resolve_backend` takes it. Softcaps and sinks of a model, which cuDNN does not
    take, are not known here."""
    found = software_on(cluster, software, context=layout.context)
    model = job.model
    is_ours = found.keeps_traced and found.attention == "flash" and layout.context == 1
    if not is_ours or not prices_cudnn(cluster):
        return found
    kernel = resolve_backend(
        "auto",
        dtype="bfloat16" if job.compute_bytes == 2 else "float32",
        head_dim=model.score_dim,
        value_dim=model.value_dim,
        platform="gpu",
    )
    return dataclasses.replace(found, attention="cudnn") if kernel.backend == "cudnn" else found


def copies_into_stacks(cluster: Cluster, software: Software) -> bool:
    """Returns whether what layers keep is copied into stacks at a price that a search should
    weigh against recomputation. CPU devices are left out, where `_own_memory` prices the copies
    and a search stops at what fits."""
    return cluster.platform == "gpu" and software.keeps_traced


def _stacked(device: computation.Device, cluster: Cluster, layers: float) -> Work:
    """Returns the traffic between the loop over layers and the stacks of what it keeps. A chunk of
    a pipeline that runs again fills them in that second run."""
    kept = memory.kept_per_layer(device, cluster) * device.tokens * layers
    moved = Stream(_STACK_PASSES[cluster.platform] * kept)
    return Work("recompute" if device.reruns else "forward", "elementwise", moved)


def _own_memory(
    device: computation.Device, cluster: Cluster, weights: communication.LocalWeights
) -> Work:
    """Returns the traffic of CPU devices that receive the memory of a step from the system, and
    copy kept activations, weights and gradients of layers into stacks and out of them."""
    held = memory.peak_memory(device.job, device.layout, cluster, device.software)
    allocated = held.total - held.params - held.optimizer - held.runtime
    turns = device.layout.microbatches * device.layout.chunks
    copied = _STACK_PASSES[cluster.platform] * held.activations * turns
    copied += _WEIGHT_PASSES * (weights.dense + weights.routed) * device.job.compute_bytes * turns
    return Work("forward", "elementwise", Stream(copied, fresh_bytes=allocated))
