"""Models made of random pieces: something that reads the input, pieces, and heads."""

from typing import Any

import jax
from flax import linen

from random_programs import dense, experts, graphs, images, nnx_model, tokens
from random_programs.draws import Random


class Model(linen.Module):
    """Reads the input, applies the pieces in turn, and returns what each head makes of the last.

    With `tied` a further head multiplies by the transposed embedding. What is called with more than
    one array passes the others on to each piece.
    """

    read: linen.Module
    pieces: tuple[linen.Module, ...]
    heads: tuple[linen.Module, ...]
    tied: bool = False

    def __call__(self, x: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
        x = self.read(x)
        for piece in self.pieces:
            x = piece(x, *others)
        outputs = tuple(head(x) for head in self.heads)
        return (*outputs, self.read.attend(x)) if self.tied else outputs


class Flat(linen.Module):
    """A head over everything that a sample holds, or over its mean."""

    features: int
    mean: bool

    @linen.compact
    def __call__(self, x):
        if x.ndim > 2:
            inner = tuple(range(1, x.ndim - 1))
            x = x.mean(inner) if self.mean else x.reshape(x.shape[0], -1)
        return linen.Dense(self.features)(x)


KINDS: dict[str, tuple[str, ...]] = {
    "dense": (*dense.PIECES, "square", "square", "residual", "norm_chain"),
    "tokens": (*tokens.PIECES, *experts.PIECES, *dense.PIECES),
    "recurrent": ("recurrent", "recurrent", "recurrent", "residual", "chain", "dynamic_slice"),
    "attention": ("attention", "gqa", "fused_attention", "residual", "gated", "scan"),
    "experts": (*experts.PIECES, "dense_experts", "residual", "attention"),
    "scans": (
        *("state_space", "state_space", "state_space", "pool1d", "pool1d"),
        *("cumsum_tokens", "conv1d", "convolve", "crop", "dynamic_slice"),
    ),
    "images": tuple(images.PIECES),
    "graph": tuple(graphs.PIECES),
    "nnx": tuple(nnx_model.PIECES),
}
"""The pieces that a model of each kind is drawn from."""

_DRAWS = tokens.PIECES | experts.PIECES | dense.PIECES | images.PIECES | graphs.PIECES


def draw_model(kind: str, random: Random) -> tuple[Any, tuple[Any, ...], tuple[str, ...]]:
    """Returns a model of a kind, a batch of its inputs, and the names of its pieces.

    The model is a linen module, or for the kind `nnx` a function `make(rngs)`.

    The first dim of every input is cut over the batch's mesh axes: samples, or nodes and edges.
    """
    names = tuple(random.pick(*KINDS[kind]) for _ in range(random.pick(1, 2, 2, 3, 3, 4)))
    names = _without_repeats(names, "crop", "top_tokens", "pool", "conv_transpose")
    if kind == "nnx":
        inputs: tuple[Any, ...] = (random.normal(random.pick(8, 16, 32), 8, 16),)
        return nnx_model.draw_nnx(names, 16, random), inputs, names
    pieces = tuple(_DRAWS[name](random) for name in names)
    rows, width = random.pick(8, 16, 16, 32), random.pick(16, 16, 32)
    read: linen.Module = linen.Dense(width)
    if kind == "dense":
        inputs = (random.normal(rows, random.pick(8, 16, 32)),)
    elif kind == "images":
        side, channels = random.pick(8, 8, 16), random.pick(1, 3, 4, 8)
        inputs = (random.normal(rows, side, side, channels),)
        read = linen.Conv(random.pick(8, 16), (3, 3))
    elif kind == "graph":
        edges = 4 * rows
        inputs = (random.normal(rows, 8), random.below(rows, edges), random.below(rows, edges))
    elif random.chance(0.5):
        symbols = random.pick(32, 64)
        inputs = (random.below(symbols, rows, random.pick(8, 16)),)
        read = linen.Embed(symbols, width, embedding_init=linen.initializers.normal(1.0))
    else:
        inputs = (random.normal(rows, random.pick(8, 16), 8),)
    tied = isinstance(read, linen.Embed) and random.chance(0.4)
    return Model(read, pieces, _draw_heads(random), tied), inputs, names


def _draw_heads(random: Random) -> tuple[linen.Module, ...]:
    def head() -> linen.Module:
        features = random.pick(8, 16, 32)
        return random.pick(linen.Dense(features), Flat(features, True), Flat(features, False))

    return tuple(head() for _ in range(random.pick(1, 1, 1, 2, 3)))


def _without_repeats(names: tuple[str, ...], *once: str) -> tuple[str, ...]:
    """Drops a second piece of those that make the input shorter or larger."""
    return tuple(n for i, n in enumerate(names) if n not in once or n not in names[:i])
