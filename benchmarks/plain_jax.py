"""A Llama-style training step in plain JAX and optax: the baseline of the benchmarks.

What an experienced user writes by hand: parameters in a nested dict, one scan over stacked layers,
one jitted step with a donated state, and shardings spelt out for each mesh. It imports neither
shardlib nor Flax. Model, initial distribution, loss and optimizer are those of shardlib's
transformer without dropout, and the paths and shapes of the parameters are equal, so that the
weights of one run in the other.

    python benchmarks/plain_jax.py --steps 20 --devices 8 --strategy fsdp

Shapes: b batch, l length, e embed, h query heads, k key-value heads, d head dim, m MLP, v vocab.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Schedule = Callable[[Any], Any]
"""Learning rate by step."""


@dataclasses.dataclass(frozen=True)
class PlainConfig:
    """Sizes of the model and what is computed how."""

    num_layers: int = 4
    embed_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32
    mlp_dim: int = 344
    vocab_size: int = 1024
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    init_stddev: float = 0.02
    dtype: str = "float32"
    """What is computed in. Parameters, optimizer, norms, softmax and loss are float32."""
    remat: str = "none"
    """What layers keep for the backward pass: none (everything), dots, full (nothing)."""
    attention: Literal["xla", "cudnn"] | Callable[..., jax.Array] | None = None
    """Implementation of `jax.nn.dot_product_attention`: None, "xla" or "cudnn". Or a function of
    query [b, l, h, d], key and value [b, l, k, d] and segments [b, l] or None."""


def init(config: PlainConfig, key: jax.Array) -> dict[str, Any]:
    """Returns the parameters, float32. Stacked layers have a leading dim."""
    layers, e, d = config.num_layers, config.embed_dim, config.head_dim
    h, k, m = config.num_heads, config.num_kv_heads, config.mlp_dim
    keys = iter(jax.random.split(key, 9))
    residual = config.init_stddev / math.sqrt(2 * layers)

    def normal(shape: tuple[int, ...], stddev: float = config.init_stddev) -> dict[str, jax.Array]:
        return {"kernel": stddev * jax.random.normal(next(keys), shape)}

    return {
        "token_embedding": {"embedding": normal((config.vocab_size, e))["kernel"]},
        "layers": {
            "attention_norm": {"scale": jnp.ones((layers, e))},
            "attention": {
                "query": normal((layers, e, h, d)),
                "key": normal((layers, e, k, d)),
                "value": normal((layers, e, k, d)),
                "out": normal((layers, h, d, e), residual),
            },
            "mlp_norm": {"scale": jnp.ones((layers, e))},
            "mlp": {
                "gate": normal((layers, e, m)),
                "up": normal((layers, e, m)),
                "down": normal((layers, m, e), residual),
            },
        },
        "final_norm": {"scale": jnp.ones((e,))},
        "head": normal((e, config.vocab_size)),
    }


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)[None, None]).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attend(config: PlainConfig, query: Any, key: Any, value: Any, segments: Any) -> jax.Array:
    """Causal attention within segments [b, l]; within rows if they are None."""
    if callable(config.attention):
        return config.attention(query, key, value, segments)
    mask = None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=True, implementation=config.attention
    )


def block(
    config: PlainConfig, x: jax.Array, p: Any, cos: Any, sin: Any, segments: Any
) -> jax.Array:
    """One layer over x [b, l, e]; segments as in `attend`."""
    y = rms_norm(x, p["attention_norm"]["scale"], config.norm_eps)
    attention = p["attention"]
    query = rotate(jnp.einsum("ble,ehd->blhd", y, attention["query"]["kernel"]), cos, sin)
    key = rotate(jnp.einsum("ble,ekd->blkd", y, attention["key"]["kernel"]), cos, sin)
    value = jnp.einsum("ble,ekd->blkd", y, attention["value"]["kernel"])
    y = attend(config, query, key, value, segments)
    x = x + jnp.einsum("blhd,hde->ble", y, attention["out"]["kernel"])
    y = rms_norm(x, p["mlp_norm"]["scale"], config.norm_eps)
    mlp = p["mlp"]
    gate = jnp.einsum("ble,em->blm", y, mlp["gate"]["kernel"])
    up = jnp.einsum("ble,em->blm", y, mlp["up"]["kernel"])
    return x + jnp.einsum("blm,me->ble", jax.nn.silu(gate) * up, mlp["down"]["kernel"])


def _is_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether results are those of cuDNN's attention, which have no name."""
    return primitive.name.startswith("dot_product_attention_fwd")


