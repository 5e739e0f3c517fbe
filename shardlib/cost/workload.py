"""Workload of a training step: a transformer by its dims, and the job that trains it.

A layer is a list of matmuls with their tensor-parallel sharding. The cost model sees the shapes
that one device multiplies, and not only their FLOPs.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Literal, NamedTuple

Cut = Literal["in", "out", "none"]
Precision = Literal["bf16", "fp16", "fp8", "int8", "f32"]


class Matmul(NamedTuple):
    """Product of tokens with a weight of `[fan_in, fan_out]`."""

    name: Literal["qkv", "out", "up", "down", "router", "shared_up", "shared_down"]
    fan_in: int
    fan_out: int
    cut: Cut
    """The dim that `tensor` shards: `out` column-parallel, `in` row-parallel, `none` replicated."""
    routed: bool = False
    """Whether each expert has its own weight."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """Routed experts in place of the MLP of some layers."""

    number: int
    per_token: int
    mlp: int
    """Hidden width of one expert."""
    shared_mlp: int = 0
    """Hidden width of the shared expert that every token also passes; 0 for none."""
    dense_layers: int = 0
    """Layers that keep the plain MLP."""
    groups: tuple[int, int] = (1, 1)
    """Groups that the experts form, and how many of them a token may choose experts from. Source:
    DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2, "node-limited routing"."""

    def hosts_reached(self, hosts: int) -> float:
        """Returns the expected number of other hosts to which a token goes, if `hosts` hosts have
        equal shares of the experts and each choice of experts is equally likely."""
        elsewhere = self.number - self.number / hosts
        missed = 1.0
        for chosen in range(self.per_token):
            missed *= max(elsewhere - chosen, 0.0) / (self.number - chosen)
        number, most = self.groups
        reachable = hosts * most / number if hosts >= number else hosts
        return (1 - 1 / hosts) * min(hosts * (1 - missed), reachable)


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention. Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1."""

    query_rank: int
    """0 for queries from the residual stream itself."""
    kv_rank: int
    head_nope: int
    head_rope: int
    head_value: int


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer by its dims."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    gated: bool = True
    tied: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    window: int | None = None
    """Positions that a windowed layer sees."""
    windowed_layers: int = 0
    learned_positions: int = 0
    """Rows of the learned position embedding; 0 for none."""
    activation: str = ""
    """Nonlinearity of the MLP, such as `gelu_tanh`; empty for SiLU if gated, else `gelu_tanh`."""
    qk_norm: bool = False
    """Whether attention normalises queries and keys."""
    sandwich: bool = False
    """Whether a norm also follows each branch, as in Gemma 2."""

    @property
    def dense_layers(self) -> int:
        """Layers with a plain MLP."""
        return self.layers if self.experts is None else self.experts.dense_layers

    @property
    def routed_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers

    @property
    def score_dim(self) -> int:
        """Size of a head in the product of query and key."""
        return self.head_dim if not self.latent else self.latent.head_nope + self.latent.head_rope

    @property
    def value_dim(self) -> int:
        """Size of a head in the product of probabilities and value."""
        return self.latent.head_value if self.latent else self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of key and value together that attention holds for one token."""
        return self.kv_heads * (self.score_dim + self.value_dim)

    @functools.cached_property
    def layer_weights(self) -> tuple[float, float]:
        """Weights of a dense layer, and of a routed layer without its routed experts."""
        routed = self.matmuls(routed=True) if self.experts else ()
        return _weights(self.matmuls(routed=False)), _weights(m for m in routed if not m.routed)

    @property
    def layer_arrays(self) -> int:
        """Weight arrays of one layer."""
        return sum(map(self.arrays_of, self.matmuls(routed=self.experts is not None)))

    def arrays_of(self, product: Matmul) -> int:
        """Returns the weight arrays that are one matmul: query, key and value, or gate and up."""
        if product.name == "qkv":
            return 1 if self.latent else 3
        return 2 if self.gated and product.name in ("up", "shared_up") else 1

    @functools.cached_property
    def expert_weights(self) -> float:
        """Weights of all routed experts of one layer together."""
        if self.experts is None:
            return 0.0
        routed = _weights(m for m in self.matmuls(routed=True) if m.routed)
        return routed * self.experts.number

    @property
    def vocab_weights(self) -> float:
        """Weights of the embedding table. The head has as many."""
        return float(self.vocab * self.embed)

    @property
    def num_params(self) -> float:
        """Weights of all matrices, without scales and biases."""
        dense, routed = self.layer_weights
        tables = (1 if self.tied else 2) * self.vocab_weights + self.learned_positions * self.embed
        experts = self.routed_layers * (routed + self.expert_weights)
        return self.dense_layers * dense + experts + tables

    @property
    def active_weights(self) -> float:
        """Weights of the matmuls that one token passes, including the head."""
        dense, routed = self.layer_weights
        total = self.dense_layers * dense + self.vocab_weights
        if self.experts is not None:
            share = self.experts.per_token / self.experts.number
            total += self.routed_layers * (routed + share * self.expert_weights)
        return total

    def matmuls(self, *, routed: bool) -> tuple[Matmul, ...]:
        """Returns the matmuls of one layer, with routed experts or with a plain MLP."""
        return self._matmuls[routed and self.experts is not None]

    @functools.cached_property
    def _matmuls(self) -> tuple[tuple[Matmul, ...], ...]:
        """Matmuls of a layer with a plain MLP and, if the model has experts, of a routed layer."""
        found = self._latent_matmuls() if self.latent else self._plain_attention()
        widths = 2 if self.gated else 1
        up = Matmul("up", self.embed, widths * self.mlp, "out")
        dense = (*found, up, Matmul("down", self.mlp, self.embed, "in"))
        if self.experts is None:
            return (dense,)
        experts = self.experts
        found = (
            *found,
            Matmul("router", self.embed, experts.number, "none"),
            Matmul("up", self.embed, widths * experts.mlp, "out", routed=True),
            Matmul("down", experts.mlp, self.embed, "in", routed=True),
        )
        if experts.shared_mlp:
            found += (
                Matmul("shared_up", self.embed, widths * experts.shared_mlp, "out"),
                Matmul("shared_down", experts.shared_mlp, self.embed, "in"),
            )
        return dense, found

    def _plain_attention(self) -> tuple[Matmul, ...]:
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        return (
            Matmul("qkv", self.embed, width, "out"),
            Matmul("out", self.heads * self.head_dim, self.embed, "in"),
        )

    def _latent_matmuls(self) -> tuple[Matmul, ...]:
        latent, heads = self.latent, self.heads
        assert latent is not None
        down = latent.query_rank + latent.kv_rank + latent.head_rope
        return (
            Matmul("qkv", self.embed, down, "none"),
            Matmul("qkv", latent.query_rank or self.embed, heads * self.score_dim, "out"),
            Matmul("qkv", latent.kv_rank, heads * (latent.head_nope + latent.head_value), "out"),
            Matmul("out", heads * latent.head_value, self.embed, "in"),
        )


@dataclasses.dataclass(frozen=True)
class Remat:
    """Rematerialisation policy: the fractions of all layers that the backward pass recomputes.

    Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", for whole layers;
    Korthikanti et al. 2022, section 5, for the core of attention alone.
    """

    kept: frozenset[str] = frozenset(
        (
            *("qkv", "attention", "out", "router", "up", "down"),
            *("shared_up", "shared_down", "elementwise"),
        )
    )
    """Residuals that are not recomputed: matmuls by name, `attention` and `elementwise`."""
    offloaded: frozenset[str] = frozenset()
    """Residuals offloaded to host memory: some of `kept`, and `input`, the input of the layer."""
    half: frozenset[str] = frozenset()
    """Matmuls of which every second one is recomputed."""
    whole: bool = False
    """Whether the last matmul is also rerun, although nothing reads its result (PyTorch)."""

    def again(self, name: str) -> float:
        """Fraction of this part that the backward pass recomputes."""
        if name in self.kept:
            return 0.0
        if name in self.half:
            return 0.5
        return float(self.whole or name not in ("down", "shared_down"))

    @property
    def any(self) -> bool:
        """Whether a layer is recomputed up to its last matmul."""
        return "up" not in self.kept


NONE = Remat()
"""Keeps everything. Fused attention recomputes its scores by itself."""
FULL = Remat(frozenset())
"""Keeps the inputs of layers. Results that nothing reads are not recomputed (XLA)."""
FULL_EAGER = Remat(frozenset(), whole=True)
"""Keeps the inputs of layers, and reruns every operation of the layer (PyTorch)."""
SELECTIVE = Remat(NONE.kept - {"attention"})
"""Recomputes the core of attention."""
EVERY_SECOND = Remat(frozenset(("qkv", "attention", "down")), half=frozenset(("out", "up")))
"""Keeps attention and every second matmul (torchtitan's `selective`, by operation)."""
DOTS = Remat(NONE.kept - {"elementwise"})
"""Keeps the results of weight matmuls and of fused attention."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One training step."""

    model: Transformer
    length: int
    """Tokens of a sequence."""
    batch: int
    """Sequences of a step, over all devices."""
    precision: Precision = "bf16"
    remat: Remat = NONE
    remat_layers: int | None = None
    """Layers that follow `remat`, while the others keep everything; None for all."""
    causal: bool = True
    compute_bytes: int = 2
    """Bytes of one element of an activation or a gathered parameter."""
    gradient_bytes: int = 4
    """Bytes of one gradient element where it is kept and summed over devices."""
    param_bytes: float = 4
    """Bytes of one parameter in the state; a mean, if frozen weights are quantized."""
    moment_bytes: int = 8
    """Bytes of all optimizer moments of one parameter together."""
    loss_chunks: int = 1
    newton_schulz_steps: int = 0
    """Newton-Schulz iterations of an optimizer that orthogonalises the update of each matrix of the
    layers; 0 for others. Source: Jordan et al. 2024, "Muon": five."""
    trained: float = 1.0
    """Trained parameters relative to the weights of the model. Below 1 the weights are frozen, and
    have neither gradients nor optimizer state; only adapters have."""

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all devices."""
        return self.batch * self.length

    @property
    def remat_share(self) -> float:
        """Fraction of the layers that follow `remat`."""
        return 1.0 if self.remat_layers is None else self.remat_layers / self.model.layers

    @property
    def frozen(self) -> bool:
        """Whether adapters are trained in place of the weights."""
        return self.trained < 1.0

    def again(self, name: str) -> float:
        """Fraction of a part of the layers that the backward pass recomputes, over all layers."""
        return self.remat_share * self.remat.again(name)


def _weights(matmuls: Iterable[Matmul]) -> float:
    return float(sum(m.fan_in * m.fan_out for m in matmuls))
