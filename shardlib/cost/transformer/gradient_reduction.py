"""Seconds of gradient sums over replicas, as shardlib runs them.

If the compiler places the sums, they are part of each microbatch, in the compute dtype, and hide
behind its backward pass (as seen in programs compiled for TPUs, where the loop over microbatches
keeps them). With `train.reduction` the groups along `data` sum once a step, in float32, after all
computation. Nothing is left to hide behind, but many microbatches send far less.
`Layout.reduces_once` says which of the two a plan takes.
"""

from collections.abc import Mapping

from shardlib.cost.machine.fabric import Link
from shardlib.cost.transformer.communication_time import LocalWeights, hidden
from shardlib.cost.transformer.compute_time import Device, Passes


def reduce_seconds(
    device: Device, links: Mapping[str, Link], weights: LocalWeights, work: Passes
) -> float:
    """Returns the exposed seconds of summing gradients over replicas, per step.

    Over several axes the sum is hierarchical: each axis carries what the faster axes leave.

    Args:
        device: Device with its layout and software.
        links: Link of each mesh axis.
        weights: Weights that the device holds before `fsdp` shards them.
        work: Computation of one microbatch.
    """
    job, layout = device.job, device.layout
    cut = 1 if layout.zero == 1 else layout.fsdp
    dense, routed = (weights.dense + weights.vocab) / cut, weights.routed / cut
    pieces = job.model.layers / layout.stage + 1
    width = job.gradient_bytes if layout.microbatches == 1 else job.compute_bytes
    each, once = 0.0, 0.0
    for axis in ("context", "expert", "data", "slices"):
        link = links.get(axis)
        if link is None or link.size == 1:
            continue
        summed = dense + (0.0 if axis == "expert" else routed)
        if layout.reduces_once and axis in ("data", "slices"):
            once += link.all_reduce(summed * job.gradient_bytes, pieces)
        else:
            each += link.all_reduce(summed * width, pieces)
        dense /= link.size
        routed /= 1 if axis == "expert" else link.size
    if device.reruns:  # Every stage holds embedding and head: summed once a step.
        once += links["stage"].all_reduce(weights.vocab / cut * job.gradient_bytes)
    if not device.software.overlap_data:
        return once + layout.microbatches * each
    back = work.backward.total + work.again.total
    return once + layout.microbatches * hidden(each, back, device.rates.hide_data)
