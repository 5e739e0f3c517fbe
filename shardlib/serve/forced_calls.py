"""Grammars of answers that must call tools.

The answer has the form of the model's chat template, of the two that `tool_calls` reads, with the
spaces of `json.dumps`. The arguments follow the JSON schema of their tool.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from shardlib.engine import Grammar
from shardlib.errors import DataError

CallForm = Literal["tagged", "alone"]
"""`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, or `{"name": ..., "parameters": ...}`
and nothing else."""

_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""Source: the OpenAI API reference, `tools`: a function without parameters has an empty list."""


def form_of(template: str) -> CallForm:
    """Returns the form of the calls that the text of a chat template asks for.

    Raises:
        DataError: If it asks for neither form.
    """
    if "<tool_call>" in template:
        return "tagged"
    if '"parameters"' in template:
        return "alone"
    raise DataError(
        'the chat template asks for no calls as <tool_call>{"name": ..., "arguments": ...}'
        '</tool_call> or as {"name": ..., "parameters": ...}, so none can be forced.\n'
        "  Leave tool_choice out, or force JSON by response_format."
    )


def grammar_of_calls(
    functions: Sequence[Mapping[str, Any]], form: CallForm, *, several: bool
) -> Grammar:
    """Returns the grammar of an answer that calls one of some functions.

    Args:
        functions: The `function` of each tool: its name, and `parameters`, the schema of an object.
        form: The form of a call. Only one fits into an answer with `alone`.
        several: Whether more calls may follow the first.
    """
    key = "arguments" if form == "tagged" else "parameters"
    rules = [f"one: {' | '.join(f'tool_{number}' for number in range(len(functions)))}"]
    for number, function in enumerate(functions):
        begin = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{key}": '
        given = function.get("parameters")
        schema = _NO_PARAMETERS if given is None else given
        # A rule of its own for each, because references of a schema begin at its root.
        arguments = json.dumps({"type": "object", **schema, "x-guidance": _SPACES})
        rules.append(f'tool_{number}: {_literal(begin)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {arguments}")
    call = 'start: "<tool_call>\\n" one "\\n</tool_call>"' if form == "tagged" else "start: one"
    if form == "tagged" and several:
        call += ' ("\\n<tool_call>\\n" one "\\n</tool_call>")*'
    return Grammar("lark", "\n".join([call, *rules]))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
