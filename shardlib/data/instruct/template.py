"""Chat templates: the text of a chat, and which of its characters the assistant writes."""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from shardlib.data.tokenizer import tokenizer_settings
from shardlib.errors import DataError, require

# Characters that Unicode never assigns; they enclose the assistant's text while it is rendered.
_START, _END = "\ufdd0", "\ufdd1"
_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

_ANSWER = "\ufdd2"

TEMPLATE = "chat_template.jinja"
"""The file of a template in a tokenizer's folder."""

Span = tuple[int, int]


class ChatTemplate:
    """A chat template of Hugging Face, rendered in Jinja's sandbox. `special_tokens` are
    `bos_token`, `eos_token` and others that the template may name.

    Raises:
        DataError: If the template is malformed.
        MissingExtraError: If jinja2 is not installed.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._has_tag = _TAG.search(source) is not None
        self._render = _compile(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, list[Span]]:
        """Returns the text of a chat and the spans of characters that the assistant writes.

        `tools` are the JSON schemas of the functions that the assistant may call.

        The template's tag `generation` encloses the spans. In a template without it, a span begins
        where the prompt for the assistant's message ends, and ends with the message.

        Raises:
            DataError: If the template refuses the messages, or has no tag and renders the beginning
                of the chat in another way than the whole.
        """
        whole = self.text(messages, tools)
        if self._has_tag:
            return _without_marks(whole)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.text(messages[:index], tools, add_generation_prompt=True)
                after = self.text(messages[: index + 1], tools)
                if not (whole.startswith(after) and after.startswith(before)):
                    raise DataError(
                        "the chat template renders the beginning of a chat in another way than the "
                        "whole, so the assistant's text cannot be found.\n"
                        "  Set data.template to one that encloses it in {% generation %} and "
                        "{% endgeneration %}."
                    )
                spans.append((len(before), len(after)))
        return whole, spans

    @property
    def answer_end(self) -> str:
        """What follows an answer, such as `<|im_end|>`: a line, or else white space, such as a line
        break; empty if the template puts nothing there.

        Raises:
            DataError: If the template refuses a question and its answer.
        """
        said = [{"role": "user", "content": "1"}, {"role": "assistant", "content": _ANSWER}]
        end = self.text(said, None).partition(_ANSWER)[2]
        end = end.replace(_START, "").replace(_END, "")
        # Some put the end of a text behind it, which follows the last answer alone.
        return end.strip().partition("\n")[0] or end

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            return self._render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        # A template is a program: any error of Python may come from its expressions.
        except Exception as error:
            said = str(error).rstrip(".") or type(error).__name__
            raise DataError(
                f"the chat template refuses the messages: {said}.\n"
                "  Change the messages, or set data.template."
            ) from None


def find_template(folder: Path | None, template: str | None) -> ChatTemplate:
    """Returns the chat template of a config: its own, or that of the tokenizer's folder.

    Raises:
        DataError: If neither has one, or it is malformed.
    """
    settings = tokenizer_settings(folder)
    if template is None and folder is not None and (folder / TEMPLATE).is_file():
        template = (folder / TEMPLATE).read_text(encoding="utf-8")
    if template is None:
        stored = settings.get("chat_template")
        if isinstance(stored, list):
            stored = {entry["name"]: entry["template"] for entry in stored}.get("default")
        template = stored
    if template is None:
        place = "" if folder is None else f" of {folder}"
        raise DataError(
            f"the tokenizer{place} has no chat template: no chat_template.jinja and no "
            "chat_template in tokenizer_config.json.\n  Set data.template."
        )
    if not isinstance(template, str):
        raise DataError(
            f"the chat template of the tokenizer is {type(template).__name__}, not a text.\n"
            "  Repair its tokenizer_config.json, or set data.template."
        )
    tokens = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    return ChatTemplate(template, tokens)


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    spans, pieces, length, start = [], [], 0, 0
    for piece in re.split(f"([{_START}{_END}])", marked):
        if piece == _START:
            start = length
        elif piece == _END:
            spans.append((start, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), spans


def _compile(source: str) -> Callable[..., str]:
    require("jinja2", "chat", "a chat template")
    import jinja2
    import jinja2.ext

    from shardlib.data.instruct.sandbox import Sandbox

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    # The filters and functions that transformers gives to templates.
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.renderer(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise DataError(f"the chat template is malformed: {error}.\n  Correct it.") from None


def _generation() -> Any:
    """Returns Jinja's extension for the tag that encloses the assistant's text."""
    import jinja2.ext
    import jinja2.nodes

    class Generation(jinja2.ext.Extension):
        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return _START + caller() + _END

    return Generation


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
