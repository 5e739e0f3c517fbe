"""Exchange of a variable number of rows between devices.

Every device holds rows sorted by the device they go to and, within it, by group (an expert of that
device). After the exchange it holds the rows sent to it, sorted by group and, within a group, by
their source device, without gaps. The reverse exchange puts the rows back in their places. No row
is ever dropped: the sizes of the buffers are bounds that no routing exceeds.

Two implementations of one contract:

| method   | what is sent                               | platforms                   |
|----------|--------------------------------------------|-----------------------------|
| `ragged` | the rows, by `jax.lax.ragged_all_to_all`   | GPU, TPU; v5e to 16 chips   |
| `padded` | a packet for each pair of devices, as      | all                         |
|          | large as any pair may need                 |                             |
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int, Shaped

from shardlib.errors import ModelError
from shardlib.hardware import cluster_of
from shardlib.sharding.constrain import active, platform

Method = Literal["auto", "ragged", "padded"]

_RAGGED_PLATFORMS = ("tpu", "gpu", "cuda", "rocm")
_V5E_CHIPS = 16
"""In larger slices of v5e libtpu 0.0.42 refuses it: "not supported in limited ICI routing"."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """The slices of rows on both sides of an exchange: [devices, groups] int32 each.

    Entry [p, g] of `send_*` describes the slice for device p and group g: the row at which this
    device reads it, its number of rows, and the row at which p writes it. Entry [p, g] of `recv_*`
    describes the slice of group g from device p: the row at which this device writes it, its number
    of rows, and the row at which p reads it.
    """

    send_at: jax.Array
    send_sizes: jax.Array
    send_to: jax.Array
    recv_at: jax.Array
    recv_sizes: jax.Array
    recv_from: jax.Array

    def reversed(self) -> "ExchangePlan":
        """Returns the plan that sends every row back to its place."""
        return ExchangePlan(
            send_at=self.recv_at,
            send_sizes=self.recv_sizes,
            send_to=self.recv_from,
            recv_at=self.send_at,
            recv_sizes=self.send_sizes,
            recv_from=self.send_to,
        )


@dataclasses.dataclass(frozen=True)
class ExchangeGroup:
    """The devices of an exchange and its method."""

    axes: tuple[str, ...]
    """Mesh axes, manual here, over which rows are exchanged."""
    pair_rows: int
    """The most rows that one device sends to another."""
    method: Literal["ragged", "padded"]
    """See the table of this module."""


def resolve_method(method: Method) -> Literal["ragged", "padded"]:
    """Returns the method that `auto` means on the devices of the active mesh.

    Raises:
        ModelError: If they cannot run `ragged`.
    """
    missing = _without_ragged()
    if method == "ragged" and missing:
        raise ModelError(
            f"exchange='ragged' cannot run on {missing}, which has no ragged-all-to-all.\n"
            "  Use exchange='auto', or 'padded'."
        )
    if method != "auto":
        return method
    return "padded" if missing else "ragged"


def _without_ragged() -> str:
    """Returns the devices of the active mesh if they have no ragged all-to-all, else ""."""
    if platform() not in _RAGGED_PLATFORMS:
        return platform()
    scope = active()
    if scope is None or not isinstance(scope.mesh, Mesh):
        return ""
    cluster = cluster_of(list(scope.mesh.devices.flat))
    if cluster is None or cluster.chip is None or cluster.chip.name != "v5e":
        return ""
    return cluster.name if cluster.devices_per_domain > _V5E_CHIPS else ""


def plan_exchange(counts: Int[Array, "devices groups"], axes: tuple[str, ...]) -> ExchangePlan:
    """Returns the plan of an exchange, after an all-gather of the counts.

    Args:
        counts: [devices, groups] int32, the rows of this device for each device and group.
        axes: Mesh axes, manual here, with that many devices.
    """
    assert counts.shape[0] == jax.lax.axis_size(axes), "counts for each device of the axes"
    everywhere = jax.lax.all_gather(counts, axes)  # [source, destination, group]
    here = jax.lax.axis_index(axes)
    # A source orders its rows by (destination, group), a destination by (group, source).
    read_at = _starts(everywhere, (0, 1, 2))
    written_at = _starts(everywhere, (1, 2, 0))
    return ExchangePlan(
        send_at=read_at[here],
        send_sizes=counts,
        send_to=written_at[here],
        recv_at=written_at[:, here],
        recv_sizes=everywhere[:, here],
        recv_from=read_at[:, here],
    )


def _starts(counts: jax.Array, order: tuple[int, int, int]) -> jax.Array:
    """Returns the first rows of slices that are contiguous along the last two dims of `order`."""
    ordered = jnp.transpose(counts, order)
    flat = ordered.reshape(ordered.shape[0], -1)
    starts = (jnp.cumsum(flat, axis=1, dtype=jnp.int32) - flat).reshape(ordered.shape)
    back = sorted(range(3), key=order.__getitem__)
    return jnp.transpose(starts, back)


def exchange(
    rows: Shaped[Array, "sent embed"], plan: ExchangePlan, out_rows: int, link: ExchangeGroup
) -> Shaped[Array, "{out_rows} embed"]:
    """Returns the rows that the plan brings to this device: [out_rows, d], padded with zeros.

    Its derivative is the exchange by the reversed plan.

    Args:
        rows: [n, d]; rows outside the slices of the plan are not sent.
        plan: A result of `plan_exchange`, or its reverse.
        out_rows: An upper bound on the rows that arrive.
        link: The devices, and a bound on the rows between two of them.
    """
    return _exchange(rows, plan, out_rows, link)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _exchange(rows: jax.Array, plan: ExchangePlan, out_rows: int, link: ExchangeGroup) -> jax.Array:
    if link.method == "padded":
        return _padded(rows, plan, out_rows, link)
    return jax.lax.ragged_all_to_all(
        rows,
        jnp.zeros((out_rows, rows.shape[1]), rows.dtype),
        plan.send_at.reshape(-1),
        plan.send_sizes.reshape(-1),
        plan.send_to.reshape(-1),
        plan.recv_sizes.reshape(-1),
        axis_name=link.axes,
    )


def _exchange_forward(
    rows: jax.Array, plan: ExchangePlan, out_rows: int, link: ExchangeGroup
) -> tuple[jax.Array, tuple[ExchangePlan, int]]:
    return _exchange(rows, plan, out_rows, link), (plan, rows.shape[0])


def _exchange_backward(
    out_rows: int, link: ExchangeGroup, kept: tuple[ExchangePlan, int], gradient: jax.Array
) -> tuple[jax.Array, None]:
    plan, num_rows = kept
    return _exchange(gradient, plan.reversed(), num_rows, link), None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def _padded(rows: jax.Array, plan: ExchangePlan, out_rows: int, link: ExchangeGroup) -> jax.Array:
    sent_at = _packet_rows(plan.send_at, plan.send_sizes, link.pair_rows, rows.shape[0])
    packets = rows.at[sent_at].get(mode="fill", fill_value=0)
    packets = jax.lax.all_to_all(packets, link.axes, split_axis=0, concat_axis=0, tiled=True)
    written_at = _packet_rows(plan.recv_at, plan.recv_sizes, link.pair_rows, out_rows)
    out = jnp.zeros((out_rows, rows.shape[1]), rows.dtype)
    return out.at[written_at].set(packets, mode="drop")


def _packet_rows(at: jax.Array, sizes: jax.Array, pair_rows: int, beyond: int) -> jax.Array:
    """Returns the index of each row of the packets: [devices, pair_rows] int32.

    A packet holds the slices of all groups one after the other. The indices of its remaining rows
    are `beyond`, outside the array.
    """
    ends = jnp.cumsum(sizes, axis=1, dtype=jnp.int32)
    row = jnp.arange(pair_rows, dtype=jnp.int32)[None]
    group = jnp.sum(row[:, :, None] >= ends[:, None, :], axis=-1, dtype=jnp.int32)
    behind = group == sizes.shape[1]
    group = jnp.where(behind, 0, group)
    starts = ends - sizes
    offset = jnp.take_along_axis(at - starts, group, axis=1)
    return jnp.where(behind, beyond, row + offset)
