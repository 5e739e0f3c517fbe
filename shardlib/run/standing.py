"""Where a run stands: what its checkpoints say beside the arrays, and what of that must fit."""

import dataclasses
from collections.abc import Callable
from typing import Any

from shardlib import __version__
from shardlib.checkpoint import Manifest, SavedTiers
from shardlib.checkpoint.damage import listed
from shardlib.checkpoint.directory import StepDirectory
from shardlib.config import from_dict, to_dict
from shardlib.data import MapSource, StreamPosition
from shardlib.errors import CheckpointError, DataError
from shardlib.mesh import describe
from shardlib.run.config import RunConfig, check_resumable
from shardlib.run.directory import RunDirectory
from shardlib.run.events import EVENTS_FILE, saved_step
from shardlib.run.setup import Setup
from shardlib.train.guards import GuardPolicy
from shardlib.train.metrics import METRICS_FILE


@dataclasses.dataclass(frozen=True)
class Standing:
    """How far a run is: at which step, at which sample of its stream, and what it has passed over.

    Attributes:
        position: The step, and the samples seen by then.
        skipped: Ranges [first, end) of samples that rewinds have passed over.
    """

    position: StreamPosition = dataclasses.field(default_factory=StreamPosition)
    skipped: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(manifest: Manifest) -> "Standing":
        """Returns where the run stood at a checkpoint."""
        data = manifest.run["data"]
        return Standing(
            StreamPosition(manifest.step, data["samples_seen"]),
            tuple((first, end) for first, end in data.get("skipped", ())),
        )

    def past(self, samples: int) -> "Standing":
        """Returns where a run stands that has come back to here and is not to see the samples up to
        `samples` again."""
        gap = (self.position.samples_seen, samples)
        return Standing(StreamPosition(self.position.step, samples), (*self.skipped, gap))

    def metadata(
        self, step: int, parts: Setup, source: MapSource, guards: GuardPolicy
    ) -> dict[str, Any]:
        """Returns what a checkpoint of `step`, reached from here by equal batches, says of the
        run.

        `healthy` says whether it is one to go back to; see `shardlib.checkpoint.retention`.
        """
        rules = parts.scope.rules
        batch = parts.config.train.global_batch
        return {
            "shardlib": __version__,
            "config": to_dict(parts.config),
            "mesh": describe(parts.scope.mesh),
            "rules": {kind: dict(rules.table(kind)) for kind in ("params", "activations")},
            "data": {
                "samples_seen": self.position.samples_at(step, batch),
                "skipped": [list(gap) for gap in self.skipped],
                "fingerprint": source.fingerprint,
                "spec": dataclasses.asdict(source.spec),
            },
            "guards": guards.state(),
            "healthy": guards.healthy,
        }


def no_checkpoint(run_dir: str, saved: SavedTiers) -> CheckpointError:
    """Returns the error that a run has nothing to read: no checkpoint yet, or only damaged ones."""
    steps = sorted({step for place in saved.tiers.values() for step in place.candidates()})
    if not steps:
        return CheckpointError(
            f"{run_dir} has no checkpoint yet.\n  Train on with `shardlib train` until it has."
        )
    return CheckpointError(
        f"none of the checkpoints of {run_dir} is readable (steps {listed(steps)}).\n"
        f"  `shardlib checkpoint verify {run_dir}` says what is wrong with each."
    )


def check_not_lost(directory: RunDirectory) -> None:
    """Refuses to start a run anew over what one has written whose checkpoints are out of sight, for
    example on a disk that is not mounted.

    Raises:
        CheckpointError: If the run has saved checkpoints in its directory, and none is there.
    """
    step, place = saved_step(directory.path), directory.checkpoints
    listing = StepDirectory(place, lambda _: None)
    # Damaged ones and links are there: who restores them says what is wrong.
    if step is None or listing.candidates() or listing.links():
        return
    what = "holds no checkpoint" if place.is_dir() else "is not there"
    raise CheckpointError(
        f"{place} {what}, but {directory}/{EVENTS_FILE} records that step {step} was saved: to go "
        "on without it would start at step 1 and overwrite the metrics.\n"
        f"  Mount the disk that holds the checkpoints, or set run_dir to another directory; to "
        f"start over in this one, move its {EVENTS_FILE} and {METRICS_FILE} away."
    )


def as_saved(config: RunConfig, manifest: Manifest) -> RunConfig:
    """Returns the config of a run with the guards that a checkpoint of it was saved with: they may
    have changed since, and decide which leaves it has."""
    place = f"{config.run_dir}, step {manifest.step}"
    guards = from_dict(RunConfig, manifest.run["config"], place).train.guards
    return dataclasses.replace(config, train=dataclasses.replace(config.train, guards=guards))


def check_same_run(parts: Setup, source: MapSource) -> Callable[[Manifest], None]:
    """Returns what raises for a checkpoint that the run must not go on from.

    It raises `ConfigError` for one of another config, `DataError` for one of other data.
    """

    def check(manifest: Manifest) -> None:
        place = f"{parts.config.run_dir}, step {manifest.step}"
        saved = from_dict(RunConfig, manifest.run["config"], place)
        check_resumable(saved, parts.config)
        if manifest.run["data"]["fingerprint"] != source.fingerprint:
            raise DataError(
                f"the data of {parts.config.run_dir} has changed since its last checkpoint.\n"
                "  Restore the files, or set run_dir to another directory."
            )

    return check
