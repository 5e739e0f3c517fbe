"""Step time of shardlib's training step, against `plain_jax.py`: the same model by hand.

Both train one transformer from the same parameters on the same packed batches with the same
optimizer, in one process, on 1 device and on 8 (`data=8` and `fsdp=8`). Their steps alternate, each
timed until its results are ready, and who goes first changes from pair to pair. A ratio is the
median over pairs of shardlib's time over the baseline's. The losses of both must agree.

    python benchmarks/step_overhead.py                # 8 virtual CPU devices
    JAX_PLATFORMS=cuda python benchmarks/step_overhead.py --precision bf16    # the GPUs at hand

The last line is JSON: `ratio_1_device`, `ratio_8_devices` (the worse of both meshes) and the
medians behind them. What has fewer than 8 devices gives the ratio on all of them.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import plain_jax
from plain_jax import PlainConfig

LEARNING_RATE = 1e-3
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far two losses may be apart, relatively. Rounding differs, and training amplifies it."""

Step = Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]


@dataclasses.dataclass
class Trainer:
    """A state, the step that advances it, and what was measured."""

    state: Any
    step: Step
    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)

    def advance(self, batch: Any) -> None:
        """Runs one step to its end."""
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(metrics["loss"]))


def shardlib_trainer(
    config: PlainConfig, mesh: Any, *, length: int, steps: int, precision: str | None = None
) -> Trainer:
    """Returns shardlib's transformer of these sizes with its optimizer and step, by default in the
    precision of the sizes."""
    import shardlib as sl
    from shardlib.optim.build import OptimizerConfig, build_optimizer
    from shardlib.registry import DataSpec
    from shardlib_models.transformer import FAMILY

    sizes = dataclasses.asdict(config)
    dtype, attention = sizes.pop("dtype"), sizes.pop("attention")
    model = FAMILY.config(**sizes, attention=attention or "xla")
    data = DataSpec(vocab_size=config.vocab_size, sequence_length=length)
    optimizer = build_optimizer(
        OptimizerConfig(learning_rate=LEARNING_RATE, weight_decay=0.1, clip_norm=1.0),
        steps=steps,
        global_batch=1,
    )
    with sl.use(mesh, sl.rules.STANDARD):
        state = sl.init_state(lambda rngs: FAMILY.make(model, data, rngs), optimizer.transform)
        step = sl.make_train_step(
            functools.partial(FAMILY.loss, train=True),
            precision=precision or ("bf16" if dtype == "bfloat16" else "f32"),
            schedule=optimizer.schedule,
        )
    return Trainer(state, step)


def plain_trainer(config: PlainConfig, mesh: Any, *, steps: int, params: Any = None) -> Trainer:
    """Returns the baseline, over parameters on the host or over its own."""
    optimizer, schedule = plain_jax.make_optimizer(steps, learning_rate=LEARNING_RATE)
    if params is None:
        state = plain_jax.init_state(config, optimizer, mesh)
    else:
        placed = plain_jax.state_shardings(config, optimizer, mesh)
        state = jax.device_put((params, optimizer.init(params)), placed)
    jitted = plain_jax.make_step(config, optimizer, schedule, mesh)
    indices = iter(range(10**9))

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        return jitted(state, batch, jnp.int32(next(indices)))

    return Trainer(state, step)


def packed_batch(config: PlainConfig, rows: int, length: int, seed: int) -> dict[str, np.ndarray]:
    """Returns random tokens as rows of two documents each, [rows, length] int32."""
    first = length // 3
    documents = (np.arange(length) >= first).astype(np.int32)
    positions = np.arange(length, dtype=np.int32) - first * documents
    shared = {"segment_ids": documents + 1, "positions": positions}
    tiled = {name: np.tile(row, (rows, 1)) for name, row in shared.items()}
    return plain_jax.random_batch(config, rows, length, seed) | tiled


def compare(config: PlainConfig, strategy: str, devices: Any, flags: Any) -> dict[str, float]:
    """Returns the ratio and both medians on one mesh.

    Raises:
        SystemExit: If the losses do not agree: then the times compare different work.
    """
    mesh = plain_jax.make_mesh(strategy, devices)
    steps = flags.warmup + flags.steps
    ours = shardlib_trainer(config, mesh, length=flags.length, steps=steps)
    plain = plain_trainer(config, mesh, steps=steps, params=jax.device_get(ours.state.params))
    rows = jax.NamedSharding(mesh, jax.P(strategy))
    for index in range(steps):
        batch = jax.device_put(packed_batch(config, flags.batch, flags.length, index), rows)
        for trainer in (ours, plain) if index % 2 else (plain, ours):
            trainer.advance(batch)
    apart = float(np.max(np.abs(np.divide(ours.losses, plain.losses) - 1)))
    if not apart < TOLERANCE[config.dtype]:
        raise SystemExit(f"{strategy}={len(devices)}: the losses are {apart:.1e} apart, relatively")
    timed = slice(flags.warmup, None)
    pairs = zip(ours.seconds[timed], plain.seconds[timed], strict=True)
    return {
        "ratio": statistics.median(mine / theirs for mine, theirs in pairs),
        "shardlib_seconds": statistics.median(ours.seconds[timed]),
        "plain_seconds": statistics.median(plain.seconds[timed]),
        "losses_apart": apart,
    }


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of all meshes."""
    config = PlainConfig(
        num_layers=flags.layers,
        embed_dim=flags.embed,
        head_dim=flags.embed // PlainConfig.num_heads,
        mlp_dim=flags.embed * 8 // 3 // 8 * 8,
        dtype="bfloat16" if flags.precision == "bf16" else "float32",
    )
    devices = jax.devices()[: flags.devices]
    meshes = {"1_device": ("data", devices[:1])}
    if len(devices) > 1:
        meshes |= {f"{len(devices)}_devices_{s}": (s, devices) for s in ("data", "fsdp")}
    figures: dict[str, Any] = {"device": devices[0].device_kind, "precision": flags.precision}
    worst = 0.0
    for name, (strategy, used) in meshes.items():
        result = compare(config, strategy, used, flags)
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in result.items()))
        figures |= {f"{key}_{name}": float(f"{value:.4g}") for key, value in result.items()}
        if len(used) > 1:
            worst = max(worst, result["ratio"])
            figures[f"ratio_{len(used)}_devices"] = float(f"{worst:.4g}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="timed pairs of steps, each mesh")
    parser.add_argument("--warmup", type=int, default=3, help="pairs before those, not timed")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--embed", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", flags.devices)
    print(json.dumps(measure(flags)))


if __name__ == "__main__":
    main()
