"""Ten meshes of the quickstart's model on 8 virtual CPU devices: are they ranked as they run?

    python benchmarks/plan_ranking.py
    python benchmarks/plan_ranking.py --calibration FILE      # of `shardlib calibrate --on cpu:8`

First the machine is calibrated (matmuls, passes over memory, collectives; nothing of a model), then
the step of `configs/quickstart.yaml` is predicted for each mesh, and last it is run: steps of all
meshes take turns, and of each mesh the median counts. Kendall's tau compares the two orders: the
pairs of meshes in the same order less those in the other, over all pairs; 1 is the same order, and
0 what a guess would give. The spread beside each time is half the range between its quartiles:
where it is as large as the differences between meshes, another machine or a quieter hour is needed.
Seconds of the processors (CPU) are those of this process, whatever else the machine does.

The last line is JSON: `kendall_tau`, the same of the processors' seconds, both times of each mesh,
and the spread.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from shardlib.config import load
from shardlib.cost.machine.measured import load as load_calibration
from shardlib.cost.machine.measured import measured_cluster
from shardlib.data import batch_spec
from shardlib.hardware import parse_cluster
from shardlib.plan import Job, Layout, StepTime, Transformer, step_time
from shardlib.run.checks import expected_spec
from shardlib.run.config import RunConfig
from shardlib.run.devices import keep_compiled_programs
from shardlib.run.plans.calibrating import calibrate
from shardlib.run.setup import make_scope, setup
from shardlib.train.state import materialize
from shardlib.train.step import batch_shardings

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
VOCAB = 1024
MESHES = (
    ("data=8", 1),
    ("fsdp=8", 1),
    ("data=2,fsdp=4", 1),
    ("data=4,tensor=2", 1),
    ("data=2,tensor=4", 1),
    ("fsdp=4,tensor=2", 1),
    ("data=4,context=2", 1),
    ("fsdp=2,context=4", 1),
    ("stage=2,data=4", 4),
    ("stage=4,data=2", 8),
)
"""Meshes with their numbers of microbatches."""


@dataclasses.dataclass
class Candidate:
    """A mesh: its step, and what was predicted and measured."""

    mesh: str
    predicted: StepTime
    state: Any
    step: Any
    batch: Any
    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    """Of all threads of this process, whatever else the machine does."""

    def advance(self) -> None:
        """Runs one step to its end."""
        start, worked = time.perf_counter(), time.process_time()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - worked)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the range between quartiles, relative to the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


def job_of(config: RunConfig) -> Job:
    """Returns what the planner must know of a run of the transformer."""
    model = config.model
    dims = Transformer(
        layers=model.num_layers,
        embed=model.embed_dim,
        heads=model.num_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_size,
        mlp=model.mlp_size,
        vocab=VOCAB,
        gated=model.mlp == "gated",
        tied=model.tied_embeddings,
    )
    return Job(
        dims,
        config.data.sequence_length,
        config.train.global_batch,
        precision="f32",
        compute_bytes=4,
        newton_schulz_steps=5 if config.optimizer.name == "muon" else 0,
    )


def layout_of(mesh: str, microbatches: int) -> Layout:
    """Returns the layout of a mesh under the standard rules."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in mesh.split(","))}
    layout = Layout(microbatches=microbatches, sequence_parallel=False)
    return dataclasses.replace(layout, **sizes)  # type: ignore[arg-type]


