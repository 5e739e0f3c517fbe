"""Read-only access to the checkpoints of a run: listing, verification and restore."""

import copy
import logging
import os
import pathlib
import threading
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from shardlib.checkpoint import fingerprint
from shardlib.checkpoint.checksums import check_contents
from shardlib.checkpoint.config import CheckpointConfig
from shardlib.checkpoint.consensus import Peers, one_checkpoint
from shardlib.checkpoint.directory import Notify, StepDirectory
from shardlib.checkpoint.errors import DamageError, first_line, listed
from shardlib.checkpoint.manifest import Manifest, Partial
from shardlib.checkpoint.restoring import Restoring, check_fingerprints
from shardlib.checkpoint.saving import THREAD_NAME
from shardlib.checkpoint.tree import dtype_of, flatten
from shardlib.errors import CheckpointError, WrongPlaceError

_Path = str | os.PathLike[str]
# Names of the places.
RUN, LOCAL = "run", "local"


def _log(text: str) -> None:
    logging.getLogger(__name__).warning("%s", text)


def open_saved(
    directory: _Path,
    config: CheckpointConfig,
    *,
    notify: Notify | None = None,
    owner: str | None = None,
) -> "SavedCheckpoints":
    """Returns the checkpoints of a run from one or two places, for reading only.

    A local directory that does not exist, for example on another machine, or that holds checkpoints
    of another run is skipped and reported through `notify`.

    Args:
        directory: As in `open_checkpoints`.
        config: Checkpoint config of the run.
        notify: As in `RunCheckpoints`.
        owner: As in `open_checkpoints`.
    """
    notify = notify or _log
    places: dict[str, _Path] = {RUN: directory}
    if config.local is not None:
        local = StepDirectory(config.local.directory, notify)
        if not local.path.is_dir():
            notify(f"checkpoint.local.directory does not exist, skipped: {local.path}")
        elif local.foreign_steps(owner):
            notify(
                f"checkpoint.local.directory holds checkpoints of another run, skipped: "
                f"{local.path}"
            )
        else:
            places[LOCAL] = local.path
    return SavedCheckpoints(places, notify=notify)


