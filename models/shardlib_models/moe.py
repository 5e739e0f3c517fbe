"""Mixtures of gated experts in place of a transformer's MLP."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.config import configclass
from shardlib.losses import Mean
from shardlib.nn import moe
from shardlib.sharding.constrain import constrain
from shardlib_models.layers import Linear, parameter


@configclass
class MoEConfig:
    """Routed experts, as in Mixtral and DeepSeek."""

    num_experts: int = 8
    """Number of routed experts."""
    experts_per_token: int = 2
    """Number of experts per token."""
    dense_layers: int = 0
    """Number of first layers that have an MLP in place of experts."""
    mlp_dim: int | None = None
    """Hidden width of one expert; null for the width of the model's MLP."""
    num_shared_experts: int = 0
    """Number of experts for every token, as one MLP of their total width."""
    shared_mlp_dim: int | None = None
    """Width of that MLP; null for num_shared_experts times the width of an expert."""
    shared_gate: bool = False
    """Whether that MLP's output is multiplied by the sigmoid of a projection of the token."""
    scores: moe.Scores = "softmax"
    """Scores of the experts: softmax over all of them, or sigmoid of each."""
    groups: int = 1
    """Number of groups of consecutive experts."""
    groups_per_token: int = 1
    """Number of groups that the experts of a token come from."""
    group_best: int = 1
    """Number of the best experts of a group whose scores are added up to score the group."""
    router_bias: bool = False
    """Whether the logits of the router have a learned bias; `balance: bias` adds others to its
    scores."""
    normalize_weights: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    weights_scale: float = 1.0
    """Factor of the weights of a token's experts."""
    dispatch: moe.Dispatch = "dropless"
    """Whether experts take all tokens (dropless), or a fixed number from each row (capacity)."""
    capacity_factor: float = 1.25
    """Tokens that an expert takes, as a multiple of an even load; with dispatch: capacity."""
    balance: Literal["none", "loss", "bias"] = "loss"
    """Method of load balancing: none, a loss, or biases that the optimizer moves (and the loss, if
    balance_loss is not 0). For biases, wrap an optimizer of your own in
    `shardlib.nn.moe.balance_biases`."""
    balance_loss: float | None = None
    """Coefficient of the load-balancing loss; null for 0.01 with balance: loss, 0 with bias."""
    balance_over: Literal["batch", "sequence"] = "batch"
    """Scope of the mean in the load-balancing loss: a microbatch, or each row. If groups along
    `data` compute separately (train.reduction, train.local_sgd), a microbatch belongs to one group,
    so the loss depends on the number of groups; with rows it does not."""
    router_z_loss: float = 0.0
    """Coefficient of the squared log-normaliser of the router; 0.001 in ST-MoE."""
    exchange: moe.Method = "auto"
    """Exchange method of tokens between devices; with dispatch: dropless."""
    exchange_chunks: int = 1
    """Number of parts in which a device computes its tokens, to save memory; with dispatch:
    dropless. The last part is padded if necessary. With fewer tokens, as in decoding, there are as
    many parts as tokens."""

    @property
    def balance_coefficient(self) -> float:
        """The coefficient of the load-balancing loss."""
        if self.balance_loss is not None:
            return self.balance_loss
        return 0.01 if self.balance == "loss" else 0.0

    def shared_size(self, mlp_dim: int) -> int:
        """Returns the hidden width of the shared experts in a model whose MLP has `mlp_dim`."""
        if self.shared_mlp_dim is not None:
            return self.shared_mlp_dim
        return self.num_shared_experts * self.expert_size(mlp_dim)

    def expert_size(self, mlp_dim: int) -> int:
        """Returns the hidden width of one expert in a model whose MLP has `mlp_dim`."""
        return mlp_dim if self.mlp_dim is None else self.mlp_dim


