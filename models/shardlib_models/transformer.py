"""A decoder-only transformer whose layers are stacked and scanned."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.attention import frequencies, rotations
from shardlib.constrain import constrain
from shardlib.errors import ModelError
from shardlib.losses import Mean, chunked_cross_entropy, cross_entropy
from shardlib.registry import DataSpec, ModelFamily
from shardlib.stack import scan_layers, stack_layers
from shardlib_models.layers import Embedding, Linear, Norm, dropout, residual, whole
from shardlib_models.transformer_block import Block, Context, KeyValues
from shardlib_models.transformer_config import REMAT_TAGS, TransformerConfig, validate
from shardlib_models.transformer_decode import generate


class Transformer(nnx.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, config: TransformerConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config = config
        self.vocab_size = vocab_size
        width, stddev = config.embed_dim, config.init_stddev
        self.token_embedding = Embedding(vocab_size, width, "vocab", stddev=stddev, rngs=rngs)
        learned = config.max_positions if config.positions == "learned" else None
        self.position_embedding = (
            Embedding(learned, width, "positions", stddev=stddev, rngs=rngs) if learned else None
        )
        self.layers = stack_layers(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs)
        self.final_norm = Norm(width, kind=config.norm, eps=config.norm_eps)
        self.head = (
            None
            if config.tied_embeddings
            else Linear({"embed": width}, {"vocab": vocab_size}, stddev=stddev, rngs=rngs)
        )
        # Last, so that the initial weights are the same with and without dropout.
        self.embedding_dropout = dropout(config.dropout, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits [batch, length, vocab], in the dtype of the parameters.

        Args:
            tokens: [batch, length] int32.
            positions: [batch, length] int32, within each document; None for 0, 1, 2, ...
            segment_ids: [batch, length] int32, the document of each position in a packed row; None
                when each row is one document.

        Raises:
            ModelError: If the row is longer than `max_positions`.
        """
        return self.logits(self.residual(tokens, positions, segment_ids))

    def residual(
        self, tokens: jax.Array, positions: jax.Array | None, segment_ids: jax.Array | None
    ) -> jax.Array:
        """Returns the last residual stream [batch, length, embed]; see `__call__`."""
        self.check_length(tokens.shape[1])
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        x, _ = self.hidden(tokens, positions, Context(segment_ids=segment_ids))
        return x

    def hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        context: Context,
        caches: KeyValues | None = None,
    ) -> tuple[jax.Array, KeyValues | None]:
        """Returns the last residual stream [batch, length, embed] and the caches of all layers."""
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        else:
            config = self.config
            turns = frequencies(config.head_size, config.rope_theta, config.rope_scaling)
            context = context._replace(rotations=rotations(positions, turns))
        x = self.embedding_dropout(residual(x))
        return scan_layers(
            lambda layer, x, cache: layer(x, context, cache),
            self.layers,
            x,
            caches,
            remat=self.config.remat,
            tags=REMAT_TAGS,
        )

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns the logits [batch, length, vocab] of a residual stream."""
        head = self.token_embedding if self.head is None else self.head
        return project(head, self.final_norm(x))

    def cross_entropy(
        self, x: jax.Array, targets: jax.Array, mask: jax.Array | None, **options: float
    ) -> tuple[Mean, dict[str, Mean]]:
        """Returns `shardlib.losses.cross_entropy` of a residual stream, in `loss_chunks` chunks."""
        if self.config.loss_chunks == 1:
            return cross_entropy(self.logits(x), targets, mask, **options)
        head = self.token_embedding if self.head is None else self.head
        graphdef, weights = nnx.split(head)
        return chunked_cross_entropy(
            lambda weights, x: project(nnx.merge(graphdef, weights), x),
            weights,
            self.final_norm(x),
            targets,
            mask,
            num_chunks=self.config.loss_chunks,
            **options,
        )

    def check_length(self, length: int) -> None:
        """Raises `ModelError` when the model has fewer positions than `length`."""
        longest = self.config.max_positions
        if longest is not None and length > longest:
            raise ModelError(
                f"a sequence of {length} tokens is longer than max_positions={longest}.\n"
                "  Shorten it, or make the model with more positions."
            )


def project(head: Embedding | Linear, x: jax.Array) -> jax.Array:
    """Returns the logits [batch, length, vocab] of a normalised residual stream."""
    x = whole(x)
    logits = head.attend(x) if isinstance(head, Embedding) else head(x)
    return constrain(logits, "batch", "length", "vocab")


def make(config: TransformerConfig, data: DataSpec, rngs: nnx.Rngs) -> Transformer:
    """Returns a new transformer for `data`.

    Raises:
        ModelError: If `validate` finds faults; the message lists all of them.
    """
    faults = validate(config, data)
    if faults:
        raise ModelError("the transformer cannot be made:\n  " + "\n  ".join(faults))
    return Transformer(config, config.vocabulary(data), rngs=rngs)


def loss(
    model: Transformer,
    batch: dict[str, Any],
    rng: jax.Array,
    *,
    train: bool,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Mean, dict[str, Mean]]:
    """Returns the mean loss of the next token, and metrics.

    Args:
        model: A transformer of this step alone: it is put into training or evaluation mode.
        batch: `tokens` and `targets` [batch, length] int32; of packed rows also `segment_ids`
            (0 where there is no target) and `positions`; `num_bytes` [batch] int32 for the bytes of
            text that the targets cover.
        rng: Not used: dropout draws from the model's own streams.
        train: Whether dropout is on.
        label_smoothing: See `shardlib.losses.cross_entropy`.
        z_loss: See `shardlib.losses.cross_entropy`.

    Returns:
        The loss; the metrics `accuracy`, `nll_nats` and, with `num_bytes`, `bits_per_byte`.
    """
    del rng
    if train:
        model.train()
    else:
        model.eval()
    segment_ids = batch.get("segment_ids")
    x = model.residual(batch["tokens"], batch.get("positions"), segment_ids)
    mask = None if segment_ids is None else segment_ids > 0
    mean, metrics = model.cross_entropy(
        x, batch["targets"], mask, label_smoothing=label_smoothing, z_loss=z_loss
    )
    if "num_bytes" in batch:
        num_bytes = jnp.sum(batch["num_bytes"].astype(jnp.float32))
        metrics["bits_per_byte"] = Mean(metrics["nll_nats"].total / math.log(2), num_bytes)
    return mean, metrics


def flops_per_example(config: TransformerConfig, data: DataSpec) -> float:
    """Returns the model FLOPs of one sequence, forward and backward, by the causal convention.

    6 FLOPs for each weight of a matmul (logits included, lookups not) and token, and 12 for each
    pair of positions that causal attention needs, each head and each of its dims: length**2 / 2
    pairs, or fewer with a window. What rematerialisation recomputes is not counted, and neither
    are document borders.

    Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1; Chowdhery et al.
    2022, "PaLM", appendix B, whose attention term counts all pairs, the double of this one.

    Raises:
        ModelError: If the data do not say how long a sequence is.
    """
    length = data.sequence_length
    if length is None:
        raise ModelError(
            "the FLOPs of a sequence depend on its length, which the data do not say.\n"
            "  Give DataSpec(sequence_length=...)."
        )
    heads_size = (config.num_heads + config.kv_heads) * config.head_size
    attention = 2 * config.embed_dim * heads_size
    mlp = (3 if config.mlp == "gated" else 2) * config.embed_dim * config.mlp_size
    weights = config.num_layers * (attention + mlp)
    weights += config.embed_dim * config.vocabulary(data)
    window = min(length, config.window or length)
    pairs = length * window - window**2 / 2
    attended = 12.0 * pairs * config.num_heads * config.head_size * config.num_layers
    return 6.0 * weights * length + attended


FAMILY = ModelFamily(
    config=TransformerConfig,
    inputs="text",
    make=make,
    validate=validate,
    loss=loss,
    flops_per_example=flops_per_example,
    generate=generate,
)
