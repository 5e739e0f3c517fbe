"""Progress of a run: the metadata of its checkpoints, and the checks that a resume needs."""

import dataclasses
from collections.abc import Callable
from typing import Any

from shardlib import __version__
from shardlib.checkpoint import Manifest, SavedCheckpoints
from shardlib.checkpoint.directory import StepDirectory
from shardlib.checkpoint.errors import listed
from shardlib.config import from_dict, to_dict
from shardlib.data import MapSource, StreamPosition, Tokenizer
from shardlib.errors import CheckpointError, DataError
from shardlib.log.events import EVENTS_FILE, saved_step
from shardlib.log.metrics import METRICS_FILE
from shardlib.mesh import describe
from shardlib.registry import DataSpec
from shardlib.run.config import RunConfig, check_resumable
from shardlib.run.directory import RunDirectory
from shardlib.run.setup import Setup
from shardlib.train.guards import GuardPolicy


@dataclasses.dataclass(frozen=True)
class NoData:
    """What is known of the data of a model that was imported without data to train on."""

    spec: DataSpec
    tokenizer: Tokenizer | None
    fingerprint: None = None


@dataclasses.dataclass(frozen=True)
class Standing:
    """The progress of a run: its step, its sample in the stream, and the samples it has skipped.

    Attributes:
        position: The step, and the samples seen by then.
        skipped: Ranges [first, end) of samples that rewinds have skipped.
    """

    position: StreamPosition = dataclasses.field(default_factory=StreamPosition)
    skipped: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(manifest: Manifest) -> "Standing":
        """Returns the progress of the run at a checkpoint."""
        data = manifest.run["data"]
        return Standing(
            StreamPosition(manifest.step, data["samples_seen"]),
            tuple((first, end) for first, end in data.get("skipped", ())),
        )

    def past(self, samples: int) -> "Standing":
        """Returns the progress of a run that was rewound to here and skips the samples up to
        `samples`."""
        gap = (self.position.samples_seen, samples)
        return Standing(StreamPosition(self.position.step, samples), (*self.skipped, gap))

    def metadata(
        self, step: int, parts: Setup, source: MapSource | NoData, guards: GuardPolicy
    ) -> dict[str, Any]:
        """Returns the metadata of a checkpoint of `step`, reached from here by equal batches.

        `healthy` says whether a rewind may go back to it; see `shardlib.checkpoint.directory.kept`.
        """
        rules = parts.scope.rules
        batch = parts.config.train.global_batch
        return {
            "shardlib": __version__,
            "config": to_dict(parts.recorded),
            "mesh": describe(parts.scope.mesh),
            "rules": {kind: dict(rules.table(kind)) for kind in ("params", "activations")},
            "data": {
                "samples_seen": self.position.samples_at(step, batch),
                "skipped": [list(gap) for gap in self.skipped],
                "fingerprint": source.fingerprint,
                "spec": dataclasses.asdict(source.spec),
                "tokenizer": source.tokenizer and source.tokenizer.fingerprint,
            },
            "guards": guards.state(),
            "healthy": guards.healthy,
        }


def no_checkpoint(run_dir: str, saved: SavedCheckpoints) -> CheckpointError:
    """Returns the error of a run without a readable checkpoint: none yet, or only damaged ones."""
    steps = saved.candidates()
    if not steps:
        return CheckpointError(
            f"{run_dir} has no checkpoint yet.\n  Train with `shardlib train` until it has one."
        )
    return CheckpointError(
        f"none of the checkpoints of {run_dir} is readable (steps {listed(steps)}).\n"
        f"  See what is wrong with each: shardlib checkpoint verify {run_dir}"
    )


def check_not_lost(directory: RunDirectory) -> None:
    """Refuses to restart a run from scratch if its checkpoints are missing, for example because
    their disk is not mounted.

    Raises:
        CheckpointError: If the run has saved checkpoints in its directory, and none is left there.
    """
    step, place = saved_step(directory.path), directory.checkpoints
    listing = StepDirectory(place, lambda _: None)
    # Damaged checkpoints and links count as present: the restore reports their fault.
    if step is None or listing.candidates() or listing.links():
        return
    what = "holds no checkpoint" if place.is_dir() else "is not there"
    raise CheckpointError(
        f"{place} {what}, but {directory}/{EVENTS_FILE} records that step {step} was saved: "
        "continuing would start at step 1 and overwrite the metrics.\n"
        f"  Mount the disk that holds the checkpoints, or set run_dir to another directory; to "
        f"start over in this one, move its {EVENTS_FILE} and {METRICS_FILE} away."
    )


def as_saved(config: RunConfig, manifest: Manifest) -> RunConfig:
    """Returns the config of a run with the guards of a checkpoint: they may have changed since, and
    they decide which leaves the checkpoint has."""
    place = f"{config.run_dir}, step {manifest.step}"
    guards = from_dict(RunConfig, manifest.run["config"], place).train.guards
    return dataclasses.replace(config, train=dataclasses.replace(config.train, guards=guards))


def check_same_run(parts: Setup, source: MapSource) -> Callable[[Manifest], None]:
    """Returns a check that raises for a checkpoint from which the run must not resume.

    It raises `ConfigError` if the config differs, and `DataError` if the data differs.
    """

    def check(manifest: Manifest) -> None:
        place = f"{parts.config.run_dir}, step {manifest.step}"
        saved = from_dict(RunConfig, manifest.run["config"], place)
        check_resumable(saved, parts.config)
        if manifest.run["data"]["fingerprint"] is None:
            raise DataError(
                f"{parts.config.run_dir} was imported without data to train on.\n"
                "  Import it again with data.path, or train a new run with model.init_from."
            )
        if manifest.run["data"]["fingerprint"] != source.fingerprint:
            raise DataError(
                f"the data of {parts.config.run_dir} has changed since its last checkpoint.\n"
                "  Restore the files, or set run_dir to another directory."
            )

    return check