class SavedCheckpoints:
    """The checkpoints of a run in one or several places, opened read-only.

    If several places have a step, the first complete checkpoint of it is used.

    With several processes, each makes its own instance on the same shared directories, and all call
    `latest` and `restore` together; see `RunCheckpoints`.

    Args:
        directory: Holds the checkpoints, for example `run/checkpoints`; it need not exist. Several
            places are given by name, as directories or as the `SavedCheckpoints` of each.
        notify: As in `RunCheckpoints`.
    """

    def __init__(
        self,
        directory: "_Path | Mapping[str, _Path | SavedCheckpoints]",
        *,
        notify: Notify | None = None,
    ) -> None:
        places = directory if isinstance(directory, Mapping) else {RUN: directory}
        self.peers = Peers()
        self._tell = notify or _log
        self._later: list[str] = []
        self._places: Mapping[str, StepDirectory] = {
            name: StepDirectory(
                place.directory if isinstance(place, SavedCheckpoints) else place, self.notify
            )
            for name, place in places.items()
        }

    @property
    def directory(self) -> pathlib.Path:
        """The directory of the run's checkpoints."""
        return next(iter(self._places.values())).path

    @property
    def tiers(self) -> "Mapping[str, SavedCheckpoints]":
        """The checkpoints of each place alone, by its name: `run`, and `local` if there is one."""
        views = {name: copy.copy(self) for name in self._places}
        for name, view in views.items():
            view._places = {name: self._places[name]}
        return views

    def settle(self) -> None:
        """Waits for the save in flight; a reader has none."""

    def notify(self, text: str) -> None:
        """Reports a text; a text from the thread of a save waits for the next call."""
        if threading.current_thread().name == THREAD_NAME:
            self._later.append(text)
        else:
            self._tell(text)

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, oldest first.

        A directory is listed if its name and manifest are well-formed. `notify` is called once for
        each symbolic link and each other directory; they are left alone.

        Raises:
            CheckpointError: If a place cannot be listed.
        """
        return list(self.manifests())

    def manifests(self) -> dict[int, Manifest]:
        """Returns the manifests of the complete checkpoints by step, oldest first."""
        merged: dict[int, Manifest] = {}
        for place in self._places.values():
            merged = place.manifests() | merged
        return dict(sorted(merged.items()))

    def candidates(self) -> list[int]:
        """Returns the steps of all checkpoints, damaged or not, oldest first."""
        return sorted({step for place in self._places.values() for step in place.candidates()})

    def links(self) -> list[int]:
        """Returns the steps whose checkpoint is a symbolic link; other lists omit them."""
        return sorted({step for place in self._places.values() for step in place.links()})

    def latest(self) -> int | None:
        """Returns the newest step, the same on every process; None without checkpoints."""
        decision = self.peers.decide("latest", "", lambda _: str(max(self.steps(), default=-1)))
        return None if int(decision) < 0 else int(decision)

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of the checkpoint of `step` without reading arrays.

        Raises:
            CheckpointError: If the step has no checkpoint, or its manifest is damaged.
        """
        return self._place_of(step).read(step)

    def _name_of(self, step: int) -> str:
        """Returns the name of the first place with a complete checkpoint of a step, or with any."""
        holders = [name for name, place in self._places.items() if place.holds(step)]
        if not holders:
            raise self._no_checkpoint(step)
        if len(holders) > 1:  # The sort is stable.
            holders.sort(key=lambda name: step not in self._places[name].manifests())
        return holders[0]

    def _place_of(self, step: int) -> StepDirectory:
        return self._places[self._name_of(step)]

    def _no_checkpoint(self, step: int) -> CheckpointError:
        where = " and ".join(str(place.path) for place in self._places.values())
        return WrongPlaceError(
            f"step {step} has no checkpoint in {where}.\n"
            f"  Choose one of its steps: {listed(self.steps())}."
        )

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns the metadata that was passed to `save`, as parsed from JSON."""
        return self.manifest(step).run

    def target(self, step: int, sharding: jax.sharding.Sharding | None = None) -> dict[str, Any]:
        """Returns a restore target for a step: nested dicts of `jax.ShapeDtypeStruct`.

        It replaces the classes of the state where they are not available. Without a sharding,
        leaves are numpy arrays on the host.

        Raises:
            CheckpointError: If the step has no checkpoint, or its manifest is damaged.
        """
        from flax.traverse_util import unflatten_dict

        structs = {
            path: jax.ShapeDtypeStruct(spec.shape, dtype_of(spec), sharding=sharding)
            for path, spec in self.manifest(step).leaves.items()
        }
        return unflatten_dict(structs, sep="/")

    def check(self, step: int, target: PyTree) -> None:
        """Checks that the checkpoint has the leaves of `target`, without reading arrays.

        Raises:
            CheckpointError: If the step has no checkpoint, or its leaves differ from `target`: each
                missing or unexpected leaf, or leaf of another shape or dtype, is listed.
        """
        place = self._place_of(step)
        Restoring(place.of_step(step), place.read(step), self.peers, self.notify).check(target)

    def restore(
        self,
        step: int,
        target: PyTree,
        *,
        cast: bool = False,
        partial: Partial = False,
        on_difference: Notify | None = None,
    ) -> PyTree:
        """Returns the state saved at `step`, bit for bit, on the shardings of `target`.

        The restored values are verified against the fingerprints in the manifest.

        Args:
            step: One of `steps()`.
            target: A tree with the structure of the state. Leaves are `jax.ShapeDtypeStruct` with
                a sharding on any mesh, or arrays, whose sharding is used. A leaf without a
                sharding is restored to a numpy array on the host.
            cast: Whether leaves may have other dtypes in `target`. They are cast after
                verification, and each one is reported.
            partial: Whether leaves (or those whose paths it returns True for) may be missing from
                the checkpoint or from `target`. Leaves missing from the checkpoint keep their
                values in `target`; each missing leaf is reported.
            on_difference: Receives these reports; `notify` by default.

        Raises:
            CheckpointError: As in `check`, before any array is read. Also if the checkpoint is
                damaged: damaged files or leaves are listed.
        """
        self.settle()
        place = self._places[self.peers.decide("place", "", lambda _: self._name_of(step))]
        manifest = self._same_manifest(place, step)
        options = (on_difference, cast, partial)
        try:
            return Restoring(
                place.of_step(step), manifest, self.peers, self.notify, *options
            ).restore(target)
        except DamageError as error:
            body = str(error).removesuffix("\n  Restore another step.")
            others = listed(self.steps(), without=step)
            raise DamageError(f"{body}\n  Restore another step ({others}).") from error

    def stored(
        self, step: int, target: PyTree
    ) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, tuple[int, ...]]]:
        """Returns the structs and chunk shapes that a restore onto `target` would read.

        It reads no arrays and uses no device. The meshes of `target` may be abstract.

        Returns:
            The leaves with elements and a sharding, with PRNG keys as their stored integers; and
            the chunk shape of each stored array. Both are by path.

        Raises:
            CheckpointError: As in `check`. Also if the index of the arrays is damaged.
        """
        from shardlib.checkpoint import arrays

        self.check(step, target)
        path = self._place_of(step).of_step(step)
        structs = arrays.stored_structs(flatten(target))
        try:
            chunks = arrays.chunk_shapes(path, {name: x.shape for name, x in structs.items()})
        except Exception as error:
            raise DamageError(
                f"checkpoint {path} cannot be read: {first_line(error)}\n"
                f"  Name another step ({listed(self.steps(), without=step)})."
            ) from error
        return structs, chunks

    def _same_manifest(self, place: StepDirectory, step: int) -> Manifest:
        """Returns the manifest of a step, which must be equal on all processes.

        Each process verifies the arrays that it reads by its own copy.
        """

        def read() -> Manifest:
            if not place.holds(step):
                raise self._no_checkpoint(step)
            return place.read(step)

        manifest = self.peers.all_or_none("manifest", read)
        if self.peers.count > 1:
            self.peers.decide("same", f"{step} {manifest.identity}", one_checkpoint)
        return manifest

    def verify(self, step: int) -> Manifest:
        """Verifies every file, then every array of a checkpoint by its checksum or fingerprint.

        Arrays are read on the host, one at a time.

        Raises:
            CheckpointError: If the step has no checkpoint, it was saved without checksums
                (format 1), or files or arrays are missing or changed: all are listed.
        """
        from shardlib.checkpoint import arrays

        place = self._place_of(step)
        manifest, path = place.read(step), place.of_step(step)
        if not manifest.is_verifiable:
            raise CheckpointError(
                f"checkpoint {path} has format {manifest.schema}, without checksums.\n"
                "  Restore it and save it again to add them."
            )
        check_contents(path, manifest.files)
        # Arrays without elements are not stored.
        actual = {
            leaf: fingerprint.of_host(arrays.read_whole(path, leaf))
            for leaf, spec in manifest.leaves.items()
            if spec.size
        }
        check_fingerprints(path, manifest, actual)
        return manifest
