"""The thread that runs the engine: prompts go in, and pieces of answers come out.

The engine is touched by this thread alone. Others hand it functions to call between two steps, and
never wait for a lock that a step holds.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeVar

from shardlib.engine import Engine, EngineStats, Request, Sampling, Token
from shardlib.engine.arguments import Prompt
from shardlib.engine.requests import FinishReason
from shardlib.errors import ModelError, ShardlibError

_LOG = logging.getLogger(__name__)
_MOST_FAILURES = 8
"""Steps in a row that may fail. Each but the first ends one request."""
_IDLE_SECONDS = 0.5
"""Time after which an idle thread looks around, so that it notices when it is told to end."""

T = TypeVar("T")
Prepared = list[Request]


class BusyError(ShardlibError):
    """More prompts wait than the queue may hold; a retry may succeed."""


class EngineStoppedError(ShardlibError):
    """The thread of the engine has ended, and answers nothing any more."""


class FailedAnswerError(ShardlibError):
    """An answer ended by an error of the server."""


class Observer(Protocol):
    """Receives the progress of answers, in the thread of the engine."""

    def first_token(self, seconds: float) -> None:
        """A first token came `seconds` after its request."""

    def next_tokens(self, count: int, seconds: float) -> None:
        """`count` tokens came `seconds` after the one before them."""

    def finished(self, request: Request) -> None:
        """An answer is complete."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text and tokens of one answer."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None


@dataclasses.dataclass
class _Progress:
    """A request and what of its answer was handed on."""

    request: Request
    seen: int = 0
    sent: int = 0
    last_at: float = 0.0
    is_done: bool = False


