"""Peak memory of one device in a training step, by category.

Activations of a layer follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", sections 4.1 and 4.2. For a plain MLP of 4 h and half precision they derive

    s b h (10 + 24 / t + 5 a s / (h t)) bytes,

of which sequence parallelism also splits the 10. Here each part counts by its own width, so that
gated MLPs, grouped queries and remat policies follow from the same table. State is sharded as in
ZeRO (Rajbhandari et al. 2020, section 5).
"""

import dataclasses

from shardlib.cost.costs import RUNTIME_BYTES, Memory, peak, usable
from shardlib.cost.layout import SHARDLIB, Layout, Software
from shardlib.cost.transformer import communication, computation, program_memory
from shardlib.cost.transformer.program_memory import Phase
from shardlib.cost.workload import NONE, Job, Remat
from shardlib.hardware import Cluster
from shardlib.hardware.capacity import capacity
from shardlib.nn.stages import StageCut

_LOGIT_BYTES = 4
"""Bytes per logit: logits and their gradient in half precision. The softmax between them is not
stored."""


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
        layout: Degrees of the mesh axes.
        cluster: Cluster, for the memory that the runtime of its chips takes.
        software: Program properties: fusion of attention, and what is gathered at a time.
        dropout: Whether the residual branches keep dropout masks.
    """
    device = computation.Device(job, layout, software)
    held = communication.local_weights(device)
    base, recomputing = _through_the_step(device, cluster, held, dropout=dropout)
    if not software.keeps_traced:
        return peak(base, _published_phases(device, held))

    def at_peak(recomputing: float) -> Memory:
        phases = program_memory.phases(device, cluster, held, recomputing)
        if layout.offload_optimizer:
            phases += (program_memory.update(device, held),)
        return peak(base, phases)

    limit = capacity(cluster.chip)
    if program_memory.delays_gradients(device, cluster) and limit is not None:
        late = at_peak(base["activations"] + program_memory.late_gradients(device))
        if late.fits(limit.usable_bytes):
            return late
        # XLA then delays a part: about half of what there is room for, in compiled programs.
        early = at_peak(recomputing)
        room = max(min(late.total, usable(limit.usable_bytes)) - early.total, 0.0)
        return dataclasses.replace(early, activations=early.activations + room / 2)
    return at_peak(recomputing)


def _through_the_step(
    device: computation.Device,
    cluster: Cluster,
    held: communication.LocalWeights,
    *,
    dropout: bool,
) -> tuple[Phase, float]:
    """Returns the bytes alive in every phase: state, runtime, and activations for the backward
    pass. Also returns the part of the activations that layers under the remat policy keep."""
    job, layout, software = device.job, device.layout, device.software
    optimizer = held.trained(job).total / layout.fsdp
    optimizer /= layout.data * layout.expert if layout.shard_optimizer else 1
    kept, others, host = _activations(device, cluster, dropout=dropout)
    waiting = device.tokens * _layers_in_flight(job, layout, reruns=device.reruns)
    inputs = 0.0
    if device.reruns:
        cut = layout.tensor if layout.sequence_parallel else 1
        inputs = layout.kept_inputs * device.tokens * job.model.embed * job.compute_bytes / cut
    # GPUs fetch what the next layer needs from the host while they compute one.
    fetched = device.tokens * host if cluster.platform == "gpu" and software.keeps_traced else 0.0
    moments = optimizer * job.moment_bytes
    away = moments if layout.offload_optimizer else 0.0
    base = {
        "params": _param_bytes(device, cluster, held, optimizer),
        "optimizer": moments - away,
        "activations": waiting * (kept + others) + inputs + fetched,
        "runtime": RUNTIME_BYTES[cluster.platform],
        "host": waiting * host + away,
    }
    return base, waiting * kept + fetched


def _published_phases(
    device: computation.Device, held: communication.LocalWeights
) -> tuple[Phase, Phase]:
    """Returns what differs in the head and in the backward pass of a layer, for programs other than
    shardlib's, from what they must hold."""
    job, layout = device.job, device.layout
    gradients = held.trained(job).total * job.gradient_bytes
    if layout.zero > 1:
        gradients /= layout.fsdp
    in_head = {
        "logits": device.tokens * job.model.vocab / layout.tensor * _LOGIT_BYTES / job.loss_chunks,
        "gradients": gradients if layout.microbatches > 1 else 0.0,
    }
    in_backward = {
        "gradients": gradients,
        "recomputed": device.tokens * _recomputed(device),
        "gathered": _gathered(device),
    }
    return in_head, in_backward


def _recomputed(device: computation.Device) -> float:
    """Returns the bytes per token that a layer as a whole recomputes or fetches from the host."""
    job, layout, software = device.job, device.layout, device.software
    everything, _ = layer_activations(dataclasses.replace(job, remat=NONE), layout, software)
    kept, host = layer_activations(job, layout, software)
    some = job.remat != NONE and 0 < job.remat_share < 1
    return everything if host or some or job.remat_share * kept < everything else 0.0


def kept_per_layer(device: computation.Device, cluster: Cluster) -> float:
    """Returns the bytes per token that a loop over layers keeps on the device for the backward
    pass, averaged over the layers."""
    job = device.job
    share = 0.0 if job.remat == NONE else job.remat_share
    kept, _ = layer_activations(job, device.layout, device.software)
    return share * kept + (1 - share) * program_memory.traced(device, cluster, dropout=False)


