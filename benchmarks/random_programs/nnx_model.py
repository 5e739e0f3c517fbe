"""NNX models: stacked layers under `nnx.scan`, batch norm, dropout and convolutions."""

import jax
import jax.numpy as jnp
from flax import nnx

from random_programs.draws import Random


class Layer(nnx.Module):
    """A residual layer; many of them are stacked."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Stack(nnx.Module):
    """Layers whose parameters are stacked, under scan and rematerialised where asked for."""

    def __init__(self, width: int, depth: int, remat: bool, rngs: nnx.Rngs):
        make = nnx.vmap(lambda rngs: Layer(width, rngs), in_axes=0, out_axes=0)
        self.layers, self.remat = make(rngs.split(depth)), remat

    def __call__(self, x: jax.Array) -> jax.Array:
        def apply(x: jax.Array, layer: Layer) -> jax.Array:
            return layer(x)

        body = nnx.remat(apply) if self.remat else apply
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class NormalizedDense(nnx.Module):
    """Linear layers with batch norm and dropout between them."""

    def __init__(self, width: int, depth: int, rngs: nnx.Rngs):
        self.linears = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])
        self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs) for _ in range(depth)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = self.dropout(jax.nn.relu(norm(linear(x))))
        return x


class Attended(nnx.Module):
    """NNX's multi-head attention between the rows of a sequence."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.attend = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.attend(x)


class Model(nnx.Module):
    """A layer that reads the input, pieces, and a head for each of two outputs."""

    def __init__(self, features: int, width: int, pieces: list[nnx.Module], rngs: nnx.Rngs):
        self.read = nnx.Linear(features, width, rngs=rngs)
        self.pieces = nnx.List(pieces)
        self.heads = nnx.List([nnx.Linear(width, out, rngs=rngs) for out in (8, 16)])

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        x = self.read(x)
        for piece in self.pieces:
            x = piece(x)
        return tuple(head(jnp.tanh(x)) for head in self.heads)


PIECES = {
    "nnx_scan": lambda r: (Stack, r.pick(2, 4), r.pick(True, False)),
    "nnx_batch_norm": lambda r: (NormalizedDense, r.pick(1, 2, 3)),
    "nnx_attention": lambda r: (Attended, r.pick(2, 4)),
}
"""A function of each piece that draws it, as its class and arguments after the width."""


def draw_nnx(names: tuple[str, ...], features: int, random: Random):
    """Returns `make(rngs)` of a model of these pieces."""
    width = random.pick(16, 16, 32)
    drawn = [PIECES[name](random) for name in names]

    def make(rngs: nnx.Rngs) -> Model:
        pieces = [kind(width, *options, rngs=rngs) for kind, *options in drawn]
        return Model(features, width, pieces, rngs)

    return make
