"""Peak memory of compiled training steps, by shardlib and by `plain_jax.py`, with no accelerator.

    python benchmarks/step_memory.py
    python benchmarks/step_memory.py --only 8xh100 --held      # what both hold at their peaks

Each row is Llama 3 8B or Llama 3.2 1B (here with a head of its own), a cluster and a mesh. Both
steps are compiled ahead of time for that cluster: the same batch, microbatches, rematerialisation,
AdamW with clipping, float32 state that is donated, and products in bfloat16. Both attend by the
same kernel, shardlib's: splash on a TPU, blockwise on a GPU, where cuDNN's cannot be compiled
without a GPU. So the rows compare everything else. The plain step has no chunks of the loss: it is
compared with shardlib's with and without them.

Width and vocabulary are full; a row with `layers` has fewer layers. Programs for TPUs are compiled
without optimization, whose peaks differ by 1-7%; `--optimize` compiles them as a run does.

`shardlib`, `plain` and `chunked` (`loss_chunks=8`) are XLA's peaks with the program's code, in GiB
of the device that holds most; `ratio` is shardlib's to the plain one, and `chunks` the chunked one
to shardlib's. Chunks lower a peak that lies in the loss. In the backward pass of a layer nothing of
the loss is left: where the peak lies there, which `--held` tells, `chunks` is 1. An example is
Llama 3 8B on 8xh100 with `fsdp=4,tensor=2` and 16x4096: 21.08 GiB in an MLP, both times. The last
line is JSON: the rows, and the largest of both ratios.
"""

import argparse
import dataclasses
import json
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import plain_jax
from plain_jax import PlainConfig
from plan_memory import Cell
from shardlib.data import batch_spec as batch_shapes
from shardlib.explain.analysis.memory import MemoryReport, read_memory
from shardlib.explain.aot.compile import CompiledStep, compile_step
from shardlib.explain.aot.topology import devices_of
from shardlib.nn.attention import attend
from shardlib.run.checks import expected_spec
from shardlib.run.config import RunConfig
from shardlib.run.setup import Setup, make_scope, setup
from shardlib.sharding.constrain import use

_GIB = 2**30
_CHUNKS = 8


@dataclasses.dataclass(frozen=True)
class Row(Cell):
    """A cell of `plan_memory`, perhaps with fewer layers."""

    layers: int | None = None

    @property
    def name(self) -> str:
        return super().name + (f" layers={self.layers}" if self.layers else "")

    def config(self) -> RunConfig:
        config = super().config()
        optimizer = dataclasses.replace(config.optimizer, weight_decay=0.1, clip_norm=1.0)
        return dataclasses.replace(config, optimizer=optimizer)

    def _model(self) -> dict[str, Any]:
        fewer = {"num_layers": self.layers} if self.layers else {}
        return super()._model() | {"tied_embeddings": False} | fewer


_8B, _1B = "llama3-8b", "llama3.2-1b"
ROWS = (
    Row(_8B, "v5e-8", "fsdp=8", 8, layers=8),
    Row(_8B, "v5e-8", "fsdp=8", 64, microbatches=8, layers=8),
    Row(_8B, "v5e-8", "fsdp=4,tensor=2", 8, layers=8),
    Row(_8B, "v5e-16", "data=2,fsdp=8", 16, layers=8),
    Row(_8B, "v5e-16", "data=2,fsdp=8", 128, microbatches=8, layers=8),
    Row(_8B, "v5p-16", "fsdp=8", 16),
    Row(_8B, "v5p-16", "fsdp=8", 16, remat="dots"),
    Row(_8B, "v5p-16", "fsdp=8", 128, microbatches=8),
    Row(_8B, "v5p-16", "fsdp=4,tensor=2", 16),
    Row(_8B, "v5p-16", "fsdp=4,tensor=2", 64, remat="dots", microbatches=8),
    Row(_8B, "v5p-32", "fsdp=16", 32),
    Row(_8B, "8xh100", "fsdp=8", 16),
    Row(_8B, "8xh100", "fsdp=8", 16, remat="dots"),
    Row(_8B, "8xh100", "fsdp=8", 64, microbatches=8),
    Row(_8B, "8xh100", "fsdp=4,tensor=2", 16),
    Row(_8B, "8xh100", "fsdp=4,tensor=2", 64, microbatches=8),
    Row(_8B, "16xh100", "data=2,fsdp=8", 32),
    Row(_8B, "16xh100", "data=2,fsdp=8", 128, microbatches=8),
    Row(_1B, "v5e-8", "fsdp=8", 16),
    Row(_1B, "v5e-8", "fsdp=8", 64, microbatches=8, remat="dots"),
    Row(_1B, "v5e-16", "data=2,fsdp=8", 32, remat="dots"),
    Row(_1B, "v5p-16", "fsdp=8", 64, microbatches=8),
    Row(_1B, "8xh100", "fsdp=8", 16, remat="dots"),
    Row(_1B, "8xh100", "fsdp=8", 64, microbatches=8),
    Row(_1B, "8xh100", "fsdp=4,tensor=2", 64, microbatches=8, remat="dots"),
    Row(_1B, "16xh100", "data=2,fsdp=8", 128, microbatches=8),
)


