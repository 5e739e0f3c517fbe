"""Bodies of responses, whole and in pieces, in the format of the OpenAI API.

Source: the OpenAI API reference, "Completions", "Chat", "Embeddings" and "Streaming".
"""

import base64
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from shardlib.engine import Completion, Request, Token
from shardlib.serve.bodies import CHAT, EMBEDDINGS, Asked, Speaker
from shardlib.serve.engine_thread import Piece
from shardlib.serve.logprobs import CompletionText, chat_logprobs
from shardlib.serve.tool_calls import ToolCall, ToolReader, split_calls


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
            common["logprobs"] = chat_logprobs(one.tokens, speaker)
        return common | _message(asked, index, one, identity)
    whole = CompletionText(asked, index, one.prompt, speaker)
    text, logprobs = whole.add(one.text, one.tokens, one.prompt_tokens)
    return common | {"text": text, "logprobs": logprobs}


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


@dataclasses.dataclass
class Chunks:
    """The pieces of one response."""

    asked: Asked
    speaker: Speaker
    identity: str
    created: int
    _texts: dict[int, CompletionText] = dataclasses.field(default_factory=dict)
    """The text of each choice of a completion."""
    _readers: dict[int, ToolReader] = dataclasses.field(default_factory=dict)
    """The reader of each choice, which finds its calls."""

    def first(self) -> Iterator[dict[str, Any]]:
        """Yields what comes before any text: the role of each message of a chat."""
        if self.asked.url == CHAT:
            for index in range(len(self.asked.samplings)):
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, piece: Piece, request: Request) -> Iterator[dict[str, Any]]:
        """Yields the chunks of a piece of the choice that answers `request`."""
        if self.asked.url == CHAT:
            yield from self._chat_piece(piece.index, piece.text, piece.tokens, piece.finish_reason)
            return
        if (index := piece.index) not in self._texts:
            ids = request.sequence.asked
            self._texts[index] = CompletionText(self.asked, index, ids, self.speaker)
        scored = request.scored_prompt()
        text, logprobs = self._texts[index].add(piece.text, piece.tokens, scored)
        yield self._chunk(index, {"text": text}, piece.finish_reason, logprobs)

    def _chat_piece(
        self, index: int, text: str, tokens: Sequence[Token], finish_reason: str | None
    ) -> Iterator[dict[str, Any]]:
        wants = self.asked.wants_logprobs and bool(tokens)
        logprobs = chat_logprobs(tokens, self.speaker) if wants else None
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
