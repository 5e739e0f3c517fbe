"""Memory of shardlib's own step on one device, phase by phase, as XLA compiles it.

The terms are read from the scheduled programs of `benchmarks/plan_memory.py`, in which each buffer
alive at the peak has a shape and a source line. Each term has this form: so many arrays of tokens
by hidden width, of the vocabulary table, or of the weights of a layer. If XLA could choose between
two layouts, the larger one counts.
"""

import dataclasses
import math

from shardlib.cost.layout import Layout
from shardlib.cost.transformer.communication import (
    LocalWeights,
    embedding_weights,
    exchanges_vectors,
)
from shardlib.cost.transformer.computation import OFFLOADED_PIECES, Device, kv_cut, qkv_width
from shardlib.cost.workload import NONE, Job
from shardlib.hardware import Cluster

Phase = dict[str, float]
"""Bytes by category of `Memory`."""
_FLOAT32 = 4
_LANES = {"tpu": 128, "gpu": 1}
"""Multiple to which the last dim of an array is padded in memory. Source: "Array layouts" in the
documentation of JAX's Pallas for TPUs."""
_GATED_COPIES = {"gelu_tanh": 8}
_PLAIN_COPIES = {"relu": 3, "silu": 4, "gelu": 4, "gelu_tanh": 6}
_OTHER_COPIES = 6
"""Hidden vectors per token that an MLP keeps, by its activation: the residuals of its gradient in
JAX, and its output. A mask counts as one."""
_HIDDEN_AT_ONCE = 4
"""Hidden vectors of the MLP in its backward pass: gate and up, and the gradients of both."""
_GATED_HIDDEN_AT_ONCE = {"tpu": 3}
"""The same for a gated MLP that is computed again, where it is fewer. Programs for TPUs hold gate,
up and the gradient of their product, and compute the gradients of the two where they are read. With
`gelu_tanh` they also hold its derivative."""
_LATE_HIDDEN = 2
"""Gradients of hidden vectors that wait where the weights of a layer get their gradients late: of
gate and up, and with `gelu_tanh` of their product."""
_RESIDUALS_AT_ONCE = {"tpu": 4, "gpu": 7}
"""Vectors of residual-stream width in the backward pass of a layer, whole along the length: the
input of both branches, the incoming gradient and the gradient of the MLP's input. Programs for GPUs
hold the gradients of gate and up apart, and one vector in transit between devices."""
_MATRICES_AT_ONCE = 2
"""Matrices of the largest kind alive at the same time: the next one is gathered while one is in
use. Gate and up of an MLP count as one."""
_GATED_AT_ONCE = {"tpu": 1.5}
"""The same for a gated MLP, where it is fewer. Programs for TPUs hold gate, up and the gradient of
one of them before it is scattered."""
_ALONE = 2
"""Further hidden vectors per row on GPUs where a device has one expert and keeps no product."""
_ROUTED_AT_ONCE = {"tpu": (6, 3), "gpu": (7, 1)}
"""Hidden vectors and vectors of residual-stream width per row of experts in the backward pass, in
addition to a mask of one byte per hidden element. On TPUs gate, up, their product and the gradients
of all three; the row, its gradient and the gradient of its result."""


def phases(
    device: Device, cluster: Cluster, held: LocalWeights, recomputing: float
) -> tuple[Phase, ...]:
    """Returns what differs in the head, and in the backward pass of the layers.

    Layers that keep everything come after those that recompute. Their backward pass is a loop of
    its own, before the gradients of the others are allocated, and frees what they keep.

    `held` are the weights of the device before `fsdp` shards them; `recomputing` are bytes of
    activations that stay until the layers that recompute go backward.
    """
    gradients = _gradients(device, held)
    head, layers = _head(device, cluster, gradients), _layers(device, cluster, gradients)
    if not device.in_ranges:
        return head, layers
    summed, handed_on, stacked = gradients
    last = dataclasses.replace(device, job=dataclasses.replace(device.job, remat=NONE))
    if device.last_alone and cluster.platform == "tpu":
        head["gathered"] += _gathered(device, cluster)
        if "qkv" not in device.job.remat.kept:
            # Before layers that compute all products again, the gradient of the table is computed.
            layers["logits"] = 0.0
    share = 1 - device.job.remat_share
    whole = _layers(last, cluster, (summed, handed_on, share * stacked))
    if device.last_alone and device.job.model.routed_layers and cluster.platform == "tpu":
        # What a single layer of experts keeps is among what its backward pass holds at once.
        whole["activations"] = recomputing
    if device.last_alone and cluster.platform == "gpu":
        # The gradient of the table is computed before a single layer goes backward.
        whole["logits"] = layers["logits"] = 0.0
        layers["recomputed"] += _left_over(device)
    return head, whole, {**layers, "activations": recomputing}


