"""Every expert on every token: the oracle for dispatch."""

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.nn.moe import ExpertWeights, route

EXPERTS, EMBED, MLP = 8, 16, 12

# Rounding moves scores by some 1e-7. Choices of tokens whose scores lie further apart than this
# are the same on every mesh.
MARGIN = 1e-4


def expert_weights(seed=0, num=EXPERTS):
    shapes = [(EMBED, MLP), (EMBED, MLP), (MLP, EMBED), (MLP,), (MLP,), (EMBED,)]
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    draw = jax.random.normal
    return ExpertWeights(*(0.3 * draw(k, (num, *s)) for k, s in zip(keys, shapes, strict=True)))


def tokens_and_routing(batch, length, k=2):
    """Returns tokens [batch, length, embed], logits of a random router, and a mask with padding.

    They are the first, by seed, without a near tie.
    """
    seed = 0
    while True:
        keys = jax.random.split(jax.random.key(seed), 2)
        x = jax.random.normal(keys[0], (batch, length, EMBED))
        logits = x @ (0.5 * jax.random.normal(keys[1], (EMBED, EXPERTS)))
        if margin(jax.nn.softmax(logits, axis=-1), k) > MARGIN:
            break
        seed += 1
    mask = np.ones((batch, length), bool)
    mask[:, -2:] = False
    mask[1] = False
    return x, logits, jnp.asarray(mask)


def margin(scores, k):
    """The least distance between scores of neighbouring rank, down to the first not chosen."""
    ranked = np.sort(np.asarray(scores), axis=-1)[..., ::-1]
    return (ranked[..., :k] - ranked[..., 1 : k + 1]).min()


def dense(x, logits, weights, mask, kept=None, k=2):
    """Returns sums over all experts, whose weights are 0 for those not chosen or not kept."""
    routing = route(logits, k)
    by = routing.weights if kept is None else jnp.where(kept, routing.weights, 0.0)
    chosen = jax.nn.one_hot(routing.experts, weights.gate.shape[0], dtype=jnp.float32)
    by = jnp.sum(chosen * by[..., None], axis=2) * mask[..., None].astype(jnp.float32)
    gate = jnp.einsum("bld,edm->blem", x, weights.gate) + weights.gate_bias[None, None]
    up = jnp.einsum("bld,edm->blem", x, weights.up) + weights.up_bias[None, None]
    each = jnp.einsum("blem,emd->bled", jax.nn.silu(gate) * up, weights.down)
    each = each + weights.down_bias[None, None]
    return jnp.sum(each * by[..., None], axis=2)


def kept_by_loop(experts, mask, places):
    """Which copies get a place: row by row, first choices first, earlier tokens first."""
    experts, mask = np.asarray(experts), np.asarray(mask)
    batch, _, k = experts.shape
    kept = np.zeros(experts.shape, bool)
    for row in range(batch):
        taken = np.zeros(EXPERTS, int)
        for choice in range(k):
            for token in np.flatnonzero(mask[row]):
                expert = experts[row, token, choice]
                kept[row, token, choice] = taken[expert] < places
                taken[expert] += 1
    return kept
