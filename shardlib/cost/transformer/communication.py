"""Collectives of one device in a step, and what they overlap with.

Bytes follow ZeRO (Rajbhandari et al. 2020, section 7), Megatron-LM (Shoeybi et al. 2019, section 3;
Korthikanti et al. 2022, section 4.2.2), Ring Attention (Liu et al. 2023, section 3), GShard
(Lepikhin et al. 2020, section 3.2) and pipelining (Narayanan et al. 2021, section 2.2).
"""

import dataclasses
import functools
import math

from shardlib.cost.costs import CollectiveCost, Overlap, Window
from shardlib.cost.layout import Layout
from shardlib.cost.transformer.computation import Device, kv_cut, matrices
from shardlib.cost.workload import Job, Transformer
from shardlib.nn.lookup import MIN_WIDTH

FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class LocalWeights:
    """Weights on a device before `fsdp` shards them: of all its layers, and of the vocabulary."""

    dense: float
    routed: float
    vocab: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.routed + self.vocab

    def trained(self, job: Job) -> "LocalWeights":
        """Returns the trained parameters, which have gradients and optimizer state."""
        share = job.trained
        return LocalWeights(share * self.dense, share * self.routed, share * self.vocab)


def local_weights(device: Device) -> LocalWeights:
    """Returns the weights that tensor, expert and stage parallelism leave on the largest device."""
    model, layout = device.job.model, device.layout
    shared = model.dense_layers * _layer_weights(device, routed=False)
    if model.routed_layers:
        shared += model.routed_layers * _layer_weights(device, routed=True)
    experts = model.routed_layers * model.expert_weights
    tables = 1 if model.tied or (layout.stage > 1 and not device.reruns) else 2
    return LocalWeights(
        shared / layout.stage,
        experts / (layout.tensor * layout.stage * layout.expert),
        tables * model.vocab_weights / layout.tensor,
    )


def _layer_weights(device: Device, *, routed: bool) -> float:
    """Returns the weights of a layer on a device, without its routed experts. The rules of shardlib
    replicate keys and values where `tensor` does not divide their heads, and shard a router along
    `expert`."""
    model, layout = device.job.model, device.layout
    products = (m for m in model.matmuls(routed=routed) if not m.routed)
    weights = 0.0
    for product in products:
        own = math.prod(device.local_dims(product))
        weights += own / layout.expert if product.name == "router" else own
    if device.software.keeps_traced and model.kv_heads % layout.tensor and not model.latent:
        kv = 2 * model.embed * model.kv_heads * model.head_dim
        weights += kv - kv / kv_cut(model, layout)
    return weights


def tensor(device: Device, layers: float) -> list[CollectiveCost]:
    """Returns the collectives over `tensor` for one microbatch of `layers` layers.

    A layer takes two all-reduces of the residual stream forward, two backward, and the recomputed
    ones whose result is read. Sequence parallelism sends the same bytes.
    """
    job = device.job
    again = (2 if job.remat.whole else 1) if job.remat.any else 0
    count = 4.0 + again * job.remat_share + (2 if device.reruns else 0)
    residual = device.tokens * job.model.embed * job.compute_bytes
    return [_over("tensor", "all_reduce", residual, count * layers + 2, "tensor", "layers")]


def expert(device: Device, routed_layers: float, hosts: int) -> list[CollectiveCost]:
    """Returns the exchanges over `expert` for one microbatch: tokens to experts and back. If a
    token travels once to each of the `hosts` hosts, the network carries fewer copies; it remains
    slower than the links within a host, which carry all."""
    job, experts = device.job, device.job.model.experts
    if experts is None:
        return []
    times = 4 + (2 * job.remat_share if job.remat.any else 0) + (2 if device.reruns else 0)
    copies = device.tokens * experts.per_token * job.model.embed * job.compute_bytes
    if device.software.dispatch_once and hosts > 1:
        copies *= experts.hosts_reached(hosts) / (experts.per_token * (1 - 1 / hosts))
    count = routed_layers * times
    return [_over("expert", "all_to_all", copies, count, "expert", "layers")]


def context(device: Device, layers: float) -> list[CollectiveCost]:
    """Returns the shifts of keys and values around the ring of `context`, for one microbatch."""
    job = device.job
    held = device.tokens * job.model.kv_width / kv_cut(job.model, device.layout)
    held *= 2 * job.compute_bytes + FLOAT32
    count = layers * (device.layout.context - 1)
    return [_over("context", "shift", held, count, "gather", "attention")]


