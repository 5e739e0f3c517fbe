"""Requests that are open, and what the steps of an engine draw for them."""

import collections
import dataclasses
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from shardlib.engine.answering import Request
from shardlib.engine.programs import StepResult
from shardlib.engine.requests import FinishReason, Sampling, Token
from shardlib.engine.sampling import Drawn
from shardlib.engine.scheduler import Scheduler
from shardlib.engine.sizes import EngineSizes
from shardlib.engine.steps import DecodeRow, EngineStep, Lane, SequenceState
from shardlib.errors import ModelError


class InFlight(NamedTuple):
    """A step that runs, and the version of its parameters."""

    step: EngineStep
    result: StepResult | None
    """What its rows and lanes draw; None without them."""
    embeddings: jax.Array | None
    """Embeddings of its texts: [groups, texts, features] float32; None without them."""
    version: int


def steps_of(engine: object) -> collections.deque[InFlight]:
    """Returns a queue for the steps of an engine that run. Its end, and that of the process, waits
    for them: the exit of a process destroys what XLA for CPU still uses."""
    steps = collections.deque[InFlight]()
    weakref.finalize(engine, _wait_for, steps)
    return steps


def _wait_for(steps: Iterable[InFlight]) -> None:
    jax.block_until_ready([(one.result, one.embeddings) for one in steps])