def forward(
    config: PlainConfig, params: Any, batch: Any, pin: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Returns the logits [b, l, v] float32. `pin` fixes the sharding of activations."""
    params = jax.tree.map(lambda p: p.astype(config.dtype), params)
    tokens, segments = batch["tokens"], batch.get("segment_ids")
    positions = batch.get("positions", jnp.arange(tokens.shape[1])[None])
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    angles = positions.astype(jnp.float32)[..., None] * config.rope_theta ** -exponents[None, None]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return pin(block(config, x, layer, cos, sin, segments)), None

    known = jax.checkpoint_policies
    policies = {
        "none": known.everything_saveable,
        "dots": known.save_from_both_policies(
            known.dots_with_no_batch_dims_saveable,
            known.save_from_both_policies(known.save_only_these_names("attended"), _is_cudnn),
        ),
        "full": known.nothing_saveable,
    }
    if config.remat != "none":
        body = jax.checkpoint(body, policy=policies[config.remat], prevent_cse=False)
    x = pin(params["token_embedding"]["embedding"][tokens])
    x, _ = jax.lax.scan(body, x, params["layers"])
    x = rms_norm(x, params["final_norm"]["scale"], config.norm_eps)
    return jnp.einsum("ble,ev->blv", x, params["head"]["kernel"]).astype(jnp.float32)


def loss(
    config: PlainConfig,
    params: Any,
    batch: dict[str, jax.Array],
    pin: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """Returns the mean cross-entropy of the next token over positions with a target, float32.

    `batch` holds tokens and targets [b, l] int32, and of packed rows also segment_ids (0 where
    there is no target) and positions.
    """
    logits, targets = forward(config, params, batch, pin), batch["targets"]
    # Without a gather, which would keep the logits in float32, and whole if `vocab` is cut.
    is_target = targets[..., None] == jnp.arange(config.vocab_size)[None, None]
    nll = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    if "segment_ids" not in batch:
        return jnp.mean(nll)
    mask = (batch["segment_ids"] > 0).astype(jnp.float32)
    return jnp.sum(nll * mask) / jnp.sum(mask)


def make_optimizer(
    steps: int, *, learning_rate: float = 3e-3, warmup_steps: int = 0, clip_norm: float = 1.0
) -> tuple[optax.GradientTransformation, Schedule]:
    """Returns AdamW with a cosine schedule to a tenth and clipping, and the schedule."""
    schedule = optax.warmup_cosine_decay_schedule(
        learning_rate / (warmup_steps + 1), learning_rate, warmup_steps, steps, learning_rate / 10
    )

    def decayed(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)

    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(clip_norm), adamw), schedule


def make_mesh(strategy: str, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh such as `data=2,fsdp=4`. An axis without a size is over all devices."""
    devices = devices or jax.devices()
    axes = [part.partition("=") for part in strategy.split(",")]
    sizes = tuple(int(size or len(devices)) for _, _, size in axes)
    names, types = tuple(name for name, _, _ in axes), (AxisType.Auto,) * len(axes)
    return jax.make_mesh(sizes, names, types, devices=devices)


def batch_spec(mesh: Mesh) -> P:
    """Returns the sharding of a batch: its rows are cut over `data` and `fsdp`."""
    return P(tuple(name for name in ("data", "fsdp") if name in mesh.axis_names))


def param_specs(mesh: Mesh) -> dict[str, Any]:
    """Returns the sharding of each parameter.

    `fsdp` cuts the embed dim, and `tensor` heads, MLP and vocab (Shoeybi et al. 2019,
    "Megatron-LM"). Over `data` parameters are replicated, and norms everywhere.
    """
    fsdp, tensor = (name if name in mesh.axis_names else None for name in ("fsdp", "tensor"))
    first, last = {"kernel": P(None, fsdp, tensor)}, {"kernel": P(None, tensor, fsdp)}
    return {
        "token_embedding": {"embedding": P(tensor, fsdp)},
        "layers": {
            "attention_norm": {"scale": P()},
            "attention": {
                "query": first,
                "key": first,
                "value": first,
                "out": {"kernel": P(None, tensor, None, fsdp)},
            },
            "mlp_norm": {"scale": P()},
            "mlp": {"gate": first, "up": first, "down": last},
        },
        "final_norm": {"scale": P()},
        "head": {"kernel": P(fsdp, tensor)},
    }


State = tuple[Any, Any]
"""Parameters and optimizer state."""


def state_shardings(
    config: PlainConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Any:
    """Returns the sharding of each leaf of a state; the optimizer's follow the parameters'."""
    params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(mesh))
    abstract = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, abstract),
        params,
        transform_non_params=lambda _: NamedSharding(mesh, P()),
    )
    return params, opt_state


