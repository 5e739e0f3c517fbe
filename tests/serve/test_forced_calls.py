"""Answers that must call a tool."""

import dataclasses
import json

import openai
import pytest
from byte_decoder import SPEAKER, TEXT, serving

from shardlib.engine.grammars import GrammarReader
from shardlib.errors import DataError
from shardlib.serve.bodies import CHAT, BodyError, parse
from shardlib.serve.forced_calls import form_of, grammar_of_calls
from shardlib.serve.tool_calls import ToolCall, split_calls

POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/place"}, "flip": {"type": "boolean"}},
    "required": ["at", "flip"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["é", "left"]}},
}
FUNCTIONS = [{"name": "point", "parameters": POINT}, {"name": 'stop "now"'}]
TOOLS = [{"type": "function", "function": one} for one in FUNCTIONS]
NAMES = [one["name"] for one in FUNCTIONS]
CALL = '"point", "arguments": {"at": "é", "flip": true}'
STOP = r'"stop \"now\"", "arguments": {}'


def tagged(*calls):
    return "\n".join(f'<tool_call>\n{{"name": {call}}}\n</tool_call>' for call in calls)


def accepted(grammar, text):
    """Returns whether a text is a whole answer of a grammar."""
    matcher, ids = (
        GrammarReader(TEXT, (TEXT.eot,), TEXT.vocab_size).read(grammar),
        TEXT.encode(text),
    )
    steps = [*enumerate(ids), (len(ids), TEXT.eot)]
    return all(matcher.allowed(ids[:at])[token] for at, token in steps)


ALONE = f'{{"name": {CALL}}}'.replace("arguments", "parameters")
ANSWERS = [
    ("tagged", True, tagged(CALL), [ToolCall("point", '{"at": "é", "flip": true}')]),
    ("tagged", True, tagged(STOP, CALL), [ToolCall(NAMES[1], "{}"), ToolCall("point", CALL[22:])]),
    ("alone", True, ALONE, [ToolCall("point", '{"at": "é", "flip": true}')]),
    # No second call, no text, no other tool, and no arguments that their schema lacks.
    ("tagged", False, tagged(CALL, CALL), None),
    ("alone", True, f"{ALONE}; {ALONE}", None),
    ("tagged", True, f"I point. {tagged(CALL)}", None),
    ("tagged", True, tagged(CALL.replace("point", "paint")), None),
    ("tagged", True, tagged(CALL.replace("é", "up")), None),
    ("tagged", True, tagged(STOP.replace("{}", '{"x": 1}')), None),
    ("tagged", True, "", None),
]


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_a_grammar_takes_calls_of_the_tools_alone(number):
    form, several, text, calls = ANSWERS[number]
    grammar = grammar_of_calls(FUNCTIONS, form, several=several)
    assert accepted(grammar, text) == (calls is not None)
    if calls is not None:
        assert split_calls(text, NAMES) == ("", calls)


def test_the_template_says_the_form():
    assert form_of("{{ tools }} in <tool_call></tool_call> tags") == "tagged"
    assert form_of('Respond as {"name": function name, "parameters": {...}}.') == "alone"
    with pytest.raises(DataError, match=r"asks for no calls as <tool_call>.*\n  Leave"):
        form_of("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]")
    # Rows of a batch get this as their answer too.
    speaker = dataclasses.replace(SPEAKER, call_form=lambda: form_of("{{ messages }}"))
    with pytest.raises(BodyError, match="so none can be forced"):
        parse(CHAT, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED}, speaker)


MESSAGES = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "point"}}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
WRONG = [
    ({"tool_choice": "needed"}, r"tool_choice is 'needed'.\n  Give 'auto', 'none', 'required'"),
    ({"tool_choice": {"type": "function"}}, r"tool_choice is wrong.\n  Give"),
    ({"tool_choice": {"type": "allowed_tools"}}, r"tool_choice is wrong.\n  Give"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "paint"}}},
        r"names 'paint', which is not one of the tools. Did you mean 'point'",
    ),
    ({"tool_choice": "required", "tools": []}, r"'required', and the body has no tools.\n  Give"),
    ({"tool_choice": NAMED, "tools": []}, r"'point', which is not.*\n.*no tools are given"),
    ({"tool_choice": NAMED, "response_format": SCHEMA}, r"response_format another .*\n  Leave one"),
    ({"tool_choice": NAMED, "ignore_eos": True}, "a grammar and ignore_end"),
    (
        {
            "tool_choice": "required",
            "tools": [
                {"type": "function", "function": {"name": "a", "parameters": {"type": "null"}}}
            ],
        },
        r"parameters of a are not the JSON schema of an object.\n  Give",
    ),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_choices_that_cannot_be_forced(number):
    body, fault = WRONG[number]
    with pytest.raises(BodyError, match=fault):
        parse(CHAT, {"messages": MESSAGES, "tools": TOOLS} | body, SPEAKER)


def test_a_choice_forces_the_grammar_of_its_form():
    speaker = dataclasses.replace(SPEAKER, call_form=lambda: "alone")
    body = {"messages": MESSAGES, "tools": TOOLS}
    asked = parse(CHAT, body | {"tool_choice": NAMED}, speaker)
    assert asked.samplings[0].grammar == grammar_of_calls(FUNCTIONS[:1], "alone", several=False)
    asked = parse(CHAT, body | {"tool_choice": "required"}, SPEAKER)
    assert asked.samplings[0].grammar == grammar_of_calls(FUNCTIONS, "tagged", several=True)
    assert parse(CHAT, body | {"tool_choice": "auto"}, SPEAKER).samplings[0].grammar is None


@pytest.mark.process
def test_the_official_client_forces_calls():
    asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 100, "seed": 1}
    with (
        serving() as (_, address),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as official,
    ):
        create = official.chat.completions.create
        (named,) = create(**asked, tool_choice=NAMED).choices
        (needed,) = create(**asked, tool_choice="required").choices
        chunks = [one.choices[0] for one in create(**asked, tool_choice=NAMED, stream=True)]
        (short,) = create(**asked | {"max_tokens": 20}, tool_choice=NAMED).choices
        bad = {"type": "object", "properties": {"x": {"type": "strng"}}}
        tool = {"type": "function", "function": {"name": "a", "parameters": bad}}
        with pytest.raises(openai.BadRequestError, match="Invalid type: strng"):
            create(**asked | {"tools": [tool]}, tool_choice="required")
    streamed = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    for calls in (named.message.tool_calls, streamed):
        (call,) = calls
        assert call.function.name == "point"
        arguments = json.loads(call.function.arguments)
        assert arguments["at"] in POINT["$defs"]["place"]["enum"]
        assert isinstance(arguments["flip"], bool)
    assert named.message.content is None
    assert named.finish_reason == chunks[-1].finish_reason == "tool_calls"
    assert {call.function.name for call in needed.message.tool_calls} <= set(NAMES)
    # Cut off: what there is of a call stays text.
    assert short.finish_reason == "length"
    assert short.message.tool_calls is None
    assert tagged(CALL).startswith(short.message.content[:12])
