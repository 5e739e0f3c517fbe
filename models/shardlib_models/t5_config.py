"""The config of T5, and its faults."""

from typing import Any, ClassVar, Literal

from shardlib.config import configclass
from shardlib.nn import remat
from shardlib.registry import DataSpec
from shardlib_models.data_sizes import faults_of_size

TAGS = (
    "layer_in",
    "query",
    "key",
    "value",
    "attention_out",
    "cross_out",
    "mlp_hidden",
    "mlp_out",
)
"""The names in a layer that `save:` policies can keep."""


@configclass
class T5Config:
    """An encoder and a decoder that reads its output; the defaults of its options are T5 v1.0's.

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified
    Text-to-Text Transformer", section 2.1.
    """

    name: Literal["t5"] = "t5"
    init_from: str | None = None
    """A folder in the format of Hugging Face, or its name on the hub, whose weights the run starts
    from; its config.json gives the fields that are left out."""
    vocab_size: int | None = None
    """Number of rows of the embedding; null for the vocabulary of the data."""
    num_layers: int = 4
    """Number of layers of the encoder."""
    num_decoder_layers: int | None = None
    """Number of layers of the decoder; null for `num_layers`."""
    embed_dim: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Number of heads."""
    head_dim: int | None = None
    """Dims of a head; null for embed_dim / num_heads."""
    mlp_dim: int | None = None
    """Hidden width of the MLP; null for 4 * embed_dim."""
    mlp: Literal["relu", "gated_gelu"] = "relu"
    """The MLP: plain with ReLU (v1.0), or gated by GELU, approximated by tanh (v1.1, Flan-T5)."""
    relative_buckets: int = 32
    """Number of kinds of distances that the bias of attention tells apart."""
    relative_max_distance: int = 128
    """Distance in tokens from which all distances are of one kind."""
    tied_embeddings: bool = True
    """Whether the head is the table of the embedding, with inputs divided by sqrt(embed_dim);
    otherwise it has its own weights (v1.1, Flan-T5)."""
    start_token: int = 0
    """Id that the decoder reads before the first token of its answer."""
    norm_eps: float = 1e-6
    """Value added to the mean square in an RMSNorm."""
    dropout: float = 0.0
    """Probability of dropping a unit of the embeddings, of each branch, of the hidden layer of the
    MLP and of the result of each stack, in [0, 1). T5 also drops weights of attention, which this
    model does not."""
    init_factor: float = 1.0
    """Factor of the standard deviations of the initial weights."""
    remat: str = "none"
    """Values kept for the backward pass: none, dots, full, save:NAME,NAME, or these by ranges of
    layers. auto chooses one for all layers, with rules: auto."""
    remat_tags: ClassVar = TAGS

    @property
    def head_size(self) -> int:
        """The dims of a head."""
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def mlp_size(self) -> int:
        """The hidden width of the MLP."""
        return 4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim

    @property
    def decoder_size(self) -> int:
        """The number of layers of the decoder."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers


_SIZES = (
    "vocab_size",
    "num_layers",
    "num_decoder_layers",
    "embed_dim",
    "num_heads",
    "head_dim",
    "mlp_dim",
)


def validate(config: T5Config, data: DataSpec) -> list[str]:
    """Returns all faults of a config, alone and with its data, as sentences."""
    faults = [
        f"{name} is {value}; it must be at least 1."
        for name in _SIZES
        if (value := getattr(config, name)) is not None and value < 1
    ]
    if not faults and config.head_dim is None and config.embed_dim % config.num_heads:
        faults.append(
            f"embed_dim={config.embed_dim} is not a multiple of num_heads={config.num_heads}; "
            "change one of them, or set head_dim."
        )
    if not 0.0 <= config.dropout < 1.0:
        faults.append(f"dropout is {config.dropout}; it must be in [0, 1).")
    if config.init_factor <= 0.0:
        faults.append(f"init_factor is {config.init_factor}; it must be greater than 0.")
    faults += _distance_faults(config) + _vocabulary_faults(config, data)
    for count in sorted({config.num_layers, config.decoder_size}):
        faults += remat.check(config.remat, TAGS, count)
    return list(dict.fromkeys(faults))


def _distance_faults(config: T5Config) -> list[str]:
    buckets, distance = config.relative_buckets, config.relative_max_distance
    if buckets < 4 or buckets % 4:
        return [f"relative_buckets is {buckets}; it must be a multiple of 4."]
    if distance <= buckets // 2:
        return [
            f"relative_max_distance is {distance}; it must be greater than "
            f"relative_buckets / 2 = {buckets // 2}."
        ]
    return []


def _vocabulary_faults(config: T5Config, data: DataSpec) -> list[str]:
    if faults := faults_of_size(config, data, "vocab_size", "tokens"):
        return faults
    size: Any = config.vocab_size or data.vocab_size
    if not 0 <= config.start_token < size:
        return [f"start_token is {config.start_token}; it must be in [0, {size})."]
    return []
