"""Bodies of responses, whole and in pieces, in the format of the OpenAI API.

Source: the OpenAI API reference, "Completions", "Chat", "Embeddings" and "Streaming".
"""

import base64
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from shardlib.engine import Completion, Token
from shardlib.engine.texts import UNFINISHED
from shardlib.serve.bodies import CHAT, EMBEDDINGS, Asked, Speaker
from shardlib.serve.tool_calls import ToolCall, ToolReader, split_calls

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


def response(
    asked: Asked,
    completions: Sequence[Completion],
    speaker: Speaker,
    *,
    identity: str,
    created: int,
) -> dict[str, Any]:
    """Returns the body of a response."""
    if asked.url == EMBEDDINGS:
        return _embeddings(asked, completions)
    is_chat = asked.url == CHAT
    return {
        "id": identity,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": asked.model,
        "choices": [
            _choice(asked, index, one, speaker, identity) for index, one in enumerate(completions)
        ],
        "usage": usage(asked, completions),
    }


def _embeddings(asked: Asked, completions: Sequence[Completion]) -> dict[str, Any]:
    counts = usage(asked, completions)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _vector(asked, one)}
            for index, one in enumerate(completions)
        ],
        "model": asked.model,
        "usage": {name: counts[name] for name in ("prompt_tokens", "total_tokens")},
    }


def _vector(asked: Asked, one: Completion) -> str | list[float]:
    assert one.embedding is not None, "the request asks for it"
    vector = one.embedding.astype("<f4")
    return base64.b64encode(vector.tobytes()).decode() if asked.in_base64 else vector.tolist()


