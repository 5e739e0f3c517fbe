"""Bodies of requests, in the format of the OpenAI API.

Source: the OpenAI API reference, "Completions", "Chat" and "Embeddings". The fields `suffix`,
`best_of` and `dimensions` are not served. `top_k`, `min_p`, `stop_token_ids` and `ignore_eos` are
added, and `response_format` has the types `regex` and `lark` besides.
"""

import copy
import dataclasses
import hashlib
import json
import re
import reprlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from shardlib.engine import Grammar, Sampling
from shardlib.errors import DataError, ModelError, ShardlibError, did_you_mean
from shardlib.serve.forced_calls import CallForm, grammar_of_calls

Url = Literal["/v1/completions", "/v1/chat/completions", "/v1/embeddings"]
COMPLETIONS: Url = "/v1/completions"
CHAT: Url = "/v1/chat/completions"
EMBEDDINGS: Url = "/v1/embeddings"
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
    "stream_options": dict,
}
FIELDS: Mapping[Url, Mapping[str, Any]] = {
    COMPLETIONS: _COMMON | {"prompt": (str, list), "logprobs": int, "echo": bool},
    CHAT: _COMMON
    | {
        "messages": list,
        "max_completion_tokens": int,
        "logprobs": bool,
        "top_logprobs": int,
        "tools": list,
        "tool_choice": (str, dict),
    },
    EMBEDDINGS: {"model": str, "input": (str, list), "encoding_format": str, "user": str},
}
_COMPLETION_TOKENS = 16
"""Tokens of a completion without `max_tokens`. Source: the OpenAI API reference."""
_MOST_CHOICES = 128
"""Source: the OpenAI API reference, `n`."""
MOST_STOPS = 16
"""Stop texts of a body. Each is looked for after each token, while all requests wait."""
_LONGEST_STOP = 1000
"""Characters of each."""


class BodyError(ShardlibError):
    """A body that cannot be answered.

    `status` is the status of HTTP with which a server returns it, and `code` its code in the OpenAI
    API.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


Asking = Sequence[tuple[str | tuple[int, ...], tuple[Sampling, ...]]]
"""Prompts with the samplings of their choices."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a body asks for."""

    url: Url
    model: str
    """The name of the model, or of an adapter."""
    prompts: tuple[str | tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    """Of the choices of each prompt."""
    wants_logprobs: bool
    """Whether choices have log probabilities."""
    echo: bool = False
    """Whether a choice begins with its prompt."""
    drops_answer: bool = False
    """Whether the prompt is all that is asked for: one token is drawn, and left out."""
    streams: bool = False
    """Whether the answer is sent in pieces."""
    includes_usage: bool = False
    """Whether the numbers of tokens follow the last piece."""
    tools: tuple[str, ...] = ()
    """Names of the tools that an answer may call."""
    in_base64: bool = False
    """Whether embeddings are the base64 of their float32, little end first."""
    has_seed: bool = True
    """Whether the body says how its answers are drawn."""

    def by_prompt(self) -> Asking:
        """Returns each prompt with the samplings of its choices. Without a seed, equal prompts are
        answered apart."""
        every, number = [], 0
        for prompt in self.prompts:
            every.append((prompt, tuple(_seeded(one, number) for one in self.samplings)))
            number += 0 if self.has_seed else len(self.samplings)
        return every


@dataclasses.dataclass(frozen=True)
class Speaker:
    """The model that answers."""

    name: str
    decode: Callable[[Sequence[int]], str]
    chat: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], Sequence[int]]
    """`chat(messages, tools)`: the tokens of messages, up to the answer. It raises `DataError`
    without a template."""
    call_form: Callable[[], CallForm] = lambda: "tagged"
    """Returns the form in which the chat template asks for calls of tools. It raises `DataError` if
    that is not known."""
    adapters: tuple[str, ...] = ()
    """Adapters of the engine, each of which is a model to its clients."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models."""
        return self.name, *self.adapters