def parts_of(row: Row) -> Setup:
    """Returns the parts of the run of a row."""
    config = row.config()
    return setup(config, expected_spec(config), make_scope(config, devices_of(row.cluster)))


def shardlib_step(row: Row, *, optimize: bool) -> CompiledStep:
    """Returns the step that `shardlib train` would run."""
    parts = parts_of(row)
    batch = batch_shapes(parts.config.data, row.batch)
    arguments = parts.saved_state(), batch
    return compile_step(parts.train_step(), arguments, on=row.cluster, optimize=optimize)


def plain_step(row: Row, *, optimize: bool) -> CompiledStep:
    """Returns the step of `plain_jax.py`, on the same mesh."""
    parts = parts_of(row)
    mesh, config = parts.scope.mesh, plain_config(row, parts)
    optimizer, schedule = plain_jax.make_optimizer(parts.config.train.steps)

    def init(key: jax.Array) -> plain_jax.State:
        params = plain_jax.init(config, key)
        return params, optimizer.init(params)

    def placed(x: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state_at = plain_jax.state_shardings(config, optimizer, mesh)
    state = jax.tree.map(placed, jax.eval_shape(init, jax.random.key(0)), state_at)
    rows = NamedSharding(mesh, plain_jax.batch_spec(mesh))
    shapes = batch_shapes(parts.config.data, row.batch)
    batch = {name: placed(x, rows) for name, x in shapes.items() if name != "num_bytes"}
    index = jax.ShapeDtypeStruct((), jnp.int32)
    step = plain_jax.make_step(config, optimizer, schedule, mesh, row.microbatches)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers.
        return compile_step(step, (state, batch, index), on=row.cluster, optimize=optimize)


def plain_config(row: Row, parts: Setup) -> PlainConfig:
    """Returns the model of a row for the plain step, with shardlib's attention."""
    model, scope = parts.config.model, parts.scope

    def attention(query: Any, key: Any, value: Any, segments: Any) -> jax.Array:
        with use(scope.mesh, scope.rules):
            return attend(query, key, value, segment_ids=segments, backend=model.attention)

    names = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
    sizes = {name: getattr(model, name) for name in (*names, "vocab_size")}
    return PlainConfig(**sizes, dtype="bfloat16", remat=row.remat, attention=attention)


def measured(row: Row, flags: argparse.Namespace) -> dict[str, Any]:
    """Returns the peaks of a row in GiB, and their ratios."""
    chunked = dataclasses.replace(row, loss_chunks=_CHUNKS)
    makers = {
        "plain": lambda: plain_step(row, optimize=flags.optimize),
        "shardlib": lambda: shardlib_step(row, optimize=flags.optimize),
        "chunked": lambda: shardlib_step(chunked, optimize=flags.optimize),
    }
    peaks = {}
    for name, make in makers.items():
        report = read_memory(make())
        peaks[name] = report.peak_bytes
        if flags.held:
            print(f"  {name}: {report.peak_bytes / _GIB:.2f} GiB at {report.at}\n{held(report)}")
    return {
        "row": row.name,
        **{name: round(peak / _GIB, 3) for name, peak in peaks.items()},
        "ratio": round(peaks["shardlib"] / peaks["plain"], 4),
        "chunks": round(peaks["chunked"] / peaks["shardlib"], 4),
    }


def held(report: MemoryReport) -> str:
    """Returns the largest buffers at a peak, a line each."""
    lines = [
        f"    {b.bytes * b.count / _GIB:6.2f} GiB  {b.count} x {b.shape}  {b.category}  {b.phase}  "
        f"{b.opcode}  {b.op_name[-80:]}"
        for b in report.largest
    ]
    totals = ", ".join(f"{k} {v / _GIB:.2f}" for k, v in report.categories.items() if v > _GIB / 99)
    return "\n".join([f"    {totals}", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name has all of these words")
    parser.add_argument("--optimize", action="store_true", help="optimize programs for TPUs")
    parser.add_argument("--held", action="store_true", help="show what is held at the peaks")
    flags = parser.parse_args()
    rows = []
    print(f"{'plain':>7} {'shardlib':>8} {'ratio':>6} {'chunked':>8} {'chunks':>6}  row")
    for row in ROWS:
        if not set(flags.only.split()) <= set(row.name.split()):
            continue
        found = measured(row, flags)
        rows.append(found)
        print(
            f"{found['plain']:7.2f} {found['shardlib']:8.2f} {found['ratio']:6.3f} "
            f"{found['chunked']:8.2f} {found['chunks']:6.3f}  {row.name}",
            flush=True,
        )
    largest = {key: max(row[key] for row in rows) for key in ("ratio", "chunks")}
    last = {"largest_ratio": largest["ratio"], "largest_chunks_ratio": largest["chunks"]}
    print(json.dumps({"rows": rows, **last}))


if __name__ == "__main__":
    main()
