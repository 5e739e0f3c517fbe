"""Batches that a server answers when it has time, one after the other.

Source: the OpenAI API reference, "Batch".
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from shardlib.engine import Engine, Request
from shardlib.errors import ShardlibError
from shardlib.serve.batch import answer_rows, check_urls, enqueue_all
from shardlib.serve.bodies import Asking, Speaker
from shardlib.serve.engine_thread import EngineStoppedError, EngineThread
from shardlib.serve.file_store import FileStore

_LOG = logging.getLogger(__name__)
_LATER = 1
"""The priority of their prompts: clients that wait come first."""
_STEP_SECONDS = 0.05
"""Longest wait for a step of the engine."""
_REPORT_SECONDS = 0.5
_RETRY_SECONDS = 10
"""Wait before a batch whose files could not be written goes on."""


class _BatchStoppedError(Exception):
    """The batch is cancelled, or the server is about to end."""


class BatchJobs:
    """The thread that answers batches. After a restart it goes on with those that are
    unfinished."""

    def __init__(self, store: FileStore, thread: EngineThread, speaker: Speaker):
        self.store, self._engine, self._speaker = store, thread, speaker
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._cancelled: set[str] = set()
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)

    def start(self) -> None:
        """Starts the thread.

        Raises:
            ConfigError: If another server uses the folder.
        """
        self.store.hold()
        self.store.remove_remains()
        for batch in self.store.unfinished():
            if batch["status"] == "cancelling":
                self._cancelled.add(batch["id"])
            self._queue.put(batch["id"])
        self._thread.start()

    def drain(self) -> None:
        """Tells the thread to end; the batch that runs goes on after the next start."""
        self._stopping.set()
        self._queue.put(None)

    def stop(self, seconds: float = 5.0) -> None:
        """Ends the thread, and leaves the folder to another server."""
        self.drain()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        if not self._thread.is_alive():
            self.store.release()

    def add(self, file: str, endpoint: str, window: str, metadata: Any) -> dict[str, Any]:
        """Queues a batch, and returns it."""
        batch = {
            "id": self.store.new_id("batch"),
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file,
            "completion_window": window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(time.time()),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        self.store.put(batch)
        self._queue.put(batch["id"])
        return batch

    def cancel(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Cancels a batch, unless it is complete; returns it."""
        with self._lock:
            found = self.store.get(batch["id"], "batch") or batch
            if found["status"] in ("validating", "in_progress"):
                self._cancelled.add(found["id"])
                found = self.store.put(
                    found | {"status": "cancelling", "cancelling_at": int(time.time())}
                )
            return found

    def _run(self) -> None:
        while (identity := self._queue.get()) is not None and not self._stopping.is_set():
            try:
                self._try(identity)
            except _BatchStoppedError:
                return
            except EngineStoppedError:
                _LOG.error("%s stopped with the engine; the next start goes on with it.", identity)
                return
            except OSError as error:
                _LOG.error("%s goes on in %d seconds: %s.", identity, _RETRY_SECONDS, error)
                self._stopping.wait(_RETRY_SECONDS)
                self._queue.put(identity)

    def _try(self, identity: str) -> None:
        """Answers a batch. One that cannot be answered ends as failed.

        Raises:
            OSError: If its files cannot be written, as on a full disk.
        """
        try:
            self._answer(identity)
        except (_BatchStoppedError, EngineStoppedError, OSError):
            raise
        except ShardlibError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            self._end(identity, "failed", error)
        except Exception as error:
            _LOG.exception("%s has failed.", identity)
            self._end(identity, "failed", error)

    def _answer(self, identity: str) -> None:
        batch = self.store.get(identity, "batch")
        if batch is None:
            return
        source = self.store.content(batch["input_file_id"])
        out = self._output(identity)
        engine = _SharedEngine(self._engine, lambda: self._check(identity))
        self._update(identity, status="in_progress", in_progress_at=int(time.time()))
        reporter = _CountReporter(lambda *counts: self._counted(identity, *counts))
        try:
            self._check(identity)
            check_urls(source, batch["endpoint"])
            card = answer_rows(source, self.store.content(out), engine, self._speaker, reporter)
        except _BatchStoppedError:
            if self._stopping.is_set():
                raise
            self._end(identity, "cancelled")
            return
        self._end(identity, "completed", counts=_counts(card.rows, card.failed, card.rows))

    def _output(self, identity: str) -> str:
        """Returns the id of the file of responses, the same after a restart."""
        return identity.replace("batch-", "file-")

    def _check(self, identity: str) -> None:
        if self._stopping.is_set() or identity in self._cancelled:
            raise _BatchStoppedError

    def _counted(self, identity: str, done: int, failed: int, total: int) -> None:
        self._check(identity)
        self._update(identity, request_counts=_counts(done, failed, total))

    def _update(self, identity: str, **fields: Any) -> None:
        with self._lock:
            batch = self.store.get(identity, "batch")
            if batch is not None and batch["status"] != "cancelling":
                self.store.put(batch | fields)

    def _end(
        self,
        identity: str,
        status: str,
        error: Exception | None = None,
        counts: dict[str, int] | None = None,
    ) -> None:
        """Writes how a batch has ended; responses that it has are a file."""
        with self._lock:
            batch = self.store.get(identity, "batch")
            if batch is None:
                return
            out = self._output(identity)
            fields: dict[str, Any] = {"status": status, f"{status}_at": int(time.time())}
            if self.store.content(out).is_file():
                self.store.add_file(f"{identity}_output.jsonl", "batch_output", out)
                fields["output_file_id"] = out
            if error is not None:
                text = str(error)
                # Clients know files by their ids, and not where the server keeps them.
                for one in (batch["input_file_id"], out):
                    text = text.replace(str(self.store.content(one)), one)
                said = {"code": "invalid_request", "message": text, "line": None}
                fields["errors"] = {"object": "list", "data": [said]}
            if counts is not None:
                fields["request_counts"] = counts
            self.store.put(batch | fields)
            self._cancelled.discard(identity)


