"""Small data sets from Python's standard library."""

import ast
from collections.abc import Callable, Iterator
from typing import Any

from shardlib.data.text.corpus import builtin_files
from shardlib.errors import DataError, did_you_mean


def builtin_examples(name: str) -> Iterator[dict[str, Any]]:
    """Yields the examples of an embedded data set, in a fixed order.

    Raises:
        DataError: If no embedded data set has this name, or this Python ships no source files.
    """
    if name not in _SETS:
        raise DataError(
            f"no embedded set of examples is called {name!r}.{did_you_mean(name, _SETS)}\n"
            f"  Choose {' or '.join(_SETS)}, or give the path of a file."
        )
    return _SETS[name]()


def _docstrings() -> Iterator[dict[str, Any]]:
    """Yields functions, whose signature is the prompt and whose first sentence the completion."""
    for file in builtin_files("builtin:python"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.FunctionDef):
                continue
            prompt = f"def {node.name}({ast.unparse(node.args)}):"
            completion = _first_sentence(ast.get_docstring(node) or "")
            if completion.isascii() and completion and len(prompt) + len(completion) < 200:
                roles = (("user", prompt), ("assistant", completion))
                messages = [{"role": role, "content": content} for role, content in roles]
                yield {"prompt": prompt, "completion": completion, "messages": messages}


def _topics() -> Iterator[dict[str, Any]]:
    """Yields a question on each help text of Python, answered by its first sentence."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        title, _, body = text.strip().partition("\n")
        context = " ".join(body.lstrip("*=-~^\n").split())
        if answer := _first_sentence(context):
            found = {"text": [answer], "answer_start": [context.index(answer)]}
            question = f"What does Python's manual say about {title.strip(' *')}?"
            example = {"id": name, "title": title, "context": context, "question": question}
            yield example | {"answers": found}


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    head, stop, _ = paragraph.partition(". ")
    return head + stop.strip()


_SETS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "builtin:docstrings": _docstrings,
    "builtin:topics": _topics,
}
