"""Read-only access to the checkpoints in a directory: listing, verification and restore."""

import logging
import os
import pathlib
import threading
from typing import Any

import jax

from shardlib.checkpoint import fallback, fingerprint
from shardlib.checkpoint.checksums import check_contents
from shardlib.checkpoint.consensus import Peers, one_checkpoint
from shardlib.checkpoint.directory import Notify, StepDirectory
from shardlib.checkpoint.errors import DamageError, first_line, listed
from shardlib.checkpoint.manifest import Manifest, Partial
from shardlib.checkpoint.restoring import Restoring, check_fingerprints
from shardlib.checkpoint.saving import THREAD_NAME
from shardlib.checkpoint.tree import dtype_of, flatten, nest
from shardlib.errors import CheckpointError


def _log(text: str) -> None:
    logging.getLogger(__name__).warning("%s", text)


class SavedCheckpoints:
    """The checkpoints in a directory, opened read-only.

    With several processes, each makes its own instance on the same shared directory, and all call
    `latest` and `restore` together; see `RunCheckpoints`.

    Args:
        directory: Holds the checkpoints, for example `run/checkpoints`; it need not exist.
        notify: As in `RunCheckpoints`.
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
            CheckpointError: If the directory cannot be listed.
        """
        return list(self.manifests())

    def manifests(self) -> dict[int, Manifest]:
        """Returns the manifests of the complete checkpoints by step, oldest first."""
        return self._steps.manifests()

    def candidates(self) -> list[int]:
        """Returns the steps of all checkpoints, damaged or not, oldest first."""
        return self._steps.candidates()

    def links(self) -> list[int]:
        """Returns the steps whose checkpoint is a symbolic link; other lists omit them."""
        return self._steps.links()

    def latest(self) -> int | None:
        """Returns the newest step, the same on every process; None without checkpoints."""
        decision = self.peers.decide("latest", "", lambda _: str(max(self.steps(), default=-1)))
        return None if int(decision) < 0 else int(decision)

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of the checkpoint of `step` without reading arrays.

        Raises:
            CheckpointError: If the step has no checkpoint, or its manifest is damaged.
        """
        if step not in (*self.candidates(), *self.links()):
            raise CheckpointError(
                f"step {step} has no checkpoint in {self.directory}.\n"
                f"  Steps there: {listed(self.steps())}."
            )
        return self._steps.read(step)

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns the metadata that was passed to `save`, as parsed from JSON."""
        return self.manifest(step).run

    def target(self, step: int, sharding: jax.sharding.Sharding | None = None) -> dict[str, Any]:
        """Returns a restore target for a step: nested dicts of `jax.ShapeDtypeStruct`.

        It replaces the classes of the state where they are not available.

        Args:
            step: One of `steps()`.
            sharding: The sharding of every leaf; None restores numpy arrays on the host.

        Raises:
            CheckpointError: If the step has no checkpoint, or its manifest is damaged.
        """
        leaves = self.manifest(step).leaves
        return nest(
            {
                path: jax.ShapeDtypeStruct(spec.shape, dtype_of(spec), sharding=sharding)
                for path, spec in leaves.items()
            }
        )

    def check(self, step: int, target: Any) -> None:
        """Checks that the checkpoint has the leaves of `target`, without reading arrays.

        Raises:
            CheckpointError: If the step has no checkpoint, or its leaves differ from `target`: each
                missing or unexpected leaf, or leaf of another shape or dtype, is listed.
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
        """Returns the structs and chunk shapes that a restore onto `target` would read.

        It reads no arrays and uses no device.

        Args:
            step: One of `steps()`.
            target: As in `restore`; its meshes may be abstract.

        Returns:
            The leaves with elements and a sharding, with PRNG keys as their stored integers; and
            the chunk shape of each stored array. Both are by path.

        Raises:
            CheckpointError: As in `check`. Also if the index of the arrays is damaged.
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
        self, step: int, target: Any, accept: fallback.Accept, *, partial: Partial = False
    ) -> tuple[Manifest, Any] | None:
        """Restores one step, or returns None if `accept` skips it."""
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
        """Returns the manifest of a step, which must be equal on all processes.

        Each process verifies the arrays that it reads by its own copy.
        """
        manifest = self.peers.all_or_none("manifest", lambda: self.manifest(step))
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

        manifest = self.manifest(step)
        if not manifest.is_verifiable:
            raise CheckpointError(
                f"checkpoint {self._steps.of_step(step)} has format {manifest.schema}, without "
                "checksums.\n  Restore it and save it again to add them."
            )
        place = self._steps.of_step(step)
        check_contents(place, manifest.files)
        # Arrays without elements are not stored.
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
