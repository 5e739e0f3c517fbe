"""Texts that an encoder reads at once, in a few compiled shapes."""

import functools
from collections.abc import Sequence
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from shardlib.engine.programs import serving_scope
from shardlib.engine.scheduler import EngineStep
from shardlib.engine.servable import Servable
from shardlib.engine.sizes import EncoderShape
from shardlib.errors import ModelError, did_you_mean
from shardlib.hf.pooling import Pooling
from shardlib.registry import Encoding
from shardlib.sharding.constrain import Scope, use


class TextArrays(NamedTuple):
    """Texts of one shape as arrays."""

    tokens: np.ndarray
    """[groups, rows, length] int32, 0 after the end of a text."""
    lengths: np.ndarray
    """[groups, rows] int32; 0 for rows without a text."""


class EncoderPrograms:
    """The programs that embed texts: one for each shape."""

    def __init__(
        self, model: nnx.Module, encoding: Encoding, scope: Scope | None, pooling: Pooling
    ):
        self.name = type(model).__name__
        self._graphdef, self._encoding = nnx.graphdef(model), encoding
        self._scope = scope and serving_scope(scope, nnx.state(model))
        self._pooling: Pooling = pooling
        self._run = jax.jit(self._embedded)
        self.num_traced = 0
        """Programs that have been traced, and so compiled."""

    def run(self, params: nnx.State, arrays: TextArrays) -> jax.Array:
        """Starts a program; returns embeddings of length 1: [groups, rows, embed] float32."""
        return self._run(params, arrays)

    def _embedded(self, params: nnx.State, arrays: TextArrays) -> jax.Array:
        self.num_traced += 1
        model, scope = nnx.merge(self._graphdef, params), self._scope
        groups, rows, length = arrays.tokens.shape
        tokens = jnp.asarray(arrays.tokens).reshape(-1, length)
        lengths = jnp.asarray(arrays.lengths).reshape(-1)
        segment_ids = (jnp.arange(length)[None] < lengths[:, None]).astype(jnp.int32)
        run = functools.partial(self._encoding.hidden, model, tokens, segment_ids)
        if scope is None:
            return pooled(run(), lengths, self._pooling).reshape(groups, rows, -1)
        with use(scope.mesh, scope.rules):
            vectors = pooled(run(), lengths, self._pooling).reshape(groups, rows, -1)
            # Every process reads them.
            return jax.lax.with_sharding_constraint(vectors, NamedSharding(scope.mesh, P()))


def pooled(
    hidden: Float[Array, "texts length embed"], lengths: Int[Array, " texts"], pooling: Pooling
) -> Float[Array, "texts embed"]:
    """Returns the embeddings of texts, float32 vectors of length 1; 0 for a text without tokens.

    Source: Reimers and Gurevych 2019, "Sentence-BERT: Sentence Embeddings using Siamese
    BERT-Networks", section 3.

    Args:
        hidden: The outputs of an encoder, in any floating-point dtype.
        lengths: The tokens of each text.
        pooling: How they become one vector.
    """
    x = hidden.astype(jnp.float32)
    is_text = (jnp.arange(x.shape[1])[None] < lengths[:, None])[..., None]
    if pooling == "cls":
        found = jnp.where(is_text[:, 0], x[:, 0], 0.0)
    elif pooling == "max":
        found = jnp.where(is_text[:, :1], jnp.where(is_text, x, -jnp.inf), 0.0).max(axis=1)
    else:
        # The sum has the direction of the mean.
        found = jnp.sum(jnp.where(is_text, x, 0.0), axis=1)
    sizes = jnp.linalg.norm(found, axis=-1, keepdims=True)
    return found / jnp.maximum(sizes, jnp.finfo(jnp.float32).tiny)


def opened_encoder(
    servable: Servable, model: nnx.Module, encoding: Encoding | None, pooling: Pooling | None
) -> EncoderPrograms | None:
    """Returns the programs of a model as it is served; None without an encoder.

    Raises:
        ModelError: If there is no such pooling, or the folder has one that shardlib lacks.
    """
    if encoding is None:
        return None
    said = None if pooling is not None else getattr(servable, "pooling", None)
    # As sentence-transformers pools the outputs of models without a word about it.
    chosen: Pooling = pooling or (said and said.kind) or "mean"
    known = get_args(Pooling)
    if chosen not in known:
        raise ModelError(
            f"pooling is {chosen!r}.{did_you_mean(chosen, known)}\n"
            f"  Use one of: {', '.join(known)}."
        )
    return EncoderPrograms(model, encoding, servable.scope, chosen)


def longest_text(servable: Servable, encoding: Encoding | None) -> int | None:
    """Returns the most tokens of a text that the folder of an encoder says; None for all that the
    model has."""
    if encoding is None or (said := getattr(servable, "pooling", None)) is None:
        return None
    longest = encoding.max_length(servable.config)
    return min((n for n in (said.max_length, longest) if n is not None), default=None)


def text_arrays(step: EngineStep, shapes: Sequence[EncoderShape]) -> TextArrays:
    """Returns the texts of a step as arrays of the shape of all of them."""
    longest = max(len(text.tokens) for group in step.groups for text in group.texts)
    shape = next(one for one in shapes if one.length >= longest)
    arrays = empty_texts(shape, len(step.groups))
    for number, group in enumerate(step.groups):
        for row, text in enumerate(group.texts):
            arrays.tokens[number, row, : len(text.tokens)] = text.tokens
            arrays.lengths[number, row] = len(text.tokens)
    return arrays


def empty_texts(shape: EncoderShape, groups: int) -> TextArrays:
    """Returns arrays of a shape without texts."""
    tokens = np.zeros((groups, *shape), np.int32)
    return TextArrays(tokens, np.zeros((groups, shape.rows), np.int32))
