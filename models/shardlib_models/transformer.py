"""A decoder-only transformer whose layers are stacked and scanned."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.errors import ModelError
from shardlib.functional import axis_names_of
from shardlib.losses import Mean, chunked_cross_entropy, cross_entropy
from shardlib.nn import remat
from shardlib.nn.attention import Order, frequencies, rotations, zigzag
from shardlib.nn.attention import positions as row_positions
from shardlib.nn.moe import RouterStats
from shardlib.nn.stack import scan_layers, stack_layers
from shardlib.registry import TEXT, DataSpec, ModelFamily
from shardlib.sharding.constrain import constrain
from shardlib_models import moe
from shardlib_models.layers import Embedding, Linear, dropout, read_by_head, residual, whole
from shardlib_models.sizes import SIZES
from shardlib_models.transformer_attention import Cache, Context, norm_of
from shardlib_models.transformer_block import Block
from shardlib_models.transformer_config import TransformerConfig, validate
from shardlib_models.transformer_decode import generate
from shardlib_models.transformer_facts import choices, dims, plan
from shardlib_models.transformer_pages import DECODING


class Transformer(nnx.Module):
    """A transformer from tokens to the logits of the next token."""

    def __init__(self, config: TransformerConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config = config
        self.vocab_size = vocab_size
        width, stddev = config.embed_dim, config.init_stddev
        options = {"stddev": stddev, "rngs": rngs}
        projected = config.token_size != width
        axis = "token_dim" if projected else "embed"
        token = {axis: config.token_size}
        self.token_embedding = Embedding(
            vocab_size, config.token_size, "vocab", width=axis, **options
        )
        learned = config.positions == "learned" and (config.max_positions or 0)
        rows = learned + config.position_offset
        self.position_embedding = (
            Embedding(rows, width, "positions", **options) if learned else None
        )
        dense = config.num_dense_layers
        self.dense_layers = nnx.data(None)
        if dense:
            plain = dataclasses.replace(config, moe=None)
            self.dense_layers = stack_layers(
                lambda rngs: Block(plain, rngs=rngs), dense, rngs, axis_name="dense_layers"
            )
        self.layers = stack_layers(
            lambda rngs: Block(config, rngs=rngs), config.num_layers - dense, rngs
        )
        self.final_norm = None if config.block == "post" else norm_of(config, width)
        self.project_in = Linear(token, {"embed": width}, **options) if projected else None
        self.project_out = Linear({"embed": width}, token, **options) if projected else None
        biased = {"bias": config.head_bias, **options}
        tied = config.tied_embeddings
        self.head = None if tied else Linear(token, {"vocab": vocab_size}, **biased)
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
        return self.logits(self.residual(tokens, positions, segment_ids)[0])

    def residual(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        order: Order = "contiguous",
    ) -> tuple[jax.Array, RouterStats | None]:
        """Returns the last residual stream [batch, length, embed], and the router statistics; see
        `__call__`.

        With `order="zigzag"`, all arrays are already reordered by `zigzag` along length, including
        positions.
        """
        self.check_length(tokens.shape[1])
        if positions is None:
            positions = jnp.broadcast_to(row_positions(tokens.shape[1], order), tokens.shape)
        x, stats, _ = self.hidden(tokens, positions, Context(segment_ids=segment_ids, order=order))
        return x, stats

    def hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        context: Context,
        caches: tuple[Cache, ...] | None = None,
    ) -> tuple[jax.Array, RouterStats | None, tuple[Cache, ...] | None]:
        """Returns the last residual stream [batch, length, embed], the router statistics summed
        over layers, and the caches of all layers, one for each stack."""
        config = self.config
        x = self.token_embedding(tokens)
        if config.embed_factor != 1.0:
            # Rounded to the dtype of the embeddings, as Gemma was trained.
            x = x * jnp.asarray(config.embed_factor, x.dtype)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions + config.position_offset)
        else:
            length = context.max_length or tokens.shape[1]
            context = with_rotations(context, config, positions, length)

        def call(layer: Block, carry: tuple[Any, Any, Any], inputs: Any) -> tuple[Any, None]:
            x, stats, cache = carry
            x, of_layer, cache = layer(x, context.of_layer(*inputs), cache)
            return (x, stats if of_layer is None else stats + of_layer, cache), None

        x = self.embedding_dropout(residual(x))
        stats = None if config.moe is None else RouterStats.zeros()
        dense, total, tags = config.num_dense_layers, config.num_layers, config.remat_tags
        *first, last = caches or (None,)
        earlier = first[0] if first else None
        policy = config.remat
        if self.dense_layers is not None:
            inputs = per_layer(config, range(dense), earlier is not None)
            policy = remat.part_of(config.remat, total, 0, dense)
            carry = x, stats, earlier
            (x, stats, earlier), _ = scan_layers(
                call, self.dense_layers, carry, inputs, remat=policy, tags=tags, staged=False
            )
            policy = remat.part_of(config.remat, total, dense, total)
        inputs = per_layer(config, range(dense, total), last is not None)
        carry = x, stats, last
        (x, stats, last), _ = scan_layers(call, self.layers, carry, inputs, remat=policy, tags=tags)
        made = (cache for cache in (earlier, last) if cache is not None)
        return x, stats, None if caches is None else tuple(made)

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns the logits [batch, length, vocab] of a residual stream."""
        return project(self._logit_head, read_by_head(self.normed(x)), *self._logit_options())

    @property
    def _logit_head(self) -> Embedding | Linear:
        return self.token_embedding if self.head is None else self.head

    def _logit_options(self) -> tuple[float | None, float]:
        return self.config.logit_softcap, self.config.logit_divisor

    def normed(self, x: jax.Array) -> jax.Array:
        """Returns the input of the head [batch, length, embed] for a residual stream."""
        x = x if self.final_norm is None else self.final_norm(x)
        return x if self.project_out is None else self.project_out(x)

    def cross_entropy(
        self, x: jax.Array, targets: jax.Array, mask: jax.Array | None, **options: float
    ) -> tuple[Mean, dict[str, Mean]]:
        """Returns `shardlib.losses.cross_entropy` of a residual stream, in `loss_chunks` chunks."""
        if self.config.loss_chunks == 1:
            return cross_entropy(self.logits(x), targets, mask, **options)
        graphdef, weights = nnx.split(self._logit_head)
        return chunked_cross_entropy(
            lambda weights, x: project(
                nnx.merge(graphdef, weights), whole(x), *self._logit_options()
            ),
            weights,
            whole(self.normed(x)),
            targets,
            mask,
            axes=jax.tree.map(_axes, weights, is_leaf=lambda node: isinstance(node, nnx.Variable)),
            num_chunks=self.config.loss_chunks,
            **options,
        )

    def check_length(self, length: int) -> None:
        """Raises `ModelError` if the model has fewer positions than `length`."""
        longest = self.config.max_positions
        if longest is not None and length > longest:
            raise ModelError(
                f"a sequence of {length} tokens is longer than max_positions={longest}.\n"
                "  Shorten it, or make the model with more positions."
            )


