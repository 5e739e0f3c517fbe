"""The save of one checkpoint: copy, write, checksums, and commit by one rename.

The training loop waits only for the copy from device to host. A thread then waits for the files,
computes the checksums of the files that this process wrote, and reports success or failure to the
first process. The first process merges the store, computes the remaining checksums, writes the
manifest and renames the directory. If any process failed, it removes the partial files instead.
Every process learns the outcome.
"""

import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardlib.checkpoint import fingerprint
from shardlib.checkpoint import manifest as manifests
from shardlib.checkpoint.checksums import FileRecord, checksums, sync, walk
from shardlib.checkpoint.consensus import Peers
from shardlib.checkpoint.directory import STATE, StepDirectory
from shardlib.checkpoint.errors import first_line
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.tree import Leaf
from shardlib.errors import CheckpointError

if TYPE_CHECKING:
    from shardlib.checkpoint.arrays import ArrayWriter, Future

THREAD_NAME = "shardlib-save"


class Saving:
    """A save in flight; every process makes one for the same step.

    `draft` is the manifest without fingerprints and files, which `_complete` adds. `after` is
    called by the first process once the checkpoint is in place, in the thread of the save; it must
    not fail. It has to make the new name survive a power loss.
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

    def begin(self, leaves: Mapping[str, Leaf]) -> None:
        """Copies the leaves to the host and starts to write them; they may then be donated.

        Raises:
            CheckpointError: If the first process cannot create the directory, or the step exists.
        """
        self._peers.decide("begin", "", lambda _: self._make_room())
        arrays = {path: leaf for path, leaf in leaves.items() if np.prod(np.shape(leaf))}
        try:
            self._futures = self._writer.start(self._temporary / STATE, arrays)
        except Exception as error:  # `_written` reports it to the other processes.
            self._copy_failure = error
        try:
            # After the copy, which the loop waits for. It also runs after a failed copy, because it
            # needs every process.
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
        """Waits for the checkpoint on every process; returns the error if it failed."""
        if self._thread is not None:
            self._thread.join()
        return self._failure

    def _make_room(self) -> str:
        """Creates the directories that all processes write to."""
        self._directory.path.mkdir(parents=True, exist_ok=True)
        self._directory.clean()
        if os.path.lexists(self._directory.of_step(self.step)):
            raise CheckpointError(
                f"{self._directory.of_step(self.step)} exists and is not a complete checkpoint"
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
        """Waits for the writes of this process; returns checksums or the error as JSON."""
        from shardlib.checkpoint.arrays import own_files

        failures = [self._copy_failure] if self._copy_failure else []
        for future in self._futures:  # Wait for all: later code requires that writing has ended.
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
        for name in rest:  # Orbax does not sync all of these files.
            sync(self._temporary / name)
        manifest = dataclasses.replace(
            self._draft,
            fingerprints=self._fingerprints.result(),
            files=dict(sorted(files.items())),
        )
        document = self._temporary / manifests.FILE_NAME
        document.write_text(manifest.to_json(), encoding="utf-8")
        for path in (document, self._temporary / STATE, self._temporary):
            sync(path)
        self._temporary.rename(self._directory.of_step(self.step))
