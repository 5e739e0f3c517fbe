"""Examples as tokens, with a mask of the tokens to learn."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardlib.data import records
from shardlib.data.hashing import digest
from shardlib.data.instruct.fields import ChatFields, ExampleFields, PairFields, PromptFields
from shardlib.data.instruct.template import ChatTemplate, Span, find_template
from shardlib.data.tokenizer import BytesTokenizer, Tokenizer, read_tokenizer, tokenizer_file
from shardlib.errors import DataError

Learned = tuple[np.ndarray, np.ndarray]
"""Tokens `[n] int64`, and whether the loss counts each, `[n] bool`."""


def load_tokenizer(config: ExampleFields) -> Tokenizer:
    """Returns the tokenizer of a config.

    Raises:
        DataError: If its file is missing or malformed.
    """
    if config.tokenizer == "bytes":
        return BytesTokenizer()
    return read_tokenizer(tokenizer_file(config.tokenizer), config.end_of_text)


def encoder(
    config: ExampleFields, tokenizer: Tokenizer
) -> tuple[str, Callable[[dict[str, Any]], Learned]]:
    """Returns a digest of how a config encodes examples, and the function that does."""
    if isinstance(config, ChatFields):
        template = find_template(tokenizer_folder(config), config.template)
        tokens = chat_encoder(tokenizer)

        def encode_chat(example: dict[str, Any]) -> Learned:
            messages = _messages(example, config.messages_field)
            return tokens(*template.render(messages, _tools(example)))

        parts = (config.messages_field, template.source, sorted(template.special_tokens.items()))
        return digest(("chat", *parts)), encode_chat
    assert isinstance(config, PromptFields)
    parts = (config.prompt_fields, config.completion_field)
    way = digest(("pairs", *parts) if isinstance(config, PairFields) else parts)
    return way, lambda example: _completion(config, tokenizer, example)


def chat_encoder(tokenizer: Tokenizer) -> Callable[[str, Sequence[Span]], Learned]:
    """Returns the function of a rendered chat and the assistant's spans to its tokens.

    Names of special tokens in the text are special tokens. A token belongs to the assistant if one
    of its characters does.
    """
    if isinstance(tokenizer, BytesTokenizer):
        return _bytes_of_chat
    from tokenizers import Tokenizer as Library

    library = Library.from_str(tokenizer.to_json())
    library.no_truncation()
    library.no_padding()

    def encode(text: str, spans: Sequence[Span]) -> Learned:
        encoding = library.encode(text, add_special_tokens=False)
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        mask = np.zeros(len(starts), bool)
        for start, end in spans:
            mask |= (starts < end) & (ends > start)
        return np.array(encoding.ids, np.int64), mask

    return encode


def prompt_of_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Returns the tokens of messages, up to the answer, as `chat_encoder` encodes them."""
    text = template.text(messages, tools, add_generation_prompt=True)
    return chat_encoder(tokenizer)(text, [])[0].tolist()


def _bytes_of_chat(text: str, spans: Sequence[Span]) -> Learned:
    mask = np.zeros(len(text), bool)
    for start, end in spans:
        mask[start:end] = True
    widths = [len(character.encode()) for character in text]
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64), np.repeat(mask, widths)


def tokenizer_folder(config: ExampleFields) -> Path | None:
    """Returns the folder of the tokenizer of a config; None for bytes."""
    if config.tokenizer == "bytes":
        return None
    place = Path(config.tokenizer).expanduser()
    return place if place.is_dir() else place.parent


def _messages(example: Mapping[str, Any], field: str) -> list[Mapping[str, Any]]:
    messages = records.field(example, field, _meant("data.messages_field"))
    if not (
        isinstance(messages, list)
        and messages
        and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages)
    ):
        raise DataError(
            f"the field {field!r} is not a list of messages.\n"
            '  Write it as [{"role": "user", "content": "..."}, ...].'
        )
    return messages


def _tools(example: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Returns the functions that the assistant may call; None without any."""
    tools = example.get("tools") or None
    # Tables have no columns of objects with different fields, so they hold JSON.
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"the field 'tools' is not JSON: {error}.\n  Repair it.") from None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(each, dict) for each in tools)
    ):
        raise DataError(
            "the field 'tools' is not a list of functions.\n"
            '  Write it as [{"type": "function", "function": {"name": "...", ...}}, ...].'
        )
    return tools or None


def _completion(config: PromptFields, tokenizer: Tokenizer, example: Mapping[str, Any]) -> Learned:
    """Encodes prompt and completion apart, as a prompt is encoded when a model is used."""
    prompts = [_text(example, name, "data.prompt_fields") for name in config.prompt_fields]
    if isinstance(config, PairFields):
        prompt = [*tokenizer.encode("\n".join(prompts)), tokenizer.eot]
    else:
        prompt = tokenizer.encode("\n".join(prompts) + "\n")
    completion = tokenizer.encode(_text(example, config.completion_field, "data.completion_field"))
    ids = np.array([*prompt, *completion, tokenizer.eot], np.int64)
    return ids, np.arange(len(ids)) >= len(prompt)


def _text(example: Mapping[str, Any], name: str, key: str) -> str:
    value = records.field(example, name, _meant(key))
    if isinstance(value, dict) and value.get("text"):
        example = {name: value["text"][0]}
    return records.text(example, name, f"Set {key} to a field of text.")


def _meant(key: str) -> str:
    return f"Set {key} to the field that is meant."
