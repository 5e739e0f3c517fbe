"""Experts on any mesh: one manual region in which each device sorts and sends its own tokens.

| dim of the weights | mesh axes (by the rules)  | communication                                 |
|--------------------|---------------------------|-----------------------------------------------|
| expert             | also shard tokens         | tokens travel to their experts and back       |
| expert             | shard no tokens           | each device applies its experts to all        |
|                    |                           | tokens; the outputs are summed                |
| embed, mlp         | also shard tokens (fsdp)  | gathered for the layer and again for its      |
|                    |                           | gradient, which is reduce-scattered           |
| mlp                | shard no tokens (tensor)  | each device computes some hidden units; the   |
|                    |                           | outputs are summed                            |
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from shardlib.errors import RuleError
from shardlib.mesh import entry_axes
from shardlib.nn.moe.capacity import capacity, with_capacity
from shardlib.nn.moe.dropless import dropless
from shardlib.nn.moe.exchange import Method
from shardlib.nn.moe.routing import Routing
from shardlib.nn.moe.weights import ExpertWeights, Glu
from shardlib.sharding.constrain import active
from shardlib.sharding.manual import manual

Dispatch = Literal["dropless", "capacity"]
Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The mesh axes, still automatic outside the region, that shard each dim; () for none."""

    batch: Axes = ()
    length: Axes = ()
    expert: Axes = ()
    embed: Axes = ()
    mlp: Axes = ()

    @property
    def tokens(self) -> Axes:
        return self.batch + self.length

    @property
    def sent(self) -> Axes:
        """Returns the axes along which tokens travel to their experts."""
        return tuple(name for name in self.expert if name in self.tokens)

    @property
    def apart(self) -> Axes:
        """Returns the axes along which devices have the same tokens and different experts."""
        return tuple(name for name in self.expert if name not in self.tokens)

    @property
    def parts(self) -> Axes:
        """Returns the axes along which devices share experts or hidden units for the same tokens:
        their results are partial sums."""
        return self.apart + self.partial_mlp

    @property
    def partial_mlp(self) -> Axes:
        """Returns the axes along which devices have hidden units of their own."""
        return tuple(name for name in self.mlp if name not in self.tokens)

    @property
    def gathered_mlp(self) -> Axes:
        return tuple(name for name in self.mlp if name in self.tokens)

    @property
    def all(self) -> Axes:
        names = self.tokens + self.expert + self.embed + self.mlp
        return tuple(dict.fromkeys(names))


def apply_experts(
    x: Float[Array, "batch length embed"],
    routing: Routing,
    weights: ExpertWeights,
    glu: Glu,
    *,
    mask: Bool[Array, "batch length"] | None = None,
    dispatch: Dispatch = "dropless",
    capacity_factor: float = 1.25,
    exchange: Method = "auto",
    chunks: int = 1,
) -> tuple[Float[Array, "batch length embed"], Bool[Array, "batch length k"]]:
    """Returns the combined outputs of the chosen experts, and the copies that were computed.

    Args:
        x: The tokens.
        routing: The choice of k experts for each token.
        weights: All experts, in the dtype of `x`.
        glu: The hidden units of an expert from its projections, as `gated(jax.nn.silu)`.
        mask: False for tokens that go to no expert and give 0. None for all.
        dispatch: `dropless` or `capacity`: see the modules of these names.
        capacity_factor: Places as a multiple of what an even load needs; `capacity` only.
        exchange: Exchange method of the tokens; `dropless` only.
        chunks: Number of parts in which a device computes its tokens; `dropless` only.

    Returns:
        The outputs in the dtype of `x`, and whether each copy was computed.

    Raises:
        RuleError: If some of the mesh axes that shard experts shard tokens and others do not.
    """
    layout = _layout(x, weights.gate)
    if dispatch == "capacity":
        k, num_experts = routing.experts.shape[2], weights.gate.shape[0]
        places = capacity(x.shape[1], k, num_experts, capacity_factor)
        options: dict[str, Any] = {"places": places, "length_axes": layout.length}
        send = functools.partial(with_capacity, axes=layout.sent, **options)
    else:
        options = {"method": exchange, "chunks": chunks}
        send = functools.partial(_rows_dropless, axes=layout.sent, **options)
    counted = jnp.ones(x.shape[:2], jnp.bool_) if mask is None else mask
    local = functools.partial(_on_device, layout, send, glu)
    local = _in_region(local, layout, chunks, biased=weights.down_bias is not None)
    parts, kept = local(x, routing.experts, routing.weights, counted, weights)
    # Summed outside the region, where the gradient needs no second sum.
    return jax.lax.reduce_sum(parts, axes=(0,)), kept


def _on_device(
    layout: _Layout,
    send: Callable[..., tuple[jax.Array, jax.Array | None]],
    glu: Glu,
    x: Float[Array, "batch length embed"],
    experts: Int[Array, "batch length k"],
    by: Float[Array, "batch length k"],
    counted: Bool[Array, "batch length"],
    mlp: ExpertWeights,
) -> tuple[Float[Array, "1 batch length embed"], Bool[Array, "batch length k"]]:
    """Returns the part of the outputs that this device computes, and the computed copies."""
    mlp = _gathered(mlp, layout)
    if layout.apart:
        experts = _own(experts, layout.apart, mlp.gate.shape[0])
    y, kept = send(x, experts, by, counted, mlp, glu)
    if kept is None:
        kept = jnp.broadcast_to(counted[..., None], experts.shape)
    elif layout.apart:
        kept = jax.lax.psum(kept.astype(jnp.int32), layout.apart) > 0
    return y[None], kept


