"""Bodies of requests and of responses, in the format of the OpenAI API.

Source: the OpenAI API reference, "Completions" and "Chat". Of its fields, `tools`, `echo`, `suffix`
and `best_of` are not served. `top_k`, `min_p`, `stop_token_ids` and `ignore_eos` are added, and
`response_format` has the types `regex` and `lark` besides.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from shardlib.engine import Completion, Grammar, Sampling, Token
from shardlib.errors import DataError, ModelError, ShardlibError, did_you_mean

Url = Literal["/v1/completions", "/v1/chat/completions"]
COMPLETIONS: Url = "/v1/completions"
CHAT: Url = "/v1/chat/completions"
_COMMON = {
    "model": str,
    "temperature": float,
    "top_p": float,
    "n": int,
    "stop": (str, list),
    "seed": int,
    "max_tokens": int,
    "user": str,
    "top_k": int,
    "min_p": float,
    "stop_token_ids": list,
    "ignore_eos": bool,
    "presence_penalty": float,
    "frequency_penalty": float,
    "logit_bias": dict,
    "response_format": dict,
    "stream": bool,
}
_FIELDS: Mapping[Url, Mapping[str, Any]] = {
    COMPLETIONS: _COMMON | {"prompt": (str, list), "logprobs": int},
    CHAT: _COMMON
    | {"messages": list, "max_completion_tokens": int, "logprobs": bool, "top_logprobs": int},
}
_COMPLETION_TOKENS = 16
"""Tokens of a completion without `max_tokens`. Source: the OpenAI API reference."""
_MOST_CHOICES = 128
"""Source: the OpenAI API reference, `n`."""


class BodyError(ShardlibError):
    """A body that cannot be answered; a server returns it with the status 400."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a body asks for."""

    url: Url
    prompts: tuple[str | tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    """Of the choices of each prompt."""
    echoes_logprobs: bool
    """Whether choices have log probabilities."""


@dataclasses.dataclass(frozen=True)
class Speaker:
    """The model that answers."""

    name: str
    decode: Callable[[Sequence[int]], str]
    chat: Callable[[Sequence[Mapping[str, Any]]], Sequence[int]]
    """The tokens of messages, up to the answer; raises `DataError` without a template."""


def parse(url: str, body: Any, speaker: Speaker) -> Asked:
    """Returns what a body asks for.

    Raises:
        BodyError: If the URL is unknown, or the body has unknown or missing fields or wrong values;
            the message lists all faults of a kind.
    """
    if url not in _FIELDS:
        raise BodyError(f"no URL is called {url!r}.\n  Use {COMPLETIONS} or {CHAT}.")
    known: Url = url  # type: ignore[assignment]
    if not isinstance(body, Mapping):
        raise BodyError(f"the body is {type(body).__name__}.\n  Give a JSON object.")
    _refuse_foreign(known, body)
    given = {name: value for name, value in body.items() if value is not None}
    if (name := given.get("model", speaker.name)) != speaker.name:
        raise BodyError(
            f"no model is called {name!r}.{did_you_mean(name, [speaker.name])}\n"
            f"  Use {speaker.name!r}, or leave model out."
        )
    if given.get("stream"):
        raise BodyError("a batch does not stream.\n  Leave stream out.")
    prompts = _prompts(given) if known == COMPLETIONS else (_chat(given, speaker),)
    choices = given.get("n", 1)
    if not 1 <= choices <= _MOST_CHOICES:
        raise BodyError(f"n is {choices}.\n  Give a number from 1 to {_MOST_CHOICES}.")
    try:
        samplings = tuple(_sampling(known, given, choice) for choice in range(choices))
    except ModelError as error:
        raise BodyError(str(error)) from None
    wants = given.get("logprobs") is not None and given["logprobs"] is not False
    return Asked(known, prompts, samplings, wants)


def _refuse_foreign(url: Url, body: Mapping[str, Any]) -> None:
    fields = _FIELDS[url]
    foreign = [f"{name!r}{did_you_mean(name, fields)}" for name in body if name not in fields]
    if foreign:
        raise BodyError(f"{url} has no field {', '.join(foreign)}\n  Leave it out.")
    wrong = [
        f"{name} is {type(body[name]).__name__}"
        for name, kind in fields.items()
        if body.get(name) is not None and not _is(body[name], kind)
    ]
    if wrong:
        raise BodyError(f"{'; '.join(wrong)}.\n  Give values of the types of the OpenAI API.")


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _prompts(given: Mapping[str, Any]) -> tuple[str | tuple[int, ...], ...]:
    prompt = given.get("prompt")
    every: Any = [prompt] if isinstance(prompt, str) or _is_tokens(prompt) else prompt
    if not every or not all(isinstance(one, str) or _is_tokens(one) for one in every):
        raise BodyError("prompt is not a text.\n  Give a text, token ids, or a list of these.")
    prompts: list[str | tuple[int, ...]] = [
        one if isinstance(one, str) else tuple(one) for one in every
    ]
    return tuple(prompts)


def _is_tokens(prompt: Any) -> bool:
    is_list = isinstance(prompt, list) and prompt
    return bool(is_list and all(isinstance(x, int) and not isinstance(x, bool) for x in prompt))


def _chat(given: Mapping[str, Any], speaker: Speaker) -> tuple[int, ...]:
    messages = given.get("messages")
    is_right = messages and all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str) and "content" in one
        for one in messages
    )
    if not messages or not is_right:
        raise BodyError('messages are missing.\n  Give a list of {"role": ..., "content": ...}.')
    try:
        return tuple(speaker.chat(messages))
    except DataError as error:
        raise BodyError(str(error)) from None