def parse(
    url: str,
    body: Any,
    speaker: Speaker,
    *,
    is_live: bool = False,
    most_answers: int | None = None,
) -> Asked:
    """Returns what a body asks for: at most `most_answers`, if given. A client that waits
    (`is_live`) may be sent a stream, and gets another answer each time unless it gives a seed; a
    row of a batch gets the same again.

    Raises:
        BodyError: If the URL is unknown, or the body has unknown or missing fields or wrong values;
            the message lists all faults of a kind.
    """
    if not isinstance(url, str) or url not in FIELDS:
        raise BodyError(f"no URL is called {url!r}.\n  Use {', '.join(FIELDS)}.")
    known: Url = url  # type: ignore[assignment]
    if not isinstance(body, Mapping):
        raise BodyError(f"the body is {type(body).__name__}.\n  Give a JSON object.")
    _refuse_foreign(known, body)
    given = {name: value for name, value in body.items() if value is not None}
    given.setdefault("model", speaker.name)
    if (name := given["model"]) not in speaker.names:
        raise BodyError(
            f"no model is called {name!r}.{did_you_mean(name, speaker.names)}\n"
            f"  Use {' or '.join(map(repr, speaker.names))}, or leave model out.",
            status=404,
            code="model_not_found",
        )
    adapter = None if name == speaker.name else name
    if known == EMBEDDINGS:
        return _embeddings(given, adapter, most_answers)
    streams, includes_usage = _streaming(given, is_live)
    prompts = _prompts(given, "prompt") if known == COMPLETIONS else (_chat(given, speaker),)
    choices = given.get("n", 1)
    if not 1 <= choices <= _MOST_CHOICES:
        raise BodyError(f"n is {choices}.\n  Give a number from 1 to {_MOST_CHOICES}.")
    _check_count(len(prompts) * choices, most_answers)
    grammar = _forced_call(given, speaker) if known == CHAT else None
    grammar = _grammar(given.get("response_format", {"type": "text"})) or grammar
    try:
        one = _sampling(known, given, adapter, grammar)
        samplings = tuple(_with_seed(one, seed) for seed in _seeds(given, choices, is_live))
    except ModelError as error:
        raise BodyError(str(error)) from None
    return Asked(
        known,
        name,
        prompts,
        samplings,
        wants_logprobs=given.get("logprobs") is not None and given["logprobs"] is not False,
        echo=given.get("echo", False),
        drops_answer=_drops_answer(given),
        streams=streams,
        includes_usage=includes_usage,
        tools=tuple(one["function"]["name"] for one in _tools(given)) if known == CHAT else (),
        has_seed="seed" in given,
    )


def _check_count(count: int, most: int | None) -> None:
    """Raises `BodyError` if a body asks for too many answers."""
    if most is not None and count > most:
        raise BodyError(
            f"the body asks for {count} answers, and the server holds {most}.\n"
            "  Send fewer prompts in a body.",
            status=413,
            code="too_many_prompts",
        )


def _streaming(given: Mapping[str, Any], may_stream: bool) -> tuple[bool, bool]:
    """Returns whether the answer is sent in pieces, and whether the numbers of tokens follow."""
    streams, options = given.get("stream", False), given.get("stream_options", {})
    if streams and not may_stream:
        raise BodyError("a batch does not stream.\n  Leave stream out.")
    if options and not streams:
        raise BodyError(
            "stream_options are given without stream.\n  Set stream, or leave them out."
        )
    known = {"include_usage", "include_obfuscation"}
    if not options.keys() <= known or not all(isinstance(x, bool) for x in options.values()):
        raise BodyError('stream_options are wrong.\n  Give {"include_usage": true}.')
    return streams, options.get("include_usage", False)


def _refuse_foreign(url: Url, body: Mapping[str, Any]) -> None:
    fields = FIELDS[url]
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


def _embeddings(given: Mapping[str, Any], adapter: str | None, most_answers: int | None) -> Asked:
    form = given.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise BodyError(f"encoding_format is {form!r}.\n  Give 'float' or 'base64'.")
    sampling = Sampling(max_tokens=1, embedding=True, adapter=adapter)
    prompts, in_base64 = _prompts(given, "input"), form == "base64"
    _check_count(len(prompts), most_answers)
    return Asked(
        EMBEDDINGS,
        given["model"],
        prompts,
        (sampling,),
        False,
        drops_answer=True,
        in_base64=in_base64,
    )


def _prompts(given: Mapping[str, Any], name: str) -> tuple[str | tuple[int, ...], ...]:
    prompt = given.get(name)
    every: Any = [prompt] if isinstance(prompt, str) or _is_tokens(prompt) else prompt
    if not every or not all(isinstance(one, str) or _is_tokens(one) for one in every):
        raise BodyError(f"{name} is not a text.\n  Give a text, token ids, or a list of these.")
    prompts: list[str | tuple[int, ...]] = [
        one if isinstance(one, str) else tuple(one) for one in every
    ]
    return tuple(prompts)


