"""What a config leaves to the run: decided once, recorded, and kept when the run resumes."""

import dataclasses

from shardlib.data import MapSource
from shardlib.errors import ConfigError
from shardlib.mesh import mesh_sizes
from shardlib.run.config import AUTO, RunConfig
from shardlib.run.setup import Setup
from shardlib.train.fit import fit_microbatches
from shardlib.train.step import TrainStep


def decide(parts: Setup, source: MapSource, saved: RunConfig | None) -> Setup:
    """Returns the parts of a run whose config leaves nothing open; compiles steps to find out.

    Args:
        parts: The parts, of a config that may say `train.microbatches: auto`, or leave out
            `train.local_sgd.groups`.
        source: The training data.
        saved: The config that the run was started with; None for a new run.

    Raises:
        ConfigError: If microbatches are to be found for steps that take them otherwise.
        MeshError: If the step does not fit with any number of microbatches.
    """
    return _microbatches(_groups(parts, saved), source, saved)


def _groups(parts: Setup, saved: RunConfig | None) -> Setup:
    local = parts.config.train.local_sgd
    if local is None or local.groups is not None:
        return parts
    started = saved.train.local_sgd.groups if saved and saved.train.local_sgd else None
    groups = started or mesh_sizes(parts.scope.mesh).get("data", 1)
    return _with(parts, local_sgd=dataclasses.replace(local, groups=groups))


def _microbatches(parts: Setup, source: MapSource, saved: RunConfig | None) -> Setup:
    train = parts.config.train
    if train.microbatches != AUTO:
        return parts
    if saved is not None and saved.train.microbatches != AUTO:
        parts = _with(parts, microbatches=saved.train.microbatches)
        return _because(parts, "microbatches", f"{saved.train.microbatches}: as the run began")
    if train.local_sgd or train.reduction.group_microbatches or train.reduction.group_seconds:
        raise ConfigError(
            "train.microbatches=auto cannot be found for groups that train apart or take unequal "
            "shares.\n  Set train.microbatches to a number."
        )

    def make_step(microbatches: int) -> TrainStep:
        step = parts.train_step(microbatches)
        assert isinstance(step, TrainStep)
        return step

    stages = mesh_sizes(parts.scope.mesh).get("stage", 1)
    batch = parts.rows(source).element_spec()
    fit = fit_microbatches(make_step, parts.abstract, batch, multiple_of=stages)
    parts = _with(parts, microbatches=fit.microbatches)
    return _because(parts, "microbatches", str(fit))


def _with(parts: Setup, **changes: object) -> Setup:
    train = dataclasses.replace(parts.config.train, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(parts, config=dataclasses.replace(parts.config, train=train))


def _because(parts: Setup, name: str, reason: str) -> Setup:
    return dataclasses.replace(parts, decided={**parts.decided, name: reason})
