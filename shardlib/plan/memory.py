"""Bytes that one device holds at the peak of a training step, by category.

Activations of a layer follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", sections 4.1 and 4.2, there for a plain MLP of 4 h and half precision:
s b h (10 + 24 / t + 5 a s / (h t)) bytes, of which 10 are split by sequence parallelism too. Here
each part counts by its own width, so that gated MLPs, grouped queries and what a policy keeps or
leaves follow from the same table. State is cut as in ZeRO (Rajbhandari et al. 2020, section 5).
"""

import dataclasses

from shardlib.hardware import Cluster
from shardlib.plan import compute, program_memory, traffic
from shardlib.plan.layout import SHARDLIB, Layout, Software
from shardlib.plan.workload import NONE, Job

_LOGIT_BYTES = 4
"""Logits and their gradient in half precision; the softmax between is taken in passing."""
RUNTIME_BYTES = {"tpu": 0.5e9, "gpu": 2.0e9, "cpu": 0.0}
"""Program, library contexts and buffers of collectives."""
_FRAGMENTATION = 0.04
"""Share of the memory that allocators cannot use. With what the runtime takes it leaves 4 to 7% of
what a program may use, more than the peak of any program of `benchmarks/plan_memory.py` exceeds
what is predicted on its kind of chip (3.5% on TPUs, 5.6% on GPUs)."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the device that holds most, at the moment of the peak; they add up to `total`.

    The peak is either in the head, where all activations wait and logits are there, or in the
    backward pass, where gradients are there and a layer is computed again and gathered.
    """

    params: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    """Kept from the forward for the backward pass."""
    recomputed: float = 0.0
    """What one layer computes again before its backward pass, and holds during it."""
    gathered: float = 0.0
    """Whole parameters of the layers in use, and their gradients before they are scattered."""
    logits: float = 0.0
    runtime: float = 0.0
    host: float = 0.0
    """Offloaded activations and optimizer state, in the memory of the host: no part of `total`."""

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return sum(value for name, value in vars(self).items() if name != "host")

    def fits(self, capacity_bytes: float) -> bool:
        """Whether it fits a device, with what allocators cannot use."""
        return self.over(capacity_bytes) <= 0

    def over(self, capacity_bytes: float) -> float:
        """Returns the bytes by which it exceeds what a device can use; negative where it fits."""
        return self.total - capacity_bytes * (1 - _FRAGMENTATION)


def peak_memory(
    job: Job,
    layout: Layout,
    cluster: Cluster,
    software: Software = SHARDLIB,
    *,
    dropout: bool = False,
) -> Memory:
    """Returns the memory of one device at the peak of a step.

    Args:
        job: Model, batch, widths of the state and rematerialisation.
        layout: Degrees of the mesh.
        cluster: For what the runtime of its chips takes.
        software: Whether attention is fused, and what is gathered at a time.
        dropout: Whether the residual branches keep masks of dropout.
    """
    device = compute.Device(job, layout, software)
    held = traffic.local_weights(device)
    base = _through_the_step(device, cluster, held, dropout=dropout)
    if software.keeps_traced:
        phases = program_memory.phases(device, cluster, held, base)
        if layout.offload_optimizer:
            phases += (program_memory.update(device, held, base),)
    else:
        phases = _published_phases(device, held, base)
    return max(phases, key=lambda phase: phase.total)


def _through_the_step(
    device: compute.Device, cluster: Cluster, held: traffic.LocalWeights, *, dropout: bool
) -> Memory:
    """What is there in every phase: state, runtime, and what waits for the backward pass."""
    job, layout = device.job, device.layout
    optimizer = held.total / layout.fsdp
    optimizer /= layout.data * layout.expert if layout.shard_optimizer else 1
    kept, host = _activations(device, cluster, dropout=dropout)
    waiting = device.tokens * _layers_in_flight(job, layout, reruns=device.reruns)
    inputs = 0.0
    if device.reruns:
        cut = layout.tensor if layout.sequence_parallel else 1
        inputs = _inputs_kept(layout) * device.tokens * job.model.embed * job.compute_bytes / cut
    moments = optimizer * job.moment_bytes
    away = moments if layout.offload_optimizer else 0.0
    return Memory(
        params=_param_bytes(device, held, optimizer),
        optimizer=moments - away,
        activations=waiting * kept + inputs,
        runtime=RUNTIME_BYTES[cluster.platform],
        host=waiting * host + away,
    )


def _published_phases(
    device: compute.Device, held: traffic.LocalWeights, base: Memory
) -> tuple[Memory, Memory]:
    """The head and the backward pass of a layer in programs of others, by what they must hold."""
    job, layout = device.job, device.layout
    gradients = held.total * job.gradient_bytes
    if layout.zero > 1:
        gradients /= layout.fsdp
    in_head = dataclasses.replace(
        base,
        logits=device.tokens * job.model.vocab / layout.tensor * _LOGIT_BYTES / job.loss_chunks,
        gradients=gradients if layout.microbatches > 1 else 0.0,
    )
    in_backward = dataclasses.replace(
        base,
        gradients=gradients,
        recomputed=device.tokens * _recomputed(device),
        gathered=_gathered(device),
    )
    return in_head, in_backward


