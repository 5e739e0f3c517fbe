"""What shardlib's own step holds on one device, phase by phase, as XLA compiles it.

Read from the scheduled programs of `benchmarks/plan_memory.py`, in which each buffer that is alive
at the peak has a shape and a source line. What is counted here has that form: so many arrays of
tokens by hidden width, of the vocabulary's table, of the weights of a layer. Whatever XLA could
lay out in either way is counted as it takes more.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

from shardlib.hardware import Cluster
from shardlib.plan.compute import OFFLOADED_PIECES, Device, qkv_width
from shardlib.plan.layout import Layout
from shardlib.plan.traffic import LocalWeights
from shardlib.plan.workload import Job

if TYPE_CHECKING:
    from shardlib.plan.memory import Memory

_FLOAT32 = 4
_LANES = {"tpu": 128, "gpu": 1}
"""What the last dim of an array is a multiple of in memory. Source: "Array layouts" in the
documentation of JAX's Pallas for TPUs."""
_MLP_COPIES = 6
"""Hidden vectors that a gated MLP, or one with GELU, keeps of each token."""
_HIDDEN_AT_ONCE = 4
"""Of the MLP in its backward pass: gate and up, and the gradients of both."""
_RESIDUALS_AT_ONCE = 6
"""Vectors of the width of the residual stream in the backward pass of a layer, whole along the
length: what both branches read, the gradient that arrives, those of gate, up and their sum."""
_MATRICES_AT_ONCE = 2
"""Of the kind of the largest: the next is gathered beside the one in use."""
_ROUTED_HIDDEN = 7
"""Hidden vectors of each row of experts in the backward pass, besides a mask of one byte each."""


def phases(
    device: Device, cluster: Cluster, held: LocalWeights, base: "Memory"
) -> tuple["Memory", ...]:
    """Returns what is held in the head, and in the backward pass of the layers.

    Args:
        device: The job on one device.
        cluster: Whose compiler it is.
        held: The weights of the device before `fsdp` cuts them.
        base: State, activations and runtime, which both hold.
    """
    gradients = _gradients(device, held)
    return _head(device, cluster, gradients, base), _layers(device, cluster, gradients, base)


def _head(
    device: Device, cluster: Cluster, gradients: tuple[float, float, float], base: "Memory"
) -> "Memory":
    """The head and its loss.

    In chunks, they hold the table as it is gathered, a copy and its gradient in float32, and on
    GPUs a second narrow copy, a mask and a gradient of the logits in four bytes each. In a piece,
    the gradient of the logits lies beside them unless devices share the vocabulary, or the table
    is the embedding's, on TPUs. On GPUs the gradients of all layers are there before, and so is
    that of the embedding.
    """
    job, layout, on_gpu = device.job, device.layout, cluster.platform == "gpu"
    width = job.compute_bytes
    table = job.model.vocab_weights / layout.tensor
    logits = device.tokens * job.model.vocab / layout.tensor
    gathered = table * width
    embedding = table * width if on_gpu and not job.model.tied else 0.0
    if job.loss_chunks > 1:
        gathered += table * _FLOAT32
        if width < _FLOAT32:
            gathered += table * (_FLOAT32 + (width if on_gpu else 0))
        embedding = table * width if on_gpu else 0.0
        held = logits / job.loss_chunks * (width + (2 * _FLOAT32 if on_gpu else 0))
    else:
        shared = layout.tensor > 1 or job.model.tied
        held = logits * width * (1 if shared and not on_gpu else 2)
    there = sum(gradients if on_gpu else gradients[:1]) + embedding
    return dataclasses.replace(base, logits=held, gradients=there, gathered=gathered)


def _layers(
    device: Device, cluster: Cluster, gradients: tuple[float, float, float], base: "Memory"
) -> "Memory":
    """The backward pass of the layers, with what waits of the head's."""
    logits, tables = _waiting(device, cluster)
    return dataclasses.replace(
        base,
        logits=logits,
        gradients=sum(gradients) + tables,
        recomputed=device.tokens * _at_once(device, cluster),
        gathered=_gathered(device),
    )


def _waiting(device: Device, cluster: Cluster) -> tuple[float, float]:
    """Bytes of gradients of logits, and of the vocabulary's tables, while layers are in turn.

    The gradient of the logits is there until the table's is taken from it, and of a loss in chunks
    the table's in float32 until it is scattered, for both of which there is time behind the layers.
    On GPUs of one host it is done before, and so it is in a pipeline, whose head is a branch of its
    own. What is looked up in the embedding has a table of gradients, on GPUs from the start.
    """
    job, layout, on_gpu = device.job, device.layout, cluster.platform == "gpu"
    table = job.model.vocab_weights / layout.tensor
    width, soon = job.compute_bytes, on_gpu and cluster.num_hosts == 1
    embedding = table * width if on_gpu and not job.model.tied else 0.0
    if device.reruns:
        return 0.0, embedding
    if job.loss_chunks > 1:
        return 0.0, embedding + table * (width if soon else _FLOAT32)
    if soon or (on_gpu and job.model.tied):
        return 0.0, embedding + table * width
    return device.tokens * job.model.vocab / layout.tensor * width, embedding


