"""A Llama of 0.7 B parameters on one GPU: predicted beside measured, step time and peak memory.

    python benchmarks/plan_gpu.py
    python benchmarks/plan_gpu.py --dry-run           # tiny sizes, on the CPU as one device

The planner knows the chip by its datasheet and the committed constants, and nothing of this run;
beside it stands the planner with what `shardlib calibrate` measures here first (on the CPU that
alone). Peak memory is what the device itself reports; the CPU reports none.

The last line is JSON: `predicted_seconds` (null where the chip is unknown), `calibrated_seconds`,
`measured_seconds`, `predicted_bytes`, `measured_bytes`.
"""

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

if "--dry-run" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from gpu_train import TINY, plain_config
from plain_jax import make_mesh, random_batch
from shardlib.cost.machine.measured import MeasuredCluster
from shardlib.hardware import Cluster, chip_for
from shardlib.plan import Job, Layout, Transformer, peak_memory, step_time
from shardlib.run.plans.calibrating import calibrate
from step_overhead import shardlib_trainer


def job_of(flags: argparse.Namespace) -> Job:
    """Returns what the planner must know."""
    dims = Transformer(
        layers=flags.layers,
        embed=flags.embed,
        heads=flags.heads,
        kv_heads=flags.kv_heads,
        head_dim=flags.head_dim,
        mlp=flags.mlp,
        vocab=flags.vocab,
    )
    return Job(dims, flags.length, flags.batch)


def measure(flags: argparse.Namespace) -> tuple[float, float | None]:
    """Returns the median seconds of a step and the peak bytes of the device."""
    mesh = make_mesh("data", jax.devices()[:1])
    config = plain_config(flags)
    trainer = shardlib_trainer(config, mesh, length=flags.length, steps=1000)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    batch = jax.device_put(random_batch(config, flags.batch, flags.length), rows)
    state, step, seconds = trainer.state, trainer.step, []
    trainer.state = None  # Its buffers are donated to the first step.
    for _ in range(flags.warmup + flags.steps):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    statistics_ = jax.devices()[0].memory_stats() or {}
    return statistics.median(seconds[flags.warmup :]), statistics_.get("peak_bytes_in_use")


def main() -> None:
    """Prints both beside each other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes: dict[str, int] = {"layers": 24, "embed": 1536, "heads": 12, "kv_heads": 4}
    sizes |= {"head_dim": 128, "mlp": 4096, "vocab": 32768, "batch": 4, "length": 4096}
    sizes |= {"warmup": 3, "steps": 20}
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--jax-attention", default="auto")
    parser.add_argument("--remat", default="none")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on the CPU")
    flags = parser.parse_args()
    if flags.dry_run:
        vars(flags).update({name: value for name, value in TINY.items() if name in sizes})
    device = jax.devices()[0]
    chip = chip_for(device)
    cluster = Cluster(f"1x{chip.name}" if chip else "cpu:1", chip, 1, 1)
    found = calibrate(rounds=3, target_seconds=1e-4 if flags.dry_run else None)
    own = {name: getattr(cluster, name) for name in cluster.__dataclass_fields__}
    job, layout = job_of(flags), Layout()
    seconds, peak = measure(flags)
    summary: dict[str, Any] = {
        "device": device.device_kind,
        "predicted_seconds": step_time(job, layout, cluster).total if chip else None,
        "calibrated_seconds": step_time(
            job, layout, MeasuredCluster(**own, calibration=found)
        ).total,
        "measured_seconds": seconds,
        "predicted_bytes": peak_memory(job, layout, cluster).total,
        "measured_bytes": peak,
    }
    for name, value in summary.items():
        print(f"{name:20} {value}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
