"""Compute seconds of one device for a microbatch: layers, head, optimizer.

Passes over memory count what each operation reads and writes, in units of the residual stream
(`embed`), of the hidden width of the MLP, and of query, key and value together:

                 forward                             backward
compiled         2 x (read x and branch, write x     2 x (read three, write one)  8 embed
                 and its norm)             8 embed   GLU: read three, write two   5 hidden
                 GLU: read two, write one 3 hidden   plain: read two, write one   3 hidden
                 plain: read, write       2 hidden
kernels          norm; bias, dropout, add 11 embed   likewise, sums of branches  17 embed
                 GLU: 3 hidden, plain: 2             GLU: 5 hidden, plain: 3
                 copies into heads         1 qkv     and out of them               2 qkv
eager            norm, add: each alone    14 embed   norm, add, sums of branches  22 embed
                 GLU: 5 hidden, plain: 2             GLU: 9 hidden, plain: 3
                 copies into heads         2 qkv     and out of them               4 qkv

The loss of the head takes its softmax in float32. Compiled, it reads and writes 14 bytes per logit
(two reductions and a gradient); with kernels 28 (a cast, an exponential that is kept, a gradient
and its cast); in eager mode 32 (a cast, a softmax and the gradients of both). Source: counted from
the operations; Korthikanti et al. 2022, section 4, for the parts that are kept.
"""

import dataclasses
import functools
import math

from shardlib.cost.layout import Layout, Software
from shardlib.cost.machine import kernels
from shardlib.cost.machine.rates import Rates
from shardlib.cost.transformer.flops import attention_flops
from shardlib.cost.workload import Job, Matmul, Transformer

_EMBED_PASSES = {"compiled": (8, 8), "kernels": (11, 17), "eager": (14, 22)}
_QKV_PASSES = {"compiled": (0, 0), "kernels": (1, 2), "eager": (2, 4)}
_GATED_PASSES = {"compiled": (3, 5), "kernels": (3, 5), "eager": (5, 9)}
_PLAIN_PASSES = {"compiled": (2, 3), "kernels": (2, 3), "eager": (2, 3)}
_LOGIT_BYTES = {"compiled": 14, "kernels": 28, "eager": 32}
_FIRST_FLASH = 1.7
"""Time of `flash1` kernels relative to `flash` kernels."""
OFFLOADED_PIECES = 8
"""Pieces of an offloaded optimizer state, updated one by one; see `shardlib.train.offload`."""
_LAUNCHES = {"compiled": 0, "kernels": 8, "eager": 20}
"""Small kernels that a layer launches forward; backward launches twice as many."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """Seconds of a forward, a backward or a repeated forward pass."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0

    @property
    def total(self) -> float:
        """Total seconds."""
        return self.matmul + self.attention + self.elementwise

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
        )

    def __mul__(self, count: float) -> "Pass":
        return Pass(self.matmul * count, self.attention * count, self.elementwise * count)


@dataclasses.dataclass(frozen=True)
class Passes:
    """Forward and backward pass of one microbatch, and the recomputation in the backward pass."""

    forward: Pass = Pass()
    backward: Pass = Pass()
    again: Pass = Pass()

    @property
    def total(self) -> float:
        """Total seconds."""
        return self.forward.total + self.backward.total + self.again.total

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(
            self.forward + other.forward, self.backward + other.backward, self.again + other.again
        )

    def __mul__(self, count: float) -> "Passes":
        return Passes(self.forward * count, self.backward * count, self.again * count)


@dataclasses.dataclass(frozen=True)
class Device:
    """A job as one device sees it."""

    job: Job
    layout: Layout
    software: Software
    achieved: Rates | None = None

    @property
    def rates(self) -> Rates:
        """Achieved rates of the device; not needed to count bytes."""
        assert self.achieved is not None, "a device without rates counts bytes only"
        return self.achieved

    @property
    def reruns(self) -> bool:
        """Whether the layers run a second time because a pipeline keeps only their inputs."""
        return self.software.rerun_chunks and self.layout.stage > 1

    def local_dims(self, product: Matmul) -> tuple[float, float]:
        """Returns the fan-in and fan-out that a device multiplies after `tensor` sharding."""
        fan_in, fan_out, tensor = product.fan_in, product.fan_out, self.layout.tensor
        if product.cut == "none" or tensor == 1:
            return fan_in, fan_out
        if product.cut == "in":
            return fan_in / tensor, fan_out
        model = self.job.model
        if product.name == "qkv" and not model.latent:
            kv = 2 * model.kv_heads * model.head_dim
            return fan_in, (fan_out - kv) / tensor + kv / kv_cut(model, self.layout)
        return fan_in, fan_out / tensor

    @functools.cached_property
    def tokens(self) -> float:
        """Tokens of one microbatch in the residual stream of one tensor-parallel group."""
        layout = self.layout
        return self.job.tokens / (layout.batch_shards * layout.context * layout.microbatches)

    @property
    def sequences(self) -> float:
        """Sequences of one microbatch; a fraction if `context` shards them."""
        return self.tokens / self.job.length


