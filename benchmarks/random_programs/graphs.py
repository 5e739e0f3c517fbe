"""Pieces over graphs: nodes [nodes, features] and edges as two columns of node numbers [edges]."""

import jax
import jax.numpy as jnp
from flax import linen


class Messages(linen.Module):
    """A message along every edge, added or the largest taken at its end, and an update."""

    hidden: int
    reduce: str

    @linen.compact
    def __call__(self, nodes, senders, receivers):
        count = nodes.shape[0]
        ends = jnp.concatenate([nodes[senders], nodes[receivers]], axis=-1)
        messages = jnp.tanh(linen.Dense(self.hidden)(ends))
        if self.reduce == "max":
            heard = jax.ops.segment_max(messages, receivers, num_segments=count)
            heard = jnp.where(jnp.isfinite(heard), heard, 0)
        else:
            heard = jax.ops.segment_sum(messages, receivers, num_segments=count)
        both = jnp.concatenate([nodes, heard], axis=-1)
        return linen.LayerNorm()(nodes + jnp.tanh(linen.Dense(nodes.shape[-1])(both)))


class Degrees(linen.Module):
    """The mean over neighbours, after GCN."""

    @linen.compact
    def __call__(self, nodes, senders, receivers):
        count = nodes.shape[0]
        ones = jnp.ones(senders.shape, nodes.dtype)
        degree = jax.ops.segment_sum(ones, receivers, num_segments=count) + 1
        h = linen.Dense(nodes.shape[-1])(nodes)
        heard = jax.ops.segment_sum(h[senders], receivers, num_segments=count)
        return jax.nn.relu((h + heard) / degree[:, None]) + nodes


class Attended(linen.Module):
    """Neighbours weighed by a softmax over the edges of a node, after GAT."""

    heads: int

    @linen.compact
    def __call__(self, nodes, senders, receivers):
        count, width = nodes.shape
        h = linen.DenseGeneral((self.heads, width // self.heads))(nodes)
        score = linen.Dense(1)(jnp.concatenate([h[senders], h[receivers]], axis=-1))
        weight = jnp.exp(jnp.tanh(score))
        total = jax.ops.segment_sum(weight, receivers, num_segments=count)
        share = weight / total[receivers]
        heard = jax.ops.segment_sum(share * h[senders], receivers, num_segments=count)
        return nodes + heard.reshape(count, width)


PIECES = {
    "messages": lambda r: Messages(r.pick(16, 32), r.pick("sum", "sum", "max")),
    "gcn": lambda r: Degrees(),
    "gat": lambda r: Attended(r.pick(2, 4)),
}
"""A function of each piece that draws it: `draw(random) -> module`."""
