"""Predicted against compiled peak memory of training steps, with no accelerator.

    python benchmarks/plan_memory.py                 # scores the peaks that are stored
    python benchmarks/plan_memory.py --recompile     # compiles all again, smallest first
    python benchmarks/plan_memory.py --missing       # compiles those that are not stored

Each cell is a published model (dense of 1B to 405B, or with experts), a cluster, a mesh and a way
to rematerialise. The step that `shardlib train` would run is compiled ahead of time for the
cluster; its peak is XLA's, and its code. The prediction is that of `shardlib plan`, which sees the
config alone. Both are of the device that holds most.

Programs for TPUs are compiled without optimization, whose peaks differ by 1-7%. Those for GPUs are
not tuned, and take no memory of the libraries that run beside them: what the runtime takes is in
neither number, but in the question of whether a step fits.

The last line is JSON: `cells`, `median_error`, `p90_error`, of absolute relative errors; the same
of the cells that the rules were not read from; how many are said to fit, and do; `wrongly_fitting`
and `wrongly_refused`, the names of those of which the opposite is true.
"""

import argparse
import dataclasses
import json
import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import jax
import numpy as np

from compiled_peaks import Peaks, measured, predicted
from shardlib.config import from_dict
from shardlib.cost.costs import Memory
from shardlib.errors import DoesNotFitError, ShardlibError
from shardlib.hardware import Cluster, parse_cluster
from shardlib.hardware.capacity import capacity
from shardlib.plan.search import capacity_bytes
from shardlib.plan.workloads.named_models import named_model
from shardlib.run.config import RunConfig

