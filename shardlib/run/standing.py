"""Where a run stands: what its checkpoints say beside the arrays, and what of that must fit."""

import dataclasses
from collections.abc import Callable
from typing import Any

from shardlib import __version__
from shardlib.checkpoint import Manifest
from shardlib.config import from_dict, to_dict
from shardlib.data import MapSource, StreamPosition
from shardlib.errors import DataError
from shardlib.mesh import describe
from shardlib.run.config import RunConfig, check_resumable
from shardlib.run.setup import Setup
from shardlib.train.guards import GuardPolicy


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