def sharded_params(device: Device, weights: LocalWeights) -> list[CollectiveCost]:
    """Returns the collectives of parameters and gradients over `fsdp` for one microbatch.

    Parameters are gathered forward and, unless kept (`zero` < 3), backward. The embedding is
    gathered once, or vectors are exchanged instead, forward and backward. The head is gathered once
    unless its loss is computed in chunks. Gradients are reduce-scattered.

    If parameters are whole between steps, updated ones are gathered in their stored dtype once a
    step, and each microbatch counts its share. Gradients are then reduce-scattered if `zero` is 2
    or there is one microbatch, and otherwise all-reduced in each microbatch.
    """
    job, layout = device.job, device.layout
    over, trained = functools.partial(_over, "fsdp"), weights.trained(job).total
    if layout.zero == 1 or (layout.zero == 2 and device.software.whole_params):
        gathered = trained * job.param_bytes / layout.microbatches
        summed, kind = trained * job.gradient_bytes, "reduce_scatter"
        if layout.zero == 1 and layout.microbatches > 1:
            summed, kind = trained * job.compute_bytes, "all_reduce"
        return [
            over("all_gather", gathered, 1.0, "gather", "all forward"),
            over(kind, summed, 1.0, "data", "all backward"),
        ]
    layers = job.model.layers / layout.stage
    arrays = layers * job.model.layer_arrays
    again = weights.total - weights.vocab
    exchanged = embedding_weights(device) if exchanges_vectors(device) else 0.0
    whole = (weights.total - exchanged) * job.compute_bytes
    summed = (trained - job.trained * exchanged) * job.gradient_bytes
    times = (2 if device.reruns else 1) if layout.zero == 3 else 0
    late: tuple[Overlap, Window] = ("gather", "all backward")
    found = [
        over("all_gather", whole, 1.0, "gather", "all forward", pieces=arrays + 2),
        over("all_gather", again * job.compute_bytes, times, *late, pieces=arrays),
        over("reduce_scatter", summed, 1.0, *late, pieces=layers + 1),
    ]
    if exchanges_vectors(device):
        vectors = device.tokens * job.model.embed * job.compute_bytes
        count = 1.0 if job.frozen else 2.0
        found.append(CollectiveCost("fsdp", "all_to_all", ("fsdp",), vectors, count=count))
    if times and job.loss_chunks > 1:
        head = job.model.vocab_weights / layout.tensor * job.compute_bytes
        found.append(over("all_gather", head, 1.0, *late, pieces=job.loss_chunks))
    return found


def exchanges_vectors(device: Device) -> bool:
    """Returns whether devices along `fsdp` exchange the vectors of their tokens.

    `shardlib.nn.lookup` does where a device has fewer tokens than rows, and wide enough parts.
    """
    model, layout = device.job.model, device.layout
    return (
        device.software.exchanges_vectors
        and layout.fsdp > 1
        and layout.zero == 3
        and device.tokens < model.vocab / layout.tensor
        and model.embed / layout.fsdp >= MIN_WIDTH
    )


def embedding_weights(device: Device) -> float:
    """Returns the weights of the embedding table on a device before `fsdp` shards them; 0 if it is
    the head as well, which needs them all."""
    model = device.job.model
    return 0.0 if model.tied else model.vocab_weights / device.layout.tensor


def sums_once(model: Transformer, layout: Layout) -> bool:
    """Returns whether gradients are summed over `data` once a step by default: where no row meets
    another, as in dense models without stages (`shardlib.train.reduce.sum_once`). Positions meet in
    attention alone, so that `context` sums once as well where the layout allows it."""
    return layout.microbatches > 1 and layout.stage == 1 and not model.routed_layers


def replica_sums(
    device: Device, weights: LocalWeights
) -> tuple[list[CollectiveCost], list[CollectiveCost]]:
    """Returns the gradient sums over replicas: in each microbatch, and once a step.

    Over several axes the sum is hierarchical: each axis carries what the faster axes leave. If the
    compiler of shardlib's programs places the sums, they are part of each microbatch, in the
    compute dtype, and hide behind its backward pass (as seen in programs compiled for TPUs, where
    the loop over microbatches keeps them). Along `data` and `context` they are taken once a step,
    in float32, after all computation: by default (`_waits`), and along `data` with
    `train.reduction` (`Layout.reduces_once`). Nothing is left to hide behind, but many microbatches
    send far less. Other programs sum once a step, behind a backward pass.
    """
    job, layout = device.job, device.layout
    each, once = [], []
    weights = weights.trained(job)
    cut = 1 if layout.zero == 1 and device.software.sums_each else layout.fsdp
    dense, routed = (weights.dense + weights.vocab) / cut, weights.routed / cut
    pieces = job.model.layers / layout.stage + 1
    width = job.gradient_bytes if layout.microbatches == 1 else job.compute_bytes
    for axis in ("context", "expert", "data"):
        size = layout.size(axis)
        if size == 1:
            continue
        summed = dense + (0.0 if axis == "expert" else routed)
        sums = CollectiveCost("data", "all_reduce", (axis,), summed * width, pieces)
        hiding = sums._replace(overlap="data", window="backward")
        if not device.software.sums_each:
            once += _published_sums(device, hiding._replace(num_bytes=summed * job.gradient_bytes))
        elif _waits(axis, job.model, layout):
            once.append(sums._replace(num_bytes=summed * job.gradient_bytes))
        else:
            each.append(hiding)
        dense /= size
        routed /= 1 if axis == "expert" else size
    if device.reruns:  # Every stage holds embedding and head: summed once a step.
        vocab = weights.vocab / cut * job.gradient_bytes
        once.append(CollectiveCost("data", "all_reduce", ("stage",), vocab))
    return each, once


