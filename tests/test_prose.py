"""Docstrings, comments and messages keep to the rules of prose that a pattern can check."""

import ast
import functools
import re
import tokenize
from pathlib import Path

import pytest

import shardlib

ROOT = Path(shardlib.__file__).parents[1]
FILES = sorted([*ROOT.glob("shardlib/**/*.py"), *ROOT.glob("models/shardlib_models/**/*.py")])
TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
AVOIDED = {
    "say 'next to' or 'with'": r"\bbeside\b",
    "say 'is not a'": r"\b(?<!there )(?<!There )(is|are|was|were) no\b(?! longer| more| less)",
    "say 'there is no'": r"\b(is|are|was|were) none\b",
    "name what is meant": r"\b(of those|those of)\b",
    "say it as a native engineer would": r"\b(befell|(is|are) told of|[Ww]hat mends|Tried is)\b",
}
QUESTION = re.compile(r"(What|Which|How|Where|Whether|Who|In what|In which|By how)\b")
FRAGMENT = re.compile(r"(Of|As|As of|For|By|With|On|From)\b")


@functools.cache
def texts(file):
    """Returns the lines of comments and strings of a file, with their numbers."""
    with file.open("rb") as source:
        return [
            line
            for token in tokenize.tokenize(source.readline)
            if token.type in TEXTS
            for line in enumerate(token.string.splitlines(), token.start[0])
        ]


@pytest.mark.parametrize("advice", AVOIDED)
def test_texts_avoid(advice):
    pattern = re.compile(AVOIDED[advice])
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in FILES
        for number, line in texts(file)
        if pattern.search(line)
    ]
    assert not found, f"{advice}:\n" + "\n".join(found)


def test_docstrings_are_sentences():
    found = []
    for file in FILES:
        tree = ast.parse(file.read_text())
        if QUESTION.match(ast.get_docstring(tree) or ""):
            found.append(f"{file.relative_to(ROOT)}: opens with a question word")
        for node in ast.walk(tree):
            is_documented = isinstance(node, ast.FunctionDef | ast.ClassDef)
            if is_documented and FRAGMENT.match(ast.get_docstring(node) or ""):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}: a fragment")
    assert not found, "\n".join(found)
