"""A transformer that names no axes, unrolled or scanned, and its loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib as sl

VOCAB, LENGTH = 512, 32


class Block(nnx.Module):
    def __init__(self, dim, heads, rngs):
        self.heads = heads
        self.norms = nnx.List([nnx.RMSNorm(dim, rngs=rngs) for _ in range(2)])
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nnx.Linear(dim, dim, use_bias=False, rngs=rngs))
        self.up = nnx.Linear(dim, 4 * dim, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, use_bias=False, rngs=rngs)

    def __call__(self, x):
        y = self.norms[0](x)
        parts = [part(y) for part in (self.query, self.key, self.value)]
        query, key, value = (p.reshape(*p.shape[:2], self.heads, -1) for p in parts)
        scores = jnp.einsum("blhd,bmhd->bhlm", query, key)
        mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), value)
        x = x + self.out(mixed.reshape(*x.shape))
        return x + self.down(jax.nn.silu(self.up(self.norms[1](x))))


class LM(nnx.Module):
    def __init__(self, rngs, *, layers=2, dim=128, heads=4, scanned=False):
        self.tokens = nnx.Embed(VOCAB, dim, rngs=rngs)
        if scanned:
            make = nnx.vmap(lambda keys: Block(dim, heads, keys), in_axes=0, out_axes=0)
            self.blocks = make(rngs.split(layers))
        else:
            self.blocks = nnx.List([Block(dim, heads, rngs) for _ in range(layers)])
        self.scanned = scanned
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.head = nnx.Linear(dim, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens)
        if self.scanned:
            x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.blocks
            )
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


class Recomputed(LM):
    """Keeps the input of each layer alone."""

    def __call__(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return self.head(self.norm(x))


def run_layer(block, x, _):
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix dtypes.
        return block(x), None


class Stacked(LM):
    """Runs its layers with `scan_layers`, and names nothing."""

    def __init__(self, rngs, *, layers=4, dim=128, heads=4):
        super().__init__(rngs, layers=1, dim=dim, heads=heads)
        self.blocks = sl.stack_layers(lambda rngs: Block(dim, heads, rngs), layers, rngs)

    def hidden(self, tokens):
        return sl.scan_layers(run_layer, self.blocks, self.tokens(tokens))[0]

    def __call__(self, tokens):
        return self.head(self.norm(self.hidden(tokens)))


def loss(model, batch):
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix dtypes.
        logits = model(batch["tokens"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def shapes(rows, length=LENGTH):
    """Returns the shapes of a batch."""
    return dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((rows, length), jnp.int32))


def batch(rows, length=LENGTH):
    draws = np.random.default_rng(0)
    return {
        name: draws.integers(0, VOCAB, (rows, length), np.int32) for name in ("tokens", "targets")
    }
