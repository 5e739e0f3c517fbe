"""Requests that were submitted, and what the engine has done for all of them."""

import dataclasses
import time

import numpy as np

from shardlib.engine.requests import Completion, FinishReason, Token
from shardlib.engine.steps import SequenceState
from shardlib.engine.texts import TextStream
from shardlib.errors import ModelError


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt that was submitted, and its answer so far."""

    sequence: SequenceState
    stream: TextStream | None
    deadline: float | None
    tokens: list[Token] = dataclasses.field(default_factory=list)
    prompt_tokens: dict[int, Token] = dataclasses.field(default_factory=dict)
    """Tokens of the prompt by position, if their log probabilities are wanted."""
    embedding: np.ndarray | None = None
    """The embedding of the prompt, if it is wanted."""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    """Why the answer cannot be completed."""
    submitted_at: float = 0.0
    first_token_at: float | None = None
    finished_at: float | None = None

    def restart_clock(self) -> None:
        """Counts its times from now on."""
        now = time.monotonic()
        if self.deadline is not None:
            self.deadline += now - self.submitted_at
        self.submitted_at = now

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    def new_text(self) -> str:
        """Returns the text that has come since the last call."""
        return "" if self.stream is None else self.stream.shown()

    def answer(self) -> Completion:
        """Returns the complete answer.

        Raises:
            ModelError: If the request is not finished, or ended by an error.
        """
        if isinstance(self.error, ModelError):
            raise self.error
        if self.finish_reason is None:
            raise ModelError(
                f"the answer has {len(self.tokens)} tokens and is not complete.\n"
                "  Call step until the request is finished, or cancel it."
            )
        if self.error is not None:
            raise ModelError(f"the answer ended by an error: {self.error}") from self.error
        text = "" if self.stream is None else self.stream.text
        cached = self.sequence.num_cached or 0
        return Completion(
            self.sequence.asked,
            tuple(self.tokens),
            text,
            self.finish_reason,
            cached,
            self.scored_prompt(),
            self.embedding,
        )

    def scored_prompt(self) -> tuple[Token, ...]:
        """Returns the tokens of the prompt but the first, if their log probabilities are wanted."""
        return tuple(token for _, token in sorted(self.prompt_tokens.items()))


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """What the engine holds and has done."""

    num_waiting: int
    num_running: int
    pages: int
    pages_used: int
    pages_idle: int
    """Pages that hold prefixes which no sequence uses now."""
    num_steps: int
    num_preemptions: int
    prompt_tokens: int
    cached_tokens: int
    """Tokens of prompts that were found in the cache."""
    answer_tokens: int
    guessed_tokens: int
    """Tokens that `speculate` guessed."""
    right_tokens: int
    """Guessed tokens that were drawn, also after the end of an answer."""
    num_compiled: int