def _head(device: Device, cluster: Cluster, gradients: tuple[float, float, float]) -> Phase:
    """Returns the memory of the head and its loss.

    A loss in chunks holds a gathered chunk of the table and its gradient, the sum of the gradients
    of the head's inputs in float32 and one part of it, and the gradient of the table, which `fsdp`
    shards. It holds the logits of a chunk. A loss in one piece holds the gathered table, the logits
    and their gradient; it holds one of the two on GPUs, or if devices share the vocabulary, or the
    table is tied to the embedding or frozen. In microbatches on TPUs the gradient of a tied table
    is added to its sum before the gradient of the head's inputs is computed: both tables are whole.
    On GPUs the gradients of all layers and of the embedding are allocated before.
    """
    job, layout, on_gpu = device.job, device.layout, cluster.platform == "gpu"
    width, chunks = job.compute_bytes, job.loss_chunks
    table = job.model.vocab_weights / layout.tensor
    trained = job.trained * table
    logits = device.tokens * job.model.vocab / layout.tensor
    gathered = table * width
    if chunks > 1:
        gathered = (table + trained) / chunks * width
        gathered += (table + trained) / layout.fsdp * width
        gathered += device.tokens * job.model.embed * (_FLOAT32 + width)
        held = logits / chunks * width
    else:
        once = on_gpu or layout.tensor > 1 or job.model.tied or job.frozen
        held = logits * width * (1 if once else 2)
        in_parts = layout.fsdp > 1 and layout.zero == 3
        if job.model.tied and layout.microbatches > 1 and in_parts and not on_gpu:
            gathered += trained * width
    embedding = _embedding_gradient(device, cluster)
    there = sum(gradients if on_gpu else gradients[:1]) + embedding
    return {"logits": held, "gradients": there, "gathered": gathered}


def _layers(device: Device, cluster: Cluster, gradients: tuple[float, float, float]) -> Phase:
    """Returns the memory of the backward pass of the layers, with what the head leaves waiting."""
    logits, tables = _waiting(device, cluster)
    return {
        "logits": logits,
        "gradients": sum(gradients) + tables,
        "recomputed": device.tokens * _at_once(device, cluster),
        "gathered": _gathered(device, cluster),
    }


def delays_gradients(device: Device, cluster: Cluster) -> bool:
    """Returns whether a program for TPUs delays the gradients of the weights of a single last layer
    past the layers that recompute. It does so where nothing waits for them, as a sum over `data`
    does. It computes the gradients of experts at once, and all of them if the other layers compute
    everything again."""
    job, layout = device.job, device.layout
    keeps = job.remat.kept or job.remat.offloaded
    summed = layout.data > 1 and layout.microbatches == 1
    dense = device.last_alone and not job.model.routed_layers
    return dense and bool(keeps) and not summed and cluster.platform == "tpu"


def late_gradients(device: Device) -> float:
    """Returns the bytes that a single last layer holds, besides what it keeps, until the gradients
    of its weights are computed."""
    job, model = device.job, device.job.model
    late = _LATE_HIDDEN + (model.activation == "gelu_tanh")
    hidden = late * model.mlp / device.layout.tensor
    return device.tokens * (hidden + 2 * model.embed) * job.compute_bytes


def _left_over(device: Device) -> float:
    """Returns the bytes that a single last layer holds on GPUs while the layers that recompute go
    backward: a hidden vector and two vectors of residual-stream width, for gradients of weights
    that are computed last (read from compiled steps)."""
    model = device.job.model
    vectors = model.mlp / device.layout.tensor + 2 * model.embed
    return device.tokens * vectors * device.job.compute_bytes


