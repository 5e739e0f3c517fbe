"""Calls of tools in answers, whole and in pieces."""

import dataclasses
import json
import re

import openai
import pytest
from byte_decoder import SPEAKER, serving
from hypothesis import given
from hypothesis import strategies as st

from shardlib.serve.bodies import CHAT, BodyError, parse
from shardlib.serve.tool_calls import ToolCall, ToolReader, split_calls

NAMES = ("look_up", "add")
LOOK_UP = '{"name": "look_up", "arguments": {"of": "é"}}'
CALL = ToolCall("look_up", '{"of": "é"}')
ADD = ToolCall("add", '{"x": 1}')
ADDS = '{"name": "add", "arguments": {"x": 1}}'
IN_TAGS = f"<tool_call>\n{LOOK_UP}\n</tool_call>"
TAG = '"</tool_call>"'
TEXTS = {
    "plain text, <tool_ and more  ": ("plain text, <tool_ and more  ", []),
    IN_TAGS: ("", [CALL]),
    f"I look.\n{IN_TAGS}\n{IN_TAGS.replace(LOOK_UP, ADDS)}\n": ("I look.", [CALL, ADD]),
    f"{IN_TAGS}\n done": ("done", [CALL]),
    '{"name": "add", "parameters": {"x": 1}}': ("", [ADD]),
    '<|python_tag|>{"name": "add", "parameters": {"x": 1}}; '
    '{"name": "look_up", "parameters": {"of": "é"}}': ("", [ADD, CALL]),
    # Calls of nothing that the request offers, and broken ones.
    '{"name": "other", "parameters": {}}': ('{"name": "other", "parameters": {}}', []),
    '{"a": 1} and {"name"': ('{"a": 1} and {"name"', []),
    "<tool_call>[1]</tool_call> x": ("<tool_call>[1]</tool_call> x", []),
    f"{IN_TAGS[:-3]}": (f"{IN_TAGS[:-3]}", []),
    # A tag in a text or a string, and one that opens nothing.
    f"A <tool_call> tag. {IN_TAGS}": ("A <tool_call> tag.", [CALL]),
    f'<tool_call>{ADDS.replace("1", TAG)}</tool_call>': ("", [ToolCall("add", f'{{"x": {TAG}}}')]),
    f"<tool_call>{{broken}}</tool_call> {IN_TAGS}": (
        "<tool_call>{broken}</tool_call>", [CALL],
    ),
} | {text: (text, []) for text in (
    '<tool_call>{"name": "add", "arguments": "x"}</tool_call>',
    '{"name": {"first": "a"}, "parameters": {}}',
    '{"name": "add", "price": 3}',
    '{"name": "add", "arguments": {"x": 1}, "parameters": {"x": 2}}',
    '{"name": "add", "parameters": {"x": NaN}}',
    '{"name": "add", "parameters": {"x": 1e999}}',
    '{"a":' * 20_000,
)}  # fmt: skip


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_calls_are_told_from_text(number):
    text, expected = list(TEXTS.items())[number]
    assert split_calls(text, NAMES) == expected


PARTS = (
    "<tool_call>",
    "</tool_call>",
    LOOK_UP,
    ADDS.replace("1", TAG),
    "{",
    '"',
    "NaN",
    "<",
    "\n",
    " ",
    "word",
    "<|python_tag|>",
    ";",
)


@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join), st.data())
def test_pieces_of_any_size_give_what_the_whole_gives(text, data):
    reader, found, at = ToolReader(NAMES), [], 0
    while at < len(text):
        size = data.draw(st.integers(1, len(text) - at))
        found += reader.read(text[at : at + size])
        at += size
    found += reader.finish()
    calls = [part for part in found if isinstance(part, ToolCall)]
    assert ("".join(part for part in found if isinstance(part, str)), calls) == split_calls(
        text, NAMES
    )
    assert reader.num_calls == len(calls)
    if not calls:
        assert "".join(found) == text


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in NAMES]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.process
def test_the_official_client_reads_calls():
    """A grammar makes the model write the answer."""
    answer = f"I look. {IN_TAGS}"
    form = {"type": "regex", "regex": re.escape(answer)}
    asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 100}
    asked["extra_body"] = {"response_format": form}
    with (
        serving() as (_, address),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as official,
    ):
        plain = official.chat.completions.create(**asked, tool_choice="none").choices[0]
        (whole,) = official.chat.completions.create(**asked).choices
        chunks = [c.choices[0] for c in official.chat.completions.create(**asked, stream=True)]
    assert plain.finish_reason == "stop"
    assert plain.message.content == answer
    assert plain.message.tool_calls is None
    assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls"
    assert whole.message.content == "I look."
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I look."
    streamed = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [call.index for call in streamed] == [0]
    for call in (*whole.message.tool_calls, *streamed):
        assert (call.function.name, call.function.arguments) == CALL
        assert call.type == "function"
        assert call.id.startswith("call_")


def test_calls_of_messages_are_objects_for_the_template():
    seen = []
    speaker = dataclasses.replace(
        SPEAKER, chat=lambda messages, tools: seen.append(messages) or [1]
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    asked = parse(CHAT, {"messages": [*MESSAGES, message], "tools": TOOLS}, speaker)
    assert asked.tools == NAMES
    assert seen[0][1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert json.loads(call["function"]["arguments"]) == {"x": 1}
    for wrong in ("{", "null", "[1]", "[" * 100_000, {"x"}):
        call["function"]["arguments"] = wrong
        with pytest.raises(BodyError, match="tool_calls of a message are wrong"):
            parse(CHAT, {"messages": [*MESSAGES, message]}, speaker)
