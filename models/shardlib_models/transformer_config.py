"""Configs of decoder-only transformers, including published models."""

import math
from typing import Annotated, Any, Literal

from shardlib.config import Variants, configclass
from shardlib.nn import remat
from shardlib.nn.attention import Backend, ContextMethod, rotary_scaling
from shardlib.nn.moe import TAGS
from shardlib.registry import DataSpec
from shardlib_models import moe
from shardlib_models.moe import MoEConfig
from shardlib_models.sizes import SIZES

_TAGS = ("layer_in", "attention_in", "query", "key", "value", "attended", "attention_out", "mlp_in")
_FACTORS = ("embed_scale", "residual_scale", "query_scale", "attention_softcap")
_FACTORS += ("logit_softcap", "logit_divisor")


@configclass
class LatentConfig:
    """Multi-head latent attention: queries, keys and values from vectors of few dims.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
    """

    query_rank: int | None = None
    """Dims of the vector that queries come from; null for the residual stream itself."""
    kv_rank: int = 512
    """Dims of the vector that keys and values come from."""
    plain_dims: int = 128
    """Dims of a head of query and key without rotary positions."""
    rotary_dims: int = 64
    """Dims of a head with rotary positions, which all heads of the key share."""
    value_dim: int = 128
    """Size of a head of the values."""