def _waiting(device: Device, cluster: Cluster) -> tuple[float, float]:
    """Returns the bytes of gradients of logits, and of vocabulary tables, during the layers.

    The gradient of the logits lives until the gradient of the table is computed from it, which can
    be delayed past the layers. It is done before them in a pipeline, whose head is a branch of its
    own. With a loss in chunks only the sharded gradient of the table is left.
    """
    job, layout, width = device.job, device.layout, device.job.compute_bytes
    table = job.trained * job.model.vocab_weights / layout.tensor
    embedding = _embedding_gradient(device, cluster)
    if device.reruns:
        return 0.0, embedding
    if job.loss_chunks > 1:
        return 0.0, embedding + table * width / layout.fsdp
    logits = 0.0 if job.frozen else device.tokens * job.model.vocab / layout.tensor * width
    return logits, embedding


def _embedding_gradient(device: Device, cluster: Cluster) -> float:
    """Returns the bytes of the gradient of the embedding lookup, which GPUs hold from the start: of
    the whole table, or of the part that `fsdp` leaves if vectors are exchanged."""
    if cluster.platform != "gpu" or device.job.model.tied:
        return 0.0
    table = device.job.trained * embedding_weights(device) * device.job.compute_bytes
    return table / device.layout.fsdp if exchanges_vectors(device) else table


def update(device: Device, held: LocalWeights) -> Phase:
    """Returns the memory while a piece of an offloaded optimizer state is updated: all gradients,
    and the piece before and after the update. A piece is filled parameter by parameter, so that it
    exceeds its share by at most one parameter.

    The arguments are the same as for `phases`, with the state on the host.
    """
    job, layout, model = device.job, device.layout, device.job.model
    copies = model.experts.number / layout.expert if model.experts else 1.0
    arrays = (
        m.fan_in * m.fan_out / model.arrays_of(m) * (copies if m.routed else 1.0)
        for routed in {False, model.experts is not None}
        for m in model.matmuls(routed=routed)
    )
    largest = max(model.layers / layout.stage * max(arrays), model.vocab_weights) / layout.tensor
    whole = layout.zero == 1 and layout.microbatches > 1
    trained = held.trained(job).total
    gradients = trained / (1 if whole else layout.fsdp) * job.gradient_bytes
    moments = trained / layout.fsdp * job.moment_bytes
    piece = min(moments, moments * (1 / OFFLOADED_PIECES + largest / held.total))
    return {"activations": 0.0, "gradients": gradients, "optimizer": 2 * piece}


def _gradients(device: Device, held: LocalWeights) -> tuple[float, float, float]:
    """Returns the bytes of gradients: sums over microbatches in float32, the gradients that a
    pipeline turn hands on, also in float32, and the stacked layer gradients of one microbatch in
    the compute dtype."""
    job, layout = device.job, device.layout
    cut = 1 if layout.zero == 1 else layout.fsdp
    held = held.trained(job)
    layers = (held.dense + held.routed) * device.slots
    summed = (layers + held.vocab) / cut * job.gradient_bytes
    stacked = layers / cut * job.compute_bytes
    return (
        summed if layout.microbatches > 1 else 0.0,
        summed if device.reruns else 0.0,
        stacked,
    )


def _at_once(device: Device, cluster: Cluster) -> float:
    """Returns the bytes per token that one layer holds while its gradient is computed."""
    job, layout = device.job, device.layout
    model, width, tensor = job.model, job.compute_bytes, layout.tensor
    on_gpu = cluster.platform == "gpu"
    residual = _RESIDUALS_AT_ONCE["gpu" if on_gpu else "tpu"] * model.embed * width
    # Attention accumulates its output and its gradients in float32.
    attention = 2 * (_FLOAT32 + width) * model.heads * model.value_dim / tensor
    hidden: float = _HIDDEN_AT_ONCE
    if "up" in job.remat.kept:
        hidden /= 2
    elif model.gated:
        fewer = _GATED_HIDDEN_AT_ONCE.get(cluster.platform, hidden)
        hidden = min(hidden, fewer + (model.activation == "gelu_tanh"))
    if not (model.experts and model.routed_layers):
        mlp = hidden * width * model.mlp / tensor
        # Attention that reads kept arrays starts after the MLP is done; what is computed or fetched
        # again is there for both.
        kept = "qkv" in job.remat.kept - job.remat.offloaded
        return residual + (max(attention, mlp) if kept else attention + mlp)
    experts = model.experts
    rows = expert_rows(job, layout)
    shared = hidden * width * experts.shared_mlp / tensor
    vectors, whole = _ROUTED_AT_ONCE["gpu" if on_gpu else "tpu"]
    routed = (vectors * width + 1) * experts.mlp / tensor + whole * width * model.embed
    if on_gpu:
        # XLA multiplies all rows by each expert of a device, with rows of other experts masked.
        # Three products copy the hidden vectors for each expert. Two copy the rows, and three do
        # where no devices exchange rows (read from compiled steps).
        copies, rows_copied = experts.number / layout.expert, 2 + (layout.expert == 1)
        more = 3 * (copies - 1) if copies > 1 else _ALONE * (not job.remat.kept)
        routed += width * (more * experts.mlp / tensor + rows_copied * copies * model.embed)
    return residual + attention + shared + rows * routed


