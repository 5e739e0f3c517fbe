"""Small data sets from Python's standard library."""

import ast
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from shardlib.data.corpus import builtin_files
from shardlib.errors import DataError, did_you_mean

# Packages that every Python has, each a class.
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest")
_LONGEST_CONTEXT = 600
_RETURNED = re.compile(r"\b[Rr]eturns? ([^.;:]+)")
_RAISED = re.compile(r"\b[Rr]aises? (?:an? |the )?(\w+(?:Error|Exception))")


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
    for _, node in _functions():
        prompt = f"def {node.name}({ast.unparse(node.args)}):"
        completion = _first_sentence(ast.get_docstring(node) or "")
        if completion.isascii() and completion and len(prompt) + len(completion) < 200:
            roles = (("user", prompt), ("assistant", completion))
            messages = [{"role": role, "content": content} for role, content in roles]
            yield {"prompt": prompt, "completion": completion, "messages": messages}


def _packages() -> Iterator[dict[str, Any]]:
    """Yields the docstrings of functions, labelled by the package that holds them."""
    for package, node in _functions():
        text = " ".join((ast.get_docstring(node) or "").split())
        if package in PACKAGES and text:
            yield {"text": text, "label": package}


def _functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the functions of Python's standard library, each after its package or module."""
    files = builtin_files("builtin:python")
    root = os.path.commonpath(files)
    for file in files:
        package = file.relative_to(root).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef):
                yield package, node


def _questions() -> Iterator[dict[str, Any]]:
    """Yields questions on signatures and docstrings of functions, answered by a span of them."""
    for package, node in _functions():
        arguments, text = ast.unparse(node.args), " ".join((ast.get_docstring(node) or "").split())
        context = f"{node.name}({arguments}) {text}"
        if not (text and context.isascii() and len(context) < _LONGEST_CONTEXT):
            continue
        for verb, (start, stop) in _spans(node.name, arguments, text, context).items():
            answers = {"text": [context[start:stop]], "answer_start": [start]}
            name = f"{package}:{node.lineno}:{node.name}:{verb}"
            asked = {"id": name, "title": package, "question": f"What does {node.name} {verb}?"}
            yield asked | {"context": context, "answers": answers}


def _spans(name: str, arguments: str, text: str, context: str) -> dict[str, tuple[int, int]]:
    """Returns what a function does, takes, returns and raises, each as a span of its context."""
    start = len(context) - len(text)
    found = {"do": (start, start + len(_first_sentence(text)))}
    if arguments:
        found["take"] = (len(name) + 1, len(name) + 1 + len(arguments))
    for verb, pattern in (("return", _RETURNED), ("raise", _RAISED)):
        if match := pattern.search(context, start):
            found[verb] = match.span(1)
    return found


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
    "builtin:packages": _packages,
    "builtin:questions": _questions,
    "builtin:topics": _topics,
}