def _activations(
    device: computation.Device, cluster: Cluster, *, dropout: bool
) -> tuple[float, float, float]:
    """Returns the bytes per token and layer, averaged over layers: of layers under the remat
    policy, of the others, and on the host. A single other layer is in no loop, and its fusions
    compute elementwise results again, which a loop would keep between two products."""
    job, layout, software = device.job, device.layout, device.software
    share = 0.0 if job.remat == NONE else job.remat_share
    padding = program_memory.padding(job, cluster) if software.keeps_traced else 1.0
    kept = host = others = 0.0
    if share > 0:
        kept, host = layer_activations(job, layout, software, dropout=dropout, padding=padding)
    # On GPUs a single layer of experts keeps the arrays of all of its products, as in a loop.
    fuses = device.last_alone and not (job.model.routed_layers and cluster.platform == "gpu")
    if share < 1 and software.keeps_traced and not fuses:
        others = program_memory.traced(device, cluster, dropout=dropout)
    elif share < 1:
        fused = {"elementwise"} if software.keeps_traced else set[str]()
        everything = dataclasses.replace(job, remat=Remat(NONE.kept - fused))
        others, _ = layer_activations(
            everything, layout, software, dropout=dropout, padding=padding
        )
        residual = layout.tensor if layout.sequence_parallel else 1
        # Attention's output is read by a norm, and their sum by the next one.
        others += job.model.sandwich * job.model.embed * job.compute_bytes / residual
    return share * kept, (1 - share) * others, share * host


def _gathered(device: computation.Device) -> float:
    """Returns the bytes of parameters gathered at a time, with one unit prefetched, and of the
    gradients of the unit. A compiled step gathers single matrices, an eager one whole layers."""
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


def _param_bytes(
    device: computation.Device,
    cluster: Cluster,
    held: communication.LocalWeights,
    optimizer: float,
) -> float:
    """Returns the bytes of parameters. If `data` shards the state, there are also whole copies in
    the compute dtype. Programs of shardlib have such copies of the layers, and so have stages with
    unequally many layers, whose copies are in slots."""
    job, layout = device.job, device.layout
    if layout.shard_optimizer:
        return held.total * job.compute_bytes + optimizer * job.param_bytes
    cut = layout.fsdp if layout.zero == 3 else 1
    copied = 0.0
    exchanged = device.slots > 1
    if device.software.keeps_traced and (job.param_bytes > job.compute_bytes or exchanged):
        copied = (held.dense + held.routed) * device.slots * job.compute_bytes
        # On TPUs microbatches share the copy of all layers, and each cuts it into ranges again.
        again = device.in_ranges and layout.microbatches > 1 and cluster.platform == "tpu"
        copied *= 1 + again
    return (held.total * job.param_bytes + copied) / cut


def layer_activations(
    job: Job,
    layout: Layout,
    software: Software = SHARDLIB,
    *,
    dropout: bool = False,
    padding: float = 1.0,
) -> tuple[float, float]:
    """Returns the bytes per token that a layer under `job.remat` keeps for its backward pass, on
    the device and on the host. Queries, keys, values and attention's output take `padding` times
    their size."""
    model, width, keeps = job.model, job.compute_bytes, job.remat.kept
    if software.attention == "unfused" and "elementwise" not in keeps:
        keeps -= {"attention"}
    residual = layout.tensor if layout.sequence_parallel else 1
    hidden = float(model.mlp)
    if model.experts and model.routed_layers:
        experts = model.experts
        hidden = float(experts.per_token * experts.mlp + experts.shared_mlp)
    heads = model.heads * model.value_dim
    scores, sums = 0.0, 4.0 * model.heads  # The sums of the softmax in float32.
    if software.attention == "unfused":
        scores, sums = model.heads * job.length * (2 * width + 1), 0.0
    parts = {
        "qkv": padding * computation.qkv_width(model, layout) * width,
        "attention": (padding * heads * width + sums + scores) / layout.tensor,
        "out": model.embed * width / residual,
        "down": model.sandwich * model.embed * width / residual,  # Read by the norm after it.
        "up": (2 if model.gated else 1) * hidden * width / layout.tensor,
        "elementwise": 2 * model.embed * (width + (1 if dropout else 0)) / residual
        + hidden * width / layout.tensor,
    }
    if software.attention == "unfused" and "attention" not in keeps:
        # Only the core is recomputed; its output to the projection stays.
        parts["core"] = heads * width / layout.tensor if "qkv" in keeps else 0.0
    kept = model.embed * width / residual
    kept += sum(size for name, size in parts.items() if name in keeps or name == "core")
    kept += sum(parts[name] / 2 for name in job.remat.half)
    host = sum(size for name, size in parts.items() if name in job.remat.offloaded)
    if "input" in job.remat.offloaded:
        host += model.embed * width / residual
    return kept - host, host


def _layers_in_flight(job: Job, layout: Layout, *, reruns: bool) -> float:
    """Returns the layers of one microbatch whose activations a device holds at the same time.

    The first of p stages holds p microbatches of its L / p layers; interleaving increases this by a
    fraction (p - 1) / (p v). Source: Korthikanti et al. 2022, section 4.2.3. If chunks are rerun
    before their backward pass, it is one chunk.
    """
    layers, stages = job.model.layers, layout.stage
    if stages == 1:
        return float(layers)
    if reruns:
        return float(StageCut(layers, stages, layout.chunks).slots)
    flying = min(layout.microbatches, stages) / stages
    if layout.chunks > 1:
        flying *= 1 + (stages - 1) / (stages * layout.chunks)
    return layers * flying
