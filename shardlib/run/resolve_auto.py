"""Settings that a config leaves to the run: decided once, recorded, and kept on resume."""

import dataclasses

from shardlib.data import MapSource
from shardlib.mesh import mesh_sizes
from shardlib.run.config import AUTO, RunConfig
from shardlib.run.setup import Setup, why_mesh
from shardlib.train.fit_microbatches import fit_microbatches
from shardlib.train.step import TrainStep


def as_recorded(config: RunConfig, saved: RunConfig | None) -> RunConfig:
    """Returns a config whose open settings are filled from the run that it continues."""
    if saved is None:
        return config
    train, began = config.train, saved.train
    # A different batch may need more microbatches, or not divide into as many.
    if train.microbatches == AUTO and train.global_batch == began.global_batch:
        train = dataclasses.replace(train, microbatches=began.microbatches)
    if train.local_sgd and began.local_sgd and train.local_sgd.groups is None:
        local = dataclasses.replace(train.local_sgd, groups=began.local_sgd.groups)
        train = dataclasses.replace(train, local_sgd=local)
    return dataclasses.replace(config, train=train)


def decide(parts: Setup, source: MapSource, asked: RunConfig) -> Setup:
    """Returns the parts of a run with every open setting decided; compiles steps if needed.

    Args:
        parts: The parts; their config may have `train.microbatches: auto` or no
            `train.local_sgd.groups`.
        source: The training data.
        asked: The config before `as_recorded`.

    Raises:
        MeshError: If the step does not fit with any number of microbatches.
    """
    why = why_mesh(parts.config, list(parts.scope.mesh.devices.flat))
    parts = dataclasses.replace(parts, decided={**parts.decided, **why})
    local = parts.config.train.local_sgd
    if local is not None and local.groups is None:
        groups = mesh_sizes(parts.scope.mesh).get("data", 1)
        parts = _with(parts, local_sgd=dataclasses.replace(local, groups=groups))
    if parts.config.train.microbatches == AUTO:
        return _fitted(parts, source)
    if asked.train.microbatches == AUTO:
        reason = f"{parts.config.train.microbatches}: as the run began"
        return _because(parts, "microbatches", reason)
    return parts


def _fitted(parts: Setup, source: MapSource) -> Setup:
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
