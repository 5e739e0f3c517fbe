"""Steps of runs compiled ahead of time, and a file of their peaks: for `plan_memory`, `plan_holds`.

A step is that of `shardlib train`, for a cluster that need not be present; its peak is XLA's, and
its code. Programs for TPUs are compiled without optimization, whose peaks differ by 1-7%. Those for
GPUs are not tuned, and take no memory of the libraries that run beside them.
"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shardlib.cost.costs import Memory
from shardlib.data import batch_spec
from shardlib.explain.analysis.memory import read_memory
from shardlib.explain.aot.compile import CompiledStep, compile_step
from shardlib.explain.aot.topology import devices_of
from shardlib.hardware import Cluster
from shardlib.run.checks import expected_spec
from shardlib.run.config import RunConfig
from shardlib.run.plans.planning import choice_of, layout_of, workload_of
from shardlib.run.setup import make_scope, setup

_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")


@dataclasses.dataclass(frozen=True)
class Peaks:
    """A JSON file: the versions of the compilers, and by name what each program holds, in bytes."""

    path: Path

    def load(self) -> dict[str, Any]:
        """Returns `versions`, and `cells` by name."""
        return json.loads(self.path.read_text()) if self.path.exists() else _EMPTY

    def add(self, name: str, found: Mapping[str, int], keep: Collection[str] | None = None) -> None:
        """Writes what one program holds.

        Args:
            name: Name of the program.
            found: The result of `measured`.
            keep: Names to keep in the file; None for all.
        """
        cells = self.load()["cells"]
        known = {key: value for key, value in cells.items() if keep is None or key in keep}
        data = {"versions": _versions(), "cells": {**known, name: dict(found)}}
        self.path.write_text(json.dumps(data, indent=1) + "\n")


_EMPTY: dict[str, Any] = {"versions": {}, "cells": {}}


def predicted(config: RunConfig, cluster: Cluster) -> Memory:
    """Returns what `shardlib plan` says of a run."""
    _, workload = workload_of(config, platform=cluster.platform)
    return workload.memory(layout_of(config, cluster), choice_of(config), cluster)


def compiled(config: RunConfig, cluster: Cluster) -> CompiledStep:
    """Returns the step of a run, compiled for a cluster."""
    parts = setup(config, expected_spec(config), make_scope(config, devices_of(cluster)))
    batch = parts.arranged(batch_spec(config.data, config.train.global_batch))
    return compile_step(parts.train_step(), (parts.saved_state(), batch), on=cluster)


def measured(config: RunConfig, cluster: Cluster) -> dict[str, int]:
    """Returns the peak of a run, and what it holds, in bytes by the categories of
    `shardlib.explain.analysis.memory`."""
    report = read_memory(compiled(config, cluster))
    return {"peak": report.peak_bytes, **{k: v for k, v in report.categories.items() if v}}


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _COMPILERS}
