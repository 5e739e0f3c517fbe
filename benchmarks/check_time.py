"""Time of the check for wrong numbers, as a share of the compilation of the step that it reads.

Two transformers of 12 layers are compiled for a mesh of three axes with XLA's default optimisation:
that of `shardlib_models`, whose layers are one loop, and a plain one whose layers follow each other
in the program. XLA partitions both unless `--constrain auto` lets shardlib partition the second,
which leaves less to read. Nothing is allocated or run. The figures are CPU time of the whole
process, each a median.

    python benchmarks/check_time.py

The last line is JSON: for each of `scanned` and `unrolled` the lines of the program, the seconds of
its compilation and of its check, and `share`, the second over the first.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import shardlib as sl
from shardlib.explain.wrong_numbers import wrong_numbers
from shardlib.registry import DataSpec
from shardlib_models.transformer import FAMILY

VOCABULARY, HEADS = 256, 4


class Block(nnx.Module):
    """One layer, which constrains nothing."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        def dense(sizes: tuple[int, int], *axes: str) -> nnx.Linear:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
            return nnx.Linear(*sizes, kernel_init=init, rngs=rngs)

        self.norms = nnx.List(nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.qkv = dense((width, 3 * width), "embed", "mlp")
        self.out = dense((width, width), "mlp", "embed")
        self.up = dense((width, 4 * width), "embed", "mlp")
        self.down = dense((4 * width, width), "mlp", "embed")

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        parts = jnp.split(self.qkv(self.norms[0](x)), 3, -1)
        q, k, v = (part.reshape(batch, length, HEADS, width // HEADS) for part in parts)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.reshape(batch, length, width))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Unrolled(nnx.Module):
    """Layers that follow each other in the program."""

    def __init__(self, layers: int, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.layers = nnx.List(Block(width, rngs) for _ in range(layers))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


def unrolled_loss(model: Unrolled, batch: Any, rng: jax.Array) -> jax.Array:
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def models(flags: argparse.Namespace) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Returns `make(rngs)` and the loss of each model."""
    config = FAMILY.config(num_layers=flags.layers, embed_dim=flags.embed, num_heads=HEADS)
    data = DataSpec(vocab_size=VOCABULARY, sequence_length=flags.length)
    return {
        "scanned": (
            lambda rngs: FAMILY.make(config, data, rngs),
            functools.partial(FAMILY.loss, train=True),
        ),
        "unrolled": (lambda rngs: Unrolled(flags.layers, flags.embed, rngs), unrolled_loss),
    }


def measure(make: Any, loss: Any, flags: argparse.Namespace) -> dict[str, float]:
    """Returns the median CPU-seconds of a compilation and of its check."""
    tokens = jax.ShapeDtypeStruct((flags.batch, flags.length), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    mesh = sl.make_mesh(flags.mesh)
    with sl.use(mesh, sl.rules.STANDARD):
        state = sl.abstract_state(make, optax.adamw(1e-3))
    compilations, checks, text = [], [], ""
    for _ in range(flags.repeats):
        jax.clear_caches()
        step = sl.make_train_step(loss, constrain=flags.constrain)
        traced = step.program(state, batch).trace(state, batch)
        lowered = traced.lower()
        start = time.process_time()
        compiled = lowered.compile()
        compilations.append(time.process_time() - start)
        start = time.process_time()
        wrong_numbers(compiled, mesh, traced.jaxpr)
        checks.append(time.process_time() - start)
        text = compiled.as_text() or ""
    compilation, check = map(statistics.median, (compilations, checks))
    return {
        "lines": text.count("\n"),
        "compile_seconds": round(compilation, 3),
        "check_seconds": round(check, 4),
        "share": round(check / compilation, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="data=2,fsdp=2,tensor=2")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--embed", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--constrain", default="user", choices=("auto", "user"))
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", flags.devices)
    jax.config.update("jax_enable_compilation_cache", False)
    figures = {}
    for name, (make, loss) in models(flags).items():
        figures[name] = measure(make, loss, flags)
        print(f"{name}: {figures[name]}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
