"""Kernels of one device for a microbatch and for the update: layers, head, optimizer.

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

from shardlib.cost.costs import Work
from shardlib.cost.layout import Layout, Software
from shardlib.cost.machine.kernels import (
    FLASH_TIMES,
    FusedAttention,
    Kernel,
    Product,
    Stream,
    UnfusedAttention,
    matmul,
)
from shardlib.cost.transformer.flops import attention_flops
from shardlib.cost.workload import NONE, Job, Matmul, Transformer

_EMBED_PASSES = {"compiled": (8, 8), "kernels": (11, 17), "eager": (14, 22)}
_QKV_PASSES = {"compiled": (0, 0), "kernels": (1, 2), "eager": (2, 4)}
_GATED_PASSES = {"compiled": (3, 5), "kernels": (3, 5), "eager": (5, 9)}
_PLAIN_PASSES = {"compiled": (2, 3), "kernels": (2, 3), "eager": (2, 3)}
_LOGIT_BYTES = {"compiled": 14, "kernels": 28, "eager": 32}
OFFLOADED_PIECES = 8
"""Pieces of an offloaded optimizer state, updated one by one; see `shardlib.train.offload`."""
_LAUNCHES = {"compiled": 0, "kernels": 8, "eager": 20}
"""Small kernels that a layer launches forward; backward launches twice as many."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A job as one device sees it."""

    job: Job
    layout: Layout
    software: Software
    block: int = 128
    """Queries and keys of a block of fused attention, and rows of a block of an expert."""

    @property
    def reruns(self) -> bool:
        """Whether the layers run a second time because a pipeline keeps only their inputs."""
        return self.software.rerun_chunks and self.layout.stage > 1

    @property
    def in_ranges(self) -> bool:
        """Whether some layers of a device follow a remat policy, in a loop of their own, and the
        layers after them keep everything. Pipelines count as one loop."""
        return self.layout.stage == 1 and self.job.remat != NONE and 0 < self.job.remat_share < 1

    @property
    def last_alone(self) -> bool:
        """Whether one layer keeps everything, after a loop of others. It is in no loop."""
        return self.in_ranges and self.job.remat_layers == self.job.model.layers - 1

    @property
    def slots(self) -> float:
        """Slots for layers on a stage relative to its mean number of layers: above 1 if a pipeline
        of shardlib pads stages that hold unequally many layers, during the step."""
        layout, layers = self.layout, self.job.model.layers
        if not self.reruns:
            return 1.0
        chunks = layout.stage * layout.chunks
        return math.ceil(layers / chunks) * chunks / layers

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


def layers(device: Device, *, routed: bool, count: float) -> list[Work]:
    """Returns the kernels of `count` layers for one microbatch."""
    job = device.job
    kernels: list[tuple[str, Kernel, tuple[Kernel, ...], float]] = [
        ("matmul", *_both_ways(job, _local(device, product)), job.again(product.name))
        for product in job.model.matmuls(routed=routed)
    ]
    attended, attended_back = (_attention(device, backward=back) for back in (False, True))
    kernels.append(("attention", attended, (attended_back,), _attention_again(device)))
    passed, passed_back = (_elementwise(device, way, routed=routed) for way in (0, 1))
    kernels.append(("elementwise", passed, (passed_back,), job.again("elementwise")))
    work = []
    for part, forward, backward, again in kernels:
        work.append(Work("forward", part, forward, count))
        work += [Work("backward", part, kernel, count) for kernel in backward]
        if again := again + device.reruns:
            work.append(Work("recompute", part, forward, count * again))
    return work


def _attention_again(device: Device) -> float:
    """Returns the fraction of attention that the backward pass recomputes. Attention of several
    kernels is not kept where elementwise operations are recomputed."""
    job = device.job
    if device.software.attention == "unfused" and job.again("elementwise"):
        return job.again("elementwise")
    return job.again("attention")


def head(device: Device) -> list[Work]:
    """Returns the kernels of logits and loss for one microbatch."""
    job, tokens, width = device.job, device.tokens, device.job.compute_bytes
    model = job.model
    vocab = model.vocab / device.layout.tensor
    forward, backward = _both_ways(job, matmul(tokens, model.embed, vocab, width=width))
    logits = tokens * vocab
    passed = Stream(logits * _LOGIT_BYTES[device.software.fusion] / 2, exponentials=logits)
    work = [Work("forward", "head", kernel) for kernel in (forward, passed)]
    work += [Work("backward", "head", kernel) for kernel in (*backward, passed)]
    if job.loss_chunks > 1:
        work.append(Work("recompute", "head", forward))
    return work


def optimizer(device: Device, params: float) -> list[Work]:
    """Returns the kernels that update the `params` parameters that the device holds.

    The update reads the state and the gradient, and writes the state and the copy that the next
    step multiplies. Source: Kingma and Ba 2015, "Adam", algorithm 1, for what it reads and writes.
    """
    job = device.job
    state = 2 * (job.param_bytes + job.moment_bytes)
    copy = job.compute_bytes if job.param_bytes != job.compute_bytes else 0
    # Each piece of an offloaded state computes the norm for clipping.
    gradients = job.gradient_bytes * (OFFLOADED_PIECES if device.layout.offload_optimizer else 1)
    update = Stream(params * (state + gradients + copy))
    iterations = orthogonalize(device) if job.newton_schulz_steps else []
    return [Work("optimizer", "optimizer", update), *iterations]