def _waits(axis: str, model: Transformer, layout: Layout) -> bool:
    """Returns whether gradients are summed over an axis once a step."""
    if axis == "context":
        return sums_once(model, layout) and layout.sums_context_once
    return axis == "data" and (layout.reduces_once or sums_once(model, layout))


def _published_sums(device: Device, sums: CollectiveCost) -> list[CollectiveCost]:
    """Returns the gradient sums of programs other than shardlib's. Half of an all-reduce scatters
    sums, the other half gathers them. If the optimizer state is sharded (ZeRO 1), updated
    parameters are gathered instead of sums, and hide behind the next forward pass."""
    if not device.layout.shard_optimizer:
        return [sums]
    share = device.job.compute_bytes / device.job.gradient_bytes / 2
    return [sums._replace(count=0.5), sums._replace(count=share, window="forward")]


def orthogonalize(device: Device) -> list[CollectiveCost]:
    """Returns the collectives of the Newton-Schulz iterations of `computation.orthogonalize`.

    If `fsdp` shards the rows, each iteration gathers A once and X twice. If `tensor` shards the
    columns, each iteration all-reduces A. The matrices of all layers travel together.
    """
    steps, model = device.job.newton_schulz_steps, device.job.model
    if not steps:
        return []
    layers, collectives = model.layers / device.layout.stage, []
    for fan_in, fan_out, tensor, copies in matrices(model, device.layout):
        small, large = sorted((fan_in, fan_out))
        outer = FLOAT32 * layers * small * small
        rows = outer + 2 * FLOAT32 * layers * small * large / tensor
        count = steps * copies
        collectives.append(CollectiveCost("optimizer", "all_gather", ("fsdp",), rows, 3.0, count))
        if tensor > 1:
            summed = outer / device.layout.fsdp
            collectives.append(
                CollectiveCost("optimizer", "all_reduce", ("tensor",), summed, 1.0, count)
            )
    return collectives


def offload(num_bytes: float) -> list[CollectiveCost]:
    """Returns the transfers of `num_bytes` of activations of a microbatch to the host and back.

    Each direction overlaps with the computation of its pass (Rajbhandari et al. 2021,
    "ZeRO-Infinity", section 6.2).
    """
    there = CollectiveCost("offload", "shift", ("host",), num_bytes, 1.0, 1.0, "gather", "forward")
    return [there, there._replace(window="backward")] if num_bytes else []


def state_offload(device: Device, params: float) -> list[CollectiveCost]:
    """Returns the transfers of the optimizer state of `params` parameters from the host and back.
    Each piece is fetched, updated and sent back before the next one, after the gradients are
    computed, so that nothing overlaps with it. See `shardlib.train.offload`."""
    if not device.layout.offload_optimizer:
        return []
    return [CollectiveCost("offload", "shift", ("host",), 2 * params * device.job.moment_bytes)]


def stage_sends(device: Device) -> list[CollectiveCost]:
    """Returns the sends between stages in a step: the residual stream sent on and back.

    Each device of a tensor-parallel group sends a part, and the group gathers it on the fast links
    (Narayanan et al. 2021, section 4.1).
    """
    layout, job = device.layout, device.job
    residual = device.tokens * job.model.embed * job.compute_bytes / layout.tensor
    turns = layout.chunks * layout.microbatches + layout.stage - 1
    return [_over("stage", "shift", residual, 2 * turns, "data", "any")]


def stage_exchange(device: Device, weights: LocalWeights) -> list[CollectiveCost]:
    """Returns the exchange of layers between stages that hold unequally many; see
    `shardlib.train.pipeline.padding`. Their parameters come once a step in the compute dtype, and
    their gradients go back."""
    layout, job = device.layout, device.job
    if not device.reruns or job.model.layers % layout.stage == 0:
        return []
    layers = (weights.dense + weights.routed) * device.slots
    params = layers / (layout.fsdp if layout.zero == 3 else 1) * job.compute_bytes
    gradients = job.trained * layers / (layout.fsdp if layout.zero > 1 else 1) * job.gradient_bytes
    return [
        CollectiveCost("stage", "all_to_all", ("stage",), num_bytes)
        for num_bytes in (params, gradients)
    ]


def _over(
    axis: str,
    kind: str,
    num_bytes: float,
    count: float,
    overlap: Overlap,
    window: Window,
    *,
    pieces: float = 1.0,
) -> CollectiveCost:
    """Returns a collective over one axis, which counts for the part of that name."""
    return CollectiveCost(axis, kind, (axis,), num_bytes, pieces, count, overlap, window)
