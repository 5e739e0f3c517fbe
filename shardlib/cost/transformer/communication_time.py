"""Seconds of collectives of one device in a step, and the part that computation hides.

Bytes follow ZeRO (Rajbhandari et al. 2020, section 7), Megatron-LM (Shoeybi et al. 2019, section 3;
Korthikanti et al. 2022, section 4.2.2), Ring Attention (Liu et al. 2023, section 3), GShard
(Lepikhin et al. 2020, section 3.2) and pipelining (Narayanan et al. 2021, section 2.2).

A collective of t seconds that overlaps with w seconds of computation costs t - min(f t, w): a
fraction f of it, the constant of its kind, can be hidden if there is enough computation.
"""

import dataclasses
import math
from collections.abc import Mapping

from shardlib.cost.machine.fabric import Link
from shardlib.cost.transformer.compute_time import Device, Passes, kv_cut, matrices

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


def hidden(seconds: float, window: float, fraction: float) -> float:
    """Returns the exposed seconds of a collective that overlaps with `window` seconds of
    computation."""
    return seconds - min(fraction * seconds, max(window, 0.0))


def tensor_seconds(device: Device, link: Link, layers: float, busy: float) -> float:
    """Returns the exposed seconds of `tensor` for one microbatch of `layers` layers.

    A layer takes two all-reduces of the residual stream forward, two backward, and the recomputed
    ones whose result is read. Sequence parallelism sends the same bytes.
    """
    if link.size == 1:
        return 0.0
    job = device.job
    again = (2 if job.remat.whole else 1) if job.remat.any else 0
    count = 4.0 + again * job.remat_share + (2 if device.reruns else 0)
    residual = device.tokens * job.model.embed * job.compute_bytes
    seconds = (count * layers + 2) * link.all_reduce(residual)
    # Decomposed matmuls read the memory of their peers, over NVLink or a torus. A network offers no
    # such reads to count on.
    if not device.software.overlap_tensor or link.leaves_domain:
        return seconds
    return hidden(seconds, busy, device.rates.hide_tensor)


def expert_seconds(device: Device, link: Link, routed_layers: float, busy: float) -> float:
    """Returns the exposed seconds of `expert` for one microbatch: tokens to experts and back."""
    experts = device.job.model.experts
    if link.size == 1 or experts is None:
        return 0.0
    copies = device.tokens * experts.per_token * device.job.model.embed
    times = 4 + (2 * device.job.remat_share if device.job.remat.any else 0)
    times += 2 if device.reruns else 0
    seconds = routed_layers * times * link.all_to_all(copies * device.job.compute_bytes)
    if not device.software.overlap_expert:
        return seconds
    return hidden(seconds, busy, device.rates.hide_tensor)


def context_seconds(device: Device, link: Link, layers: float, attention: float) -> float:
    """Returns the exposed seconds of `context` for one microbatch: keys and values around the
    ring."""
    if link.size == 1:
        return 0.0
    job = device.job
    held = device.tokens * job.model.kv_width / kv_cut(job.model, device.layout)
    widths = 2 * job.compute_bytes + FLOAT32
    seconds = layers * (link.size - 1) * link.shift(held * widths)
    if not device.software.overlap_gather:
        return seconds
    return hidden(seconds, attention, device.rates.hide_gather)


def gather_seconds(device: Device, link: Link, weights: LocalWeights, work: Passes) -> float:
    """Returns the exposed seconds of `fsdp` for one microbatch.

    Parameters are gathered forward and, unless kept (`zero` < 3), backward; embedding and head are
    gathered once. Gradients are reduce-scattered. If parameters are whole between steps, updated
    ones are gathered in their stored dtype once a step, and each microbatch counts its share.
    Gradients are then reduce-scattered if `zero` is 2 or there is one microbatch, and otherwise
    all-reduced in each microbatch.
    """
    if link.size == 1:
        return 0.0
    job, layout = device.job, device.layout
    if layout.zero == 1 or (layout.zero == 2 and device.software.whole_params):
        gather = link.gather(weights.total * job.param_bytes / layout.microbatches)
        reduce = link.reduce_scatter(weights.total * job.gradient_bytes)
        if layout.zero == 1 and layout.microbatches > 1:
            reduce = link.all_reduce(weights.total * job.compute_bytes)
        if not device.software.overlap_gather:
            return gather + reduce
        left = hidden(reduce, work.backward.total + work.again.total, device.rates.hide_data)
        return left + hidden(gather, work.forward.total, device.rates.hide_gather)
    layers = job.model.layers / layout.stage
    arrays = layers * job.model.layer_arrays
    once = link.gather(weights.total * job.compute_bytes, arrays + 2)
    reduce = link.reduce_scatter(weights.total * job.gradient_bytes, layers + 1)
    again = link.gather((weights.total - weights.vocab) * job.compute_bytes, arrays)
    times = (2 if device.reruns else 1) if layout.zero == 3 else 0
    forward, backward = once, reduce + times * again
    if not device.software.overlap_gather:
        return forward + backward
    fraction = device.rates.hide_gather
    left = hidden(forward, work.forward.total, fraction)
    return left + hidden(backward, work.backward.total + work.again.total, fraction)