def _recomputed(device: compute.Device) -> float:
    """Bytes of a token that a layer computes again, or takes back from the host, as a whole."""
    job, layout, software = device.job, device.layout, device.software
    everything, _ = layer_activations(dataclasses.replace(job, remat=NONE), layout, software)
    kept, host = layer_activations(job, layout, software)
    some = job.remat != NONE and 0 < job.remat_share < 1
    return everything if host or some or job.remat_share * kept < everything else 0.0


def _activations(device: compute.Device, cluster: Cluster, *, dropout: bool) -> tuple[float, float]:
    """Bytes per token and layer, on average over layers: kept on the device, and on the host."""
    job, layout, software = device.job, device.layout, device.software
    share = 0.0 if job.remat == NONE else job.remat_share
    padding = program_memory.padding(job, cluster) if software.keeps_traced else 1.0
    kept = host = others = 0.0
    if share > 0:
        kept, host = layer_activations(job, layout, software, dropout=dropout, padding=padding)
    if share < 1 and software.keeps_traced:
        others = program_memory.traced(device, cluster, dropout=dropout)
    elif share < 1:
        everything = dataclasses.replace(job, remat=NONE)
        others, _ = layer_activations(everything, layout, software, dropout=dropout)
    return share * kept + (1 - share) * others, share * host


def _gathered(device: compute.Device) -> float:
    """Bytes of parameters gathered at a time, one unit ahead of the one in use, and of the unit's
    gradients: a compiled step gathers single matrices, an eager one whole layers."""
    job, layout = device.job, device.layout
    if layout.fsdp == 1:
        return 0.0
    model = job.model
    if device.software.fusion == "eager":
        unit = max(model.layer_weights)
        unit += model.expert_weights / layout.expert
    else:
        unit = program_memory.largest_matrix(device)
    return unit / layout.tensor * 3 * job.compute_bytes


def _param_bytes(device: compute.Device, held: traffic.LocalWeights, optimizer: float) -> float:
    """Bytes of parameters. Where `data` cuts the state, there are whole copies in the width of the
    computation too; so are there of the layers in programs of shardlib."""
    job, layout = device.job, device.layout
    if layout.shard_optimizer:
        return held.total * job.compute_bytes + optimizer * job.param_bytes
    cut = layout.fsdp if layout.zero == 3 else 1
    copied = 0.0
    if device.software.keeps_traced and job.param_bytes != job.compute_bytes:
        copied = (held.dense + held.routed) * job.compute_bytes
    return (held.total * job.param_bytes + copied) / cut


def layer_activations(
    job: Job,
    layout: Layout,
    software: Software = SHARDLIB,
    *,
    dropout: bool = False,
    padding: float = 1.0,
) -> tuple[float, float]:
    """Returns bytes per token that a layer under `job.remat` keeps for its backward pass: on the
    device, and on the host. Queries, keys and values take `padding` times their numbers."""
    model, width, keeps = job.model, job.compute_bytes, job.remat.kept
    residual = layout.tensor if layout.sequence_parallel else 1
    hidden = float(model.mlp)
    if model.experts and model.routed_layers:
        experts = model.experts
        hidden = float(experts.per_token * experts.mlp + experts.shared_mlp)
    heads = model.heads * model.value_dim
    scores = 0.0
    if software.attention == "unfused":
        scores = model.heads * job.length * (2 * width + 1)
    parts = {
        "qkv": padding * compute.qkv_width(model, layout) * width,
        "attention": (heads * width + scores) / layout.tensor,
        "out": model.embed * width / residual,
        "up": (2 if model.gated else 1) * hidden * width / layout.tensor,
        "elementwise": 2 * model.embed * (width + (1 if dropout else 0)) / residual
        + hidden * width / layout.tensor,
    }
    if software.attention == "unfused" and "attention" not in keeps:
        # Only the core is computed again; what it gives to the projection stays.
        parts["core"] = heads * width / layout.tensor if "qkv" in keeps else 0.0
    kept = model.embed * width / residual
    kept += sum(size for name, size in parts.items() if name in keeps or name == "core")
    kept += sum(parts[name] / 2 for name in job.remat.half)
    host = sum(size for name, size in parts.items() if name in job.remat.offloaded)
    if "input" in job.remat.offloaded:
        host += model.embed * width / residual
    return kept - host, host


def _inputs_kept(layout: Layout) -> int:
    """Inputs of chunks that a stage keeps; see `shardlib.pipeline.schedules`."""
    stages, chunks = layout.stage, layout.chunks
    if layout.microbatches < stages:
        return layout.microbatches
    most = 2 * stages - 3 if chunks == 1 else (chunks + 1) * stages - 3
    return min(chunks * layout.microbatches, max(most, 1))


def _layers_in_flight(job: Job, layout: Layout, *, reruns: bool) -> float:
    """Layers of one microbatch whose activations a device holds at a time.

    The first of p stages holds p microbatches of its L / p layers; interleaving adds
    (p - 1) / (p v) to it. Source: Korthikanti et al. 2022, section 4.2.3. Where chunks run again
    before their backward pass it is one chunk.
    """
    layers, stages = job.model.layers, layout.stage
    if stages == 1:
        return float(layers)
    if reruns:
        return layers / (stages * layout.chunks)
    flying = min(layout.microbatches, stages) / stages
    if layout.chunks > 1:
        flying *= 1 + (stages - 1) / (stages * layout.chunks)
    return layers * flying