def validate(config: MoEConfig) -> list[str]:
    """Returns all faults of a config as sentences."""
    names = ("num_experts", "experts_per_token", "mlp_dim", "shared_mlp_dim", "exchange_chunks")
    names += ("groups", "groups_per_token", "group_best")
    values = {name: getattr(config, name) for name in names}
    faults = [
        f"moe.{name} is {value}; it must be at least 1."
        for name, value in values.items()
        if value is not None and value < 1
    ]
    names = ("num_shared_experts", "balance_loss", "router_z_loss", "dense_layers")
    values = {name: getattr(config, name) for name in names}
    faults += [
        f"moe.{name} is {value}; it must not be negative."
        for name, value in values.items()
        if value is not None and value < 0
    ]
    values = {name: getattr(config, name) for name in ("capacity_factor", "weights_scale")}
    faults += [
        f"moe.{name} is {value}; it must be greater than 0, and finite."
        for name, value in values.items()
        if not 0 < value < math.inf
    ]
    if config.experts_per_token > config.num_experts:
        faults.append(
            f"moe.experts_per_token={config.experts_per_token} is more than "
            f"moe.num_experts={config.num_experts}; a token goes to different experts."
        )
    faults += _group_faults(config)
    if config.shared_gate and config.num_shared_experts == 0 and config.shared_mlp_dim is None:
        faults.append("moe.shared_gate has no effect without shared experts; leave it out.")
    if config.balance == "none" and config.balance_loss:
        faults.append(
            f"moe.balance_loss={config.balance_loss} has no effect with moe.balance=none; "
            "set moe.balance to loss or bias, or leave the coefficient out."
        )
    if config.dispatch == "capacity" and config.exchange_chunks > 1:
        faults.append(
            f"moe.exchange_chunks={config.exchange_chunks} has no effect with "
            "moe.dispatch=capacity; leave it out."
        )
    return faults


def _group_faults(config: MoEConfig) -> list[str]:
    if min(config.groups, config.groups_per_token) < 1:
        return []  # `validate` tells.
    groups, size = config.groups, config.num_experts // config.groups
    if config.num_experts % groups:
        return [f"moe.groups={groups} does not divide moe.num_experts={config.num_experts}."]
    faults = []
    if config.groups_per_token > groups:
        faults.append(f"moe.groups_per_token={config.groups_per_token} is more than {groups}.")
    if (
        groups > 1
        and max(config.group_best, config.experts_per_token / config.groups_per_token) > size
    ):
        faults.append(
            f"{config.groups_per_token} groups of {size} experts are too small for "
            f"moe.experts_per_token={config.experts_per_token} and "
            f"moe.group_best={config.group_best}; make fewer groups."
        )
    return faults


