"""Calls of tools in the text of an answer.

Two forms are read: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` anywhere in a text,
and a text that is JSON alone, `{"name": ..., "parameters": {...}}`, or several of these between
semicolons, after `<|python_tag|>` or nothing. Text in these forms that calls no tool of the request
stays text.

Source: the chat templates of Hermes 2 Pro and Qwen 2.5 and 3 (the first form), and of Llama 3.1 to
3.3 (the second).
"""

import json
from collections.abc import Collection, Iterator
from typing import NamedTuple

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = "; \t\r\n"


class ToolCall(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str
    """A JSON object as text."""


class ToolReader:
    """Splits an answer, as it comes, into text and calls.

    Text that may become a call is held back: from `<tool_call>` to its end, and a text that begins
    as JSON until all of it has come. Whitespace before and after calls is dropped.

    Args:
        names: Names of the tools that may be called.
    """

    def __init__(self, names: Collection[str]):
        self._names = frozenset(names)
        self._held = ""
        self._has_shown, self._is_after_call = False, False
        self.num_calls = 0
        """Calls that were read."""

    def read(self, text: str) -> Iterator[str | ToolCall]:
        """Yields the text and the calls that new text completes."""
        self._held += text
        if not self._may_be_json():
            yield from self._split()
            yield from self._text(self._certain())

    def finish(self) -> Iterator[str | ToolCall]:
        """Yields what was held back, once the answer is complete."""
        calls = _alone(self._held, self._names) if self._may_be_json() else []
        if calls:
            self._held = ""
            self.num_calls += len(calls)
            yield from calls
            return
        yield from self._split()
        yield from self._text(len(self._held))

    def _may_be_json(self) -> bool:
        """Returns whether all of the text may be calls alone."""
        start = self._held.lstrip()
        is_start = any(start.startswith(x) or x.startswith(start) for x in ("{", _PYTHON_TAG))
        return is_start and not self._has_shown and not self.num_calls

    def _split(self) -> Iterator[str | ToolCall]:
        """Yields all that comes up to the last complete call."""
        while (start := self._held.find(_OPEN)) >= 0:
            end = self._held.find(_CLOSE, start)
            if end < 0:
                return
            call = _call(_json(self._held[start + len(_OPEN) : end]), self._names)
            end += len(_CLOSE)
            rest = self._held[end:]
            if call is None:
                yield from self._text(end)
                continue
            yield from self._text(len(self._held[:start].rstrip()))
            self._held = rest
            self._is_after_call = True
            self.num_calls += 1
            yield call

    def _certain(self) -> int:
        """Returns the length of the text that no call can take back."""
        end = self._held.find(_OPEN)
        if end < 0:
            sizes = range(min(len(_OPEN) - 1, len(self._held)), 0, -1)
            begun = next((n for n in sizes if self._held.endswith(_OPEN[:n])), 0)
            end = len(self._held) - begun
        return len(self._held[:end].rstrip())

    def _text(self, length: int) -> Iterator[str]:
        """Yields the first characters of what is held."""
        text, self._held = self._held[:length], self._held[length:]
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self._has_shown, self._is_after_call = True, False
            yield text


def split_calls(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Returns the text of a complete answer without its calls, and the calls."""
    reader = ToolReader(names)
    parts = [*reader.read(text), *reader.finish()]
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return "".join(part for part in parts if isinstance(part, str)), calls


def _alone(text: str, names: Collection[str]) -> list[ToolCall]:
    """Returns the calls of a text that is nothing else; none if it is."""
    text, calls, at = text.strip().removeprefix(_PYTHON_TAG).strip(_SEPARATORS), [], 0
    while at < len(text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            return []
        call = _call(value, names)
        if call is None:
            return []
        calls.append(call)
        at = end + len(text[end:]) - len(text[end:].lstrip(_SEPARATORS))
    return calls


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _call(value: object, names: Collection[str]) -> ToolCall | None:
    """Returns the call that a JSON value is; None if it is not one."""
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
