"""FLOPs of a training step, by the conventions of published results.

A multiply-add is two FLOPs. All conventions count 6 FLOPs per token for each weight of a matmul:
forward, and backward with respect to inputs and to weights (Kaplan et al. 2020, "Scaling Laws for
Neural Language Models", table 1). The head counts and lookups do not; only the experts that a token
goes to count. Frozen weights have no gradient, and count 4. The conventions differ in attention and
in recomputation:

full      All pairs of positions: 12 x layers x heads x head_dim x length for each token (Chowdhery
          et al. 2022, "PaLM", appendix B). Most published MFU uses it.
causal    The pairs that a causal mask leaves: half of `full`.
hardware  `full` plus recomputation in the backward pass: a third more for whole layers
          (Narayanan et al. 2021, section 5.1: 96 B s l h^2 (1 + s/6h + V/16lh)), the core of
          attention alone for `selective` (Korthikanti et al. 2022, appendix A).
"""

from typing import Literal

from shardlib.cost.workload import Job, Transformer

Convention = Literal["full", "causal", "hardware"]
CONVENTIONS: tuple[Convention, ...] = ("full", "causal", "hardware")


def attended_pairs(model: Transformer, length: int, *, causal: bool) -> float:
    """Returns the pairs of positions that attention needs per head, summed over layers."""

    def pairs(window: int) -> float:
        if not causal:
            return float(length) * window
        return length * window - window**2 / 2

    windowed = model.windowed_layers if model.window else 0
    window = min(length, model.window or length)
    return (model.layers - windowed) * pairs(length) + windowed * pairs(window)


def attention_flops(model: Transformer, length: int, *, causal: bool) -> float:
    """Returns the forward FLOPs of the scores and of the weighted values, for one sequence."""
    dims = model.score_dim + model.value_dim
    return 2.0 * attended_pairs(model, length, causal=causal) * model.heads * dims


def step_flops(job: Job, convention: Convention) -> float:
    """Returns the FLOPs of one step over all devices, by a convention of this module."""
    model = job.model
    attention = attention_flops(model, job.length, causal=convention == "causal")
    per_weight = 4.0 if job.frozen else 6.0
    per_sequence = per_weight * model.active_weights * job.length + 3 * attention
    if convention == "hardware":
        layers = model.active_weights - model.vocab_weights
        again = 2.0 * layers * job.length * job.remat_share if job.remat.any else 0.0
        per_sequence += again + attention * job.again("attention")
    return per_sequence * job.batch
