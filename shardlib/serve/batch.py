"""A file of requests, answered into a file of responses.

Source: the OpenAI API reference, "Batch": the format of rows.
"""

import collections
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from shardlib.data.records import json_lines
from shardlib.engine import Completion, Engine, Request
from shardlib.errors import DataError, MissingExtraError, ModelError, ShardlibError, require
from shardlib.serve.bodies import Asked, Asking, BodyError, Speaker, parse
from shardlib.serve.file_lock import lock
from shardlib.serve.responses import response

_AHEAD = 2
"""Requests that are submitted ahead, for each slot."""
_COLUMNS = ["custom_id", "url", "body"]
"""The columns that a row must have; others are not read."""


@dataclasses.dataclass
class BatchCard:
    """The rows, tokens and time of a batch."""

    rows: int
    """Rows of the input."""
    failed: int
    """Rows of the input whose response is an error, whichever call has answered them."""
    answered: int = 0
    """Rows that this call has answered."""
    refused: int = 0
    """Rows among them whose response is an error."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of prompts that were found in the cache."""
    answer_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers by time."""
        return self.answer_tokens / max(self.seconds, 1e-9)


class BatchEngine(Protocol):
    """What a batch asks of an engine."""

    num_slots: int
    """Requests that run at once."""

    def submit(self, asking: Asking) -> list[Request]:
        """Queues all choices of all prompts, or none. A fault that shows later is the error of the
        requests.

        Raises:
            ModelError: If one of them cannot be answered.
        """
        ...

    def cancel(self, requests: Sequence[Request]) -> None:
        """Ends answers as they are."""

    def step(self) -> None:
        """Runs a step, or waits for one."""


class _OwnEngine:
    """An engine that a batch has for itself."""

    def __init__(self, engine: Engine):
        self._engine, self.num_slots = engine, engine.scheduler.num_slots

    def submit(self, asking: Asking) -> list[Request]:
        requests = []
        for prompt, samplings in asking:
            tokens = self._engine.encode(prompt)
            requests += [self._engine.prepare(tokens, one) for one in samplings]
        enqueue_all(self._engine, requests)
        return requests

    def cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._engine.cancel(request)

    def step(self) -> None:
        self._engine.step()


def enqueue_all(engine: Engine, requests: Sequence[Request]) -> None:
    """Queues all requests, or none.

    Raises:
        ModelError: If one of them does not fit.
    """
    for number, request in enumerate(requests):
        try:
            engine.enqueue(request)
        except Exception:
            for queued in requests[:number]:
                engine.cancel(queued)
            raise


def check_urls(source: str | Path, url: str) -> None:
    """Raises `DataError` if a row of a file has another URL."""
    for row in _rows(Path(source)):
        if row["url"] != url:
            raise DataError(
                f"the row {row['custom_id']!r} has the url {row['url']!r}, and the batch {url!r}.\n"
                "  Send a batch for each."
            )


def answer_batch(
    source: str | Path,
    out: str | Path,
    engine: Engine,
    speaker: Speaker,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> BatchCard:
    """Answers the rows of a file that have no response in `out`, and adds their responses.

    Each response is one line, written at once when its row is complete. After a kill the same call
    goes on: a line that was cut off is removed, and each row has one response in the end. Responses
    come in the order in which they are complete.

    Args:
        source: JSON lines with `custom_id`, `url` and `body`, or a Parquet file with these columns,
            whose `body` is JSON text.
        out: JSON lines with `id`, `custom_id`, `response` and `error`.
        engine: The engine.
        speaker: The model of the engine.
        progress: Called with the rows that have a response, and all rows.

    Raises:
        DataError: If rows are malformed or share an id, if `out` has responses to other rows, is
            being written by another process, is the source, or cannot be written; before anything
            is computed. Also if a response cannot be written later.
    """

    def report(done: int, failed: int, every: int) -> None:
        if progress is not None:
            progress(done, every)

    return answer_rows(source, out, _OwnEngine(engine), speaker, report)


def answer_rows(
    source: str | Path,
    out: str | Path,
    engine: BatchEngine,
    speaker: Speaker,
    report: Callable[[int, int, int], None],
) -> BatchCard:
    """Does the same with an engine that others may use too. `report` is called with the rows that
    have a response, those among them whose response is an error, and all rows."""
    source, out = Path(source), Path(out)
    ids = _checked_ids(source)
    start = time.monotonic()
    with _opened(out, source) as file:
        done, failed = _responses(out, ids)
        card = BatchCard(len(ids), failed)
        work = _Work(engine, speaker, file, card)
        rows = (row for row in _rows(source) if row["custom_id"] not in done)
        try:
            for _ in work.through(rows):
                report(len(done) + card.answered, card.failed, len(ids))
        finally:
            work.cancel()
    card.seconds = time.monotonic() - start
    return card


@dataclasses.dataclass
class _OpenRow:
    """A row that the engine works on."""

    asked: Asked
    requests: list[Request]
    left: list[Request]
    """Those that are unfinished."""


@dataclasses.dataclass
class _Work:
    """Rows that the engine works on."""

    engine: BatchEngine
    speaker: Speaker
    file: FileIO
    card: BatchCard
    waiting: dict[str, _OpenRow] = dataclasses.field(default_factory=dict)
    num_left: int = 0
    """Requests of all of them that are unfinished."""

    @property
    def is_full(self) -> bool:
        return self.num_left >= (1 + _AHEAD) * self.engine.num_slots

    def through(self, rows: Iterator[dict[str, Any]]) -> Iterator[None]:
        """Answers rows; yields after each row that is added, and each step that is waited for."""
        for row in rows:
            self.add(row)
            # An engine that others run completes rows at any time.
            self.write_complete()
            yield
            while self.is_full:
                self.step()
                yield
        while self.waiting:
            self.step()
            yield

    def cancel(self) -> None:
        """Gives back what unfinished rows hold."""
        self.engine.cancel([request for row in self.waiting.values() for request in row.left])

    def add(self, row: dict[str, Any]) -> None:
        """Submits a row, or writes why it cannot be answered."""
        name = row["custom_id"]
        try:
            asked = parse(row["url"], row["body"], self.speaker)
            requests = self.engine.submit(asked.by_prompt())
        except (BodyError, ModelError, MissingExtraError) as error:
            self._refuse(name, error)
            return
        self.waiting[name] = _OpenRow(asked, requests, requests)

    def step(self) -> None:
        """Runs a step, and writes the rows that it completes."""
        self.engine.step()
        self.write_complete()

    def write_complete(self) -> None:
        """Writes the rows that are complete."""
        self.num_left, complete = 0, []
        for name, row in self.waiting.items():
            row.left = [request for request in row.left if not request.finished]
            self.num_left += len(row.left)
            if not row.left:
                complete.append(name)
        for name in complete:
            self._answer(name, self.waiting.pop(name))

    def _answer(self, name: str, row: _OpenRow) -> None:
        try:
            completions = [request.answer() for request in row.requests]
        except ModelError as error:
            self._refuse(name, error)
            return
        self._count(row.asked, completions)
        body = response(
            row.asked, completions, self.speaker, identity=f"cmpl-{name}", created=int(time.time())
        )
        self._write(name, 200, body)

    def _refuse(self, name: str, error: ShardlibError) -> None:
        self.card.refused += 1
        self.card.failed += 1
        status = error.status if isinstance(error, BodyError) else 400
        self._write(name, status, {"error": {"message": str(error), "code": status}})

    def _count(self, asked: Asked, completions: list[Completion]) -> None:
        for one in completions:
            self.card.prompt_tokens += len(one.prompt)
            self.card.cached_tokens += one.cached_tokens
            self.card.answer_tokens += 0 if asked.drops_answer else len(one.tokens)

    def _write(self, name: str, status: int, body: dict[str, Any]) -> None:
        row = _beginning(name) | {
            "response": {"status_code": status, "request_id": name, "body": body},
            "error": None,
        }
        try:
            left = memoryview(json.dumps(row).encode() + b"\n")
            while left:
                left = left[self.file.write(left) :]
        except OSError as error:
            raise DataError(
                f"a response cannot be written to {self.file.name}: {error.strerror}.\n"
                "  Make room, and repeat the command: it goes on with the rows that are left."
            ) from error
        self.card.answered += 1


def _beginning(name: str) -> dict[str, Any]:
    """Returns the fields with which the response to a row begins."""
    return {"id": f"batch_req_{name}", "custom_id": name}


def _opened(out: Path, source: Path) -> FileIO:
    """Returns a file to append to, which is this process's alone."""
    if out.exists() and not out.is_file():
        raise DataError(f"{out} is not a file.\n  Name a file for the responses.")
    if out.exists() and os.path.samefile(out, source):
        raise DataError(f"{out} is the file of the requests.\n  Name another for the responses.")
    try:
        file = out.open("ab", buffering=0)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}.\n  Name another.") from error
    try:
        lock(file)
    except BlockingIOError:
        file.close()
        raise DataError(
            f"another process writes responses to {out}.\n  Wait for its end, or name another file."
        ) from None
    return file


