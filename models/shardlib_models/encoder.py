"""Layers of encoders: attention in both directions and an MLP, stacked and scanned.

Source: Vaswani et al. 2017, "Attention Is All You Need", with the norms after each sum (`post`);
Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", with the norms before each branch (`pre`).
"""

from typing import Any, ClassVar, Literal

import jax
from flax import nnx

from shardlib.config import configclass
from shardlib.nn import remat
from shardlib.nn.attention import Backend, attend
from shardlib.nn.remat import tag
from shardlib.nn.stack import scan_layers, stack_layers
from shardlib.sharding.constrain import constrain
from shardlib_models.layers import Linear, Norm, dropout, residual, whole

Norms = Literal["pre", "post"]

TAGS = ("layer_in", "query", "key", "value", "attended", "attention_out", "mlp_hidden", "mlp_out")
"""The names in a layer that `save:` policies can keep."""

ACTIVATIONS = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
}


@configclass
class EncoderFields:
    """The fields that encoders share."""

    num_layers: int = 4
    """Number of layers, each of attention and MLP."""
    embed_dim: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Number of heads, which divides the width."""
    mlp_dim: int | None = None
    """Hidden width of the MLP; null for 4 * embed_dim."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu"] = "gelu"
    """Nonlinearity of the MLP; `gelu` is the exact one."""
    norm_eps: float = 1e-12
    """Value added to the variance in a LayerNorm."""
    dropout: float = 0.0
    """Probability of dropping a unit of the embeddings and of each branch, in [0, 1)."""
    init_stddev: float = 0.02
    """Standard deviation of the initial weights."""
    attention: Backend = "auto"
    """Implementation of attention."""
    remat: str = "none"
    """Values kept for the backward pass: none, dots, full, save:NAME,NAME, or these by ranges of
    layers. model.remat may be auto, with rules: auto."""
    remat_tags: ClassVar = TAGS

    @property
    def mlp_size(self) -> int:
        """The hidden width of the MLP."""
        return 4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim


def faults_of_fields(config: EncoderFields) -> list[str]:
    """Returns the faults of the shared fields, as sentences."""
    names = ("num_layers", "embed_dim", "num_heads", "mlp_dim")
    faults = [
        f"{name} is {value}; it must be at least 1."
        for name in names
        if (value := getattr(config, name)) is not None and value < 1
    ]
    if not faults and config.embed_dim % config.num_heads:
        faults.append(
            f"embed_dim={config.embed_dim} is not a multiple of num_heads={config.num_heads}; "
            "change one of them."
        )
    if not 0.0 <= config.dropout < 1.0:
        faults.append(f"dropout is {config.dropout}; it must be in [0, 1).")
    if config.init_stddev <= 0.0:
        faults.append(f"init_stddev is {config.init_stddev}; it must be greater than 0.")
    return faults + remat.check(config.remat, TAGS, config.num_layers)


class Attention(nnx.Module):
    """Self-attention with biases, in both directions unless it is causal."""

    def __init__(self, config: EncoderFields, *, causal: bool, rngs: nnx.Rngs):
        self.backend: Backend = config.attention
        self.causal = causal
        embed = {"embed": config.embed_dim}
        head_dim = {"head_dim": config.embed_dim // config.num_heads}
        heads, kv_heads = {"heads": config.num_heads}, {"kv_heads": config.num_heads}
        options: dict[str, Any] = {"stddev": config.init_stddev, "bias": True, "rngs": rngs}
        self.query = Linear(embed, heads | head_dim, **options)
        self.key = Linear(embed, kv_heads | head_dim, **options)
        self.value = Linear(embed, kv_heads | head_dim, **options)
        self.out = Linear(heads | head_dim, embed, **options)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        axes = ("batch", "length", "kv_heads", "head_dim")
        query = constrain(self.query(x), "batch", "length", "heads", "head_dim")
        key, value = constrain(self.key(x), *axes), constrain(self.value(x), *axes)
        y = attend(
            tag(query, "query"),
            tag(key, "key"),
            tag(value, "value"),
            segment_ids=segment_ids,
            causal=self.causal,
            backend=self.backend,
        )
        return self.out(constrain(y, "batch", "length", "heads", "head_dim"))


class MLP(nnx.Module):
    """A plain MLP with biases."""

    def __init__(self, config: EncoderFields, *, rngs: nnx.Rngs):
        self.activation = config.activation
        embed, hidden = {"embed": config.embed_dim}, {"mlp": config.mlp_size}
        options: dict[str, Any] = {"stddev": config.init_stddev, "bias": True, "rngs": rngs}
        self.up = Linear(embed, hidden, **options)
        self.down = Linear(hidden, embed, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = ACTIVATIONS[self.activation](constrain(self.up(x), "batch", "length", "mlp"))
        return self.down(tag(hidden, "mlp_hidden"))


class Layer(nnx.Module):
    """A layer: attention and an MLP, each added to the residual stream."""

    def __init__(self, config: EncoderFields, *, norms: Norms, causal: bool, rngs: nnx.Rngs):
        self.norms = norms
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, causal=causal, rngs=rngs)
        self.mlp_norm = norm_of(config)
        self.mlp = MLP(config, rngs=rngs)
        self.attention_dropout = dropout(config.dropout, rngs)
        self.mlp_dropout = dropout(config.dropout, rngs)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        x = tag(x, "layer_in")
        if self.norms == "pre":
            x = residual(x + self._attended(self.attention_norm(x), segment_ids))
            return residual(x + self._mixed(self.mlp_norm(x)))
        x = residual(self.attention_norm(x + self._attended(x, segment_ids)))
        return residual(self.mlp_norm(x + self._mixed(x)))

    def _attended(self, x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        branch = residual(self.attention(whole(x), segment_ids))
        return self.attention_dropout(tag(branch, "attention_out"))

    def _mixed(self, x: jax.Array) -> jax.Array:
        return self.mlp_dropout(tag(residual(self.mlp(whole(x))), "mlp_out"))


def norm_of(config: EncoderFields) -> Norm:
    """Returns a LayerNorm of the residual stream."""
    return Norm(config.embed_dim, kind="layer", eps=config.norm_eps)


def stack(config: EncoderFields, *, norms: Norms, causal: bool = False, rngs: nnx.Rngs) -> Layer:
    """Returns the layers of an encoder, stacked."""

    def make(rngs: nnx.Rngs) -> Layer:
        return Layer(config, norms=norms, causal=causal, rngs=rngs)

    return stack_layers(make, config.num_layers, rngs)


def encode(
    layers: Layer, x: jax.Array, segment_ids: jax.Array | None, config: EncoderFields
) -> jax.Array:
    """Returns the residual stream [batch, length, embed] after all layers.

    Args:
        layers: The result of `stack`.
        x: The first residual stream.
        segment_ids: [batch, length] int32; positions of one number see each other. None: all
            do.
        config: The config of the layers.
    """

    def call(layer: Layer, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return layer(x, segment_ids), None

    return scan_layers(call, layers, residual(x), remat=config.remat, tags=TAGS)[0]
