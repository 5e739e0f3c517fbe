"""Bytes sent and memory of models that constrain nothing: partitioned by XLA and by shardlib.

The training step of each model is compiled, never run, for eight TPU chips ahead of time (bfloat16,
needs libtpu) or for eight CPU devices (float32). Kernels have logical axes by path rules alone, as
a user would write them for a model of someone else. `user` leaves the partitioning to XLA, which
may compute wrong numbers (docs/xla_faults.md); `auto` is what shardlib makes of it.

    python benchmarks/unannotated.py
    python benchmarks/unannotated.py --models transformer,mlp --meshes fsdp=8 --on cpu:8

The ratios are of `auto` to `user`; above 1 shardlib sends or holds more. The last line is JSON: the
rows and the largest ratios.
"""

import argparse
import json
from typing import Any

import flax.linen as nn

from collectives import devices_of, start_platforms

MESHES = "data=2,fsdp=2,tensor=2", "fsdp=4,tensor=2", "fsdp=8"
PATHS = {
    "**/embedding": ("vocab", "embed"),
    "**/head/kernel": ("embed", "vocab"),
    "**/up*/kernel": ("embed", "mlp"),
    "**/down*/kernel": ("mlp", "embed"),
    "**/query/kernel": ("embed", "heads", None),
    "**/key/kernel": ("embed", "heads", None),
    "**/value/kernel": ("embed", "heads", None),
    "**/out/kernel": ("heads", None, "embed"),
    "**/expert_up": (None, "embed", "mlp"),
    "**/expert_down": (None, "mlp", "embed"),
}
STACKED = {f"layers/{path}": (None, *axes) for path, axes in PATHS.items()}
WIDTH, VOCAB, LENGTH, BATCH = 1024, 32_000, 1024, 16


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.SelfAttention(8, use_bias=False)(nn.LayerNorm()(x), mask)
        y = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, name="down")(y), None


class Transformer(nn.Module):
    layers: int = 2
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        if self.scanned:
            stack = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = stack(name="layers")(x, None)
        else:
            for i in range(self.layers):
                x, _ = Block(name=f"layer_{i}")(x)
        return nn.Dense(VOCAB, use_bias=False, name="head")(nn.LayerNorm()(x))


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for i in range(4):
            y = nn.gelu(nn.Dense(4 * WIDTH, name=f"up_{i}")(x))
            x = x + nn.Dense(WIDTH, name=f"down_{i}")(y)
        return x


class Experts(nn.Module):
    """Every token through every expert, weighted by a router."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        import jax.numpy as jnp

        init = nn.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        gates = nn.softmax(nn.Dense(8, name="router")(x))
        up = self.param("expert_up", init, (8, WIDTH, WIDTH), x.dtype)
        down = self.param("expert_down", init, (8, WIDTH, WIDTH), x.dtype)
        hidden = nn.gelu(jnp.einsum("bd,edh->beh", x, up))
        return x + jnp.einsum("beh,ehd,be->bd", hidden, down, gates)


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for width in (128, 256):
            x = nn.relu(nn.GroupNorm(8)(nn.Conv(width, (3, 3), strides=2)(x)))
            x = x + nn.Conv(width, (3, 3), feature_group_count=width)(x)
        return nn.Dense(WIDTH)(x.mean((1, 2)))


MODELS = {
    "transformer": Transformer(),
    "scanned": Transformer(4, scanned=True),
    "mlp": MLP(),
    "experts": Experts(),
    "convolutions": ConvNet(),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--meshes", nargs="+", default=MESHES)
    parser.add_argument("--on", default="v5e-8", help="a cluster of 8 devices")
    flags = parser.parse_args(arguments)
    start_platforms()
    cluster, devices = devices_of(flags.on)
    if isinstance(devices, str):
        print(devices)
        return
    print(f"{'model':13} {'mesh':24} {'sent MB':>17} {'ratio':>6} {'peak MiB':>15} {'ratio':>6}")
    rows = []
    for name in flags.models.split(","):
        for mesh in flags.meshes:
            rows.append(row(name, mesh, cluster.platform, devices))
            print(line(rows[-1]), flush=True)
    worst = {key: max(r[key] for r in rows) for key in ("sent_ratio", "peak_ratio")}
    print(json.dumps({"rows": rows, **{f"largest_{key}": n for key, n in worst.items()}}))


def row(name: str, mesh: str, platform: str, devices: Any) -> dict[str, Any]:
    """Compiles a model both ways; `sent` and `peak` are bytes of one device, XLA's first."""
    both = [measure(name, mesh, platform, devices, mode) for mode in ("user", "auto")]
    (sent, peak), (own_sent, own_peak) = both
    return {
        "model": name,
        "mesh": mesh,
        "sent": (sent, own_sent),
        "peak": (peak, own_peak),
        "sent_ratio": round(own_sent / sent, 3),
        "peak_ratio": round(own_peak / peak, 3),
    }


def measure(name: str, mesh_text: str, platform: str, devices: Any, mode: Any) -> tuple[int, int]:
    """Returns the bytes that a device sends in a step, and its peak memory in bytes."""
    import jax
    import optax

    import shardlib as sl
    from shardlib.explain.analysis.collectives import read_program
    from shardlib.explain.aot.compile import compile_step

    model, batch = MODELS[name], batch_of(name)
    mesh = sl.make_mesh(mesh_text, devices=devices)
    policy = "bf16" if platform == "tpu" else "f32"
    rules = sl.rules.STANDARD.override(paths={**STACKED, **PATHS})
    with sl.use(mesh, rules):
        inputs = (jax.ShapeDtypeStruct(batch["x"].shape, batch["x"].dtype),)
        state = sl.abstract_state(model, optax.sgd(1e-2), inputs=inputs, precision=policy)
    step = sl.make_train_step(loss, constrain=mode, precision=policy)
    compiled = compile_step(step, (state, batch), keep=False)
    sent = sum(c.sent_bytes for c in read_program(compiled.text, mesh).collectives)
    return int(sent), compiled.memory["peak"]


def loss(model: Any, batch: Any, rng: Any) -> Any:
    import jax.numpy as jnp
    import optax

    found = model(batch["x"]).astype(jnp.float32)
    if batch["x"].dtype == jnp.int32:
        return optax.softmax_cross_entropy_with_integer_labels(found, batch["y"]).mean()
    return jnp.mean((found - batch["y"]) ** 2)


def batch_of(name: str) -> dict[str, Any]:
    import jax

    shapes = {
        "transformer": ((BATCH, LENGTH), (BATCH, LENGTH)),
        "scanned": ((BATCH, LENGTH), (BATCH, LENGTH)),
        "convolutions": ((64, 64, 64, 8), (64, WIDTH)),
    }
    x, y = shapes.get(name, ((4096, WIDTH), (4096, WIDTH)))
    dtype = "int32" if name in ("transformer", "scanned") else "float32"
    return {"x": jax.ShapeDtypeStruct(x, dtype), "y": jax.ShapeDtypeStruct(y, dtype)}


def line(row: dict[str, Any]) -> str:
    sent = " -> ".join(f"{n / 1e6:.1f}" for n in row["sent"])
    peak = " -> ".join(f"{n / 2**20:.0f}" for n in row["peak"])
    ratios = row["sent_ratio"], row["peak_ratio"]
    return f"{row['model']:13} {row['mesh']:24} {sent:>17} {ratios[0]:6} {peak:>15} {ratios[1]:6}"


if __name__ == "__main__":
    main()
