"""Dropless dispatch: every token reaches its experts, however uneven the load.

The copies of the tokens (k each) are sorted by expert, sent to the devices of their experts,
multiplied group by group (`jax.lax.ragged_dot`), sent back and summed by weight. Compute is
proportional to the tokens that arrive on platforms with a grouped matmul. XLA for CPU multiplies
every row by every expert and masks the result.

Memory is sized for the worst case, since no token may be dropped: all devices may send all their
rows to one. With t tokens on a device, k experts per token and E experts over D devices, a device
holds

    D * t * min(k, E / D) rows

of embed and of mlp, at most D times the rows of an even load. `chunks` cuts t into parts and pads
the last one. With as many chunks as devices the buffers are as large as an even load needs without
chunks. Each chunk is recomputed in the backward pass, including its exchange.

Source: Gale et al. 2022, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts".
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from shardlib.nn.moe.exchange import ExchangeGroup, Method, exchange, plan_exchange, resolve_method
from shardlib.nn.moe.rows import collect, spread, weighted_sum
from shardlib.nn.moe.weights import ExpertWeights, Glu, mlp_of_sorted


def dropless(
    tokens: Float[Array, "t embed"],
    experts: Int[Array, "t k"],
    weights: Float[Array, "t k"],
    counted: Bool[Array, " t"],
    mlp: ExpertWeights,
    glu: Glu,
    *,
    axes: tuple[str, ...] = (),
    method: Method = "auto",
    chunks: int = 1,
) -> Float[Array, "t embed"]:
    """Returns the weighted sums of the experts' outputs.

    Args:
        tokens: The tokens of this device.
        experts: int32, from 0 to E - 1; a copy for E goes nowhere and gives 0.
        weights: float32.
        counted: Uncounted tokens go nowhere and give 0.
        mlp: The experts of this device: all of them, or its shard over `axes`.
        glu: The hidden units of an expert from its projections, as `gated(jax.nn.silu)`.
        axes: Mesh axes, manual here, that shard the experts; () for none.
        method: See `shardlib.nn.moe.exchange`.
        chunks: Number of parts in which the tokens are computed one after the other; at most t.
    """

    def part(args: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return _dropless(*args, mlp, glu, axes, method)

    args = (tokens, experts, weights, counted)
    num = tokens.shape[0]
    chunks = min(chunks, num)
    if chunks == 1:
        return part(args)
    missing = -num % chunks

    def cut(x: jax.Array) -> jax.Array:
        # Padding of the last chunk is not counted.
        filled = jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1)))
        return filled.reshape(chunks, -1, *x.shape[1:])

    done = jax.lax.map(jax.checkpoint(part, prevent_cse=False), jax.tree.map(cut, args))
    return done.reshape(num + missing, -1)[:num]


def _dropless(
    tokens: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    counted: jax.Array,
    mlp: ExpertWeights,
    glu: Glu,
    axes: tuple[str, ...],
    method: Method,
) -> jax.Array:
    num, k = experts.shape
    here = mlp.gate.shape[0]
    devices = jax.lax.axis_size(axes) if axes else 1
    nowhere = here * devices
    # Copies that go nowhere sort behind the last expert.
    experts = jnp.where(counted[:, None], experts, nowhere)
    key, goes = experts.reshape(-1), experts < nowhere
    source = jnp.argsort(key, stable=True).astype(jnp.int32)
    place = jnp.argsort(source).astype(jnp.int32).reshape(num, k)
    place = jnp.where(goes, place, num * k)
    weights = jnp.where(goes, weights, 0.0)
    sizes = jnp.zeros(nowhere, jnp.int32).at[key].add(1, mode="drop")
    # A token goes to an expert at most once: with fewer experts than k there are fewer rows.
    source = source[: num * min(k, nowhere)]

    rows = spread(tokens, source, place)
    if axes:
        rows = _through_devices(rows, sizes, mlp, glu, axes, min(k, here) * num, method)
    else:
        rows = mlp_of_sorted(rows, sizes, mlp, glu)
    return weighted_sum(collect(rows, source, place), weights)


def _through_devices(
    rows: jax.Array,
    sizes: jax.Array,
    mlp: ExpertWeights,
    glu: Glu,
    axes: tuple[str, ...],
    pair_rows: int,
    method: Method,
) -> jax.Array:
    """Sends sorted rows to the devices of their experts and the results back to their places."""
    devices = jax.lax.axis_size(axes)
    link = ExchangeGroup(axes, pair_rows, resolve_method(method))
    plan = plan_exchange(sizes.reshape(devices, -1), axes)
    arrived = exchange(rows, plan, devices * pair_rows, link)
    arrived_sizes = jnp.sum(plan.recv_sizes, axis=0, dtype=jnp.int32)
    results = mlp_of_sorted(arrived, arrived_sizes, mlp, glu)
    return exchange(results, plan.reversed(), rows.shape[0], link)