def _gathered(device: Device, cluster: Cluster) -> float:
    """Returns the bytes of the parameters gathered at a time, as single matrices, and of their
    gradients."""
    layout, most = device.layout, _MATRICES_AT_ONCE
    if layout.fsdp == 1:
        return 0.0
    if device.job.model.gated:
        most = _GATED_AT_ONCE.get(cluster.platform, most)
    return most * largest_matrix(device) / layout.tensor * device.job.compute_bytes


def largest_matrix(device: Device) -> float:
    """Returns the weights of the largest matrix of a layer, over all experts of a device
    together."""
    model = device.job.model
    matrices = [m for routed in (False, True) for m in model.matmuls(routed=routed)]
    copies = model.experts.number / device.layout.expert if model.experts else 1.0
    return max(m.fan_in * m.fan_out * (copies if m.routed else 1) for m in matrices)


def traced(device: Device, cluster: Cluster, *, dropout: bool) -> float:
    """Returns the bytes per token of a layer that keeps everything, as counted in its traced
    backward pass.

    A norm keeps its input, its normalised input and the product with its scale in float32, and its
    output to the matmuls, whole along the length. Norms of queries and keys keep the same, and
    their output is counted as a query or key. A gated MLP keeps gate and up and the
    intermediates of its activation. Dropless experts keep the rows they received, the same hidden
    vectors for each row, and their results in float32.
    """
    job, layout = device.job, device.layout
    model, width = job.model, job.compute_bytes
    residual = layout.tensor if layout.sequence_parallel else 1
    given = width if width != _FLOAT32 else 0  # In float32 it is the product above.
    norms = 2 * model.embed * (3 * _FLOAT32 / residual + given)
    if model.sandwich:  # Its two further norms give vectors to sums, not to matmuls.
        norms += 2 * model.embed * 3 * _FLOAT32 / residual
    masks = 2 * model.embed / residual if dropout else 0
    heads = model.heads * model.value_dim / layout.tensor
    heads += qkv_width(model, layout)
    if model.qk_norm:
        values = model.kv_heads * model.value_dim / kv_cut(model, layout)
        norms += 3 * _FLOAT32 * (qkv_width(model, layout) - values)
    attention = model.heads * _FLOAT32
    if device.software.attention == "unfused":
        attention += model.heads * job.length * (2 * width + 1)
    kinds = _GATED_COPIES if model.gated else _PLAIN_COPIES
    copies = kinds.get(model.activation, _OTHER_COPIES)
    hidden = copies * width * model.mlp
    routed = 0.0
    if model.experts and model.routed_layers:
        experts = model.experts
        rows = expert_rows(job, layout)
        hidden = (copies + 0.5) * width * rows * experts.mlp
        hidden += copies * width * experts.shared_mlp
        routed = rows * model.embed * (width + _FLOAT32)
        routed += model.embed * _FLOAT32 / residual
    cut = heads * width * padding(job, cluster) + (attention + hidden) / layout.tensor
    return norms + masks + cut + routed


def expert_rows(job: Job, layout: Layout) -> float:
    """Returns the rows of experts that a device allocates per token of its own. Nothing is dropped,
    so all devices along `expert` may send it all their tokens; see `shardlib.nn.moe.dropless`."""
    experts = job.model.experts
    assert experts is not None
    return layout.expert * min(experts.per_token, experts.number / layout.expert)


def padding(job: Job, cluster: Cluster) -> float:
    """Returns the memory of queries, keys, values and attention's output relative to their size:
    their last dim is a head, which is padded."""
    size, lanes = job.model.score_dim, _LANES.get(cluster.platform, 1)
    return math.ceil(size / lanes) * lanes / size
