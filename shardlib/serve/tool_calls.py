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
_ARGUMENTS = {"arguments", "parameters"}
"""The key of the arguments, in the one form and in the other; a call has one of them."""
_KEYS = {"name", "type", "id"} | _ARGUMENTS


class ToolCall(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str
    """A JSON object as text."""


class ToolReader:
    """Splits an answer, as it comes, into text and calls.

    Text that may become a call is held back: from `<tool_call>` to its end, and a text that begins
    as JSON until all of it has come. Whitespace before and after calls is dropped.
    """

    def __init__(self, names: Collection[str]):
        self._names = frozenset(names)
        self._held, self._read_again_at = "", 0
        self._has_shown, self._is_after_call = False, False
        self.num_calls = 0
        """Calls that were read."""

    def read(self, text: str) -> Iterator[str | ToolCall]:
        """Yields the text and the calls that new text completes."""
        self._held += text
        # A call that grows is read again where it may end, or be found broken, not for each piece.
        new = self._held[-len(text) - len(_CLOSE) :]
        if len(self._held) < self._read_again_at and _CLOSE not in new:
            return
        if not self._may_be_json():
            yield from self._decided(is_complete=False)
            self._read_again_at = len(self._held) * 9 // 8 if _OPEN in self._held else 0

    def finish(self) -> Iterator[str | ToolCall]:
        """Yields what was held back, once the answer is complete."""
        calls = _alone(self._held, self._names) if self._may_be_json() else []
        if calls:
            self._held = ""
            self.num_calls += len(calls)
            yield from calls
            return
        yield from self._decided(is_complete=True)

    def _may_be_json(self) -> bool:
        """Returns whether all of the text may be calls alone."""
        start = self._held.lstrip()
        is_start = any(start.startswith(x) or x.startswith(start) for x in ("{", _PYTHON_TAG))
        return is_start and not self._has_shown and not self.num_calls

    def _decided(self, *, is_complete: bool) -> Iterator[str | ToolCall]:
        """Yields the text and the calls that no further text can change."""
        at = 0
        while (start := self._held.find(_OPEN, at)) >= 0:
            at = start + len(_OPEN)
            call, end = _tagged(self._held, at, self._names)
            if call is not None:
                rest = self._held[end:]
                yield from self._text(len(self._held[:start].rstrip()))
                self._held, at = rest, 0
                self._is_after_call = True
                self.num_calls += 1
                yield call
            elif end is None and not is_complete:
                yield from self._text(len(self._held[:start].rstrip()))
                return
        yield from self._text(len(self._held) if is_complete else self._certain())

    def _certain(self) -> int:
        """Returns the length of the text without the begin of a tag, and without whitespace, which
        is dropped before a call."""
        sizes = range(min(len(_OPEN) - 1, len(self._held)), 0, -1)
        begun = next((n for n in sizes if self._held.endswith(_OPEN[:n])), 0)
        return len(self._held[: len(self._held) - begun].rstrip())

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
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        call = _call(value, names)
        if call is None:
            return []
        calls.append(call)
        at = end + len(text[end:]) - len(text[end:].lstrip(_SEPARATORS))
    return calls


def _tagged(text: str, start: int, names: Collection[str]) -> tuple[ToolCall | None, int | None]:
    """Returns the call after an opening tag, and the end of its closing tag. Without a call the end
    is that of what was read, or None if further text may make it a call."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    if not text.startswith("{", begin):
        return None, begin if begin < len(text) else None
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        # Not cut short: a string ends, and no other token goes on through a tag.
        is_whole = not error.msg.startswith("Unterminated") and _CLOSE in text[error.pos :]
        return None, error.pos if is_whole else None
    except (ValueError, RecursionError):
        return None, begin
    rest = text[end:].lstrip()
    if rest.startswith(_CLOSE):
        return _call(value, names), len(text) - len(rest) + len(_CLOSE)
    return None, None if _CLOSE.startswith(rest) else end


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _call(value: object, names: Collection[str]) -> ToolCall | None:
    """Returns the call that a JSON value is; None if it is not one."""
    if not isinstance(value, dict) or not value.keys() <= _KEYS or value.keys() >= _ARGUMENTS:
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    try:
        # Of numbers beyond floats, such as 1e999, JSON knows none.
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        return None
