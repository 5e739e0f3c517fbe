"""Requests to the engine, and completions."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np

from shardlib.errors import ModelError

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
"""Why an answer ended: at a stop token or text, at its longest, by the client's will or time, or
because a step failed for it."""
MOST_LOGPROBS = 20
"""Alternatives that a step returns for each token. Source: the OpenAI API, `top_logprobs`."""


GrammarKind = Literal["json_schema", "regex", "lark"]


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The form of an answer, which ends when it is complete. It needs the extra `grammar`.

    Raises:
        ModelError: If the kind is unknown, or the text is not a text.
    """

    kind: GrammarKind
    text: str
    """A JSON schema, a regular expression, or a grammar in the syntax of Lark."""

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        if self.kind not in kinds or not isinstance(self.text, str):
            raise ModelError(
                f"a grammar has kind={self.kind!r} and a {type(self.text).__name__}.\n"
                f"  Give a kind ({', '.join(kinds)}) and its text."
            )


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
        object.__setattr__(self, "stop_tokens", _tuple(self.stop_tokens))
        optional = {
            "max_tokens": ("an integer of 1 or more", is_integer(self.max_tokens, 1)),
            "logprobs": (
                f"an integer from 0 to {MOST_LOGPROBS}",
                is_integer(self.logprobs, 0, MOST_LOGPROBS),
            ),
            "adapter": ("a name", isinstance(self.adapter, str)),
            "grammar": ("a Grammar", isinstance(self.grammar, Grammar)),
        }
        checks = {
            "temperature": ("a number from 0 to 1e38", is_number(self.temperature, 0, 1e38)),
            "top_k": ("an integer from 0 to 2**31 - 1", is_integer(self.top_k, 0, 2**31 - 1)),
            "top_p": (
                "above 0 and at most 1",
                is_number(self.top_p, 0, 1) and self.top_p > 0,
            ),
            "min_p": ("from 0 to 1", is_number(self.min_p, 0, 1)),
            "seed": ("an integer from 0 to 2**32 - 1", is_integer(self.seed, 0, 2**32 - 1)),
            "stop": (
                "texts that are not empty",
                all(isinstance(one, str) and one for one in self.stop),
            ),
            "stop_tokens": ("integers", all(map(is_integer, self.stop_tokens))),
            "presence_penalty": ("from -2 to 2", is_number(self.presence_penalty, -2, 2)),
            "frequency_penalty": ("from -2 to 2", is_number(self.frequency_penalty, -2, 2)),
            "logit_bias": ("numbers from -100 to 100 by ids of tokens", _is_bias(self.logit_bias)),
            "ignore_end": _boolean(self.ignore_end),
            "prompt_logprobs": _boolean(self.prompt_logprobs),
            "embedding": _boolean(self.embedding),
        } | {name: check for name, check in optional.items() if getattr(self, name) is not None}
        wrong = [
            f"{name}={getattr(self, name)!r}, which must be {expected}"
            for name, (expected, holds) in checks.items()
            if not holds
        ]
        if self.grammar is not None and self.ignore_end:
            wrong.append("a grammar and ignore_end, of which one must be left out")
        if wrong:
            raise ModelError(f"sampling has {'; '.join(wrong)}.\n  Change these values.")


def is_integer(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Returns whether a value is an integer within limits, of Python or of NumPy."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    return is_whole and least <= int(value) <= most


def is_number(value: Any, least: float, most: float) -> bool:
    """Returns whether a value is a real number within limits, of Python or of NumPy."""
    kinds = int | float | np.integer | np.floating
    is_other = isinstance(value, bool | np.timedelta64)
    return isinstance(value, kinds) and not is_other and bool(least <= value <= most)


def _boolean(value: Any) -> tuple[str, bool]:
    return "True or False", isinstance(value, bool | np.bool_)


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        is_integer(token) and is_number(number, -100, 100) for token, number in value.items()
    )


def _tuple(values: Any) -> tuple[Any, ...]:
    """Returns the values of a sequence as a tuple; one value stands for itself, and so does a
    mapping, which is then refused."""
    is_one = isinstance(values, str | Mapping) or not has_items(values)
    return (values,) if is_one else tuple(values)


def has_items(values: Any) -> bool:
    """Returns whether something has items. An array without dims says that it is iterable."""
    return isinstance(values, Iterable) and getattr(values, "ndim", 1) > 0


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of an answer."""

    id: int
    logprob: float
    """Natural log of its probability by the model, before temperature and cuts."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their log probabilities, if the request wants them."""
    version: int = 0
    """The version of the parameters that it was drawn with, or scored with in a prompt; see
    `Engine.update`."""
    text_offset: int = 0
    """Characters of the answer's text before it. The tokens of one character share theirs."""


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