def update(device: Device, held: LocalWeights, base: "Memory") -> "Memory":
    """Returns what is held while a piece of an offloaded optimizer state is updated: all gradients,
    and the piece as it was and as it becomes. A piece is filled parameter by parameter, so that it
    exceeds its share by one of them at most.

    The arguments are those of `phases`, with the state on the host.
    """
    job, layout, model = device.job, device.layout, device.job.model
    parts = {"qkv": 1 if model.latent else 3, "up": 2 if model.gated else 1}
    copies = model.experts.number / layout.expert if model.experts else 1.0
    arrays = (
        m.fan_in * m.fan_out / parts.get(m.name, 1) * (copies if m.routed else 1.0)
        for routed in {False, model.experts is not None}
        for m in model.matmuls(routed=routed)
    )
    largest = max(model.layers / layout.stage * max(arrays), model.vocab_weights) / layout.tensor
    whole = layout.zero == 1 and layout.microbatches > 1
    gradients = held.total / (1 if whole else layout.fsdp) * job.gradient_bytes
    moments = held.total / layout.fsdp * job.moment_bytes
    piece = min(moments, moments * (1 / OFFLOADED_PIECES + largest / held.total))
    return dataclasses.replace(base, activations=0.0, gradients=gradients, optimizer=2 * piece)


def _gradients(device: Device, held: LocalWeights) -> tuple[float, float, float]:
    """Bytes of gradients: sums of microbatches in float32, those of one turn of a pipeline as it
    hands them on, in float32 too, and those of one microbatch's stacked layers in the width of the
    computation."""
    job, layout = device.job, device.layout
    cut = 1 if layout.zero == 1 else layout.fsdp
    summed = held.total / cut * job.gradient_bytes
    stacked = (held.dense + held.routed) / cut * job.compute_bytes
    return (
        summed if layout.microbatches > 1 else 0.0,
        summed if device.reruns else 0.0,
        stacked,
    )


def _at_once(device: Device, cluster: Cluster) -> float:
    """Bytes of a token that one layer holds while its gradient is computed."""
    job, layout = device.job, device.layout
    model, width, tensor = job.model, job.compute_bytes, layout.tensor
    on_gpu = cluster.platform == "gpu"
    # On GPUs one more is on its way between devices.
    residual = (_RESIDUALS_AT_ONCE + on_gpu) * model.embed * width
    # Attention adds up in float32 what it gives and what its gradients give.
    attention = 2 * (_FLOAT32 + width) * model.heads * model.value_dim / tensor
    hidden = _HIDDEN_AT_ONCE if "up" not in job.remat.kept else _HIDDEN_AT_ONCE / 2
    if not (model.experts and model.routed_layers):
        return residual + attention + hidden * width * model.mlp / tensor
    experts = model.experts
    rows = expert_rows(job, layout)
    shared = hidden * width * experts.shared_mlp / tensor
    routed = (_ROUTED_HIDDEN * width + 1) * experts.mlp / tensor + width * model.embed
    if on_gpu:
        # XLA multiplies all rows by each expert of a device, those of others masked: three products
        # have a copy of the hidden vectors for each of them, two one of the rows.
        copies = experts.number / layout.expert
        routed += width * (3 * (copies - 1) * experts.mlp / tensor + 2 * copies * model.embed)
    return residual + attention + shared + rows * routed


def _gathered(device: Device) -> float:
    """Bytes of the parameters that are gathered at a time, single matrices."""
    layout = device.layout
    if layout.fsdp == 1:
        return 0.0
    return _MATRICES_AT_ONCE * largest_matrix(device) / layout.tensor * device.job.compute_bytes


def largest_matrix(device: Device) -> float:
    """Returns the weights of the largest matrix of a layer, of all experts of a device together."""
    model = device.job.model
    matrices = [m for routed in (False, True) for m in model.matmuls(routed=routed)]
    copies = model.experts.number / device.layout.expert if model.experts else 1.0
    return max(m.fan_in * m.fan_out * (copies if m.routed else 1) for m in matrices)


def traced(device: Device, cluster: Cluster, *, dropout: bool) -> float:
    """Returns the bytes per token of a layer that keeps everything, as counted in its traced
    backward pass.

    A norm keeps its input, its normalised input and the product with its scale in float32, and what
    it gives to the matmuls, whole along the length. A gated MLP keeps gate and up, and what silu
    makes of the gate on the way; so does a plain one with GELU. Dropless experts keep the rows they
    were sent, the same of each row, and their results in float32.
    """
    job, layout = device.job, device.layout
    model, width = job.model, job.compute_bytes
    residual = layout.tensor if layout.sequence_parallel else 1
    given = width if width != _FLOAT32 else 0  # In float32 it is that product.
    norms = 2 * model.embed * (3 * _FLOAT32 / residual + given)
    masks = 2 * model.embed / residual if dropout else 0
    heads = model.heads * model.value_dim / layout.tensor
    heads += qkv_width(model, layout)
    attention = model.heads * _FLOAT32
    if device.software.attention == "unfused":
        attention += model.heads * job.length * (2 * width + 1)
    hidden = _MLP_COPIES * width * model.mlp
    routed = 0.0
    if model.experts and model.routed_layers:
        experts = model.experts
        rows = expert_rows(job, layout)
        hidden = (_MLP_COPIES + 0.5) * width * rows * experts.mlp
        hidden += _MLP_COPIES * width * experts.shared_mlp
        routed = rows * model.embed * (width + _FLOAT32)
        routed += model.embed * _FLOAT32 / residual
    cut = heads * width * padding(job, cluster) + (attention + hidden) / layout.tensor
    return norms + masks + cut + routed


def expert_rows(job: Job, layout: Layout) -> float:
    """Returns the rows of experts that a device has room for, by token of its own: nothing is
    dropped, so that all devices along `expert` may send it all they have; see
    `shardlib.moe.dropless`."""
    experts = job.model.experts
    assert experts is not None
    return layout.expert * min(experts.per_token, experts.number / layout.expert)


def padding(job: Job, cluster: Cluster) -> float:
    """Returns how much larger queries, keys and values are in memory than their numbers: their last
    dim is that of a head."""
    size, lanes = job.model.score_dim, _LANES.get(cluster.platform, 1)
    return math.ceil(size / lanes) * lanes / size
