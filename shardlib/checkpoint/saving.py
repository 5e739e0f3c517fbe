"""One checkpoint on its way to the disk: copied, written, summed up, and committed by one rename.

The loop waits for the copy from device to host alone. A thread then waits for the files, takes the
checksums of those that this process wrote, and tells the first process whether all went well. That
one merges, checks the rest, writes the manifest and renames; or it removes what was written, when
any process failed. Every process learns which.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardlib.checkpoint import fingerprint
from shardlib.checkpoint import manifest as manifests
from shardlib.checkpoint.agreement import Peers
from shardlib.checkpoint.damage import first_line
from shardlib.checkpoint.directory import STATE, StepDirectory
from shardlib.checkpoint.files import FileRecord, checksums, sync, walk
from shardlib.checkpoint.manifest import Manifest
from shardlib.errors import CheckpointError

if TYPE_CHECKING:
    from shardlib.checkpoint.arrays import ArrayWriter, Future

THREAD_NAME = "shardlib-save"


class Saving:
    """A save in flight; every process makes one for the same step.

    Args:
        directory: Where checkpoints are.
        peers: The processes.
        writer: Writes the arrays.
        draft: The manifest, but for what is known only later.
        after: Called by the first process once the checkpoint is there, in the thread of the save;
            must not fail. That the new name outlives a loss of power is still to be seen to.
    """

    def __init__(
        self,
        directory: StepDirectory,
        peers: Peers,
        writer: "ArrayWriter",
        draft: Manifest,
        after: Callable[[], None],
    ) -> None:
        self.step = draft.step
        self._directory, self._peers, self._writer = directory, peers, writer
        self._draft, self._after = draft, after
        self._temporary = directory.temporary(draft.step)
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._copy_failure: Exception | None = None
        self._futures: Sequence[Future] = ()
        self._fingerprints: fingerprint.Pending | None = None

    def begin(self, leaves: Mapping[str, Any]) -> None:
        """Copies the leaves to the host and starts to write them; they may then be donated.

        Raises:
            CheckpointError: If the first process cannot make the directory, or the step is there.
        """
        self._peers.decide("begin", "", lambda _: self._make_room())
        arrays = {path: leaf for path, leaf in leaves.items() if np.prod(np.shape(leaf))}
        try:
            self._futures = self._writer.start(self._temporary / STATE, arrays)
        except Exception as error:  # The others have to learn of it; see `_written`.
            self._copy_failure = error
        try:
            # After the copy, which is waited for; and in any case, for it needs every process.
            self._fingerprints = fingerprint.dispatch(leaves)
        except Exception as error:
            self._copy_failure = self._copy_failure or error
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether `finish` would return at once."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> Exception | None:
        """Waits until the checkpoint is there on every process, or returns why it is not."""
        if self._thread is not None:
            self._thread.join()
        return self._failure

    def _make_room(self) -> str:
        """Makes the directories that all processes write to."""
        self._directory.path.mkdir(parents=True, exist_ok=True)
        self._directory.clean()
        if os.path.lexists(self._directory.of_step(self.step)):
            raise CheckpointError(
                f"{self._directory.of_step(self.step)} is in the way and is no complete checkpoint"
            )
        (self._temporary / STATE).mkdir(parents=True)
        return ""

    def _run(self) -> None:
        try:
            self._peers.decide("commit", self._written(), self._commit)
        except Exception as error:
            self._failure = error
        self._futures, self._fingerprints = (), None

    def _written(self) -> str:
        """Waits for what this process writes; returns checksums, or what went wrong, as JSON."""
        from shardlib.checkpoint.arrays import own_files

        failures = [self._copy_failure] if self._copy_failure else []
        for future in self._futures:  # All of them: nothing may be written after this.
            try:
                future.result()
            except Exception as error:
                failures.append(error)
        try:
            if failures:
                raise failures[0]
            state = self._temporary / STATE
            records = checksums(state, own_files(state))
        except Exception as error:
            return json.dumps({"error": first_line(error)})
        return json.dumps({name: dataclasses.asdict(r) for name, r in records.items()})

    def _commit(self, texts: list[str]) -> str:
        """Completes the checkpoint if every process has written its part."""
        try:
            self._complete([json.loads(text) for text in texts])
        except Exception:
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        self._after()
        return ""

    def _complete(self, parts: list[dict[str, Any]]) -> None:
        for index, part in enumerate(parts):
            if "error" in part:
                where = f"process {index}: " if len(parts) > 1 else ""
                raise CheckpointError(where + part["error"])
        assert self._fingerprints is not None
        self._writer.finish(self._temporary / STATE)
        files = {
            f"{STATE}/{name}": FileRecord(**record)
            for part in parts
            for name, record in part.items()
        }
        rest = [name for name in walk(self._temporary) if name not in files]
        files |= checksums(self._temporary, rest)
        for name in rest:  # Not all of it is synchronized by who wrote it.
            sync(self._temporary / name)
        manifest = dataclasses.replace(
            self._draft,
            fingerprints=self._fingerprints.result(),
            files=dict(sorted(files.items())),
        )
        _write(self._temporary / manifests.FILE_NAME, manifest.to_json())
        for directory in (self._temporary / STATE, self._temporary):
            sync(directory)
        self._temporary.rename(self._directory.of_step(self.step))


def _write(path: pathlib.Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
