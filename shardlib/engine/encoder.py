"""Texts that an encoder reads at once, in a few compiled shapes."""

import contextlib
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from shardlib.engine.programs import serving_scope
from shardlib.engine.servable import Servable
from shardlib.engine.sizes import EncoderShape, EngineSizes
from shardlib.engine.steps import EngineStep
from shardlib.errors import ModelError, did_you_mean
from shardlib.hf.pooling import Pooling, TextPooling
from shardlib.nn.attention import Pages, write_texts
from shardlib.registry import ModelFamily
from shardlib.sharding.constrain import Scope, use


class TextArrays(NamedTuple):
    """Texts of one shape as arrays."""

    tokens: np.ndarray
    """[groups, rows, length] int32, 0 after the end of a text."""
    lengths: np.ndarray
    """[groups, rows] int32; 0 for rows without a text."""
    tables: np.ndarray
    """The pages of the sequence of each text: [groups, rows, pages_a_row] int32."""


class EncoderPrograms:
    """The programs that encode texts: one for each shape."""

    def __init__(self, model: nnx.Module, family: ModelFamily, scope: Scope | None, pool: Pooling):
        self._graphdef, self._family = nnx.graphdef(model), family
        self._scope = scope and serving_scope(scope, nnx.state(model))
        self._pooling: Pooling = pool
        self._embed, self._write = jax.jit(self._embedded), jax.jit(self._written, donate_argnums=1)
        self.num_traced = 0
        """Programs that have been traced, and so compiled."""

    def run(
        self, params: nnx.State, pages: tuple[Pages, ...], arrays: TextArrays
    ) -> tuple[tuple[Pages, ...], jax.Array | None]:
        """Starts a program.

        Of a model with a decoder it returns the pages, which are donated, with the keys and values
        of texts, and None. Of others it returns the pages as they are, and embeddings of length 1:
        [groups, rows, embed] float32.
        """
        if self._family.decoding is None:
            return pages, self._embed(params, arrays)
        return self._write(params, pages, arrays), None

    def _embedded(self, params: nnx.State, arrays: TextArrays) -> jax.Array:
        with self._scoped():
            _, hidden, lengths = self._hidden(params, arrays)
            vectors = pooled(hidden, lengths, self._pooling)
            vectors = vectors.reshape(*arrays.lengths.shape, -1)
            if self._scope is None:
                return vectors
            # Every process reads them.
            whole = NamedSharding(self._scope.mesh, P())
            return jax.lax.with_sharding_constraint(vectors, whole)

    def _written(
        self, params: nnx.State, pages: tuple[Pages, ...], arrays: TextArrays
    ) -> tuple[Pages, ...]:
        decoding = self._family.decoding
        assert decoding is not None
        assert decoding.keys_of_text is not None
        with self._scoped():
            model, hidden, _ = self._hidden(params, arrays)
            shape = arrays.tokens.shape
            where = jnp.asarray(arrays.tables), jnp.asarray(arrays.lengths)
            written = []
            for one, pair in zip(pages, decoding.keys_of_text(model, hidden), strict=True):
                key, value = (x.reshape(x.shape[0], *shape, *x.shape[3:]) for x in pair)
                written.append(write_texts(one, key, value, *where))
            return tuple(written)

    def _hidden(
        self, params: nnx.State, arrays: TextArrays
    ) -> tuple[nnx.Module, jax.Array, jax.Array]:
        """Returns the model, its outputs [groups * rows, length, embed], and the lengths."""
        self.num_traced += 1
        assert self._family.encoding is not None
        model, length = nnx.merge(self._graphdef, params), arrays.tokens.shape[-1]
        tokens = jnp.asarray(arrays.tokens).reshape(-1, length)
        lengths = jnp.asarray(arrays.lengths).reshape(-1)
        segment_ids = (jnp.arange(length)[None] < lengths[:, None]).astype(jnp.int32)
        return model, self._family.encoding.hidden(model, tokens, segment_ids), lengths

    def _scoped(self) -> contextlib.AbstractContextManager[Any]:
        scope = self._scope
        return contextlib.nullcontext() if scope is None else use(scope.mesh, scope.rules)


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
    servable: Servable, model: nnx.Module, pooling: Pooling | None
) -> EncoderPrograms | None:
    """Returns the programs of a model as it is served; None without an encoder.

    Raises:
        ModelError: If there is no such pooling, or the folder has one that shardlib lacks.
    """
    if servable.family.encoding is None:
        return None
    said = None if pooling is not None else said_of(servable)
    if said is not None and said.unknown is not None:
        raise ModelError(
            f"{said.unknown}\n"
            "  Choose another model, or pool all tokens: pooling='mean' (--pooling mean)."
        )
    # As sentence-transformers pools the outputs of models without a word about it.
    chosen: Pooling = pooling or (said and said.kind) or "mean"
    known = get_args(Pooling)
    if chosen not in known:
        raise ModelError(
            f"pooling is {chosen!r}.{did_you_mean(chosen, known)}\n"
            f"  Use one of: {', '.join(known)}."
        )
    return EncoderPrograms(model, servable.family, servable.scope, chosen)


def said_of(servable: Servable) -> TextPooling | None:
    """Returns what the folder of an encoder says about embeddings; None of other models."""
    family = servable.family
    if family.encoding is None or family.decoding is not None:
        return None
    return getattr(servable, "pooling", None)


def longest_text(servable: Servable) -> int | None:
    """Returns the most tokens of a text that the folder of an encoder says; None for all that the
    model has."""
    encoding, said = servable.family.encoding, said_of(servable)
    if encoding is None or said is None:
        return None
    longest = encoding.max_length(servable.config)
    return min((n for n in (said.max_length, longest) if n is not None), default=None)


def text_arrays(step: EngineStep, sizes: EngineSizes) -> TextArrays:
    """Returns the texts of a step as arrays of the shape of all of them."""
    longest = max(len(text.tokens) for group in step.groups for text in group.texts)
    shape = next(one for one in sizes.encoder_shapes if one.length >= longest)
    arrays = empty_texts(shape, sizes)
    for number, group in enumerate(step.groups):
        for row, text in enumerate(group.texts):
            arrays.tokens[number, row, : len(text.tokens)] = text.tokens
            arrays.lengths[number, row] = len(text.tokens)
            arrays.tables[number, row, : len(text.pages)] = text.pages
    return arrays


def empty_texts(shape: EncoderShape, sizes: EngineSizes) -> TextArrays:
    """Returns arrays of a shape without texts."""
    rows = sizes.groups, shape.rows
    return TextArrays(
        np.zeros((*rows, shape.length), np.int32),
        np.zeros(rows, np.int32),
        np.zeros((*rows, sizes.pages_a_row), np.int32),
    )
