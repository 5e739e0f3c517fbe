"""Bytes that one device holds at the peak of a training step, by category.

Activations of a layer follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", sections 4.1 and 4.2, there for a plain MLP of 4 h and half precision:
s b h (10 + 24 / t + 5 a s / (h t)) bytes, of which 10 are split by sequence parallelism too. Here
each part counts by its own width, so that gated MLPs, grouped queries and what a policy keeps or
leaves follow from the same table. State is cut as in ZeRO (Rajbhandari et al. 2020, section 5).
"""

import dataclasses

from shardlib.hardware import Cluster
from shardlib.plan import compute, traffic
from shardlib.plan.layout import SHARDLIB, Layout, Software
from shardlib.plan.workload import NONE, Job

_FLOAT32 = 4
_MLP_COPIES = 6
"""Hidden vectors that a gated MLP, or one with GELU, keeps of each token."""
_LOGIT_BYTES = 4
"""Logits and their gradient in half precision; the softmax between is taken in passing."""
_RUNTIME_BYTES = {"tpu": 0.5e9, "gpu": 2.0e9}
"""Program, library contexts and buffers of collectives."""
_FRAGMENTATION = 0.04
"""Share of the memory that allocators cannot use."""


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
    """What one layer computes again before its backward pass."""
    gathered: float = 0.0
    """Whole parameters of the layers in use, and their gradients before they are scattered."""
    logits: float = 0.0
    runtime: float = 0.0
    host: float = 0.0
    """Offloaded activations, in the memory of the host: no part of `total`."""

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return sum(value for name, value in vars(self).items() if name != "host")

    def fits(self, capacity_bytes: float) -> bool:
        """Whether it fits a device, with what allocators cannot use."""
        return self.total <= capacity_bytes * (1 - _FRAGMENTATION)


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
    held = traffic.local_weights(device).total
    sharded = held / layout.fsdp
    optimizer = sharded / (layout.data * layout.expert if layout.shard_optimizer else 1)
    kept, everything, host = _activations(job, layout, software, dropout=dropout)
    waiting = device.tokens * _layers_in_flight(job, layout, reruns=device.reruns)
    inputs = 0.0
    if device.reruns:
        cut = layout.tensor if layout.sequence_parallel else 1
        inputs = _inputs_kept(layout) * device.tokens * job.model.embed * job.compute_bytes / cut
    base = Memory(
        params=_param_bytes(job, layout, software, held, sharded, optimizer),
        optimizer=optimizer * job.moment_bytes,
        activations=waiting * kept + inputs,
        runtime=_RUNTIME_BYTES[cluster.chip.kind] if cluster.chip else 0.0,
        host=waiting * host,
    )
    if software.keeps_traced:
        again = _recomputes(job, host, kept < everything)
        if job.model.experts and job.model.routed_layers:
            everything = _traced(job, layout, software, dropout=dropout)
            rows = _expert_rows(job, layout) / layout.tensor
            everything += rows * job.model.experts.mlp * job.compute_bytes
        layer = device.tokens * everything if again else 0.0
        phases = _program_phases(device, cluster, base, layer)
        return max(phases, key=lambda phase: phase.total)
    whole = layout.fsdp == 1 or layout.zero == 1
    gradients = (held if whole else sharded) * job.gradient_bytes
    in_head = dataclasses.replace(
        base,
        logits=device.tokens * job.model.vocab / layout.tensor * _LOGIT_BYTES / job.loss_chunks,
        gradients=gradients if layout.microbatches > 1 else 0.0,
    )
    in_backward = dataclasses.replace(
        base,
        gradients=gradients,
        recomputed=device.tokens * everything if _recomputes(job, host, kept < everything) else 0.0,
        gathered=_gathered(device),
    )
    return max(in_head, in_backward, key=lambda phase: phase.total)


def _program_phases(
    device: compute.Device, cluster: Cluster, base: Memory, layer: float
) -> tuple[Memory, Memory]:
    """What shardlib's own step holds in the head and in the backward pass of the layers, as read
    from programs of XLA.

    Gradients of stacked layers are summed up in the width of the computation, one microbatch's
    beside the sums of all in float32. On GPUs they are there before the head's backward pass. A
    loss in chunks holds of the head's table what is gathered, a copy and a gradient in float32,
    and on GPUs a second narrow copy; one in a piece holds the logits, on GPUs with their gradient
    beside them. The gradient of the logits stays until the table's is taken from it, for which a
    TPU has time until the layers are through.
    """
    job, layout, on_gpu = device.job, device.layout, cluster.platform == "gpu"
    held = traffic.local_weights(device)
    cut = 1 if layout.zero == 1 else layout.fsdp
    width = job.compute_bytes
    each = (held.dense + held.routed) / cut * width
    summed = held.total / cut * job.gradient_bytes if layout.microbatches > 1 else 0.0
    table = job.model.vocab_weights / layout.tensor
    gathered = table * width * (1 - 1 / layout.fsdp)
    scattered = table * width if on_gpu and not job.model.tied else 0.0
    logits = device.tokens * job.model.vocab / layout.tensor
    if job.loss_chunks > 1:
        gathered += table * (2 * _FLOAT32 + (width if on_gpu else 0))
        scattered = table * width if on_gpu else 0.0
        in_head = logits / job.loss_chunks * _FLOAT32 * (2 if on_gpu else 1)
        waiting = 0.0
    else:
        in_head = logits * width * (2 if on_gpu else 1)
        waiting = 0.0 if on_gpu else logits * width
    return (
        dataclasses.replace(
            base,
            logits=in_head,
            gradients=summed + (each if on_gpu else 0.0) + scattered,
            gathered=gathered,
        ),
        dataclasses.replace(
            base,
            logits=waiting,
            gradients=summed + each + scattered,
            recomputed=layer,
            gathered=_gathered(device),
        ),
    )