STORED = Peaks(Path(__file__).parent / "data" / "compiled_memory.json")
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model on a cluster; what is not said is that of a run in bf16 with AdamW."""

    model: str
    on: str
    mesh: str
    batch: int
    length: int = 4096
    remat: str = "full"
    microbatches: int = 1
    loss_chunks: int = 1
    rules: str = "standard"
    precision: str = "bf16"

    @property
    def name(self) -> str:
        """All that differs from the defaults, in one line."""
        parts = [self.model, self.on, self.mesh, f"{self.batch}x{self.length}", self.remat]
        parts += [f"microbatches={self.microbatches}"] if self.microbatches > 1 else []
        parts += [f"loss_chunks={self.loss_chunks}"] if self.loss_chunks > 1 else []
        parts += [self.rules] if self.rules != "standard" else []
        parts += [self.precision] if self.precision != "bf16" else []
        return " ".join(parts)

    @property
    def cluster(self) -> Cluster:
        return parse_cluster(self.on)

    def config(self) -> RunConfig:
        """Returns the run."""
        return from_dict(
            RunConfig,
            {
                "model": self._model(),
                "data": {"path": "corpus", "sequence_length": self.length},
                "optimizer": {"name": "adamw"},
                "train": {
                    "steps": 1000,
                    "global_batch": self.batch,
                    "microbatches": self.microbatches,
                },
                "mesh": self.mesh,
                "rules": self.rules,
                "precision": self.precision,
            },
            "a cell",
        )

    def _model(self) -> dict[str, Any]:
        dims = named_model(self.model).model
        found = {
            "name": "transformer",
            "num_layers": dims.layers,
            "embed_dim": dims.embed,
            "num_heads": dims.heads,
            "num_kv_heads": dims.kv_heads,
            "head_dim": dims.head_dim,
            "mlp_dim": dims.mlp,
            "vocab_size": dims.vocab,
            "tied_embeddings": dims.tied,
            "remat": self.remat,
            "loss_chunks": self.loss_chunks,
            # cuDNN's cannot be compiled where cuDNN is not installed; both keep as much.
            "attention": "blockwise" if self.cluster.platform == "gpu" else "auto",
        }
        if dims.experts:
            experts = dims.experts
            found["moe"] = {
                "num_experts": experts.number,
                "experts_per_token": experts.per_token,
                "mlp_dim": experts.mlp,
            }
        return found


_SAVE = "save:query,key,value,attention_out"
READ = (
    Cell("llama3.2-1b", "8xh100", "fsdp=8", 32),
    Cell("llama3.2-1b", "8xh100", "fsdp=8", 16, 2048, "none"),
    Cell("llama3.2-1b", "8xh100", "data=8", 16),
    Cell("llama3.2-1b", "v5e-16", "fsdp=16", 16),
    Cell("llama3.2-1b", "v5e-16", "fsdp=16", 16, 1024, "none"),
    Cell("llama3.2-1b", "v5e-16", "data=4,fsdp=4", 16, 2048, loss_chunks=8),
    Cell("llama3.2-1b", "v5e-16", "fsdp=8,tensor=2", 16, remat="dots", loss_chunks=8),
    Cell("llama3-8b", "8xh100", "fsdp=8", 8, 8192, loss_chunks=8),
    Cell("llama3-8b", "8xh100", "fsdp=4,tensor=2", 16),
    Cell("llama3-8b", "8x8xh100", "data=8,fsdp=8", 512, 8192, microbatches=8),
    Cell("llama3-8b", "v5e-16", "fsdp=16", 16, 2048, loss_chunks=8),
    Cell("llama3-8b", "v5e-256", "fsdp=64,tensor=4", 64, 8192),
    Cell("llama3-8b", "v6e-16", "fsdp=16", 32, loss_chunks=8),
    Cell("llama3-8b", "v5p-128", "fsdp=64", 64, 8192),
    Cell("llama3-70b", "8x8xh100", "fsdp=8,tensor=8", 64),
    Cell("llama3-70b", "v5p-128", "fsdp=16,tensor=4", 64),
    Cell("mixtral-8x7b", "8x8xh100", "fsdp=8,expert=8", 64, loss_chunks=8),
    Cell("mixtral-8x7b", "v5p-128", "fsdp=8,expert=8", 64),
    Cell("llama3.2-3b", "8xh100", "fsdp=8", 16, remat="dots", loss_chunks=8),
    Cell("llama2-13b", "4x8xh100", "fsdp=32", 64, loss_chunks=8),
    Cell("llama2-13b", "v6e-64", "fsdp=64", 64, remat=_SAVE),
    Cell("llama3-8b", "v6e-64", "data=4,fsdp=16", 256, microbatches=4, loss_chunks=8),
    Cell("llama3-405b", "64x8xh100", "fsdp=64,tensor=8", 64, 8192),
    Cell("llama3-405b", "v5p-1024", "fsdp=64,tensor=8", 128, 8192),
    Cell("llama3-70b", "v5e-256", "fsdp=32,tensor=8", 64),
    Cell("llama3-70b", "v6e-256", "fsdp=64,tensor=4", 64, loss_chunks=8),
    Cell("llama3-8b", "v5p-128", "fsdp=64", 64, remat="none", loss_chunks=8),
    Cell("llama3-8b", "v5p-128", "fsdp=64", 128, remat="dots", loss_chunks=8),
    Cell("qwen3-30b-a3b", "4x8xh100", "fsdp=4,expert=8", 32, loss_chunks=8),
    Cell("llama3-70b", "8x8xh100", "fsdp=8,tensor=8", 64, 8192, rules="sequence"),
    Cell("llama3-70b", "v5p-128", "fsdp=16,tensor=4", 64, 8192, rules="sequence"),
    Cell("llama3-8b", "8xh100", "stage=2,fsdp=4", 32, microbatches=8, loss_chunks=8),
    Cell("llama3-70b", "v5p-128", "stage=4,fsdp=16", 256, microbatches=16, loss_chunks=8),
    Cell("llama3-8b", "v6e-64", "fsdp=16,context=4", 16, 32768, loss_chunks=8),
    Cell("llama3-8b", "4x8xh100", "fsdp=32", 64, remat="0-15:full,16-:none", loss_chunks=8),
    Cell("llama3-8b", "8xh100", "fsdp=8", 16, precision="bf16_params", loss_chunks=8),
    Cell("llama3.2-3b", "v6e-16", "fsdp=16", 16, remat="none", loss_chunks=8),
    Cell("mixtral-8x22b", "v5p-256", "fsdp=16,expert=8", 128, loss_chunks=8),
    Cell("llama3.2-3b", "v5e-16", "data=2,fsdp=8", 64, microbatches=4, loss_chunks=8),
    Cell("llama3-70b", "8x8xh100", "fsdp=64", 64, remat=_SAVE, loss_chunks=8),
)
"""Models from whose programs the rules of `shardlib.cost.transformer.program_memory` come."""
HELD_OUT = (
    Cell("qwen3-8b", "8xh100", "fsdp=8", 16, remat="dots"),
    Cell("qwen3-32b", "4x8xh100", "fsdp=8,tensor=4", 32),
    Cell("gemma-7b", "v5p-16", "fsdp=8", 16, loss_chunks=8),
    Cell("qwen3-14b", "v6e-32", "fsdp=16,tensor=2", 32, remat=_SAVE),
    Cell("llama2-70b", "v5p-128", "fsdp=64", 64, remat="dots", loss_chunks=8),
    Cell("qwen3-1.7b", "v5e-8", "data=2,fsdp=4", 32, microbatches=4),
    Cell("llama2-7b", "8xh100", "data=2,fsdp=4", 64, microbatches=4, loss_chunks=8),
    Cell("mixtral-8x7b", "4x8xh100", "fsdp=8,expert=4", 32),
    Cell("llama2-13b", "v6e-64", "stage=2,fsdp=32", 256, microbatches=8),
    Cell("qwen3-14b", "2x8xh100", "fsdp=4,tensor=4", 16, 8192, loss_chunks=8, rules="sequence"),
    Cell("qwen3-1.7b", "v6e-8", "fsdp=4,tensor=2", 8, remat="none", precision="bf16_params"),
)
"""Chosen before there were rules; none was read from them."""
NEAR_CAPACITY = (
    Cell("llama3-8b", "8xh100", "fsdp=8", 48, 8192, remat=_SAVE, loss_chunks=8),
    Cell("qwen3-14b", "8xh100", "fsdp=8", 72),
    Cell("qwen3-32b", "2x8xh100", "fsdp=16", 112, loss_chunks=8),
    Cell("llama3-70b", "8x8xh100", "fsdp=64", 512, loss_chunks=8),
    Cell(
        "llama3-70b",
        "8x8xh100",
        "fsdp=8,tensor=8",
        64,
        remat="dots",
        loss_chunks=8,
        rules="sequence",
    ),
    Cell("mixtral-8x7b", "2x8xh100", "fsdp=4,expert=4", 16, 8192, loss_chunks=8),
    Cell("llama3-8b", "v5e-16", "fsdp=16", 32, loss_chunks=8),
    Cell("llama3-8b", "v5e-16", "fsdp=16", 64, loss_chunks=8),
    Cell("llama3-8b", "v5e-16", "fsdp=16", 32),
    Cell("llama3-8b", "v5e-64", "fsdp=64", 64, 3072, remat="dots", loss_chunks=8),
    Cell("qwen3-8b", "v6e-16", "fsdp=16", 32, remat="dots"),
    Cell("llama3-8b", "8xh100", "fsdp=8", 64, 8192, remat=_SAVE, loss_chunks=8),
    Cell("qwen3-32b", "2x8xh100", "fsdp=16", 160, loss_chunks=8),
    Cell("llama3-8b", "8xh100", "fsdp=8", 32, remat="none", loss_chunks=8),
    Cell("llama3-70b", "8x8xh100", "fsdp=64", 640, loss_chunks=8),
    Cell("qwen3-32b", "2x8xh100", "fsdp=16", 208, loss_chunks=8),
)
"""Predicted at 0.8 of what a device has or more, before any of them was compiled."""
CELLS = (*READ, *HELD_OUT, *NEAR_CAPACITY)


@dataclasses.dataclass(frozen=True)
class Scored:
    """A cell with both numbers, in bytes of one device."""

    cell: Cell
    compiled: Mapping[str, int]
    """The peak, and what it holds by the categories of `shardlib.explain.analysis.memory`."""
    predicted: Memory
    usable: int

    @property
    def error(self) -> float:
        """Predicted over compiled, less 1; what the runtime takes is in neither."""
        return (self.predicted.total - self.predicted.runtime) / self.compiled["peak"] - 1

    @property
    def said_to_fit(self) -> bool:
        return self.predicted.fits(capacity_bytes(self.cell.cluster))

    @property
    def fits(self) -> bool:
        return self.compiled["peak"] <= self.usable


def scored(cells: Mapping[str, Mapping[str, int]]) -> list[Scored]:
    """Returns the score of each cell whose peak is known, by name."""
    return [_scored(cell, cells[cell.name]) for cell in CELLS if cell.name in cells]


def _scored(cell: Cell, compiled: Mapping[str, int]) -> Scored:
    limit = capacity(cell.cluster.chip)
    assert limit is not None
    told = predicted(cell.config(), cell.cluster)
    return Scored(cell, compiled, told, limit.usable_bytes)


def compile_all(wanted: Callable[[Cell], bool]) -> None:
    """Compiles cells and stores their peaks, each as soon as it is known."""
    for cell in filter(wanted, CELLS):
        try:
            found = measured(cell.config(), cell.cluster)
        except (DoesNotFitError, ShardlibError, jax.errors.JaxRuntimeError) as error:
            print(f"{cell.name}: {str(error).splitlines()[0]}", flush=True)
            continue
        STORED.add(cell.name, found, {c.name for c in CELLS})
        print(_line(_scored(cell, found)), flush=True)


def table(scores: list[Scored]) -> str:
    """Returns a line for each cell."""
    head = f"{'compiled':>8} {'predicted':>9} {'error':>6}  fits  cell"
    return "\n".join([head, *map(_line, scores)])


def _line(score: Scored) -> str:
    total = score.predicted.total - score.predicted.runtime
    fits = {True: "yes", False: "no"}[score.fits]
    if score.said_to_fit != score.fits:
        fits += "!"
    numbers = f"{score.compiled['peak'] / _GIB:8.2f} {total / _GIB:9.2f} {score.error:+6.1%}"
    return f"{numbers}  {fits:4}  {score.cell.name}"


def parts(scores: list[Scored]) -> str:
    """Returns what each cell holds by category, compiled and predicted, in GiB."""
    lines = []
    for score in scores:
        lines.append(_line(score))
        for what, values in (("compiled", score.compiled), ("predicted", vars(score.predicted))):
            held = ", ".join(f"{k} {v / _GIB:.2f}" for k, v in values.items() if v > 0.005 * _GIB)
            lines.append(f"    {what}: {held}")
    return "\n".join(lines)


def confusion(scores: list[Scored]) -> dict[str, dict[str, int]]:
    """Returns how many cells fit and do not, of those that are said to and of the others."""
    counted = Counter((score.said_to_fit, score.fits) for score in scores)
    return {
        said: {fact: counted[told, true] for fact, true in (("fit", True), ("do_not", False))}
        for said, told in (("said_to_fit", True), ("refused", False))
    }


def summary(scores: list[Scored]) -> dict[str, Any]:
    """Returns the last line."""
    unread = [score for score in scores if score.cell not in READ]
    wrong = [score for score in scores if score.said_to_fit != score.fits]
    return {
        **_errors(scores),
        "not_read_from": _errors(unread),
        **confusion(scores),
        "wrongly_fitting": [score.cell.name for score in wrong if score.said_to_fit],
        "wrongly_refused": [score.cell.name for score in wrong if score.fits],
    }


def _errors(scores: list[Scored]) -> dict[str, Any]:
    errors = [abs(score.error) for score in scores]
    if not errors:
        return {"cells": 0}
    return {
        "cells": len(scores),
        "median_error": round(statistics.median(errors), 4),
        "p90_error": round(float(np.quantile(errors, 0.9)), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recompile", action="store_true", help="compile all cells")
    parser.add_argument("--missing", action="store_true", help="compile cells that are not stored")
    parser.add_argument("--parts", action="store_true", help="show what each cell holds")
    options = parser.parse_args()
    if options.recompile or options.missing:
        known = {} if options.recompile else STORED.load()["cells"]
        compile_all(lambda cell: cell.name not in known)
    data = STORED.load()
    scores = scored(data["cells"])
    if not scores:
        raise SystemExit("No peak is stored: give --missing, and time.")
    print("compiled with " + ", ".join(f"{k} {v}" for k, v in data["versions"].items()))
    print(parts(scores) if options.parts else table(scores))
    missing = [cell.name for cell in CELLS if cell.name not in data["cells"]]
    print("".join(f"not compiled: {name}\n" for name in missing))
    print(f"{'':11} {'fit':>4} {'do not':>6}")
    for said, counts in confusion(scores).items():
        print(f"{said.replace('_', ' '):11} {counts['fit']:4} {counts['do_not']:6}")
    print(json.dumps(summary(scores)))


if __name__ == "__main__":
    main()