def orthogonalize(device: Device) -> list[Work]:
    """Returns the Newton-Schulz iterations on the layer matrices that a device holds.

    For X of m rows and n >= m columns each iteration computes A = X X', A A and (bA + cAA) X. Rows
    are sharded like parameters; sharding the columns along `tensor` leaves A A whole. Matrices of
    one kind, stacked over layers and experts, are one kernel. Source: Jordan et al. 2024, "Muon: An
    optimizer for hidden layers in neural networks".
    """
    layout, steps = device.layout, device.job.newton_schulz_steps
    work = []
    for fan_in, fan_out, tensor, copies in matrices(device.job.model, layout):
        small, large = sorted((fan_in, fan_out))
        rows, groups = small / layout.fsdp, copies * device.job.model.layers / layout.stage
        outer = matmul(rows, large / tensor, small, width=4, groups=groups)
        again = matmul(rows, small, small, width=4, groups=groups)
        work.append(Work("optimizer", "optimizer", outer, 2 * steps))
        work.append(Work("optimizer", "optimizer", again, steps))
    return work


def matrices(model: Transformer, layout: Layout) -> list[tuple[float, float, int, float]]:
    """Returns fan-in, fan-out, tensor degree and count per device of the matrices of a layer."""
    shapes = []
    for product in model.matmuls(routed=model.experts is not None):
        number = model.arrays_of(product)
        copies = 1.0
        if product.routed and model.experts:
            copies = max(model.experts.number / layout.expert, 1.0)
        cut = 1 if product.cut == "none" else layout.tensor
        shapes.append((product.fan_in, product.fan_out / number, cut, float(number * copies)))
    return shapes


def _local(device: Device, product: Matmul) -> Product:
    """Returns one matmul of a layer as the device runs it."""
    width, experts = device.job.compute_bytes, device.job.model.experts
    fan_in, fan_out = device.local_dims(product)
    if not product.routed:
        return matmul(device.tokens, fan_in, fan_out, width=width)
    assert experts is not None
    local = max(experts.number / device.layout.expert, 1.0)
    # Partly filled blocks of rows of an expert are computed whole (Gale et al. 2022, "MegaBlocks",
    # section 5).
    rows = device.tokens * experts.per_token / local + device.block / 2
    return matmul(rows, fan_in, fan_out, width=width, groups=local, uneven=True)


def _both_ways(job: Job, forward: Product) -> tuple[Product, tuple[Product, ...]]:
    """Returns a matmul, and the matmuls for the gradients of its operands: of its inputs alone if
    its weights are frozen. The matmuls of adapters are small and not counted."""
    rows, fan_in, fan_out = forward[:3]
    inputs = forward._replace(fan_in=fan_out, fan_out=fan_in)
    if job.frozen:
        return forward, (inputs,)
    return forward, (inputs, forward._replace(rows=fan_in, fan_in=rows))


def _attention(device: Device, *, backward: bool) -> FusedAttention | UnfusedAttention:
    """Returns the attention of one layer."""
    job, layout, model = device.job, device.layout, device.job.model
    heads = max(model.heads / layout.tensor, 1.0)
    if device.software.attention == "unfused":
        dims = device.sequences, job.length, heads, model.head_dim
        return UnfusedAttention(*dims, width=job.compute_bytes, backward=backward)
    flops = attention_flops(model, job.length, causal=job.causal)
    # Blocks on the diagonal are computed whole.
    flops *= 1 + (device.block / job.length if job.causal else 0)
    flops *= device.sequences * heads / (model.heads * model.layers)
    exponentials = flops / (2 * (model.score_dim + model.value_dim))
    flops *= FLASH_TIMES[device.software.attention]
    return FusedAttention(flops, model.score_dim, exponentials, backward)


def _elementwise(device: Device, way: int, *, routed: bool) -> Stream:
    """Returns the passes over memory of one layer, forward (0) or backward (1)."""
    model, layout, fusion = device.job.model, device.layout, device.software.fusion
    shared = layout.tensor if layout.sequence_parallel else 1
    hidden, copies = float(model.mlp), 0.0
    if routed and model.experts:
        experts = model.experts
        hidden = float(experts.shared_mlp + experts.per_token * experts.mlp)
        # Copies to the experts are read and written, and their results are read and summed.
        copies = (3 * experts.per_token + 1) * model.embed / shared
    passes = _GATED_PASSES if model.gated else _PLAIN_PASSES
    width = _EMBED_PASSES[fusion][way] * model.embed / shared
    width += _QKV_PASSES[fusion][way] * qkv_width(model, layout)
    width += passes[fusion][way] * hidden / layout.tensor
    moved = device.tokens * device.job.compute_bytes
    return Stream(
        moved * width,
        exponentials=device.tokens * hidden / layout.tensor,
        launches=_LAUNCHES[fusion] * (1 + way),
        dispatched_bytes=moved * copies,
    )