def _recomputes(job: Job, host: float, keeps_less: bool) -> bool:
    """Whether some layer is computed again, or comes back from the host, as a whole."""
    return bool(host) or keeps_less or (job.remat != NONE and 0 < job.remat_share < 1)


def _activations(
    job: Job, layout: Layout, software: Software, *, dropout: bool
) -> tuple[float, float, float]:
    """Bytes per token and layer, on average over layers: kept on the device, what there is to
    keep, and kept on the host."""
    keeps_all = dataclasses.replace(job, remat=NONE)
    everything, _ = layer_activations(keeps_all, layout, software, dropout=dropout)
    kept, host = layer_activations(job, layout, software, dropout=dropout)
    others = everything
    if software.keeps_traced:
        others = _traced(job, layout, software, dropout=dropout)
        kept = others if job.remat == NONE else kept
    share = job.remat_share
    return share * kept + (1 - share) * others, everything, share * host


def _gathered(device: compute.Device) -> float:
    """Bytes of parameters gathered at a time, one unit ahead of the one in use, and of the unit's
    gradients: a compiled step gathers single matrices, an eager one whole layers."""
    job, layout = device.job, device.layout
    if layout.fsdp == 1:
        return 0.0
    model = job.model
    if device.software.fusion == "eager":
        unit = max(model.layer_weights) / layout.tensor
        unit += model.expert_weights / (layout.tensor * layout.expert)
    else:
        matrices = [m for routed in (False, True) for m in model.matmuls(routed=routed)]
        copies = model.experts.number / layout.expert if model.experts else 1.0
        unit = max(m.fan_in * m.fan_out * (copies if m.routed else 1) for m in matrices)
        unit /= layout.tensor
    return unit * 3 * job.compute_bytes


def _param_bytes(
    job: Job, layout: Layout, software: Software, held: float, sharded: float, optimizer: float
) -> float:
    """Bytes of parameters: where `data` cuts the state, whole copies in the compute width too."""
    if layout.shard_optimizer:
        return held * job.compute_bytes + optimizer * job.param_bytes
    width = job.param_bytes
    if software.keeps_traced and width != job.compute_bytes:
        width += job.compute_bytes
    return (sharded if layout.zero == 3 else held) * width


def layer_activations(
    job: Job, layout: Layout, software: Software = SHARDLIB, *, dropout: bool = False
) -> tuple[float, float]:
    """Returns bytes per token that a layer under `job.remat` keeps for its backward pass: on the
    device, and on the host."""
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
        "qkv": (model.heads * model.score_dim + model.kv_width) * width / layout.tensor,
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


def _traced(job: Job, layout: Layout, software: Software, *, dropout: bool) -> float:
    """Bytes per token of a layer of shardlib's transformer that keeps everything, as counted in its
    traced backward pass.

    A norm keeps its input, its normalised input and the product with its scale in float32, and what
    it gives to the matmuls, whole along the length. A gated MLP keeps gate and up, and what silu
    makes of the gate on the way; so does a plain one with GELU. Dropless experts keep the rows they
    were sent, the same of each row, and their results in float32.
    """
    model, width = job.model, job.compute_bytes
    residual = layout.tensor if layout.sequence_parallel else 1
    norms = 2 * model.embed * (3 * _FLOAT32 / residual + width)
    masks = 2 * model.embed / residual if dropout else 0
    heads = model.heads * (model.score_dim + model.value_dim) + model.kv_width
    attention = heads * width + model.heads * _FLOAT32
    if software.attention == "unfused":
        attention += model.heads * job.length * (2 * width + 1)
    hidden = _MLP_COPIES * width * model.mlp
    routed = 0.0
    if model.experts and model.routed_layers:
        experts = model.experts
        hidden = (_MLP_COPIES + 0.5) * width * _expert_rows(job, layout) * experts.mlp
        hidden += _MLP_COPIES * width * experts.shared_mlp
        rows = _expert_rows(job, layout)
        routed = rows * model.embed * (width + _FLOAT32)
        routed += model.embed * _FLOAT32 / residual
    return norms + masks + (attention + hidden) / layout.tensor + routed


def _expert_rows(job: Job, layout: Layout) -> float:
    """Rows of experts that a device has room for, by token of its own: nothing is dropped, so that
    all devices along `expert` may send it all they have; see `shardlib.moe.dropless`."""
    experts = job.model.experts
    assert experts is not None
    return layout.expert * min(experts.per_token, experts.number / layout.expert)


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
