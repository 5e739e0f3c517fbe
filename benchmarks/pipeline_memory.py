"""Temporary memory of a pipeline's step, by schedule and number of microbatches.

A pipeline of 4 stages computes the gradients of a transformer over microbatches of one size. GPipe
keeps the inputs of all microbatches until the last one has passed; 1F1B and its interleaved variant
keep those of as many as there are stages, whatever the number of microbatches. The program is
compiled and not run; the figures are XLA's, for one device. XLA's for CPU are not those of an
accelerator, whose compiler fuses and shares buffers in another way; what grows, grows on both.

    python benchmarks/pipeline_memory.py

The last line is JSON: bytes by schedule and number of microbatches, and `<schedule>_ratio`, the
most microbatches over the fewest.
"""

import argparse
import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

SCHEDULES = ("1f1b", "gpipe", "interleaved")
MICROBATCHES = (16, 64)


def temp_bytes(schedule: str, microbatches: int, flags: argparse.Namespace) -> int:
    """Returns the temporary bytes per device of the compiled gradients."""
    import shardlib as sl
    from shardlib.functional.precision import precision
    from shardlib.registry import DataSpec
    from shardlib.train.gradients import LossArguments, PartLoss
    from shardlib.train.pipeline import PipelineConfig
    from shardlib.train.pipeline.gradients import pipelined_gradients
    from shardlib_models.transformer import FAMILY

    config = FAMILY.config(
        num_layers=flags.layers, embed_dim=flags.embed, num_heads=4, remat="full"
    )
    data = DataSpec(vocab_size=256, sequence_length=flags.length)
    mesh, rules = sl.make_mesh(flags.mesh), sl.rules.STANDARD
    state = sl.abstract_state(
        lambda rngs: FAMILY.make(config, data, rngs), optax.sgd(0.1), mesh=mesh, rules=rules
    )

    def loss_fn(model: Any, batch: Any, rng: Any) -> Any:
        return FAMILY.loss(model, batch, rng, train=True)

    loss = PartLoss(state.definition, loss_fn, precision("f32"))
    pipeline = PipelineConfig(schedule=schedule, skip_idle=True)  # type: ignore[arg-type]

    def gradients(params: Any, batch: Any, key: jax.Array) -> Any:
        with sl.use(mesh, rules):
            arguments = LossArguments(params, {}, batch, key)
            return pipelined_gradients(loss, arguments, microbatches=microbatches, config=pipeline)

    shape = (flags.microbatch * microbatches, flags.length)
    over = NamedSharding(mesh, PartitionSpec(("data", "fsdp") if "data" in mesh.shape else None))
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=over)
    batch = {"tokens": tokens, "targets": tokens}
    compiled = jax.jit(gradients).lower(state.params, batch, jax.random.key(0)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="stage=4,tensor=2")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--embed", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--microbatch", type=int, default=4, help="examples in each")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    figures: dict[str, Any] = {}
    for schedule in flags.schedules:
        found = [temp_bytes(schedule, count, flags) for count in MICROBATCHES]
        for count, size in zip(MICROBATCHES, found, strict=True):
            figures[f"{schedule}_{count}_bytes"] = size
        figures[f"{schedule}_ratio"] = round(found[-1] / found[0], 3)
        print(f"{schedule:12} {found[0]:>12,} -> {found[-1]:>12,} bytes")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
