"""A mixture of experts that names no axes, with dense or sorted dispatch, and its loss."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

VOCAB = 256


class Experts(nnx.Module):
    """Two of some experts for each token.

    `dense` takes as many tokens of each row as an even load needs, by products with one-hot arrays
    (Lepikhin et al. 2020, "GShard", algorithm 1); `sorted` takes all tokens, sorted by expert.
    """

    def __init__(self, dim, hidden, experts, dispatch, rngs):
        self.router = nnx.Linear(dim, experts, use_bias=False, rngs=rngs)
        init = nnx.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        self.up = nnx.Param(init(rngs.params(), (experts, dim, hidden)))
        self.bias = nnx.Param(jnp.zeros((experts, hidden)))
        self.down = nnx.Param(init(rngs.params(), (experts, hidden, dim)))
        self.experts, self.dispatch = experts, dispatch

    def __call__(self, x):
        gates, chosen = lax.top_k(jax.nn.softmax(self.router(x).astype(jnp.float32)), 2)
        return getattr(self, self.dispatch)(x, gates.astype(x.dtype), chosen)

    def dense(self, x, gates, chosen):
        ones = jax.nn.one_hot(chosen, self.experts, dtype=x.dtype)
        at = jnp.cumsum(ones.sum(2), axis=1) - 1
        places = jnp.einsum("bske,bse->bsk", ones, at).astype(jnp.int32)
        ones_of_places = jax.nn.one_hot(places, 2 * x.shape[1] // self.experts, dtype=x.dtype)
        mask = jnp.einsum("bske,bskc->bsec", ones, ones_of_places)
        taken = jnp.einsum("bsec,bsd->becd", mask, x)
        hidden = jnp.einsum("becd,edh->bech", taken, self.up[...])
        hidden = jax.nn.gelu(hidden + self.bias[...].astype(x.dtype)[None, :, None])
        made = jnp.einsum("bech,ehd->becd", hidden, self.down[...])
        weights = jnp.einsum("bsk,bske->bse", gates, ones)
        return jnp.einsum("bsec,becd->bsd", mask * weights[..., None], made)

    def sorted(self, x, gates, chosen):
        rows, by = x.reshape(-1, x.shape[-1]), chosen.reshape(-1)
        order = jnp.argsort(by)
        counts = jnp.bincount(by, length=self.experts)
        hidden = lax.ragged_dot(rows[order // 2], self.up[...], counts)
        hidden = jax.nn.gelu(hidden + self.bias[...].astype(x.dtype)[by[order]])
        made = lax.ragged_dot(hidden, self.down[...], counts) * gates.reshape(-1)[order][:, None]
        return jnp.zeros_like(rows).at[order // 2].add(made).reshape(x.shape)


class Block(nnx.Module):
    def __init__(self, dim, hidden, experts, dispatch, rngs):
        self.mix = nnx.Linear(dim, dim, rngs=rngs)
        self.experts = Experts(dim, hidden, experts, dispatch, rngs)

    def __call__(self, x):
        x = x + jax.nn.silu(self.mix(x))
        return x + self.experts(x)


class MoE(nnx.Module):
    def __init__(self, rngs, *, dim=64, hidden=128, experts=4, dispatch="dense", scanned=False):
        def make(rngs):
            return Block(dim, hidden, experts, dispatch, rngs)

        self.tokens = nnx.Embed(VOCAB, dim, rngs=rngs)
        stacked = nnx.vmap(make, in_axes=0, out_axes=0)
        self.blocks = (
            stacked(rngs.split(2)) if scanned else nnx.List([make(rngs) for _ in range(2)])
        )
        self.head = nnx.Linear(dim, VOCAB, use_bias=False, rngs=rngs)
        self.scanned = scanned

    def __call__(self, tokens):
        x = self.tokens(tokens)
        if self.scanned:
            x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.blocks
            )
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def loss(model, batch):
    with jax.numpy_dtype_promotion("standard"):  # Flax's layers mix dtypes.
        logits = model(batch["tokens"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
