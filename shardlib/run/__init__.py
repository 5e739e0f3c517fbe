"""Runs: train, explain and sample from one config."""

import importlib
from typing import TYPE_CHECKING, Any

from shardlib.run.config import RulesConfig as RulesConfig
from shardlib.run.config import RunConfig as RunConfig

if TYPE_CHECKING:
    from shardlib.run.explain import explain as explain
    from shardlib.run.generate import generate as generate
    from shardlib.run.train import TrainResult as TrainResult
    from shardlib.run.train import train as train

_HOME = {"explain": "explain", "generate": "generate", "TrainResult": "train", "train": "train"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
