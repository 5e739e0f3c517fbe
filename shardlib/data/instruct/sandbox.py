"""Jinja's sandbox with limits: a template comes with a folder of others, and may not end."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
"""Rounds of loops and calls in one rendering."""
MAX_SIZE = 50_000_000
"""Characters or entries of one value, and characters of all outputs."""

# Methods of texts whose first argument is a width.
_PADDING = ("center", "ljust", "rjust", "zfill")


class Sandbox(ImmutableSandboxedEnvironment):
    """Counts rounds, calls and output, and computes no value beyond `MAX_SIZE` by an operator."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def __init__(self, **options: Any):
        """Args: the options of `jinja2.Environment`."""
        self.steps = self.size = 0
        super().__init__(finalize=self._output, **options)
        self.filters |= {"rounds": self._rounds, "checked": _checked}

    def renderer(self, source: str) -> Callable[..., str]:
        """Returns the function of a template's variables to its text.

        The function raises a TemplateError if a limit is passed.
        """
        tree = self.parse(source)
        for loop in [*tree.find_all(nodes.For)]:
            loop.iter = nodes.Filter(loop.iter, "rounds", [], [], None, None)
        for join in [*tree.find_all(nodes.Concat)]:
            join.nodes = [nodes.Filter(nodes.Concat(join.nodes), "checked", [], [], None, None)]
        return functools.partial(self._rendered, self.from_string(tree))

    def call(self, context: Context, called: Any, /, *args: Any, **options: Any) -> Any:
        """Calls a function or method for a template."""
        self._step()
        if args and getattr(called, "__name__", "") in _PADDING:
            _refuse_above(args[0])
        return _checked(super().call(context, called, *args, **options))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes `left operator right`."""
        if operator == "*":
            _refuse_above(_size(left) * _size(right))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _refuse_above(left.bit_length() * right)
        if operator == "%" and isinstance(left, str):
            _refuse_above(max(map(int, re.findall(r"\d{1,20}", left)), default=0))
        return _checked(super().call_binop(context, operator, left, right))

    def _rendered(self, template: Template, **variables: Any) -> str:
        self.steps = self.size = 0
        pieces, size = [], 0
        for piece in template.generate(**variables):
            pieces.append(piece)
            size += len(piece)
            _refuse_above(size)
        return "".join(pieces)

    def _rounds(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    def _step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TemplateError(f"it takes more than {MAX_STEPS:,} steps")

    def _output(self, value: Any) -> Any:
        self.size += len(value) if isinstance(value, str) else 0
        _refuse_above(self.size)
        return value


def _size(value: object) -> Any:
    return len(value) if isinstance(value, str | list | tuple) else value


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _refuse_above(len(value))
    return value


def _refuse_above(size: object) -> None:
    if isinstance(size, int) and size > MAX_SIZE:
        raise TemplateError(f"it makes a value or a text of more than {MAX_SIZE:,} characters")
