"""Checkpoints in a directory, as someone sees them who only reads: listed, proved, restored."""

import logging
import os
import pathlib
import threading
from typing import Any

import jax

from shardlib.checkpoint import fingerprint, newest
from shardlib.checkpoint.agreement import Peers, one_checkpoint
from shardlib.checkpoint.damage import DamageError, first_line, listed
from shardlib.checkpoint.directory import Notify, StepDirectory
from shardlib.checkpoint.files import check_contents
from shardlib.checkpoint.manifest import Manifest, Partial
from shardlib.checkpoint.restoring import Restoring, check_fingerprints
from shardlib.checkpoint.saving import THREAD_NAME
from shardlib.checkpoint.tree import dtype_of, flatten, nest
from shardlib.errors import CheckpointError


def _log(text: str) -> None:
    logging.getLogger(__name__).warning("%s", text)


class SavedCheckpoints:
    """The checkpoints in a directory; nothing in it is changed.

    Under several processes each makes its own instance on the same shared directory, and all call
    `latest` and `restore` together; see `RunCheckpoints`.

    Args:
        directory: Holds the checkpoints, for example `run/checkpoints`; need not exist.
        notify: As of `RunCheckpoints`.
    """

    def __init__(self, directory: str | os.PathLike[str], *, notify: Notify | None = None) -> None:
        self.directory = pathlib.Path(directory).absolute()
        if ".." in self.directory.parts:  # TensorStore takes no such paths.
            self.directory = self.directory.resolve()
        self.peers = Peers()
        self._tell = notify or _log
        self._later: list[str] = []
        self._steps = StepDirectory(self.directory, self.notify)

    def settle(self) -> None:
        """Waits for what this object itself is writing, which for a reader is nothing."""

    def notify(self, text: str) -> None:
        """Tells a text: what the thread of a save has to say waits for the next call."""
        if threading.current_thread().name == THREAD_NAME:
            self._later.append(text)
        else:
            self._tell(text)

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, oldest first.

        Directories are listed if name and manifest are well-formed; `notify` is told once of each
        symbolic link and each other directory, and none of them is ever touched.

        Raises:
            CheckpointError: If the directory cannot be listed.
        """
        return list(self.manifests())

    def manifests(self) -> dict[int, Manifest]:
        """Returns what the complete checkpoints say of themselves, by step as of `steps`."""
        return self._steps.manifests()

    def candidates(self) -> list[int]:
        """Returns the steps of what looks like a checkpoint, damaged or not, oldest first."""
        return self._steps.candidates()

    def links(self) -> list[int]:
        """Returns the steps whose checkpoint is a symbolic link, which is not among the others."""
        return self._steps.links()

    def latest(self) -> int | None:
        """Returns the newest step, or None without any; the same on every process."""
        decision = self.peers.decide("latest", "", lambda _: str(max(self.steps(), default=-1)))
        return None if int(decision) < 0 else int(decision)

    def manifest(self, step: int) -> Manifest:
        """Returns what the checkpoint of `step` says of itself, arrays unread.

        Raises:
            CheckpointError: If there is no such checkpoint, or its manifest is damaged.
        """
        if step not in (*self.candidates(), *self.links()):
            raise CheckpointError(
                f"there is no checkpoint of step {step} in {self.directory}.\n"
                f"  Steps there: {listed(self.steps())}."
            )
        return self._steps.read(step)

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns the metadata that was given to `save`, as JSON gives it back."""
        return self.manifest(step).run

    def target(self, step: int, sharding: jax.sharding.Sharding | None = None) -> dict[str, Any]:
        """Returns what to restore a step into where its classes are not at hand: nested dicts of
        `jax.ShapeDtypeStruct`.

        Args:
            step: One of `steps()`.
            sharding: Of every leaf; on the host, as numpy arrays, without.

        Raises:
            CheckpointError: If there is no such checkpoint, or its manifest is damaged.
        """
        leaves = self.manifest(step).leaves
        return nest(
            {
                path: jax.ShapeDtypeStruct(spec.shape, dtype_of(spec), sharding=sharding)
                for path, spec in leaves.items()
            }
        )

    def check(self, step: int, target: Any) -> None:
        """Proves that `restore` would find the leaves of `target`; reads no array.

        Raises:
            CheckpointError: If there is no such checkpoint, or its leaves are not those of
                `target`: each one that is missing, unexpected, or of other shape or dtype is named.
        """
        self._restoring(step, self.manifest(step)).check(target)

    def restore(
        self,
        step: int,
        target: Any,
        *,
        cast: bool = False,
        partial: Partial = False,
        on_difference: Notify | None = None,
    ) -> Any:
        """Returns the state saved at `step`, bit for bit, on the shardings of `target`.

        What was read is proved by the fingerprints in the manifest.

        Args:
            step: One of `steps()`.
            target: A tree of the structure of the state; leaves are `jax.ShapeDtypeStruct` with
                a sharding of any mesh (or arrays, whose sharding is taken). A leaf without a
                sharding is restored to a numpy array on the host.
            cast: Whether leaves may have other dtypes in `target`: they are cast after they were
                verified, and each one is told.
            partial: Whether leaves (or those whose paths it returns True for) may be missing from
                the checkpoint, which then stay as they are in `target`, or from `target`; each one
                is told.
            on_difference: Whom they are told to; `notify`, when left out.

        Raises:
            CheckpointError: As `check`, before any array is read; or if the checkpoint is damaged:
                files or leaves are named.
        """
        self.settle()
        manifest = self._same_manifest(step)
        try:
            return self._restoring(step, manifest, cast, partial, on_difference).restore(target)
        except DamageError as error:
            body = str(error).removesuffix("\n  Restore another step.")
            others = listed(self.steps(), without=step)
            raise DamageError(f"{body}\n  Restore another step ({others}).") from error

    def stored(
        self, step: int, target: Any
    ) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, tuple[int, ...]]]:
        """Returns what a restore onto `target` would read; no array is, and no device is used.

        Args:
            step: One of `steps()`.
            target: As of `restore`; its meshes may be abstract.

        Returns:
            By path, the leaves that have elements and a sharding, PRNG keys as the integers that
            are stored for them; and the shapes of the chunks that each is stored in.

        Raises:
            CheckpointError: As `check`; or if the index of the arrays is damaged.
        """
        from shardlib.checkpoint import arrays

        self.check(step, target)
        structs = arrays.stored_structs(flatten(target))
        try:
            chunks = arrays.chunk_shapes(
                self._steps.of_step(step), {path: struct.shape for path, struct in structs.items()}
            )
        except Exception as error:
            raise DamageError(
                f"checkpoint {self._steps.of_step(step)} cannot be read: {first_line(error)}\n"
                f"  Name another step ({listed(self.steps(), without=step)})."
            ) from error
        return structs, chunks

    def restore_accepted(
        self, step: int, target: Any, accept: newest.Accept, *, partial: Partial = False
    ) -> tuple[Manifest, Any] | None:
        """Restores one step, or returns None if `accept` passes it over."""
        self.settle()
        manifest = self._same_manifest(step)
        refused: list[Exception] = []

        def see() -> bool:
            try:
                return accept(manifest) is not False
            except Exception as error:
                refused.append(error)
                raise

        try:
            if not self.peers.all_or_none("accept", see):
                return None
        except CheckpointError:
            if refused:
                raise refused[0] from None
            raise
        return manifest, self._restoring(step, manifest, False, partial).restore(target)

    def _same_manifest(self, step: int) -> Manifest:
        """Returns the manifest of a step, which has to be the same on every process: each verifies
        what it reads by its own."""
        manifest = self.peers.all_or_none("manifest", lambda: self.manifest(step))
        if self.peers.count > 1:
            self.peers.decide("same", f"{step} {manifest.identity}", one_checkpoint)
        return manifest

    def verify(self, step: int) -> Manifest:
        """Reads every file and then every array of a checkpoint, one array at a time and on the
        host, and compares them with what was saved.

        Raises:
            CheckpointError: If there is no such checkpoint, it was saved without checksums
                (format 1), or files are missing or were changed, or arrays: all are named.
        """
        from shardlib.checkpoint import arrays

        manifest = self.manifest(step)
        if not manifest.is_verifiable:
            raise CheckpointError(
                f"checkpoint {self._steps.of_step(step)} has format {manifest.schema}, without "
                "checksums.\n  Restore it and save it again to have them."
            )
        place = self._steps.of_step(step)
        check_contents(place, manifest.files)
        # Of arrays without elements nothing is stored.
        found = {
            path: fingerprint.of_host(arrays.read_whole(place, path))
            for path, spec in manifest.leaves.items()
            if spec.size
        }
        check_fingerprints(place, manifest, found)
        return manifest

    def _restoring(
        self,
        step: int,
        manifest: Manifest,
        cast: bool = False,
        partial: Partial = False,
        on_difference: Notify | None = None,
    ) -> Restoring:
        return Restoring(
            self._steps.of_step(step),
            manifest,
            self.peers,
            self.notify,
            on_difference or self.notify,
            cast,
            partial,
        )