def per_layer(
    config: TransformerConfig, layers: range, cached: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns whether each layer has the window (None if all or none have), and its index in the
    cache of its stack (None without a cache)."""
    is_local = None
    if config.global_every is not None:
        is_local = jnp.asarray([config.is_local[layer] for layer in layers])
    return is_local, jnp.arange(len(layers), dtype=jnp.int32) if cached else None


def with_rotations(
    context: Context, config: TransformerConfig, positions: jax.Array, length: int
) -> Context:
    """Adds the rotations at `positions` [batch, length] int32 in rows of `length` tokens."""
    scaling = config.rope_scaling
    turns = frequencies(config.rotary_size, config.rope_theta, scaling, length=length)
    amplitude = 1.0 if scaling is None else scaling.amplitude
    context = context._replace(rotations=rotations(positions, turns, amplitude))
    if config.local_rope_theta is None:
        return context
    turns = frequencies(config.rotary_size, config.local_rope_theta)
    return context._replace(local_rotations=rotations(positions, turns))


def project(
    head: Embedding | Linear, x: jax.Array, softcap: float | None = None, divisor: float = 1.0
) -> jax.Array:
    """Returns the logits [batch, length, vocab] of a normalised residual stream, placed whole."""
    logits = head.attend(x) if isinstance(head, Embedding) else head(x)
    if divisor != 1.0:
        logits = logits / divisor
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    return constrain(logits, "batch", "length", "vocab")


def _axes(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Returns the logical axes of a variable, None for each dim without."""
    rank = jnp.ndim(variable.get_value())
    return axis_names_of(variable.get_metadata().get("out_sharding"), rank) or (None,) * rank


def make(config: TransformerConfig, data: DataSpec, rngs: nnx.Rngs) -> Transformer:
    """Returns a new transformer for `data`.

    Raises:
        ModelError: If `validate` finds faults; the message lists all of them.
    """
    faults = validate(config, data)
    if faults:
        raise ModelError("the transformer cannot be made:\n  " + "\n  ".join(faults))
    size = config.vocabulary(data)
    return Transformer(dataclasses.replace(config, vocab_size=size), size, rngs=rngs)


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
        model: A transformer for this step alone: it is put into training or evaluation mode.
        batch: `tokens` and `targets` [batch, length] int32; for packed rows also `segment_ids`
            (0 at positions without a target) and `positions`; `loss_mask` (0 at targets that the
            loss ignores); `num_bytes` [batch] int32 for the
            bytes of text that the targets cover.
        rng: Not used: dropout draws from the model's own streams.
        train: Whether dropout is on.
        label_smoothing: See `shardlib.losses.cross_entropy`.
        z_loss: See `shardlib.losses.cross_entropy`.

    Returns:
        The loss, and the metrics `accuracy`, `nll_nats` and, with `num_bytes`, `bits_per_byte`. A
        model with experts adds the metrics of `shardlib.nn.moe.router_losses`, whose losses are
        part of the loss if `train` is set.

    If devices share rows over the mesh axis `context`, the positions are reordered as
    `plan_context` says: the loss is a sum over them.
    """
    del rng
    if train:
        model.train()
    else:
        model.eval()
    rows, order = _rows(model.config, batch)
    segment_ids = rows["segment_ids"]
    x, stats = model.residual(rows["tokens"], rows["positions"], segment_ids, order)
    mask = None if segment_ids is None else segment_ids > 0
    if rows["loss_mask"] is not None:
        learned = rows["loss_mask"] > 0
        mask = learned if mask is None else mask & learned
    mean, metrics = model.cross_entropy(
        x, rows["targets"], mask, label_smoothing=label_smoothing, z_loss=z_loss
    )
    if stats is not None:
        mean, of_routers = _with_routers(mean, stats, model.config, train)
        metrics |= of_routers
    if "num_bytes" in batch:
        num_bytes = jnp.sum(batch["num_bytes"].astype(jnp.float32))
        metrics["bits_per_byte"] = Mean(metrics["nll_nats"].total / math.log(2), num_bytes)
    return mean, metrics


def _rows(config: TransformerConfig, batch: dict[str, Any]) -> tuple[dict[str, Any], Order]:
    """Returns the rows of a batch, in the order that suits the mesh."""
    names = ("tokens", "targets", "positions", "segment_ids", "loss_mask")
    rows = {name: batch.get(name) for name in names}
    order = plan(config, batch["tokens"].shape[1]).order
    if order == "zigzag":
        rows = {name: None if row is None else zigzag(row) for name, row in rows.items()}
    return rows, order


def _with_routers(
    mean: Mean, stats: RouterStats, config: TransformerConfig, train: bool
) -> tuple[Mean, dict[str, Mean]]:
    """Adds the router losses, which only help training, to the loss."""
    assert config.moe is not None
    added, metrics = moe.losses(stats, config.moe, config.num_layers)
    return Mean(mean.total + added * mean.weight, mean.weight) if train else mean, metrics


FAMILY = ModelFamily(
    config=TransformerConfig,
    inputs=TEXT,
    make=make,
    validate=validate,
    loss=loss,
    generate=generate,
    decoding=DECODING,
    choices=choices,
    dims=dims,
    sizes=SIZES,
    architectures={
        "DeepseekV2ForCausalLM": "shardlib_models.hf.deepseek:DEEPSEEK_V2",
        "DeepseekV3ForCausalLM": "shardlib_models.hf.deepseek:DEEPSEEK_V3",
        "GPT2LMHeadModel": "shardlib_models.hf.gpt2:GPT2",
        "GPTJForCausalLM": "shardlib_models.hf.gptj:GPTJ",
        "GPTNeoXForCausalLM": "shardlib_models.hf.gpt_neox:NEOX",
        "Gemma2ForCausalLM": "shardlib_models.hf.gemma:GEMMA2",
        "Gemma3ForCausalLM": "shardlib_models.hf.gemma:GEMMA3",
        "GemmaForCausalLM": "shardlib_models.hf.gemma:GEMMA",
        "GptOssForCausalLM": "shardlib_models.hf.gpt_oss:GPT_OSS",
        "LlamaForCausalLM": "shardlib_models.hf.llama:LLAMA",
        "MistralForCausalLM": "shardlib_models.hf.llama:MISTRAL",
        "MixtralForCausalLM": "shardlib_models.hf.llama:MIXTRAL",
        "OPTForCausalLM": "shardlib_models.hf.opt:OPT",
        "Phi3ForCausalLM": "shardlib_models.hf.phi3:PHI3",
        "Qwen2ForCausalLM": "shardlib_models.hf.llama:QWEN2",
        "Qwen2MoeForCausalLM": "shardlib_models.hf.qwen_moe:QWEN2_MOE",
        "Qwen3ForCausalLM": "shardlib_models.hf.llama:QWEN3",
        "Qwen3MoeForCausalLM": "shardlib_models.hf.qwen_moe:QWEN3_MOE",
        "StableLmForCausalLM": "shardlib_models.hf.stablelm:STABLELM",
        # After Llama, which it can express too: an export takes the first that can.
        "GraniteForCausalLM": "shardlib_models.hf.granite:GRANITE",
    },
)