class OpenRequests:
    """Requests that are not finished, by their sequences.

    Attributes:
        by_sequence: The requests.
        counts: Tokens of prompts (`prompt`, of which `cached` were not computed), of answers
            (`answer`), and guesses (`guessed`, of which `right`).
    """

    def __init__(self, scheduler: Scheduler, sizes: EngineSizes):
        self.by_sequence: dict[SequenceState, Request] = {}
        self.counts = collections.Counter[str]()
        self._scheduler, self._sizes = scheduler, sizes

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ModelError: If it is open or finished, or does not fit into the cache even alone.
        """
        if request.finished or request.sequence in self.by_sequence:
            raise ModelError(
                "the request was queued before.\n  Prepare another one with the same arguments."
            )
        self._scheduler.add(request.sequence)
        self.by_sequence[request.sequence] = request
        self.counts["prompt"] += len(request.sequence.asked)

    def end(self, request: Request, reason: FinishReason) -> None:
        """Ends an answer as it is, unless it is finished."""
        if not request.finished:
            self._scheduler.end(request.sequence)
            self._finish(request, reason)

    def expire(self) -> None:
        """Ends answers whose deadline has passed."""
        now = time.monotonic()
        every = list(self.by_sequence.values())
        for request in every:
            if request.deadline is not None and request.deadline <= now:
                self.end(request, "deadline")

    def fail(self, sequence: SequenceState, error: Exception) -> None:
        """Ends an answer by an error that is its own, if it is open."""
        request = self.by_sequence.get(sequence)
        if request is not None:
            request.error = error
            self.end(request, "error")

    def restart(self, *, is_careful: bool) -> None:
        """Queues all anew, with the tokens that were read."""
        for request in list(self.by_sequence.values()):
            request.sequence.out = [token.id for token in request.tokens]
            if len(request.tokens) == request.sequence.max_tokens:
                self._finish(request, "length")
        self._scheduler.restart(self.by_sequence, is_careful=is_careful)

    def drawing(self, step: EngineStep) -> Iterator[tuple[tuple[int, int], DecodeRow | Lane]]:
        """Yields what draws in a step: its group and first row, and the row or lane."""
        return step.drawing(self._sizes.slots, self._sizes.draws_a_lane)

    def read(self, in_flight: InFlight) -> None:
        """Records the tokens of a step."""
        step, result, embeddings, version = in_flight
        if embeddings is not None:
            self._record_texts(step, jax.device_get(embeddings))
        if result is None:
            return
        if step.scores:
            self._record_prompts(step, jax.device_get(result.scores), version)
        drawn = jax.device_get(result.drawn)
        drawing = list(self.drawing(step))
        if any(work.sequence.sampling.embedding for _, work in drawing):
            self._record_embeddings(drawing, jax.device_get(result.embeddings))
        for (group, first), work in drawing:
            count = 1
            if isinstance(work, Lane) and work.guessed:
                count += self._checked(work, drawn.tokens[group, first:])
            for row in range(first, first + count):
                self._record(work.sequence, drawn, (group, row), version)

    def _checked(self, lane: Lane, drawn: np.ndarray) -> int:
        """Returns how many guesses of a lane are the tokens that were drawn."""
        wrong = (number for number, one in enumerate(lane.guessed) if one != drawn[number])
        num_right = next(wrong, len(lane.guessed))
        self._scheduler.checked(lane, num_right)
        self.counts.update(guessed=len(lane.guessed), right=num_right)
        return num_right

    def _record_prompts(self, step: EngineStep, scores: Drawn, version: int) -> None:
        """Records the log probabilities of prompts, which come before the last answer."""
        lanes = (
            (group, number, lane)
            for group, part in enumerate(step.groups)
            for number, lane in enumerate(part.lanes)
        )
        for group, number, lane in lanes:
            request = self.by_sequence.get(lane.sequence)
            if not lane.scores or request is None:
                continue
            count = len(lane.sequence.prompt) - lane.start - 1
            for offset in range(min(len(lane.tokens), count)):
                row = group, self._sizes.slots + number * self._sizes.lane + offset
                token = _token(scores, row, int(scores.tokens[row]), lane.sequence.sampling)
                request.prompt_tokens[lane.start + offset + 1] = dataclasses.replace(
                    token, version=version
                )

    def _record_texts(self, step: EngineStep, vectors: np.ndarray) -> None:
        """Ends the requests whose texts an encoder has embedded."""
        for group, part in enumerate(step.groups):
            for row, text in enumerate(part.texts):
                self._scheduler.encoded(text.sequence)
                request = self.by_sequence.get(text.sequence)
                if request is not None:
                    request.embedding = vectors[group, row].copy()
                    request.first_token_at = time.monotonic()
                    self._finish(request, "stop")

    def _record_embeddings(
        self, drawing: list[tuple[tuple[int, int], DecodeRow | Lane]], vectors: np.ndarray
    ) -> None:
        for row, work in drawing:
            request = self.by_sequence.get(work.sequence)
            # The first token follows the prompt, of which this is the last row.
            if request is not None and work.sequence.sampling.embedding and not request.tokens:
                request.embedding = vectors[row].copy()

    def _record(
        self, sequence: SequenceState, drawn: Drawn, row: tuple[int, int], version: int
    ) -> None:
        request = self.by_sequence.get(sequence)
        token = int(drawn.tokens[row])
        self._scheduler.drawn(sequence, token)
        if request is None:
            return
        if request.first_token_at is None:
            request.first_token_at = time.monotonic()
        if token in sequence.stops:
            self._finish(request, "stop")
            return
        offset = 0 if request.stream is None else len(request.stream.text)
        try:
            is_stopped = request.stream is not None and request.stream.add(token)
        except Exception as error:
            self.fail(sequence, error)
            return
        scored = _token(drawn, row, token, sequence.sampling)
        request.tokens.append(dataclasses.replace(scored, version=version, text_offset=offset))
        # The token of a request for its embedding alone is nobody's.
        is_embedding = sequence.sampling.embedding and sequence.max_tokens == 1
        self.counts["answer"] += not is_embedding
        if is_stopped:
            self.end(request, "stop")
        elif sequence.ended:
            self._finish(request, "length")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        # A request may end before it is queued.
        self.by_sequence.pop(request.sequence, None)
        self.counts["cached"] += request.sequence.num_cached or 0
        try:
            if request.stream is not None and request.error is None:
                request.stream.finish()
        except Exception as error:
            request.error, reason = error, "error"
        finally:
            request.finish_reason, request.finished_at = reason, time.monotonic()


def _token(drawn: Drawn, row: tuple[int, int], token: int, sampling: Sampling) -> Token:
    """Returns the token of a row with its log probabilities."""
    count = sampling.logprobs or 0
    top = zip(drawn.top_tokens[row][:count], drawn.top_logprobs[row][:count], strict=True)
    pairs = tuple((int(token), float(logprob)) for token, logprob in top)
    return Token(token, float(drawn.logprobs[row]), pairs)
