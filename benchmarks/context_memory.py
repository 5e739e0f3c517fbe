"""Memory of a training step when the sequence grows with the devices that share it.

The step of a small transformer is compiled twice, for one device and a sequence of `--length`, and
for `--devices` devices along `context` and a sequence as many times as long. Every device then
holds as many positions as before, so its memory should be the same: what the compiler reserves on
each device for arguments, results and temporaries of the step, nothing of which is run. The plain
way, scores of all pairs of positions, is also compiled for the short sequence on one device.

    python benchmarks/context_memory.py
    python benchmarks/context_memory.py --context gather --remat none

The last line is JSON: `ratio` is bytes per device of the long sequence over those of the short one,
and `attention_ratio` the same of attention alone, forward and backward: there a ring holds the keys
and values of a second shard, which are on their way, and the gradients of two. `work_zigzag` and
`work_contiguous` are the scores that the busiest device computes over the mean.
"""

import argparse
import json
from typing import Any

import jax


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096, help="positions of one device")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--context", choices=("ring", "gather", "ulysses"), default="ring")
    parser.add_argument("--backend", choices=("auto", "blockwise"), default="auto")
    parser.add_argument("--remat", default="full")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--embed", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=1024)
    return parser.parse_args()


def bytes_per_device(compiled: Any) -> int:
    """Returns what a program holds on each device: arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return held - memory.alias_size_in_bytes


def attention_bytes(flags: argparse.Namespace, mesh: Any, length: int) -> int:
    """Returns bytes per device of attention and its gradients alone, in bfloat16."""
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import shardlib as sl
    from shardlib.nn.attention import attend

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        with sl.use(mesh, sl.rules.STANDARD):
            y = attend(query, key, value, backend=flags.backend, context=flags.context)
        return jnp.sum(y.astype(jnp.float32))

    placed = NamedSharding(mesh, PartitionSpec(None, "context"))
    heads = (flags.heads, flags.kv_heads, flags.kv_heads)
    shapes = [(1, length, n, flags.embed // flags.heads) for n in heads]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placed) for shape in shapes]
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile()
    return bytes_per_device(compiled)


def step_bytes(flags: argparse.Namespace, mesh: Any, length: int, backend: str) -> int:
    """Returns bytes per device of the training step of a transformer."""
    import functools

    import numpy as np
    import optax

    import shardlib as sl
    from shardlib import registry

    family = registry.family("transformer")
    config = family.config(
        num_layers=flags.layers,
        embed_dim=flags.embed,
        num_heads=flags.heads,
        num_kv_heads=flags.kv_heads,
        remat=flags.remat,
        attention=backend,
    )
    data = registry.DataSpec(vocab_size=flags.vocab, sequence_length=length)

    def make(rngs: Any) -> Any:
        return family.make(config, data, rngs)

    state = sl.abstract_state(make, optax.sgd(1e-3), mesh=mesh, rules=sl.rules.STANDARD)
    row = ("batch", "length")
    step = sl.make_train_step(
        functools.partial(family.loss, train=True), batch_axes={"tokens": row, "targets": row}
    )
    tokens = jax.ShapeDtypeStruct((1, length), np.int32)
    return bytes_per_device(step.lower(state, {"tokens": tokens, "targets": tokens}).compile())


def work_ratio(length: int, devices: int, order: Any) -> float:
    """Returns the scores of the busiest device over the mean of all devices."""
    from shardlib.nn.attention import scores_per_device

    totals = [sum(steps) for steps in scores_per_device(length, devices, order)]
    return max(totals) * len(totals) / sum(totals)


def main() -> None:
    import shardlib as sl

    flags = parse()
    jax.config.update("jax_num_cpu_devices", flags.devices)
    alone = sl.make_mesh("context=1", devices=jax.devices()[:1])
    shared = sl.make_mesh(f"context={flags.devices}")
    whole = flags.length * flags.devices
    short, long = (
        step_bytes(flags, mesh, length, flags.backend)
        for mesh, length in ((alone, flags.length), (shared, whole))
    )
    short_attention, long_attention = (
        attention_bytes(flags, mesh, length)
        for mesh, length in ((alone, flags.length), (shared, whole))
    )
    figures = {
        "length": flags.length,
        "devices": flags.devices,
        "bytes_1_device": short,
        f"bytes_{flags.devices}_devices": long,
        "ratio": round(long / short, 3),
        "attention_ratio": round(long_attention / short_attention, 3),
        "bytes_1_device_xla": step_bytes(flags, alone, flags.length, "xla"),
        "work_zigzag": round(work_ratio(whole, flags.devices, "zigzag"), 4),
        "work_contiguous": round(work_ratio(whole, flags.devices, "contiguous"), 4),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
