"""Router statistics as sums, additive over layers, microbatches and groups of devices."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from shardlib.losses import Mean
from shardlib.nn.moe.routing import Routing

# An exact factor that keeps the load of experts out of the global gradient norm.
_VIOLATION_SCALE = 2.0**-20

Over = Literal["batch", "sequence"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterStats:
    """Sums over tokens and layers, scalar float32 each."""

    tokens: jax.Array
    """Number of routed tokens."""
    balance: jax.Array
    """The load-balancing loss, times the number of tokens in its mean."""
    z: jax.Array
    """Squared log-normalisers of the router's logits."""
    entropy: jax.Array
    """Entropies of the router's distributions, in nats."""
    max_load: jax.Array
    """Load of the busiest expert as a multiple of the mean load, times the tokens."""
    dropped: jax.Array
    """The share of a token's experts that had no place for it, summed over tokens."""
    violation: jax.Array
    """Always 0; its gradient with respect to the router's bias is each expert's excess load."""

    @classmethod
    def zeros(cls) -> "RouterStats":
        """Returns the sums over no tokens."""
        return cls(*(jnp.zeros((), jnp.float32) for _ in dataclasses.fields(cls)))

    def __add__(self, other: "RouterStats") -> "RouterStats":
        return jax.tree.map(jnp.add, self, other)


def router_stats(
    routing: Routing,
    kept: Bool[Array, "batch length k"],
    *,
    mask: Bool[Array, "batch length"] | None = None,
    bias: Float[Array, " experts"] | None = None,
    over: Over = "batch",
) -> RouterStats:
    """Returns the statistics of one layer.

    The load-balancing loss is E * sum_i f_i * P_i, where f_i is the share of expert i in all copies
    of tokens and P_i its mean probability. It is 1 when the load is even and E when one expert has
    it all. With `over="batch"` the means are over all tokens of a microbatch on all devices (or of
    its shard, inside a region manual over the batch). With `over="sequence"` they are over each
    row, and the loss is the mean over rows weighted by their tokens: equal for any split of the
    batch.

    Args:
        routing: The choices of one layer.
        kept: [batch, length, k] bool, whether an expert took the copy.
        mask: [batch, length] bool, the tokens that count; None for all.
        bias: [E] float32, the router's bias if it balances the load; see `balance_biases`.
        over: The scope of the means in the load-balancing loss.

    Source: Fedus et al. 2021, "Switch Transformers", eq. 4 to 6 (k = 1); Zoph et al. 2022,
    "ST-MoE", eq. 5 (router z-loss); DeepSeek-AI 2024, "DeepSeek-V3", eq. 17 to 20 (by sequence).
    """
    experts, k = routing.experts, routing.experts.shape[2]
    num_experts = routing.probabilities.shape[2]
    counted = jnp.ones(experts.shape[:2], jnp.float32) if mask is None else mask.astype(jnp.float32)
    chosen = jnp.sum(jax.nn.one_hot(experts, num_experts, dtype=jnp.float32), axis=2)
    # [batch, E]: the copies of each row for each expert, and the summed probabilities.
    counts = jnp.sum(chosen * counted[..., None], axis=1)
    sums = jnp.sum(routing.probabilities * counted[..., None], axis=1)
    row_tokens = jnp.sum(counted, axis=1)
    tokens, loads = jnp.sum(row_tokens), jnp.sum(counts, axis=0)
    if over == "batch":
        balance = num_experts * _ratio(jnp.sum(loads * jnp.sum(sums, axis=0)), tokens * k)
    else:
        balance = num_experts * jnp.sum(_ratio(jnp.sum(counts * sums, axis=1), row_tokens * k))

    log_sum = jax.nn.logsumexp(routing.logits, axis=-1)
    p = routing.probabilities
    entropy = -jnp.sum(p * jnp.log(jnp.maximum(p, jnp.finfo(p.dtype).tiny)), axis=-1)
    missed = jnp.sum(~kept, axis=2, dtype=jnp.float32) / k
    return RouterStats(
        tokens=tokens,
        balance=balance,
        z=jnp.sum(jnp.square(log_sum) * counted),
        entropy=jax.lax.stop_gradient(jnp.sum(entropy * counted)),
        max_load=jnp.max(loads) * (num_experts / k),
        dropped=jnp.sum(missed * counted),
        violation=_violation(loads * num_experts - tokens * k, bias),
    )


def _violation(above_mean: jax.Array, bias: jax.Array | None) -> jax.Array:
    if bias is None:
        return jnp.zeros((), jnp.float32)
    # As part of the loss, this term is masked, scaled and summed with it: exact under microbatches,
    # pipelines and data parallelism.
    change = bias - jax.lax.stop_gradient(bias)
    return jnp.sum(above_mean * _VIOLATION_SCALE * change)


def router_losses(
    stats: RouterStats, num_layers: int, *, balance_loss: float = 0.0, z_loss: float = 0.0
) -> tuple[jax.Array, dict[str, Mean]]:
    """Returns the router terms of the loss per token, and metrics.

    Add the loss to a `Mean` over tokens times its weight: `mean.total + loss * mean.weight`. Router
    biases balance the load only if it is added, even with both coefficients 0: it carries their
    gradient.

    Args:
        stats: Statistics summed over the layers with routers.
        num_layers: Number of layers with routers.
        balance_loss: Coefficient of each layer's load-balancing loss; 0.01 in Switch Transformers.
        z_loss: Coefficient of each layer's router z-loss; 0.001 in ST-MoE.

    Returns:
        A float32 scalar, and the means over tokens and layers: `router_balance` (1 for even load),
        `router_z`, `router_entropy_nats`, `router_max_load` (load of the busiest expert over the
        mean load) and `router_dropped` (share of copies of tokens that no expert took).
    """
    of_a_layer = stats.tokens / num_layers
    total = balance_loss * stats.balance + z_loss * stats.z + stats.violation
    metrics: dict[str, Any] = {
        "router_balance": stats.balance,
        "router_z": stats.z,
        "router_entropy_nats": stats.entropy,
        "router_max_load": stats.max_load,
        "router_dropped": stats.dropped,
    }
    means = {name: Mean(jax.lax.stop_gradient(x), stats.tokens) for name, x in metrics.items()}
    return _ratio(total, of_a_layer), means


def _ratio(total: jax.Array, weight: jax.Array) -> jax.Array:
    return total / jnp.where(weight == 0, 1.0, weight)