def _sampling(url: Url, given: Mapping[str, Any], choice: int) -> Sampling:
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    logprobs = given.get("logprobs")
    if url == COMPLETIONS:
        most = most or _COMPLETION_TOKENS
    else:
        logprobs = given.get("top_logprobs", 0) if logprobs else None
    stop = given.get("stop", ())
    return Sampling(
        max_tokens=most,
        temperature=given.get("temperature", 1.0),
        top_k=given.get("top_k", 0),
        top_p=given.get("top_p", 1.0),
        min_p=given.get("min_p", 0.0),
        seed=(given["seed"] + choice) % 2**32 if "seed" in given else _seed(given, choice),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_tokens=tuple(given.get("stop_token_ids", ())),
        ignore_end=given.get("ignore_eos", False),
        logprobs=logprobs,
        presence_penalty=given.get("presence_penalty", 0.0),
        frequency_penalty=given.get("frequency_penalty", 0.0),
        logit_bias=_bias(given.get("logit_bias", {})),
        grammar=_grammar(given.get("response_format", {"type": "text"})),
    )


def _bias(given: Mapping[str, Any]) -> dict[int, float]:
    if wrong := [key for key in given if not key.isdecimal() or not _is(given[key], float)]:
        raise BodyError(
            f"logit_bias has {', '.join(map(repr, wrong[:4]))}.\n  Give numbers by ids of tokens."
        )
    return {int(key): value for key, value in given.items()}


_FORMATS = ("text", "json_object", "json_schema", "regex", "lark")


def _grammar(given: Mapping[str, Any]) -> Grammar | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", '{"type": "object"}')
    if kind == "json_schema":
        schema = given.get("json_schema")
        schema = schema.get("schema") if isinstance(schema, Mapping) else None
        if not isinstance(schema, Mapping):
            raise BodyError("response_format has no schema.\n  Give json_schema: {schema: {...}}.")
        return Grammar("json_schema", json.dumps(schema))
    if kind == "regex" or kind == "lark":
        if not isinstance(given.get(kind), str):
            raise BodyError(f"response_format has no {kind}.\n  Give its text as {kind!r}.")
        return Grammar(kind, given[kind])
    raise BodyError(
        f"response_format has the type {kind!r}.{did_you_mean(str(kind), _FORMATS)}\n"
        f"  Use {', '.join(_FORMATS)}."
    )


def _seed(given: Mapping[str, Any], choice: int) -> int:
    """Returns a seed for a body without one: equal bodies have equal answers."""
    digest = hashlib.blake2b(repr((sorted(given.items()), choice)).encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "little")


def response(
    asked: Asked,
    completions: Sequence[Completion],
    speaker: Speaker,
    *,
    identity: str,
    created: int,
) -> dict[str, Any]:
    """Returns the body of a response.

    Args:
        asked: What was asked for.
        completions: Of each prompt, one for each choice.
        speaker: The model.
        identity: The id of the response.
        created: Seconds since 1970.
    """
    per_prompt = len(asked.samplings)
    drawn = sum(len(one.tokens) for one in completions)
    read = sum(len(one.prompt) for one in completions[::per_prompt])
    cached = sum(one.cached_tokens for one in completions[::per_prompt])
    is_chat = asked.url == CHAT
    return {
        "id": identity,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": speaker.name,
        "choices": [_choice(asked, index, one, speaker) for index, one in enumerate(completions)],
        "usage": {
            "prompt_tokens": read,
            "completion_tokens": drawn,
            "total_tokens": read + drawn,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


def _choice(asked: Asked, index: int, one: Completion, speaker: Speaker) -> dict[str, Any]:
    common = {"index": index, "finish_reason": one.finish_reason, "logprobs": None}
    if asked.url == CHAT:
        if asked.echoes_logprobs:
            common["logprobs"] = {"content": [_chat_logprob(t, speaker) for t in one.tokens]}
        return common | {"message": {"role": "assistant", "content": one.text}}
    if asked.echoes_logprobs:
        common["logprobs"] = _logprobs(one.tokens, speaker)
    return common | {"text": one.text}


def _chat_logprob(token: Token, speaker: Speaker) -> dict[str, Any]:
    def entry(number: int, logprob: float) -> dict[str, Any]:
        text = speaker.decode([number])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    top = [entry(*pair) for pair in token.top]
    return entry(token.id, token.logprob) | {"top_logprobs": top}


def _logprobs(tokens: Sequence[Token], speaker: Speaker) -> dict[str, Any]:
    texts = [speaker.decode([token.id]) for token in tokens]
    offsets = [sum(map(len, texts[:n])) for n in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {speaker.decode([number]): logprob for number, logprob in token.top} for token in tokens
        ],
        "text_offset": offsets,
    }