def reduce_seconds(
    device: Device, links: Mapping[str, Link], weights: LocalWeights, work: Passes
) -> float:
    """Returns the exposed seconds of summing gradients over replicas, once a step.

    Over several axes the sum is hierarchical: each axis carries what the faster axes leave. Half of
    an all-reduce scatters sums, and hides behind a backward pass; the other half gathers them. If
    the optimizer state is sharded (ZeRO 1), updated parameters are gathered instead of sums, and
    hide behind the next forward pass.
    """
    layout, width = device.layout, device.job.gradient_bytes
    dense = (weights.dense + weights.vocab) / layout.fsdp * width
    routed = weights.routed / layout.fsdp * width
    scatter = 0.0
    for axis in ("context", "expert", "data", "slices"):
        link = links.get(axis)
        if link is None or link.size == 1:
            continue
        summed = dense + (0.0 if axis == "expert" else routed)
        scatter += link.all_reduce(summed, device.job.model.layers / layout.stage + 1) / 2
        dense /= link.size
        routed /= 1 if axis == "expert" else link.size
    back = work.backward.total + work.again.total
    gather = scatter
    if layout.shard_optimizer:
        gather *= device.job.compute_bytes / width
    if not device.software.overlap_data:
        return scatter + gather
    fraction = device.rates.hide_data
    if layout.shard_optimizer:
        return hidden(scatter, back, fraction) + hidden(gather, work.forward.total, fraction)
    return hidden(scatter + gather, back, fraction)


def orthogonalize_seconds(device: Device, links: Mapping[str, Link]) -> float:
    """Returns the seconds of collectives in the Newton-Schulz iterations of
    `compute_time.orthogonalize`.

    If `fsdp` shards the rows, each iteration gathers A once and X twice. If `tensor` shards the
    columns, each iteration all-reduces A. The matrices of all layers travel together.
    """
    steps, model = device.job.newton_schulz_steps, device.job.model
    if not steps:
        return 0.0
    layers, seconds = model.layers / device.layout.stage, 0.0
    for fan_in, fan_out, tensor, copies in matrices(model, device.layout):
        small, large = sorted((fan_in, fan_out))
        outer = FLOAT32 * layers * small * small
        seconds += copies * links["fsdp"].gather(
            outer + 2 * FLOAT32 * layers * small * large / tensor, 3.0
        )
        if tensor > 1:
            seconds += copies * links["tensor"].all_reduce(outer / device.layout.fsdp)
    return steps * seconds


def offload_seconds(device: Device, host_bytes: float, pcie: float, work: Passes) -> float:
    """Returns the exposed seconds of offloading `host_bytes` of activations to the host and back.

    Each direction overlaps with the computation of its pass (Rajbhandari et al. 2021,
    "ZeRO-Infinity", section 6.2).

    Args:
        device: Device with the rates at which it hides transfers.
        host_bytes: Bytes of one microbatch.
        pcie: Bytes/s between device and host, one direction.
        work: Computation of one microbatch.
    """
    if not host_bytes:
        return 0.0
    seconds = host_bytes / pcie
    fraction = device.rates.hide_gather
    back = work.backward.total + work.again.total
    return hidden(seconds, work.forward.total, fraction) + hidden(seconds, back, fraction)


def stage_seconds(device: Device, link: Link) -> float:
    """Returns the exposed seconds of `stage` in a step: the residual stream sent on and back.

    Each device of a tensor-parallel group sends a part, and the group gathers it on the fast links
    (Narayanan et al. 2021, section 4.1).
    """
    if link.size == 1:
        return 0.0
    layout, job = device.layout, device.job
    residual = device.tokens * job.model.embed * job.compute_bytes / layout.tensor
    turns = layout.chunks * layout.microbatches + layout.stage - 1
    seconds = 2 * turns * link.shift(residual)
    left = 1 - device.rates.hide_data if device.software.overlap_data else 1.0
    return left * seconds