def _is_tokens(prompt: Any) -> bool:
    is_list = isinstance(prompt, list) and prompt
    return bool(is_list and all(isinstance(x, int) and not isinstance(x, bool) for x in prompt))


def _drops_answer(given: Mapping[str, Any]) -> bool:
    """Returns whether the prompt is all that is asked for, by `echo` and `max_tokens=0`."""
    return bool(given.get("echo")) and given.get("max_tokens") == 0


def _tools(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the tools that the answer may call."""
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    is_right = all(
        isinstance(one, Mapping)
        and one.get("type") == "function"
        and isinstance(one.get("function"), Mapping)
        and isinstance(one["function"].get("name"), str)
        for one in tools
    )
    if not is_right:
        raise BodyError(
            'tools are wrong.\n  Give a list of {"type": "function", "function": {"name": ...}}.'
        )
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        raise BodyError(
            f"tool_choice is {choice!r}.\n  Give 'auto', 'none', 'required', or a function."
        )
    return [] if choice == "none" else tools


def _forced_call(given: Mapping[str, Any], speaker: Speaker) -> Grammar | None:
    """Returns the grammar of an answer that must call a tool; None if it need not."""
    choice = given.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return None
    functions = [one["function"] for one in _tools(given)]
    named = None if choice == "required" else _chosen(choice, [one["name"] for one in functions])
    if not functions:
        raise BodyError(
            "tool_choice is 'required', and the body has no tools.\n  Give tools, or leave it out."
        )
    if given.get("response_format", {"type": "text"}).get("type") != "text":
        raise BodyError(
            "tool_choice forces a call, and response_format another answer.\n"
            "  Leave one of them out."
        )
    if named is not None:
        functions = [one for one in functions if one["name"] == named]
    if wrong := [one["name"] for one in functions if not _takes_object(one)]:
        raise BodyError(
            f"parameters of {', '.join(wrong)} are not the JSON schema of an object.\n"
            '  Give {"type": "object", "properties": {...}}, or leave parameters out.'
        )
    try:
        return grammar_of_calls(functions, speaker.call_form(), several=named is None)
    except DataError as error:
        raise BodyError(str(error)) from None


def _chosen(choice: Mapping[str, Any], names: Sequence[str]) -> str:
    """Returns the function that `tool_choice` names."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise BodyError(
            'tool_choice is wrong.\n  Give {"type": "function", "function": {"name": ...}}, or '
            "'auto', 'none' or 'required'."
        )
    if name not in names:
        raise BodyError(
            f"tool_choice names {name!r}, which is not one of the tools.{did_you_mean(name, names)}"
            f"\n  Use one of: {', '.join(names) or '(no tools are given)'}."
        )
    return name


def _takes_object(function: Mapping[str, Any]) -> bool:
    parameters = function.get("parameters")
    if parameters is None:
        return True
    return isinstance(parameters, Mapping) and parameters.get("type", "object") == "object"


def _chat(given: Mapping[str, Any], speaker: Speaker) -> tuple[int, ...]:
    tools, messages = _tools(given), given.get("messages")
    is_right = messages and all(
        isinstance(one, Mapping)
        and isinstance(one.get("role"), str)
        and ("content" in one or "tool_calls" in one)
        for one in messages
    )
    if not messages or not is_right:
        raise BodyError('messages are missing.\n  Give a list of {"role": ..., "content": ...}.')
    try:
        read = [_with_objects(_with_text(one)) for one in messages]
        return tuple(speaker.chat(read, tools or None))
    except UnicodeError as error:
        raise BodyError(f"messages are not Unicode: {error}.\n  Repair them.") from None
    except DataError as error:
        raise BodyError(str(error)) from None


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose content is one text: that of its parts, one after the other."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    parts = content if isinstance(content, list) else [None]
    texts = [one.get("text") if isinstance(one, Mapping) else None for one in parts]
    if not all(isinstance(text, str) for text in texts):
        raise BodyError(
            f"the content of a message is {reprlib.repr(content)}.\n"
            '  Give a text, or a list of {"type": "text", "text": "..."}.'
        )
    return {**message, "content": "".join(texts)}  # type: ignore[arg-type]


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose calls have objects as arguments, as chat templates write them. The
    API has JSON as text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    try:
        read = [
            {**call, "function": {**call["function"], "arguments": _object(call["function"])}}
            for call in calls
        ]
    except (TypeError, KeyError, ValueError, RecursionError):
        raise BodyError(
            "tool_calls of a message are wrong.\n"
            '  Give a list of {"type": "function", "function": {"name": ..., "arguments": "{}"}}.'
        ) from None
    return {**message, "tool_calls": read}


