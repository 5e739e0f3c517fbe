"""Sizes that a model and its data both may say."""

from typing import Any

from shardlib.registry import DataSpec


def faults_of_size(config: Any, data: DataSpec, name: str, what: str) -> list[str]:
    """Returns what is wrong with a size of a model that bounds one of its data, as a sentence.

    Args:
        config: The config of the model; its `init_from` tells whether the size is a folder's.
        data: The data.
        name: The field of both, such as `num_classes`.
        what: What it counts, such as `classes`.
    """
    ours, theirs = getattr(config, name), getattr(data, name)
    if ours is None and theirs is None:
        return [f"{name} is unknown: neither the model nor its data set it."]
    if ours is None or theirs is None or theirs <= ours:
        return []
    fix = "raise it or leave it out."
    if name == "num_classes" and config.init_from is not None:
        fix = f"set it to {theirs} for a new head on {config.init_from}."
    elif config.init_from is not None:
        fix = f"give data of at most {ours} {what}, or raise it if {config.init_from} lacks it."
    return [f"the data have {theirs} {what}, but {name}={ours}; {fix}"]