class OpenAnswer:
    """The answers to the prompts of one body, as they come. It belongs to one event loop."""

    def __init__(self, thread: "EngineThread", in_pieces: bool):
        self._thread, self.in_pieces = thread, in_pieces
        self.loop = asyncio.get_running_loop()
        self.progress: list[_Progress] = []
        self._queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    @property
    def requests(self) -> list[Request]:
        """The requests, in the order of prompts and choices."""
        return [one.request for one in self.progress]

    def put(self, pieces: Sequence[Piece | Exception]) -> None:
        """Hands on pieces, or why there are no more; called by the event loop."""
        for piece in pieces:
            self._queue.put_nowait(piece)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields pieces until all answers are complete.

        Raises:
            ModelError: If one of them cannot be completed.
            FailedAnswerError: If one of them ended by another error.
            EngineStoppedError: If the engine has stopped.
        """
        left = len(self.progress)
        while left:
            piece = await self._queue.get()
            if isinstance(piece, Exception):
                raise piece
            yield piece
            left -= piece.finish_reason is not None

    def close(self) -> None:
        """Gives back what unfinished answers hold."""
        self._thread.close(self)


class EngineThread:
    """The thread of an engine, which nothing else touches from now on. At most `most_waiting`
    prompts wait for a slot."""

    def __init__(self, engine: Engine, *, most_waiting: int):
        self._engine, self._most_waiting = engine, most_waiting
        self.num_slots = engine.scheduler.num_slots
        """Requests that run at once."""
        self.observer: Observer | None = None
        """Receives the progress of answers."""
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._futures: set[concurrent.futures.Future] = set()
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._answers: dict[OpenAnswer, None] = {}
        self._stopping = self._ended = False
        self.stepped = threading.Condition()
        """Notified after each step."""
        self.is_warm = False
        self.stats: EngineStats = engine.stats()
        """As of the last step."""
        self.error: BaseException | None = None
        """Why the thread has ended, unless it was told to."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def most_prompts(self) -> int:
        """Prompts that are held at once, running or waiting."""
        return self.num_slots + self._most_waiting

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs, or is still to be started."""
        return not self._ended and (self._thread.ident is None or self._thread.is_alive())

    @property
    def is_ready(self) -> bool:
        """Whether prompts are answered at once: all programs are compiled."""
        return self.is_warm and self.is_alive and not self._stopping

    def prepare(self, prompt: Prompt, samplings: Sequence[Sampling], priority: int = 0) -> Prepared:
        """Returns the requests for the choices of a prompt, in the thread of the caller; see
        `Engine.prepare`."""
        ids = self._engine.encode(prompt)
        return [self._engine.prepare(ids, one, priority=priority) for one in samplings]

    def start(self) -> None:
        """Starts the thread, which compiles all programs first."""
        self._thread.start()

    def stop(self, seconds: float = 5.0) -> None:
        """Ends the thread after its step, and all open answers with an error; waits for it."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def call(self, function: Callable[[Engine], T]) -> "concurrent.futures.Future[T]":
        """Calls a function in the thread, between two steps.

        Raises:
            EngineStoppedError: If the thread has ended; also as the result of the future.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            self._futures.discard(future)
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._engine))
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        with self._lock:
            if self._ended or not self.is_alive:
                raise self._stopped()
            self._futures.add(future)
            self._calls.append(run)
        self._wake.set()
        return future

    async def open(self, requests: Prepared, *, in_pieces: bool) -> OpenAnswer:
        """Queues the prompts of a body.

        Args:
            requests: What `prepare` has returned for each prompt.
            in_pieces: Whether text is handed on as it comes, or each answer once it is complete.

        Raises:
            BusyError: If too many prompts wait.
            ModelError: If a prompt cannot be answered; then no prompt is queued.
            EngineStoppedError: If the engine has stopped.
        """
        answer = OpenAnswer(self, in_pieces)
        try:
            await asyncio.wrap_future(
                self.call(lambda engine: self._submit(engine, answer, requests))
            )
        except asyncio.CancelledError:
            answer.close()
            raise
        return answer

    def close(self, answer: OpenAnswer) -> None:
        """Cancels what is left of an answer."""

        def cancel(engine: Engine) -> None:
            self._answers.pop(answer, None)
            for request in answer.requests:
                if not request.finished:
                    engine.cancel(request)
                    if self.observer is not None:
                        self.observer.finished(request)

        try:
            self.call(cancel)
        except EngineStoppedError:
            return

    def _submit(self, engine: Engine, answer: OpenAnswer, requests: Prepared) -> None:
        # The rows of batches give way to prompts of clients.
        waiting = sum(one.priority <= 0 for one in engine.scheduler.waiting)
        running = sum(one.priority <= 0 for one in engine.scheduler.running)
        free = engine.scheduler.num_slots - running
        if waiting + len(requests) > self._most_waiting + free:
            raise BusyError(
                f"{waiting} prompts wait, and the body has {len(requests)}: the queue holds "
                f"{self._most_waiting}.\n  Try again later, or send fewer prompts in a body."
            )
        try:
            for request in requests:
                answer.progress.append(_Progress(engine.enqueue(request)))
        except Exception:
            for request in answer.requests:
                engine.cancel(request)
            raise
        self._answers[answer] = None

    def _run(self) -> None:
        try:
            self._engine.warm_up()
            self.is_warm = True
            failures = 0
            while not self._stopping:
                while self._calls:
                    self._calls.popleft()()
                    self.stats = self._engine.stats()
                if not self._engine.busy:
                    self._wake.wait(_IDLE_SECONDS)
                    self._wake.clear()
                    continue
                failures = 0 if self._step() else failures + 1
                if failures > _MOST_FAILURES:
                    raise EngineStoppedError(f"{failures} steps in a row have failed.")
        except BaseException as error:
            self.error = error
            _LOG.exception("The thread of the engine has ended.")
        finally:
            self._end()

    def _step(self) -> bool:
        """Runs a step and hands on what it gave; returns whether it succeeded."""
        try:
            self._engine.step()
            succeeded = True
        except Exception:
            _LOG.exception("A step of the engine has failed.")
            succeeded = False
        self.stats = self._engine.stats()
        self._hand_on()
        with self.stepped:
            self.stepped.notify_all()
        return succeeded

    def _hand_on(self) -> None:
        of_loops: dict[asyncio.AbstractEventLoop, list] = collections.defaultdict(list)
        for answer in list(self._answers):
            pieces = [
                piece
                for index, progress in enumerate(answer.progress)
                if not progress.is_done and (piece := self._piece(answer, index, progress))
            ]
            if pieces:
                of_loops[answer.loop].append((answer, pieces))
            if all(one.is_done for one in answer.progress):
                del self._answers[answer]
        for loop, parts in of_loops.items():
            _in_loop(loop, parts)

    def _piece(
        self, answer: OpenAnswer, index: int, progress: _Progress
    ) -> Piece | Exception | None:
        """Returns what is new of an answer, if anything is to be handed on."""
        request = progress.request
        self._observe(progress)
        if request.finished:
            progress.is_done = True
            if isinstance(request.error, ModelError):
                return request.error
            if request.error is not None:
                return FailedAnswerError(
                    f"the answer ended by an error of the server: {request.error}"
                )
        elif not answer.in_pieces:
            return None
        text = request.new_text()
        if not text and not request.finished:
            return None
        tokens = tuple(request.tokens[progress.sent :])
        progress.sent = len(request.tokens)
        return Piece(index, text, tokens, request.finish_reason)

    def _observe(self, progress: _Progress) -> None:
        request, observer = progress.request, self.observer
        count = len(request.tokens) - progress.seen
        if observer is None:
            return
        if count:
            now = time.monotonic()
            if progress.seen:
                observer.next_tokens(count, now - progress.last_at)
            else:
                observer.first_token(now - request.submitted_at)
            progress.seen, progress.last_at = len(request.tokens), now
        if request.finished:
            observer.finished(request)

    def _stopped(self) -> EngineStoppedError:
        why = "" if self.error is None else f" by an error: {self.error!r}"
        return EngineStoppedError(f"the engine has stopped{why}.\n  Start the server again.")

    def _end(self) -> None:
        """Ends all that waits for the thread."""
        with self._lock:
            self._ended = True
            futures, self._futures = list(self._futures), set()
            self._calls.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._stopped())
        answers, self._answers = list(self._answers), {}
        for answer in answers:
            _in_loop(answer.loop, [(answer, [self._stopped()])])
        with self.stepped:
            self.stepped.notify_all()


def _in_loop(
    loop: asyncio.AbstractEventLoop, parts: list[tuple[OpenAnswer, list[Piece | Exception]]]
) -> None:
    """Hands pieces to the answers of an event loop."""

    def put() -> None:
        for answer, pieces in parts:
            answer.put(pieces)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:  # The loop is closed, and its clients are gone.
        _LOG.debug("Pieces of %d answers came after the end of their loop.", len(parts))