def init_state(
    config: PlainConfig, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int = 0
) -> State:
    """Returns a state, made on its shards."""

    def make(key: jax.Array) -> State:
        params = init(config, key)
        return params, optimizer.init(params)

    return jax.jit(make, out_shardings=state_shardings(config, optimizer, mesh))(
        jax.random.key(seed)
    )


def make_step(
    config: PlainConfig,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    mesh: Mesh,
    microbatches: int = 1,
) -> Any:
    """Returns the jitted `step(state, batch, index) -> (state, metrics)`; it donates the state.

    With microbatches, gradients are averaged over equal parts of the batch, which is exact where
    all rows have as many targets.
    """
    placed = state_shardings(config, optimizer, mesh)
    rows = NamedSharding(mesh, batch_spec(mesh))

    def pin(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, rows)

    def gradients(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        value, grads = jax.value_and_grad(lambda p: loss(config, p, batch, pin))(params)
        return value, jax.lax.with_sharding_constraint(grads, placed[0])

    def accumulated(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        def strided(x: jax.Array) -> jax.Array:
            parts = x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:])
            return jnp.moveaxis(parts, 1, 0)

        def body(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradients(params, part)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(body, zeros, jax.tree.map(strided, batch))
        return jax.tree.map(lambda x: x / microbatches, total)

    def step(state: State, batch: Any, index: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        params, opt_state = state
        value, grads = (gradients if microbatches == 1 else accumulated)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = {
            "loss": value,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(schedule(index), jnp.float32),
        }
        return (optax.apply_updates(params, updates), opt_state), metrics

    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(placed, rows, None),
        out_shardings=(placed, NamedSharding(mesh, P())),
    )


def random_batch(config: PlainConfig, batch: int, length: int, seed: int = 0) -> dict[str, Any]:
    """Returns tokens and targets [batch, length] int32 on the host."""
    import numpy as np

    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length + 1))
    tokens = tokens.astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def token_rows(file: str, batch: int, length: int, index: int) -> dict[str, Any]:
    """Returns batch `index` of a file of token ids, raw uint16: tokens and targets."""
    import numpy as np

    tokens = np.memmap(file, np.uint16, mode="r")
    size = batch * (length + 1)
    first = index * size % max(1, len(tokens) - size)
    rows = np.asarray(tokens[first : first + size], np.int32).reshape(batch, length + 1)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def main() -> None:
    """Trains on random tokens or on those of a file; the last line is JSON."""
    import argparse
    import json
    import time

    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--devices", type=int, default=1, help="virtual devices, on CPU")
    parser.add_argument("--strategy", choices=("data", "fsdp"), default="data")
    parser.add_argument("--tokens", metavar="FILE", help="token ids below 1024, raw uint16")
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", flags.devices)

    config, mesh = PlainConfig(), make_mesh(flags.strategy)
    optimizer, schedule = make_optimizer(max(2, flags.steps))
    state = init_state(config, optimizer, mesh)
    step = make_step(config, optimizer, schedule, mesh)
    rows = NamedSharding(mesh, P(flags.strategy))
    ends, losses = [], []
    for index in range(flags.steps):
        if flags.tokens:
            host = token_rows(flags.tokens, flags.batch, flags.length, index)
        else:
            host = random_batch(config, flags.batch, flags.length, index)
        state, metrics = step(state, jax.device_put(host, rows), jnp.int32(index))
        losses.append(float(metrics["loss"]))
        ends.append(time.perf_counter())
        print(f"step {index + 1}  loss {losses[-1]:.4f}", flush=True)
    gaps = sorted(after - before for before, after in itertools.pairwise(ends))
    figures = {
        "first_step_seconds": ends[0] - started,
        "step_seconds": gaps[len(gaps) // 2] if gaps else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