@configclass
class TransformerConfig:
    """A decoder-only transformer, as in Llama, GPT-2 and OPT.

    Dropout applies to the embeddings and to
    the output of each branch, as in GPT-2 without its dropout of attention weights.
    """

    name: Literal["transformer"] = "transformer"
    num_layers: int = 4
    """Number of layers, each of attention and MLP."""
    embed_dim: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key-value heads (grouped-query attention); null for as many as query heads."""
    head_dim: int | None = None
    """Size of one head; null for embed_dim / num_heads."""
    mlp_dim: int | None = None
    """Hidden width of the MLP; null for 4 * embed_dim."""
    vocab_size: int | None = None
    """Number of rows of the embedding; null for the vocabulary of the data."""
    max_positions: int | None = None
    """Longest sequence, in tokens; null for no limit (rotary positions only)."""
    block: Literal["pre", "post", "sandwich", "parallel", "parallel_one_norm"] = "pre"
    """Place of the norms: before a branch (pre), after its sum with the residual stream and not at
    the end of the model (post), before and after a branch (sandwich); or branches in parallel, each
    with its norm or both with one."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm (a scale), or LayerNorm (a scale and a bias)."""
    norm_eps: float = 1e-5
    """Value added to the variance in a norm."""
    norm_offset: float = 0.0
    """Value added to the scale of a norm: 1 in Gemma, whose scales start at 0."""
    qk_norm: bool | Literal["heads"] = False
    """Whether each head of query and key is normalised, before rotary positions; heads: with scales
    of its own and without biases, as in StableLM."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Rotary embeddings of query and key, or a learned embedding added to the token embeddings."""
    rope_theta: float = 10_000.0
    """Base of the wavelengths of rotary embeddings."""
    rope_scaling: (
        Annotated[Any, Variants(lambda: rotary_scaling.SCALINGS, key="kind", default="llama3")]
        | None
    ) = None
    """Changed rotary wavelengths for long sequences, as in Llama 3.1; null for none."""
    local_rope_theta: float | None = None
    """Base of the wavelengths, unscaled, in layers with a window; null for `rope_theta`, scaled."""
    rotary_dims: int | None = None
    """Dims of a head that are rotated, the first ones; null for all."""
    rotary_interleaved: bool = False
    """Whether neighbouring dims of a head are rotated as a pair, as in GPT-J."""
    position_offset: int = 0
    """Rows of the table of learned positions before that of the first position; 2 in OPT."""
    mlp: Literal["gated", "plain"] = "gated"
    """`activation(gate(x)) * up(x)` (SwiGLU and the like), or `activation(up(x))`."""
    moe: MoEConfig | None = None
    """Routed experts in place of the MLP of every layer; null for a dense model."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"] = "silu"
    """Nonlinearity of the MLP; `gelu_tanh` is GPT-2's approximation, and `clamped_swiglu` gives the
    hidden units of a gated MLP in gpt-oss."""
    tied_embeddings: bool = False
    """Whether the embedding table also computes the logits."""
    token_dim: int | None = None
    """Width of the embedding table, which is projected to `embed_dim` and back; null for
    `embed_dim` itself."""
    embed_scale: Literal["sqrt"] | bool | float = 1.0
    """Factor of the embeddings; sqrt or true for sqrt(embed_dim), as in Gemma; false for 1."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    query_scale: float | None = None
    """Factor of the attention scores; null for 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Bound c of the attention scores, as c * tanh(scores / c); null for none."""
    sinks: bool = False
    """Whether each head has a learned score that joins its softmax, as in gpt-oss."""
    latent: LatentConfig | None = None
    """Latent attention, as in DeepSeek; null for separate projections to query, key and value."""
    logit_softcap: float | None = None
    """Bound c of the logits, as c * tanh(logits / c); null for none."""
    logit_divisor: float = 1.0
    """Divisor of the logits, before their bound."""
    head_bias: bool = False
    """Whether logits have a bias, without `tied_embeddings`."""
    qkv_bias: bool = False
    """Whether the projections to query, key and value have biases."""
    out_bias: bool = False
    """Whether the projection out of attention has a bias."""
    mlp_bias: bool = False
    """Whether the projections of the MLP, or of routed experts, have biases."""
    dropout: float = 0.0
    """Probability of dropping a unit, in [0, 1)."""
    window: int | None = None
    """Number of positions that attention sees, including the query's own; null for all."""
    global_every: int | None = None
    """With 6, every sixth layer sees all positions, and the others `window`; null for a window in
    all layers."""
    init_stddev: float = 0.02
    """Standard deviation of the initial weights."""
    attention: Backend = "auto"
    """Implementation of attention; text generation uses `xla`."""
    context: ContextMethod = "auto"
    """Method by which devices along the mesh axis `context` share a row in attention."""
    remat: str = "none"
    """Values kept for the backward pass: none, dots, full, save:NAME,NAME, offload:NAME,NAME (in
    host memory), or these by ranges of layers, as in 0-7:full,8-:dots. auto chooses one for all
    layers, with rules: auto."""

    loss_chunks: int = 1
    """Number of chunks of the vocabulary for computing the loss; more hold fewer logits, and less
    of the head, at a time. Two or more compute the logits twice."""
    init_from: str | None = None
    """A folder in the format of Hugging Face, or its name on the hub, whose weights the run starts
    from; its config.json gives the fields that are left out."""

    def __post_init__(self) -> None:
        if isinstance(self.embed_scale, bool):
            object.__setattr__(self, "embed_scale", "sqrt" if self.embed_scale else 1.0)

    @property
    def kv_heads(self) -> int:
        """The number of key-value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """The size of one head of query and key."""
        if self.latent is not None:
            return self.latent.plain_dims + self.latent.rotary_dims
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def value_size(self) -> int:
        """The size of one head of the values."""
        return self.head_size if self.latent is None else self.latent.value_dim

    @property
    def rotary_size(self) -> int:
        """The number of dims of a head that are rotated."""
        if self.latent is not None:
            return self.latent.rotary_dims
        return self.head_size if self.rotary_dims is None else self.rotary_dims

    @property
    def embed_factor(self) -> float:
        """The factor of the embeddings."""
        return math.sqrt(self.embed_dim) if self.embed_scale == "sqrt" else self.embed_scale

    @property
    def score_scale(self) -> float:
        """The factor of the attention scores."""
        return self.head_size**-0.5 if self.query_scale is None else self.query_scale

    @property
    def mlp_size(self) -> int:
        """The hidden width of the MLP."""
        return 4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim

    @property
    def token_size(self) -> int:
        """The width of the embedding table."""
        return self.embed_dim if self.token_dim is None else self.token_dim

    @property
    def remat_tags(self) -> tuple[str, ...]:
        """The names in a layer that `save:` policies can keep."""
        hidden = ("mlp_hidden",) if self.moe is None else TAGS
        if self.num_dense_layers:
            hidden = ("mlp_hidden", *TAGS)
        return (*_TAGS, *hidden, "mlp_out")

    @property
    def is_local(self) -> list[bool]:
        """Whether each layer sees `window` positions rather than all."""
        if self.window is None:
            return [False] * self.num_layers
        every = self.global_every
        return [every is None or (n + 1) % every != 0 for n in range(self.num_layers)]

    @property
    def num_dense_layers(self) -> int:
        """The number of first layers with an MLP in a model with experts."""
        return 0 if self.moe is None else self.moe.dense_layers

    def vocabulary(self, data: DataSpec) -> int:
        """Returns the rows of the embedding table, from the config or else from the data."""
        size = self.vocab_size or data.vocab_size
        assert size is not None, "validate() refuses a model without a vocabulary"
        return size


def validate(config: TransformerConfig, data: DataSpec) -> list[str]:
    """Returns all faults of a config, alone and with its data, as sentences."""
    faults = _not_positive(config) or _shape_faults(config)
    return faults + _range_faults(config) + _data_faults(config, data)


def _not_positive(config: TransformerConfig) -> list[str]:
    names = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
    names += ("vocab_size", "max_positions", "window", "loss_chunks", "token_dim", "rotary_dims")
    names += ("global_every",)
    values = {name: getattr(config, name) for name in names}
    if config.latent is not None:
        values |= {f"latent.{name}": value for name, value in vars(config.latent).items()}
    return [
        f"{name} is {value}; it must be at least 1."
        for name, value in values.items()
        if value is not None and value < 1
    ]


def _shape_faults(config: TransformerConfig) -> list[str]:
    faults = _latent_faults(config)
    if config.head_dim is None and config.latent is None and config.embed_dim % config.num_heads:
        faults.append(
            f"embed_dim={config.embed_dim} is not a multiple of num_heads={config.num_heads}; "
            "change one of them or set head_dim."
        )
    elif config.positions == "rotary" and config.rotary_size % 2:
        faults.append(
            f"rotary positions rotate pairs of dims, but rotate {config.rotary_size} of a head; "
            "make head_dim and rotary_dims even."
        )
    elif config.rotary_size > config.head_size:
        faults.append(
            f"rotary_dims={config.rotary_size} is more than the {config.head_size} dims of a head; "
            "leave it out to rotate all."
        )
    if config.num_heads % config.kv_heads:
        faults.append(
            f"num_heads={config.num_heads} is not a multiple of num_kv_heads={config.kv_heads}; "
            "each key-value head serves equally many query heads."
        )
    return faults


def _latent_faults(config: TransformerConfig) -> list[str]:
    if config.latent is None:
        return []
    names = ("head_dim", "num_kv_heads", "rotary_dims")
    faults = [
        f"{name} has no effect with latent attention; leave it out."
        for name in names
        if getattr(config, name) is not None
    ]
    if config.qk_norm or config.qkv_bias or config.sinks:
        faults.append("latent attention has no qk_norm, qkv_bias and sinks; leave them out.")
    if config.positions != "rotary":
        faults.append("latent attention needs rotary positions; set positions: rotary.")
    return faults


def _window_faults(config: TransformerConfig) -> list[str]:
    faults = []
    if config.global_every is not None and config.window is None:
        faults.append("global_every has no effect without a window; set window, or leave it out.")
    if config.local_rope_theta is not None and config.global_every is None:
        faults.append("local_rope_theta has no effect without global_every; leave it out.")
    if config.rope_scaling is not None:
        faults += rotary_scaling.faults(config.rope_scaling, config.rotary_size)
    return faults


def _range_faults(config: TransformerConfig) -> list[str]:
    faults = _window_faults(config)
    if not 0.0 <= config.dropout < 1.0:
        faults.append(f"dropout is {config.dropout}; it must be in [0, 1).")
    if config.init_stddev <= 0.0:
        faults.append(f"init_stddev is {config.init_stddev}; it must be greater than 0.")
    if config.head_bias and config.tied_embeddings:
        faults.append("head_bias has no effect with tied_embeddings; leave it out.")
    if config.position_offset < 0:
        faults.append(f"position_offset is {config.position_offset}; it must not be negative.")
    for name in _FACTORS:
        value = getattr(config, name)
        if isinstance(value, int | float) and not 0 < value < math.inf:
            faults.append(f"{name} is {value}; it must be greater than 0, and finite.")
    if config.positions == "learned" and config.max_positions is None:
        faults.append("learned positions need max_positions, the rows of their table.")
    if config.moe is not None:
        faults += moe.validate(config.moe)
        if config.moe.dense_layers >= config.num_layers:
            faults.append(
                f"moe.dense_layers={config.moe.dense_layers} leaves none of {config.num_layers} "
                "layers to experts; lower it, or leave out moe."
            )
        if config.mlp == "plain":
            faults.append("mlp: plain has no effect on experts, which are gated; leave it out.")
        if config.mlp_bias and config.moe.shared_size(config.mlp_size):
            faults.append("mlp_bias has no effect on shared experts; leave it or them out.")
    if config.mlp == "plain" and config.activation == "clamped_swiglu":
        faults.append("activation: clamped_swiglu is of gated MLPs; set mlp: gated.")
    return faults + remat.check(config.remat, config.remat_tags, config.num_layers)


def _data_faults(config: TransformerConfig, data: DataSpec) -> list[str]:
    faults = []
    if config.vocab_size is None and data.vocab_size is None:
        faults.append("vocab_size is unknown: neither the model nor its data set it.")
    elif config.vocab_size and data.vocab_size and data.vocab_size > config.vocab_size:
        faults.append(
            f"the data have {data.vocab_size} tokens, but vocab_size={config.vocab_size}; "
            "raise vocab_size or leave it out."
        )
    longest, length = config.max_positions, data.sequence_length
    size = config.vocab_size or data.vocab_size
    if size is not None and config.loss_chunks > size:
        faults.append(
            f"loss_chunks={config.loss_chunks} is more than the {size} classes of the vocabulary; "
            "lower it."
        )
    if longest is not None and length is not None and length > longest:
        faults.append(
            f"sequences of {length} tokens are longer than max_positions={longest}; "
            "shorten data.sequence_length or raise model.max_positions."
        )
    return faults


def llama3_8b(**changes: Any) -> TransformerConfig:
    """Returns Llama 3 8B."""
    return TransformerConfig(**{**SIZES["llama3-8b"], **changes})


def gpt2(**changes: Any) -> TransformerConfig:
    """Returns GPT-2 (124 M)."""
    return TransformerConfig(**{**SIZES["gpt2"], **changes})


def opt_125m(**changes: Any) -> TransformerConfig:
    """Returns OPT 125 M."""
    return TransformerConfig(**{**SIZES["opt-125m"], **changes})