class Experts(nnx.Module):
    """The weights of all routed experts."""

    def __init__(
        self,
        num: int,
        embed_dim: int,
        mlp_dim: int,
        *,
        stddev: float,
        out_stddev: float,
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        def kernel(deviation: float, shape: tuple[int, ...], *axes: str) -> nnx.Param:
            return parameter(deviation * jax.random.normal(rngs.params(), shape), *axes)

        self.gate = kernel(stddev, (num, embed_dim, mlp_dim), "expert", "embed", "mlp")
        self.up = kernel(stddev, (num, embed_dim, mlp_dim), "expert", "embed", "mlp")
        self.down = kernel(out_stddev, (num, mlp_dim, embed_dim), "expert", "mlp", "embed")

        def zeros(size: int, axis: str) -> nnx.Param | None:
            return parameter(jnp.zeros((num, size)), "expert", axis) if bias else None

        self.gate_bias = zeros(mlp_dim, "mlp")
        self.up_bias = zeros(mlp_dim, "mlp")
        self.down_bias = zeros(embed_dim, "embed")

    def weights(self) -> moe.ExpertWeights:
        """Returns the arrays."""
        kernels = self.gate[...], self.up[...], self.down[...]
        if self.gate_bias is None or self.up_bias is None or self.down_bias is None:
            return moe.ExpertWeights(*kernels)
        biases = self.gate_bias[...], self.up_bias[...], self.down_bias[...]
        return moe.ExpertWeights(*kernels, *biases)


class SharedExperts(nnx.Module):
    """A gated MLP for every token."""

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        glu: moe.Glu,
        *,
        stddev: float,
        out_stddev: float,
        rngs: nnx.Rngs,
    ):
        self.glu = glu
        embed, hidden = {"embed": embed_dim}, {"mlp": mlp_dim}
        self.gate = Linear(embed, hidden, stddev=stddev, rngs=rngs)
        self.up = Linear(embed, hidden, stddev=stddev, rngs=rngs)
        self.down = Linear(hidden, embed, stddev=out_stddev, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = constrain(self.gate(x), "batch", "length", "mlp")
        return self.down(self.glu(gate, constrain(self.up(x), "batch", "length", "mlp")))


class MoE(nnx.Module):
    """A layer that sends each token through its k experts and through the shared ones."""

    def __init__(
        self,
        config: MoEConfig,
        embed_dim: int,
        mlp_dim: int,
        *,
        glu: moe.Glu | None = None,
        stddev: float = 0.02,
        out_stddev: float | None = None,
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        """Args: the sizes of the model (`mlp_dim` if the config sets none), the experts' hidden
        units from their projections, None for SwiGLU, the initial standard deviations of the
        weights and of the output projections, None for the same, and whether routed experts have
        biases."""
        self.config = config
        self.glu = glu = glu or moe.gated(jax.nn.silu)
        size = config.expert_size(mlp_dim)
        options = {"stddev": stddev, "out_stddev": out_stddev or stddev, "rngs": rngs}
        # In 16 bits rounding would choose between experts, and the small steps that balance the
        # load would be lost. Source: Fedus et al. 2021, "Switch Transformers", section 2.4.
        router = {"embed": embed_dim}, {"expert": config.num_experts}
        biased = {"bias": config.router_bias, "float32": True}
        self.router = Linear(*router, stddev=stddev, **biased, rngs=rngs)
        self.experts = Experts(config.num_experts, embed_dim, size, bias=bias, **options)
        shared = config.shared_size(mlp_dim)
        self.shared = SharedExperts(embed_dim, shared, glu, **options) if shared else None
        gate = {"embed": embed_dim}, {"shared_gate": 1}
        self.shared_gate = Linear(*gate, stddev=stddev, rngs=rngs) if config.shared_gate else None
        has_bias = config.balance == "bias"
        biases = jnp.zeros(config.num_experts)
        self.router_bias = parameter(biases, "expert", float32=True) if has_bias else None

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        dispatch: moe.Dispatch | None = None,
    ) -> tuple[jax.Array, moe.RouterStats]:
        """Returns the results, in the dtype of `x`, and the statistics of this layer.

        Args:
            x: [batch, length, embed].
            mask: [batch, length] bool: masked-out positions take no place, are not counted, and get
                nothing from routed experts. None for all tokens.
            dispatch: In place of the config's.
        """
        config = self.config
        x = constrain(x, "batch", "length", "embed")
        bias = self._bias()
        routing = moe.route(
            self._logits(x),
            config.experts_per_token,
            scores=config.scores,
            bias=bias,
            groups=moe.Groups(config.groups, config.groups_per_token, config.group_best),
            normalize=config.normalize_weights,
            scale=config.weights_scale,
        )
        y, kept = moe.apply_experts(
            x,
            routing,
            self.experts.weights(),
            self.glu,
            mask=mask,
            dispatch=dispatch or config.dispatch,
            capacity_factor=config.capacity_factor,
            exchange=config.exchange,
            chunks=config.exchange_chunks,
        )
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = shared * jax.nn.sigmoid(self.shared_gate(x))
            y = y + shared
        return y, moe.router_stats(routing, kept, mask=mask, bias=bias, over=config.balance_over)

    # The router is small and gathered whole: if sharded, it would pull tokens to its shards.

    def _logits(self, x: jax.Array) -> jax.Array:
        """Returns float32 logits, on accelerators too: 16-bit rounding would choose experts."""
        kernel = constrain(self.router.kernel[...].astype(jnp.float32), None, None)
        highest = jax.lax.Precision.HIGHEST
        logits = jnp.einsum("bld,de->ble", x.astype(jnp.float32), kernel, precision=highest)
        if self.router.bias is not None:
            logits = logits + constrain(self.router.bias[...].astype(jnp.float32), None)[None, None]
        return constrain(logits, "batch", "length", None)

    def _bias(self) -> jax.Array | None:
        if self.router_bias is None:
            return None
        return constrain(self.router_bias[...].astype(jnp.float32), None)


def losses(
    stats: moe.RouterStats, config: MoEConfig, num_layers: int
) -> tuple[jax.Array, dict[str, Mean]]:
    """Returns the router terms of the loss per token, and metrics; see `moe.router_losses`."""
    coefficients = {"balance_loss": config.balance_coefficient, "z_loss": config.router_z_loss}
    return moe.router_losses(stats, num_layers, **coefficients)
