"""Runs: train, explain, sample, import and export from one config."""

import importlib
from typing import TYPE_CHECKING, Any

from shardlib.run.config import RunConfig as RunConfig

if TYPE_CHECKING:
    from shardlib.run.exporting import export as export
    from shardlib.run.importing import import_model as import_model
    from shardlib.run.reports.explaining import explain as explain
    from shardlib.run.sampling import generate as generate
    from shardlib.run.training import TrainResult as TrainResult
    from shardlib.run.training import train as train

# No module shares its name with a function it offers: importing it would rebind that name.
_HOME = {
    "TrainResult": "training",
    "explain": "reports.explaining",
    "export": "exporting",
    "import_model": "importing",
    "generate": "sampling",
    "plan_run": "plans.planning",
    "served": "plans.planning",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