def _rows_dropless(
    x: Float[Array, "batch length embed"],
    experts: Int[Array, "batch length k"],
    by: Float[Array, "batch length k"],
    counted: Bool[Array, "batch length"],
    mlp: ExpertWeights,
    glu: Glu,
    **options: Any,
) -> tuple[Float[Array, "batch length embed"], None]:
    tokens, k = x.reshape(-1, x.shape[-1]), experts.shape[2]
    rows = tokens, experts.reshape(-1, k), by.reshape(-1, k), counted.reshape(-1)
    return dropless(*rows, mlp, glu, **options).reshape(x.shape), None


def _in_region(
    local: Callable[..., tuple[jax.Array, jax.Array]],
    layout: _Layout,
    chunks: int,
    *,
    biased: bool,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns `_on_device` with remat, in a region that is manual over the axes of the layout."""
    if chunks > 1:
        # A policy that keeps any value would keep it for every chunk.
        local = jax.checkpoint(local)
    elif layout.embed or layout.gathered_mlp:
        # Gathered weights kept for the gradient would fill the memory that sharding them saves.
        local = jax.checkpoint(local, policy=_all_but_gathered_weights)
    if not layout.all:
        return local
    tokens = PartitionSpec(_entry(layout.batch), _entry(layout.length))
    return manual(
        local,
        layout.all,
        (tokens, tokens, tokens, tokens, _weight_specs(layout, biased)),
        (PartitionSpec(_entry(layout.parts), *tokens), tokens),
    )


def _layout(x: jax.Array, gate: jax.Array) -> _Layout:
    scope = active()
    if scope is None:
        return _Layout()
    tokens = scope.sharding(("batch", "length", "embed"), x.shape, "activations").spec
    params = scope.sharding(("expert", "embed", "mlp"), gate.shape, "params").spec
    layout = _Layout(*map(entry_axes, (*tokens[:2], *params)))
    if layout.sent and layout.apart:
        sent, apart = "+".join(layout.sent), "+".join(layout.apart)
        raise RuleError(
            f"experts are sharded over {sent}, which shards tokens too, and over {apart}, which "
            "shards none.\n"
            f"  Let the rule for the activation axis 'batch' include {apart}, or shard 'expert' "
            f"over {sent} alone."
        )
    return layout


def _own(experts: jax.Array, apart: Axes, here: int) -> jax.Array:
    """Returns the choices as local expert indices, with `here` for experts of other devices."""
    index = experts - jax.lax.axis_index(apart).astype(jnp.int32) * here
    return jnp.where((index >= 0) & (index < here), index, here)


def _entry(axes: Axes) -> Axes | None:
    return axes or None


def _weight_specs(layout: _Layout, biased: bool) -> ExpertWeights:
    expert, embed, mlp = map(_entry, (layout.expert, layout.embed, layout.mlp))
    up, bias = PartitionSpec(expert, embed, mlp), PartitionSpec(expert, mlp)
    of_biases = (bias, bias, PartitionSpec(expert, embed)) if biased else ()
    return ExpertWeights(up, up, PartitionSpec(expert, mlp, embed), *of_biases)  # type: ignore


def _gathered(mlp: ExpertWeights, layout: _Layout) -> ExpertWeights:
    """Returns the experts of this device, gathered in all dims except its own hidden units."""

    def gather(w: jax.Array, axes: Axes, dim: int) -> jax.Array:
        return jax.lax.all_gather(w, axes, axis=dim, tiled=True) if axes else w

    def whole(w: jax.Array, embed_dim: int, mlp_dim: int) -> jax.Array:
        return gather(gather(w, layout.embed, embed_dim), layout.gathered_mlp, mlp_dim)

    kernels = whole(mlp.gate, 1, 2), whole(mlp.up, 1, 2), whole(mlp.down, 2, 1)
    if mlp.gate_bias is None or mlp.up_bias is None or mlp.down_bias is None:
        return ExpertWeights(*kernels)
    gate, up = (gather(bias, layout.gathered_mlp, 1) for bias in (mlp.gate_bias, mlp.up_bias))
    out = gather(mlp.down_bias, layout.embed, 1)
    if layout.partial_mlp:
        # Added once: these devices' results are summed.
        out = jnp.where(jax.lax.axis_index(layout.partial_mlp) == 0, out, jnp.zeros((), out.dtype))
    return ExpertWeights(*kernels, gate, up, out)


def _all_but_gathered_weights(primitive: Any, *inputs: Any, **_: Any) -> bool:
    """Whether remat may save a value: all but gathered floats, as gathered counts are integers."""
    gathers = primitive.name == "all_gather"
    return not (gathers and jnp.issubdtype(inputs[0].dtype, jnp.floating))