def _counts(done: int, failed: int, total: int) -> dict[str, int]:
    """Returns the numbers of rows as the API has them: all responses are one or the other."""
    return {"total": total, "completed": done - failed, "failed": failed}


class _CountReporter:
    """Reports progress now and then."""

    def __init__(self, report: Callable[[int, int, int], None]):
        self._report, self._next = report, 0.0

    def __call__(self, done: int, failed: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_SECONDS
            self._report(done, failed, total)


class _SharedEngine:
    """The engine, which its own thread runs, as a batch uses one."""

    def __init__(self, thread: EngineThread, check: Callable[[], None]):
        self._thread, self._check, self.num_slots = thread, check, thread.num_slots

    def submit(self, asking: Asking) -> list[Request]:
        requests = []
        for prompt, samplings in asking:
            requests += self._thread.prepare(prompt, samplings, priority=_LATER)

        def enqueue(engine: Engine) -> None:
            try:
                enqueue_all(engine, requests)
            except Exception as error:
                for request in requests:
                    request.error, request.finish_reason = error, "error"

        # Nobody waits for the call: it comes between two steps, and a row would take one each.
        self._thread.call(enqueue)
        return requests

    def cancel(self, requests: Sequence[Request]) -> None:
        def cancel_all(engine: Engine) -> None:
            for request in requests:
                engine.cancel(request)

        try:
            self._thread.call(cancel_all).result()
        except EngineStoppedError:
            return

    def step(self) -> None:
        self._check()
        with self._thread.stepped:
            self._thread.stepped.wait(_STEP_SECONDS)
        if not self._thread.is_alive:
            raise EngineStoppedError("the engine has stopped.\n  Start the server again.")
