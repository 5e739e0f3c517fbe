"""Requests to the engine, and completions."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np

from shardlib.errors import ModelError

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
"""Why an answer ended: at a stop token or text, at its longest, by the client's will or time, or
because a step failed for it."""
MOST_LOGPROBS = 20
"""Alternatives that a step returns for each token. Source: the OpenAI API, `top_logprobs`."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The form of an answer, which ends when it is complete. It needs the extra `grammar`."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    """A JSON schema, a regular expression, or a grammar in the syntax of Lark."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are drawn, and where it ends.

    Raises:
        ModelError: If a value is out of range; the message lists all of them.
    """

    max_tokens: int | None = None
    """Most tokens of the answer; None for as many as fit."""
    temperature: float = 0.0
    """0 takes the likeliest token; otherwise logits are divided by it."""
    top_k: int = 0
    """Tokens to choose from, the likeliest ones; 0 for all. Equally likely ones stay together."""
    top_p: float = 1.0
    """The share of probability to choose from. Source: Holtzman et al. 2020, "The Curious Case of
    Neural Text Degeneration"."""
    min_p: float = 0.0
    """Least probability of a choice, as a share of the likeliest one's. Source: Nguyen et al. 2024,
    "Turning Up the Heat: Min-p Sampling"."""
    seed: int = 0
    """The draw of a token depends on the seed and its position alone."""
    stop: tuple[str, ...] = ()
    """Texts before which the answer ends."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens before which the answer ends, besides the tokenizer's end of text."""
    ignore_end: bool = False
    """Whether the answer goes on after the end of text."""
    logprobs: int | None = None
    """Alternatives of each token to return with their log probabilities; None for none."""
    prompt_logprobs: bool = False
    """Whether the tokens of the prompt are returned with their log probabilities too. The whole
    prompt is then read, whatever the cache has of it."""
    adapter: str | None = None
    """The adapter of the engine that answers; None for the model without one."""
    embedding: bool = False
    """Whether the embedding of the prompt is returned; see `Completion.embedding`."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of all tokens that the answer has. Source: the OpenAI API."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token, once for each time that the answer has it. Source: the
    OpenAI API."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    """Numbers from -100 to 100 that are added to the logits of tokens, by their ids."""
    grammar: Grammar | None = None
    """The form of the answer."""

    @property
    def adjusts(self) -> bool:
        """Whether anything is added to the logits."""
        penalties = self.presence_penalty, self.frequency_penalty
        return any(penalties) or bool(self.logit_bias) or self.grammar is not None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _tuple(self.stop))
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        checks = {
            f"max_tokens={self.max_tokens}, which must be an integer of 1 or more": (
                self.max_tokens is None or _within(self.max_tokens, 1, math.inf)
            ),
            f"temperature={self.temperature}, which must be 0 or more, up to 1e38": 0
            <= self.temperature
            <= 1e38,
            f"top_k={self.top_k}, which must be an integer from 0 to 2**31 - 1": _within(
                self.top_k, 0, 2**31 - 1
            ),
            f"top_p={self.top_p}, which must be above 0 and at most 1": 0 < self.top_p <= 1,
            f"min_p={self.min_p}, which must be from 0 to 1": 0 <= self.min_p <= 1,
            f"seed={self.seed}, which must be an integer from 0 to 2**32 - 1": _within(
                self.seed, 0, 2**32 - 1
            ),
            f"stop={self.stop}, which must be texts that are not empty": all(
                isinstance(one, str) and one for one in self.stop
            ),
            f"stop_tokens={self.stop_tokens}, which must be integers": all(
                isinstance(one, Integral) and not isinstance(one, bool) for one in self.stop_tokens
            ),
            f"adapter={self.adapter!r}, which must be a name": (
                self.adapter is None or isinstance(self.adapter, str)
            ),
            f"logprobs={self.logprobs}, which must be an integer from 0 to {MOST_LOGPROBS}": (
                self.logprobs is None or _within(self.logprobs, 0, MOST_LOGPROBS)
            ),
            f"presence_penalty={self.presence_penalty}, which must be from -2 to 2": abs(
                self.presence_penalty
            )
            <= 2,
            f"frequency_penalty={self.frequency_penalty}, which must be from -2 to 2": abs(
                self.frequency_penalty
            )
            <= 2,
            f"logit_bias={self.logit_bias}, which must be numbers from -100 to 100": all(
                abs(value) <= 100 for value in self.logit_bias.values()
            ),
            "a grammar and ignore_end, of which one must be left out": (
                self.grammar is None or not self.ignore_end
            ),
        }
        if wrong := [words for words, holds in checks.items() if not holds]:
            raise ModelError(f"sampling has {'; '.join(wrong)}.\n  Change these values.")


def _within(value: Any, least: float, most: float) -> bool:
    return isinstance(value, Integral) and least <= int(value) <= most


def _tuple(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of an answer."""

    id: int
    logprob: float
    """Natural log of its probability by the model, before temperature and cuts."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their log probabilities, if the request wants them."""
    version: int = 0
    """The version of the parameters that it was drawn with; see `Engine.update`."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """The answer to a prompt."""

    prompt: tuple[int, ...]
    tokens: tuple[Token, ...]
    text: str
    """The text without stop texts; empty if the engine has no tokenizer."""
    finish_reason: FinishReason
    cached_tokens: int
    """Tokens of the prompt whose keys and values were already in the cache."""
    prompt_tokens: tuple[Token, ...] = ()
    """The tokens of the prompt but the first, if the request wants their log probabilities."""

    embedding: np.ndarray | None = dataclasses.field(default=None, compare=False)
    """The input of the head for the last token of the prompt, as a vector of length 1: [features]
    float32. None unless the request wants it."""

    @property
    def ids(self) -> list[int]:
        """The ids of the tokens."""
        return [token.id for token in self.tokens]