def fault_of_source(source: str | Path) -> str | None:
    """Returns why a path cannot be the input of a batch: None if it is a file."""
    if not os.path.exists(source):
        return f"no such file: {source}.\n  Name a file of requests."
    if not os.path.isfile(source):
        return (
            f"{source} is not a regular file, and requests are read more than once.\n"
            "  Write the requests to a file, and name it."
        )
    return None


def _rows(source: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file.

    Raises:
        DataError: At the first row that is malformed.
    """
    if (fault := fault_of_source(source)) is not None:
        raise DataError(fault)
    lines = _of_parquet(source) if source.suffix == ".parquet" else _of_json(source)
    for where, row in lines:
        missing = [name for name in _COLUMNS if name not in row]
        if missing or not isinstance(row["custom_id"], str):
            raise DataError(
                f"{where} has no {', '.join(missing) or 'text as custom_id'}.\n"
                '  Write rows as {"custom_id": "1", "url": "/v1/completions", "body": {...}}.'
            )
        yield row


def _of_json(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        for number, row in enumerate(json_lines(source, "one request"), 1):
            if row is not None:
                yield f"line {number} of {source}", row
    except OSError as error:
        raise DataError(
            f"{source} cannot be read: {error.strerror or error}.\n  Name a file that you may read."
        ) from None


def _of_parquet(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(_parquet_rows(source), 1):
        where = f"row {number} of {source}"
        if binary := [name for name in _COLUMNS if isinstance(row.get(name), bytes)]:
            raise DataError(
                f"{where} has bytes, and not text, in the column {', '.join(binary)}.\n"
                "  Write the column as strings."
            )
        try:
            if isinstance(body := row.get("body"), str):
                row["body"] = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"the body of {where} is not JSON: {error}.\n  Repair the row."
            ) from None
        yield where, row


def _parquet_rows(source: Path) -> Iterator[dict[str, Any]]:
    parquet = require("pyarrow.parquet", "parquet", "reading requests from Parquet")
    import pyarrow

    try:
        file = parquet.ParquetFile(source, page_checksum_verification=True)
        _check_names(source, file.schema_arrow.names)
        for batch in file.iter_batches(columns=_COLUMNS):
            yield from batch.to_pylist()
    # Damage shows at any page, and in texts that are not UTF-8 as a ValueError.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise DataError(f"{source} cannot be read: {why}.\n  Write the file again.") from None


def _check_names(source: Path, names: list[str]) -> None:
    """Raises `DataError` if columns share a name: which of them a row means is not known."""
    if shared := [name for name in _COLUMNS if names.count(name) > 1]:
        raise DataError(
            f"{source} has more than one column {', '.join(shared)}.\n  Rename or drop the others."
        )


def _checked_ids(source: Path) -> set[str]:
    """Returns the ids of all rows.

    Raises:
        DataError: If a row is malformed, or ids are shared.
    """
    counts = collections.Counter(row["custom_id"] for row in _rows(source))
    shared = [name for name, count in counts.items() if count > 1]
    if shared:
        raise DataError(
            f"rows of {source} share the custom_id {', '.join(map(repr, shared[:4]))}"
            f"{' and others' if len(shared) > 4 else ''}.\n  Give each row its own."
        )
    return set(counts)


def _responses(out: Path, ids: set[str]) -> tuple[set[str], int]:
    """Returns the ids that have a response and the number of errors, and cuts off a line that is
    not whole.

    Raises:
        DataError: If the file has lines that do not respond to these rows.
    """
    done, failed, end, tail = set[str](), 0, 0, b""
    with out.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                tail = line
                break
            name, status = _identified(out, line)
            if name not in ids:
                raise DataError(
                    f"{out} answers {name!r}, which no row of the input is called.\n"
                    "  Name another file, or the input that it belongs to."
                )
            done.add(name)
            failed += status != 200
            end += len(line)
    if tail:
        if not any(_begins(tail, name) for name in ids):
            raise _foreign(out)
        os.truncate(out, end)
    return done, failed


def _identified(out: Path, line: bytes) -> tuple[Any, Any]:
    """Returns the row that a response answers, and its status."""
    try:
        row = json.loads(line)
        return row["custom_id"], row["response"]["status_code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _foreign(out) from None


def _foreign(out: Path) -> DataError:
    return DataError(f"{out} has lines that are not responses.\n  Name another file.")


def _begins(tail: bytes, name: str) -> bool:
    """Returns whether bytes may be a part of the response to a row, from its first byte on."""
    # Without the brace at the end: other fields follow.
    start = json.dumps(_beginning(name))[:-1].encode() + b", "
    return tail.startswith(start) or start.startswith(tail)