def usage(asked: Asked, completions: Sequence[Completion]) -> dict[str, Any]:
    """Returns the numbers of tokens: of each prompt once, and of all its choices."""
    per_prompt = len(asked.samplings)
    drawn = 0 if asked.drops_answer else sum(len(one.tokens) for one in completions)
    read = sum(len(one.prompt) for one in completions[::per_prompt])
    cached = sum(one.cached_tokens for one in completions[::per_prompt])
    return {
        "prompt_tokens": read,
        "completion_tokens": drawn,
        "total_tokens": read + drawn,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _choice(
    asked: Asked, index: int, one: Completion, speaker: Speaker, identity: str
) -> dict[str, Any]:
    common = {"index": index, "finish_reason": one.finish_reason, "logprobs": None}
    if asked.url == CHAT:
        if asked.wants_logprobs:
            common["logprobs"] = {"content": [_chat_logprob(t, speaker) for t in one.tokens]}
        return common | _message(asked, index, one, identity)
    text, tokens = ("", ()) if asked.drops_answer else (one.text, one.tokens)
    if asked.echo:
        before, of_prompt = echoed(asked, index, one.prompt, one.prompt_tokens, speaker)
        text, tokens = before + text, (*of_prompt, *tokens)
    if asked.wants_logprobs:
        common["logprobs"] = _logprobs(tokens, speaker)
    return common | {"text": text}


def _message(asked: Asked, index: int, one: Completion, identity: str) -> dict[str, Any]:
    """Returns the message of a chat and why it has ended."""
    text, calls = split_calls(one.text, asked.tools) if asked.tools else (one.text, [])
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["content"] = text or None
        message["tool_calls"] = [
            _call(call, identity, index, number) for number, call in enumerate(calls)
        ]
    return {"message": message, "finish_reason": _reason(one.finish_reason, len(calls))}


def _call(call: ToolCall, identity: str, index: int, number: int) -> dict[str, Any]:
    """Returns a call as JSON: the `number`-th of a choice."""
    of_response = identity.partition("-")[2]
    return {
        "id": f"call_{of_response}_{index}_{number}",
        "type": "function",
        "function": call._asdict(),
    }


def _reason(finish_reason: str | None, num_calls: int) -> str | None:
    return "tool_calls" if finish_reason == "stop" and num_calls else finish_reason


def echoed(
    asked: Asked, index: int, ids: Sequence[int], scored: Sequence[Token], speaker: Speaker
) -> tuple[str, tuple[Token, ...]]:
    """Returns the text and the tokens with which a choice begins that repeats its prompt."""
    prompt = asked.prompts[index // len(asked.samplings)]
    text = prompt if isinstance(prompt, str) else speaker.decode(ids)
    return text, (Token(ids[0], math.nan), *scored)


def _chat_logprob(token: Token, speaker: Speaker) -> dict[str, Any]:
    def entry(number: int, logprob: float) -> dict[str, Any]:
        text = speaker.decode([number])
        # A token that is a part of a character decodes to a mark, whose bytes are not its own.
        known = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": _shown(logprob), "bytes": known}

    top = [entry(*pair) for pair in token.top]
    return entry(token.id, token.logprob) | {"top_logprobs": top}


def _logprobs(tokens: Sequence[Token], speaker: Speaker, offset: int = 0) -> dict[str, Any]:
    """Returns the log probabilities of tokens. `offset` is the characters of the choice before
    them."""
    texts = [speaker.decode([token.id]) for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [_shown(token.logprob) for token in tokens],
        "top_logprobs": [_top(token, speaker) for token in tokens],
        "text_offset": list(itertools.accumulate(map(len, texts), initial=offset))[:-1],
    }


def _top(token: Token, speaker: Speaker) -> dict[str, float | None] | None:
    """Returns the likeliest tokens and this one; of several with one text, the likeliest. None for
    a token that has no log probability."""
    if math.isnan(token.logprob):
        return None
    found: dict[str, float | None] = {}
    for number, logprob in (*token.top, (token.id, token.logprob)):
        found.setdefault(speaker.decode([number]), _shown(logprob))
    return found


def _shown(logprob: float) -> float | None:
    """Returns a log probability as JSON can write it."""
    return None if math.isnan(logprob) else max(logprob, _LEAST_LOGPROB)


@dataclasses.dataclass
class Chunks:
    """The pieces of one response."""

    asked: Asked
    speaker: Speaker
    identity: str
    created: int
    _lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    """Characters of each choice that were sent."""
    _readers: dict[int, ToolReader] = dataclasses.field(default_factory=dict)
    """The reader of each choice, which finds its calls."""

    def first(self) -> Iterator[dict[str, Any]]:
        """Yields what comes before any text: the role of each message of a chat."""
        if self.asked.url == CHAT:
            for index in range(len(self.asked.samplings)):
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(
        self, index: int, text: str, tokens: Sequence[Token], finish_reason: str | None
    ) -> Iterator[dict[str, Any]]:
        """Yields the chunks of a piece of a choice."""
        logprobs: dict[str, Any] | None = None
        if self.asked.url == CHAT:
            yield from self._chat_piece(index, text, tokens, finish_reason)
            return
        offset = self._lengths.get(index, 0)
        if self.asked.wants_logprobs:
            logprobs = _logprobs(tokens, self.speaker, offset)
            text_length = sum(map(len, logprobs["tokens"]))
        else:
            text_length = len(text)
        self._lengths[index] = offset + text_length
        yield self._chunk(index, {"text": text}, finish_reason, logprobs)

    def _chat_piece(
        self, index: int, text: str, tokens: Sequence[Token], finish_reason: str | None
    ) -> Iterator[dict[str, Any]]:
        wants = self.asked.wants_logprobs and bool(tokens)
        logprobs = {"content": [_chat_logprob(t, self.speaker) for t in tokens]} if wants else None
        deltas, num_calls = [{"content": text}] if text else [], 0
        if self.asked.tools:
            reader = self._readers.setdefault(index, ToolReader(self.asked.tools))
            before, parts = reader.num_calls, [*reader.read(text)]
            if finish_reason:
                parts += reader.finish()
            deltas, num_calls = [*self._deltas(parts, index, before)], reader.num_calls
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]
        for number, delta in enumerate(deltas):
            # The tokens of a piece come with its first delta.
            yield self._chunk(index, {"delta": delta}, None, None if number else logprobs)
        if finish_reason:
            yield self._chunk(index, {"delta": {}}, _reason(finish_reason, num_calls))

    def _deltas(
        self, parts: Sequence[str | ToolCall], index: int, number: int
    ) -> Iterator[dict[str, Any]]:
        """Yields the deltas of text and calls, of which the first is the `number`-th."""
        for part in parts:
            if isinstance(part, str):
                yield {"content": part}
                continue
            call = _call(part, self.identity, index, number)
            yield {"tool_calls": [{"index": number, **call}]}
            number += 1

    def usage(self, completions: Sequence[Completion]) -> Iterator[dict[str, Any]]:
        """Yields the chunk with the numbers of tokens, if it is asked for."""
        if self.asked.includes_usage:
            yield self._envelope() | {"choices": [], "usage": usage(self.asked, completions)}

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        finish_reason: str | None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        of_usage = {"usage": None} if self.asked.includes_usage else {}
        return self._envelope() | {"choices": [choice]} | of_usage

    def _envelope(self) -> dict[str, Any]:
        is_chat = self.asked.url == CHAT
        return {
            "id": self.identity,
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": self.created,
            "model": self.asked.model,
        }