def kv_cut(model: Transformer, layout: Layout) -> int:
    """Returns the number of shards into which `tensor` splits the computation of keys and values.
    Heads stay whole, so several devices compute the same heads if `tensor` does not divide their
    number."""
    return math.gcd(model.kv_heads, layout.tensor)


def qkv_width(model: Transformer, layout: Layout) -> float:
    """Returns the elements of query, key and value together that a device holds per token."""
    keys_and_values = model.kv_width / kv_cut(model, layout)
    return model.heads * model.score_dim / layout.tensor + keys_and_values


def layer(device: Device, *, routed: bool) -> Passes:
    """Returns the seconds of one layer for one microbatch."""
    job = device.job
    forward = again = backward = 0.0
    for product in job.model.matmuls(routed=routed):
        seconds, back = _matmul(device, product)
        forward += seconds
        backward += back
        again += seconds * job.again(product.name)
    attended, attended_back = _attention(device)
    passed, passed_back = _elementwise(device, routed=routed)
    attended_again = attended * job.again("attention")
    return Passes(
        Pass(forward, attended, passed),
        Pass(backward, attended_back, passed_back),
        Pass(again, attended_again, passed * job.again("elementwise")),
    )


def head(device: Device) -> Passes:
    """Returns the seconds of logits and loss for one microbatch."""
    model, tensor = device.job.model, device.layout.tensor
    vocab = model.vocab / tensor
    width = device.job.compute_bytes
    rates, tokens = device.rates, device.tokens
    product, back = _both_ways(rates, tokens, model.embed, vocab, width=width)
    moved = tokens * vocab * _LOGIT_BYTES[device.software.fusion] / rates.memory
    exps = tokens * vocab * rates.exp_seconds
    again = product if device.job.loss_chunks > 1 else 0.0
    passed = moved / 2 + exps
    return Passes(Pass(product, 0.0, passed), Pass(back, 0.0, passed), Pass(again))


def optimizer(device: Device, params: float) -> float:
    """Returns the seconds to update the `params` parameters that the device holds.

    The update reads the state and the gradient, and writes the state and the copy that the next
    step multiplies. Source: Kingma and Ba 2015, "Adam", algorithm 1, for what it reads and writes.
    """
    job = device.job
    state = 2 * (job.param_bytes + job.moment_bytes)
    copy = job.compute_bytes if job.param_bytes != job.compute_bytes else 0
    # Each piece of an offloaded state computes the norm for clipping.
    gradients = job.gradient_bytes * (OFFLOADED_PIECES if device.layout.offload_optimizer else 1)
    moved = params * (state + gradients + copy) / device.rates.memory
    return moved + (orthogonalize(device) if job.newton_schulz_steps else 0.0)


def orthogonalize(device: Device) -> float:
    """Returns the seconds of Newton-Schulz iterations on the layer matrices that a device holds.

    For X of m rows and n >= m columns each iteration computes A = X X', A A and (bA + cAA) X. Rows
    are sharded like parameters; sharding the columns along `tensor` leaves A A whole. Matrices of
    one kind, stacked over layers and experts, are one kernel. Source: Jordan et al. 2024, "Muon: An
    optimizer for hidden layers in neural networks".
    """
    layout, rates = device.layout, device.rates
    seconds = 0.0
    for fan_in, fan_out, tensor, copies in matrices(device.job.model, layout):
        small, large = sorted((fan_in, fan_out))
        rows, groups = small / layout.fsdp, copies * device.job.model.layers / layout.stage
        outer = kernels.matmul(rates, rows, large / tensor, small, width=4, groups=groups)
        again = kernels.matmul(rates, rows, small, small, width=4, groups=groups)
        seconds += 2 * outer + again
    return device.job.newton_schulz_steps * seconds