def prepare(mesh: str, microbatches: int, overrides: Sequence[str], cluster: Any) -> Candidate:
    """Predicts and compiles the step of one mesh."""
    changed = (f"mesh={mesh}", f"train.microbatches={microbatches}", *overrides)
    config = load(RunConfig, str(CONFIG), list(changed))
    predicted = step_time(job_of(config), layout_of(mesh, microbatches), cluster)
    spec = dataclasses.replace(expected_spec(config), vocab_size=VOCAB)
    parts = setup(config, spec, make_scope(config, jax.devices()))
    shapes = batch_spec(config.data, config.train.global_batch)
    rng = np.random.default_rng(0)
    batch = {
        name: _leaf(name, leaf.shape, np.dtype(leaf.dtype), rng) for name, leaf in shapes.items()
    }
    step: Any = parts.train_step()
    batch = jax.device_put(
        batch, batch_shardings(shapes, parts.scope, parts.inputs.axes_for(parts.data))
    )
    return Candidate(mesh, predicted, materialize(parts.abstract, seed=0), step, batch)


def _leaf(name: str, shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Random tokens in rows of one document each."""
    if name == "segment_ids":
        return np.ones(shape, dtype)
    if name == "positions":
        return np.broadcast_to(np.arange(shape[1], dtype=dtype), shape)
    return rng.integers(0, VOCAB, shape).astype(dtype)


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Returns Kendall's tau-a of two lists. Source: Kendall 1938, "A New Measure of Rank
    Correlation"."""
    pairs = list(itertools.combinations(range(len(predicted)), 2))
    signs = (
        np.sign(predicted[i] - predicted[j]) * np.sign(measured[i] - measured[j]) for i, j in pairs
    )
    return float(sum(signs)) / len(pairs)


def table(candidates: Sequence[Candidate]) -> None:
    """Prints the meshes from the fastest to the slowest."""
    print(
        f"\n{'mesh':20} {'measured':>10} {'spread':>7} {'CPU':>8} {'predicted':>10}  "
        "largest parts, predicted"
    )
    for one in sorted(candidates, key=lambda c: c.median):
        parts = sorted(one.predicted.parts.items(), key=lambda part: -part[1])[:4]
        named = ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in parts if seconds > 0)
        print(
            f"{one.mesh:20} {one.median * 1e3:8.0f}ms {one.spread:7.1%} "
            f"{statistics.median(one.cpu_seconds) * 1e3:6.0f}ms "
            f"{one.predicted.total * 1e3:8.0f}ms  {named}"
        )


def main() -> None:
    """Prints the table and the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calibration", type=Path, help="a file; else the machine is measured")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each mesh")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--meshes", type=int, default=len(MESHES), help="how many of the ten")
    parser.add_argument("overrides", nargs="*", help="keys of the config to change")
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    keep_compiled_programs("auto")
    found = load_calibration(flags.calibration) if flags.calibration else calibrate("cpu:8")
    cluster = measured_cluster(parse_cluster("cpu:8"), found)
    print(
        f"calibrated: {found.devices} devices on {found.cores} cores, "
        f"{found.matmul['f32'].flops * found.devices / 1e9:.0f} GFLOP/s in all, worst fit error "
        f"{found.fit_error:.0%}, median spread {found.spread:.0%}"
    )
    chosen = MESHES[: flags.meshes]
    candidates = [prepare(mesh, count, flags.overrides, cluster) for mesh, count in chosen]
    for index in range(flags.warmup + flags.rounds):
        for one in candidates if index % 2 else reversed(candidates):
            one.advance()
    for one in candidates:
        del one.seconds[: flags.warmup], one.cpu_seconds[: flags.warmup]
    table(candidates)
    predicted = [one.predicted.total for one in candidates]
    measured = [one.median for one in candidates]
    worked = [statistics.median(one.cpu_seconds) for one in candidates]
    summary = {
        "kendall_tau": round(kendall_tau(predicted, measured), 3),
        "kendall_tau_of_cpu_seconds": round(kendall_tau(predicted, worked), 3),
        "measured_seconds": {one.mesh: round(one.median, 4) for one in candidates},
        "predicted_seconds": {one.mesh: round(one.predicted.total, 4) for one in candidates},
        "median_spread": round(statistics.median(one.spread for one in candidates), 4),
        "median_error": round(
            statistics.median(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)), 4
        ),
        "calibration_error": round(found.fit_error, 4),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
