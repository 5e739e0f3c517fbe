"""The choice of experts for each token, and their weights."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shardlib.errors import ModelError

Scores = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """The choice of k out of E experts for every token."""

    experts: Int[Array, "batch length k"]
    """int32, each token's experts from best to worst."""
    weights: Float[Array, "batch length k"]
    """float32, the factors of the experts' results."""
    probabilities: Float[Array, "batch length expert"]
    """float32, the scores of each token as a distribution over the experts."""
    logits: Float[Array, "batch length expert"]
    """float32."""


class Groups(NamedTuple):
    """Groups of consecutive experts, of which a token's experts come from the best few.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.2.2, whose groups are devices.
    """

    number: int = 1
    per_token: int = 1
    """Groups that the experts of a token come from."""
    best: int = 1
    """Number of a group's best experts whose scores add up to its own."""


ONE_GROUP = Groups()


def route(
    logits: Float[Array, "batch length expert"],
    k: int,
    *,
    scores: Scores = "softmax",
    bias: Float[Array, " expert"] | None = None,
    groups: Groups = ONE_GROUP,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Returns the k experts with the highest scores for every token.

    Ties go to the expert with the lower index. The choice itself has no gradient; the weights have
    one.

    Args:
        logits: float32.
        k: Experts per token.
        scores: The function from logits to scores.
        bias: float32, added to the scores for the choice alone, not for the weights.
        groups: The groups that limit the choice.
        normalize: Whether the weights of a token are divided by their sum.
        scale: Factor of the final weights.

    Raises:
        ModelError: If there are fewer than k experts, or the groups do not fit them.

    Source: Jiang et al. 2024, "Mixtral of Experts", sec. 2.1 (softmax over the chosen: the same as
    the normalised softmax over all); DeepSeek-AI 2024, "DeepSeek-V3", eq. 12 to 16 (sigmoid, bias).
    """
    num_experts = logits.shape[-1]
    if not 1 <= k <= num_experts:
        raise ModelError(
            f"a token cannot go to {k} of {num_experts} experts.\n"
            f"  Set experts_per_token to 1 to {num_experts}."
        )
    if num_experts % groups.number or k > groups.per_token * (num_experts // groups.number):
        raise ModelError(
            f"{k} of {num_experts} experts cannot come from {groups.per_token} of {groups.number} "
            "groups.\n  Make groups that divide the experts, and take enough of them."
        )
    if scores == "softmax":
        values = probabilities = jax.nn.softmax(logits, axis=-1)
    else:
        values = jax.nn.sigmoid(logits)
        probabilities = values / jnp.sum(values, axis=-1, keepdims=True)
    ranked = values if bias is None else values + bias[None, None]
    ranked = jax.lax.stop_gradient(ranked)
    if groups.number > 1:
        ranked = _in_best_groups(ranked, groups)
    experts = _best(ranked, k)
    weights = jnp.take_along_axis(values, experts, axis=-1)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(experts, weights * scale, probabilities, logits)


def _in_best_groups(ranked: jax.Array, groups: Groups) -> jax.Array:
    """Returns the scores, with those outside of each token's best groups below all others."""
    grouped = ranked.reshape(*ranked.shape[:-1], groups.number, -1)
    of_groups = jnp.sum(jnp.sort(grouped, axis=-1)[..., -groups.best :], axis=-1)
    chosen = _best(of_groups, groups.per_token)
    is_chosen = jnp.any(jax.nn.one_hot(chosen, groups.number, dtype=bool), axis=-2)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(ranked.shape)


def _best(ranked: jax.Array, k: int) -> jax.Array:
    # A full sort: `top_k` is opaque to the partitioner, which gathers the batch around it.
    indices = jax.lax.broadcasted_iota(jnp.int32, ranked.shape, ranked.ndim - 1)
    _, order = jax.lax.sort((-ranked, indices), dimension=-1, is_stable=True, num_keys=1)
    return order[..., :k]