def _object(function: Mapping[str, Any]) -> Any:
    given = function.get("arguments", "{}")
    arguments = json.loads(given or "{}") if isinstance(given, str) else given
    if not isinstance(function["name"], str) or not isinstance(arguments, dict):
        raise TypeError
    return arguments


def _sampling(
    url: Url, given: Mapping[str, Any], adapter: str | None, grammar: Grammar | None
) -> Sampling:
    """Returns how all choices are drawn; each has a seed of its own."""
    most = _most_tokens(given)
    logprobs = given.get("logprobs")
    if url == COMPLETIONS:
        most = 1 if _drops_answer(given) else _COMPLETION_TOKENS if most is None else most
    else:
        if given.get("top_logprobs") and not logprobs:
            raise BodyError("top_logprobs are given without logprobs.\n  Set logprobs, too.")
        logprobs = given.get("top_logprobs", 0) if logprobs else None
    stop = given.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    longest = max((len(one) for one in stop if isinstance(one, str)), default=0)
    if len(stop) > MOST_STOPS or longest > _LONGEST_STOP:
        raise BodyError(
            f"stop has {len(stop)} texts of up to {longest} characters.\n"
            f"  Give at most {MOST_STOPS}, of at most {_LONGEST_STOP} characters."
        )
    scores_prompt = given.get("echo", False) and logprobs is not None
    # Harnesses such as lm-eval ask for one token after the prompt and drop the last score. So the
    # token is kept even if it ends the text.
    is_scored_alone = scores_prompt and most == 1 and grammar is None
    return Sampling(
        max_tokens=most,
        temperature=given.get("temperature", 1.0),
        top_k=given.get("top_k", 0),
        top_p=given.get("top_p", 1.0),
        min_p=given.get("min_p", 0.0),
        stop=stop,
        stop_tokens=tuple(given.get("stop_token_ids", ())),
        ignore_end=given.get("ignore_eos", False) or is_scored_alone,
        logprobs=logprobs,
        presence_penalty=given.get("presence_penalty", 0.0),
        frequency_penalty=given.get("frequency_penalty", 0.0),
        logit_bias=_bias(given.get("logit_bias", {})),
        grammar=grammar,
        adapter=adapter,
        prompt_logprobs=scores_prompt,
    )


def _most_tokens(given: Mapping[str, Any]) -> int | None:
    """Returns the most tokens of an answer, by either name of the field; None without one."""
    both = [given[name] for name in ("max_completion_tokens", "max_tokens") if name in given]
    if len(set(both)) > 1:
        raise BodyError(
            f"max_completion_tokens is {both[0]}, and max_tokens {both[1]}.\n"
            "  Leave max_tokens out: it is the older name of the same."
        )
    return both[0] if both else None


def _bias(given: Mapping[str, Any]) -> dict[int, float]:
    # An id is written in one way, so that no two keys are one token. No model has longer ids.
    is_id = re.compile("0|[1-9][0-9]{0,9}").fullmatch
    if wrong := [key for key in given if not is_id(key) or not _is(given[key], float)]:
        raise BodyError(
            f"logit_bias has {', '.join(map(reprlib.repr, wrong[:4]))}.\n"
            "  Give numbers by ids of tokens."
        )
    return {int(key): value for key, value in given.items()}


FORMATS = ("text", "json_object", "json_schema", "regex", "lark")


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
        f"response_format has the type {kind!r}.{did_you_mean(str(kind), FORMATS)}\n"
        f"  Use {', '.join(FORMATS)}."
    )


def _seeds(given: Mapping[str, Any], choices: int, is_live: bool) -> list[int]:
    """Returns the seeds of choices. Without a seed, equal rows of batches have equal answers."""
    if "seed" in given:
        first = given["seed"]
    elif is_live:
        first = secrets.randbits(32)
    else:
        # Once for all choices: a body may be long.
        digest = hashlib.blake2b(repr(sorted(given.items())).encode(), digest_size=4)
        first = int.from_bytes(digest.digest(), "little")
    return [(first + choice) % 2**32 for choice in range(choices)]


def _seeded(sampling: Sampling, more: int) -> Sampling:
    return _with_seed(sampling, ((sampling.seed or 0) + more) % 2**32) if more else sampling


def _with_seed(sampling: Sampling, seed: int) -> Sampling:
    # `dataclasses.replace` would check a bias of many tokens again, for each choice.
    other = copy.copy(sampling)
    object.__setattr__(other, "seed", seed)
    return other