def matrices(model: Transformer, layout: Layout) -> list[tuple[float, float, int, float]]:
    """Returns fan-in, fan-out, tensor degree and count per device of the matrices of a layer."""
    parts = {"qkv": 1 if model.latent else 3, "up": 2 if model.gated else 1}
    found = []
    for product in model.matmuls(routed=model.experts is not None):
        number = parts.get(product.name, 1)
        copies = 1.0
        if product.routed and model.experts:
            copies = max(model.experts.number / layout.expert, 1.0)
        cut = 1 if product.cut == "none" else layout.tensor
        found.append((product.fan_in, product.fan_out / number, cut, float(number * copies)))
    return found


def _matmul(device: Device, product: Matmul) -> tuple[float, float]:
    """Returns the seconds of one matmul, forward and backward."""
    layout, model, rates = device.layout, device.job.model, device.rates
    fan_in, fan_out = device.local_dims(product)
    width = device.job.compute_bytes
    if not product.routed:
        return _both_ways(rates, device.tokens, fan_in, fan_out, width=width)
    experts = model.experts
    assert experts is not None
    local = max(experts.number / layout.expert, 1.0)
    # Partly filled blocks of rows of an expert are computed whole (Gale et al. 2022, "MegaBlocks",
    # section 5).
    rows = device.tokens * experts.per_token / local + rates.block / 2
    forward, backward = _both_ways(rates, rows, fan_in, fan_out, width=width, groups=local)
    return forward / rates.grouped, backward / rates.grouped


def _both_ways(
    rates: Rates, rows: float, fan_in: float, fan_out: float, *, width: int, groups: float = 1
) -> tuple[float, float]:
    """Returns the seconds of a matmul forward, and of the matmuls for the gradients of its
    operands."""
    forward = kernels.matmul(rates, rows, fan_in, fan_out, width=width, groups=groups)
    inputs = kernels.matmul(rates, rows, fan_out, fan_in, width=width, groups=groups)
    weights = kernels.matmul(rates, fan_in, rows, fan_out, width=width, groups=groups)
    return forward, inputs + weights


def _attention(device: Device) -> tuple[float, float]:
    """Returns the seconds of attention of one layer, forward and backward."""
    job, layout, rates = device.job, device.layout, device.rates
    model = job.model
    heads = max(model.heads / layout.tensor, 1.0)
    share = heads / (model.heads * model.layers)
    if device.software.attention == "unfused":
        return tuple(  # type: ignore[return-value]
            kernels.unfused_attention(
                rates,
                device.sequences,
                job.length,
                heads,
                model.head_dim,
                backward=backward,
                width=job.compute_bytes,
            )
            for backward in (False, True)
        )
    flops = attention_flops(model, job.length, causal=job.causal)
    # Blocks on the diagonal are computed whole.
    flops *= 1 + (rates.block / job.length if job.causal else 0)
    flops *= (
        device.sequences * share * (_FIRST_FLASH if device.software.attention == "flash1" else 1)
    )
    exps = flops / (2 * (model.score_dim + model.value_dim)) * rates.exp_seconds
    return (
        kernels.flash_attention(rates, flops, model.score_dim, backward=False) + exps,
        kernels.flash_attention(rates, flops, model.score_dim, backward=True) + exps,
    )


def _elementwise(device: Device, *, routed: bool) -> tuple[float, float]:
    """Returns the seconds of passes over memory of one layer, forward and backward."""
    model, layout, fusion = device.job.model, device.layout, device.software.fusion
    shared = layout.tensor if layout.sequence_parallel else 1
    qkv = qkv_width(model, layout)
    hidden = float(model.mlp)
    if routed and model.experts:
        hidden = float(model.experts.shared_mlp + model.experts.per_token * model.experts.mlp)
    passes = _GATED_PASSES if model.gated else _PLAIN_PASSES
    found, copies = [], 0.0
    for way in (0, 1):
        width = _EMBED_PASSES[fusion][way] * model.embed / shared
        width += _QKV_PASSES[fusion][way] * qkv
        width += passes[fusion][way] * hidden / layout.tensor
        if routed and model.experts:
            # Copies to the experts are read and written, and their results are read and summed.
            copies = (3 * model.experts.per_token + 1) * model.embed / shared
        moved = device.tokens * device.job.compute_bytes
        seconds = moved * (width / device.rates.memory + copies / device.rates.dispatch)
        seconds += device.tokens * hidden / layout.tensor * device.rates.exp_seconds
        found.append(seconds + _LAUNCHES[fusion] * (1 + way) * device.rates.kernel_seconds)
    return found[0], found[1]
