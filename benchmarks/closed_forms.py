"""What a training step of a transformer must send, by the literature: bytes per device and step.

With ring algorithms over n devices a device sends 2 (n - 1) / n of a buffer to all-reduce it, and
(n - 1) / n to gather it, to reduce and scatter it, or to exchange all of it (Thakur et al. 2005).
Matrices count; the scales of norms, numbers and statistics of single positions do not.

Sources, by mesh axis:

data     One all-reduce of the gradients: Austin et al. 2025, "How to Scale Your Model", "Training".
fsdp     ZeRO: Rajbhandari et al. 2020, section 7. Stages 1 and 2 reduce-scatter gradients and
         gather new parameters; stage 3 gathers parameters forward and backward, and reduce-scatters
         gradients. The head is read once or stays between, so it is gathered once. So is the
         embedding, unless a device has fewer tokens than the table has rows: the vectors of its
         tokens are then looked up by parts and exchanged, and so are their gradients.
tensor   Megatron-LM: Shoeybi et al. 2019, section 3: two all-reduces of the residual stream a layer
         forward and two backward; one of what the embedding returns, and one of the gradient of
         what the head reads. With sequence parallelism each is a reduce-scatter and an all-gather:
         the same bytes (Korthikanti et al. 2022, section 4.2.2). Layers that are computed again
         repeat what they send forward, but for the sum that ends them.
context  Ring attention: Liu et al. 2023, section 3: keys and values make n - 1 hops forward, and
         n - 1 backward with their gradients. Gathered keys: Grattafiori et al. 2024, section 3.3.2:
         an all-gather forward, another backward, a reduce-scatter of the gradients. Gradients of
         keys and values are sums over devices, and travel in float32. Ulysses: Jacobs et al. 2023,
         section 3.2: an all-to-all of query, key, value and output, forward and backward.
expert   Lepikhin et al. 2020, "GShard", section 3.2: tokens to their experts and back, forward and
         backward: 4 all-to-alls of k copies of each token.
stage    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2: the
         residual stream of each microbatch to the next stage, and its gradient back.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

FLOAT32 = 4
EXCHANGED_WIDTH = 128
"""Least part of a vector that devices exchange: one register of a TPU is 128 wide."""
Zero = Literal[1, 2, 3]
Shared = Literal["ring", "gather", "ulysses"]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A Llama-like transformer, its batch, and the bytes of a number."""

    layers: int = 4
    embed: int = 2048
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 8192
    vocab: int = 32768
    batch: int = 32
    length: int = 1024
    experts: int = 0
    """Experts of a layer, each as wide as the MLP; 0 for an MLP."""
    experts_per_token: int = 2
    compute_bytes: int = FLOAT32
    """Of an activation, a gathered parameter or a gradient on its way."""
    stored_bytes: int = FLOAT32
    """Of a parameter in the state."""

    @property
    def attention_weights(self) -> int:
        return 2 * self.embed * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        return 3 * self.embed * self.mlp

    @property
    def vocab_weights(self) -> int:
        """Of the embedding or of the head."""
        return self.vocab * self.embed


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a step is split."""

    mesh: Mapping[str, int]
    zero: Zero = 3
    shared: Shared = "ring"
    microbatches: int = 1
    sequence: bool = False
    """Whether `tensor` also cuts the length of the residual stream."""
    recomputed: bool = False
    """Whether the backward pass computes each layer again, up to its last product."""

    def size(self, *axes: str) -> int:
        """Devices along all of some axes."""
        return math.prod(self.mesh.get(axis, 1) for axis in axes)

    def axes(self, *axes: str) -> str:
        """Those of some axes that have several devices, as `stage+data` in mesh order."""
        return "+".join(name for name, size in self.mesh.items() if name in axes and size > 1)


def sent_bytes(sizes: Sizes, how: Strategy) -> dict[str, float]:
    """Returns the bytes that a device sends in a step, by the mesh axes that ask for them."""
    layers, vocab = _replicas(sizes, how)
    terms = [
        (how.axes("data", "expert", "context"), layers),
        (how.axes("data", "expert", "context", "stage"), vocab),
        ("fsdp", _fsdp(sizes, how)),
        ("tensor", _tensor(sizes, how)),
        ("context", _context(sizes, how)),
        ("expert", _expert(sizes, how)),
        ("stage", _stage(sizes, how)),
    ]
    found: dict[str, float] = {}
    for axes, sent in terms:
        if sent:
            found[axes] = found.get(axes, 0.0) + sent
    return found


def _part(devices: int) -> float:
    return (devices - 1) / devices


def _tokens(sizes: Sizes, how: Strategy) -> float:
    """Tokens that a device sees of a batch."""
    return sizes.batch * sizes.length / how.size("data", "fsdp", "expert", "context")


def _layers(sizes: Sizes, how: Strategy) -> float:
    return sizes.layers / how.size("stage")


def _dense(sizes: Sizes, how: Strategy) -> tuple[float, float]:
    """Weights of layers and of embedding and head on a device before `fsdp` cuts them, without
    routed experts."""
    of_a_layer = sizes.attention_weights + (0 if sizes.experts else sizes.mlp_weights)
    tensor = how.size("tensor")
    return _layers(sizes, how) * of_a_layer / tensor, 2 * sizes.vocab_weights / tensor


def _routed(sizes: Sizes, how: Strategy) -> float:
    """Weights of routed experts on a device before `fsdp` cuts them."""
    weights = _layers(sizes, how) * sizes.experts * sizes.mlp_weights
    return weights / how.size("tensor", "expert")


def _replicas(sizes: Sizes, how: Strategy) -> tuple[float, float]:
    """All-reduces of gradients over devices that hold the same parameters, of layers and of
    embedding and head, which all stages hold too. What `fsdp` has cut is reduced by parts. Those of
    several microbatches were added up in float32, and travel so."""
    width = sizes.compute_bytes if how.microbatches == 1 else FLOAT32
    layers, vocab = _dense(sizes, how)
    replicas, stages = how.size("data", "context", "expert"), how.size("stage")
    of_layers = 2 * _part(replicas) * layers
    of_layers += 2 * _part(how.size("data", "context")) * _routed(sizes, how)
    cut = width / how.size("fsdp")
    return of_layers * cut, 2 * _part(replicas * stages) * vocab * cut


def _fsdp(sizes: Sizes, how: Strategy) -> float:
    """Every microbatch gathers parameters and reduces gradients to the parts that devices keep."""
    part, (layers, vocab) = _part(how.size("fsdp")), _dense(sizes, how)
    layers += _routed(sizes, how)
    if how.zero < 3:
        reduced = how.microbatches * (layers + vocab) * sizes.compute_bytes
        return part * (reduced + (layers + vocab) * sizes.stored_bytes)
    exchanged = 0.0
    tokens = _tokens(sizes, how) / how.microbatches
    wide = sizes.embed >= EXCHANGED_WIDTH * how.size("fsdp")
    if wide and tokens < sizes.vocab / how.size("tensor"):
        vocab /= 2
        exchanged = 2 * _tokens(sizes, how) * sizes.embed
        exchanged /= how.size("tensor") if how.sequence else 1
    gathers = 2
    if how.recomputed and how.size("stage") > 1:
        # A backward turn of a stage starts with its forward pass, within which layers are computed
        # again; so are the vectors that the first stage looks up.
        gathers, exchanged = 3, 1.5 * exchanged
    sent = how.microbatches * ((gathers + 1) * layers + 2 * vocab) + exchanged
    return part * sent * sizes.compute_bytes


def _tensor(sizes: Sizes, how: Strategy) -> float:
    residual = _tokens(sizes, how) * sizes.embed * sizes.compute_bytes
    # Computed again are attention with its sum, and what the MLP reads: half of a sum, if gathered.
    again = (1.5 if how.sequence else 1) if how.recomputed else 0
    branches = (4 + again) * _layers(sizes, how) + 2
    return branches * 2 * _part(how.size("tensor")) * residual


def _context(sizes: Sizes, how: Strategy) -> float:
    devices, tokens = how.size("context"), _tokens(sizes, how)
    heads, kv_heads = (n / how.size("tensor") for n in (sizes.heads, sizes.kv_heads))
    if how.shared == "ulysses":
        sent = 2 * _part(devices) * tokens * sizes.head_dim * 2 * (heads + kv_heads)
        return _layers(sizes, how) * sent * sizes.compute_bytes
    # Of a shard; a ring sends it on n - 1 times, and a gather sends (n - 1) / n of n of them.
    keys_and_values = 2 * tokens * kv_heads * sizes.head_dim
    again = sizes.compute_bytes if how.recomputed and how.shared == "ring" else 0
    widths = 2 * sizes.compute_bytes + again + FLOAT32
    return _layers(sizes, how) * (devices - 1) * keys_and_values * widths


def _expert(sizes: Sizes, how: Strategy) -> float:
    if not sizes.experts:
        return 0.0
    copies = _tokens(sizes, how) * sizes.experts_per_token
    sent = 4 * _part(how.size("expert")) * copies * sizes.embed * sizes.compute_bytes
    return _layers(sizes, how) * sent


def _stage(sizes: Sizes, how: Strategy) -> float:
    """Forward and backward, by a device between two others."""
    if how.size("stage") == 1:
        return 0.0
    return 2 * _tokens(sizes, how) * sizes.embed * sizes.compute_bytes
