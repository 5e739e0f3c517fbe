"""Trace stacks of the operations of a compiled program.

A program lists files, functions, lines, and frames with their parent frames. All stacks begin with
the calls that led to the compilation, and branch in the traced function.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


class Frame(NamedTuple):
    """One call of a stack.

    `function` is a qualified name, such as `Attention.__call__` or `make.<locals>.step`. `number`
    is the number of the frame in its program, and `column` the start of the call in the bytes of
    its line, or -1.
    """

    file: str
    line: int
    function: str
    number: int = 0
    column: int = -1


@dataclasses.dataclass(frozen=True)
class Stacks:
    """The stacks of a program, from the tables in its header: texts and fields by number."""

    tables: Mapping[str, Mapping[int, str]]

    def frames(self, number: int) -> Iterator[Frame]:
        """Yields the stack that ends in a frame, innermost first; nothing for an unlisted frame."""
        while number in self._parents:
            if number in self._frames:
                yield self._frames[number]
            number = self._parents[number]

    def outside(self, traced: str) -> frozenset[int]:
        """Returns the frames of the callers of the traced function, given its name."""
        if traced not in self._outside:
            named = {n for n, frame in self._frames.items() if _is_of(frame, traced)}
            # The stack of a function that was traced before may begin in the middle.
            roots = {self._root(number) for number in named} or set(self._children.get(0, ()))
            callers = (number for root in roots for number in self._callers(root, named))
            self._outside[traced] = frozenset(callers)
        return self._outside[traced]

    def _callers(self, root: int, named: set[int]) -> list[int]:
        """Returns the frames from a root to where its stacks branch, or to the traced function."""
        chain, inner = [root], self._children.get(root, [])
        while len(inner) == 1:
            chain += inner
            inner = self._children.get(chain[-1], [])
        traced = [number for number in chain if number in named]
        return (
            chain if named.intersection(inner) or not traced else chain[: chain.index(traced[-1])]
        )

    def _root(self, number: int) -> int:
        while self._parents[number]:
            number = self._parents[number]
        return number

    @functools.cached_property
    def _outside(self) -> dict[str, frozenset[int]]:
        return {}

    @functools.cached_property
    def _frames(self) -> dict[int, Frame]:
        frames = {}
        for number, row in self.tables["StackFrames"].items():
            location = self.tables["FileLocations"].get(field(row, "file_location_id"), "")
            file = self.tables["FileNames"].get(field(location, "file_name_id"))
            function = self.tables["FunctionNames"].get(field(location, "function_name_id"), "")
            if file:
                position = field(location, "line"), field(location, "column")
                frames[number] = Frame(file, position[0], function, number, position[1])
        return frames

    @functools.cached_property
    def _parents(self) -> dict[int, int]:
        """The parent of each frame, or 0."""
        rows = self.tables["StackFrames"]
        # If the first frame names itself as its parent, parents are numbered from 1, and 0 means
        # no parent.
        shift = int(field(rows.get(1, ""), "parent_frame_id") == 1)
        parents = {number: field(row, "parent_frame_id") - shift for number, row in rows.items()}
        # A caller is listed before the frames that it calls.
        return {number: up if up in rows and up < number else 0 for number, up in parents.items()}

    @functools.cached_property
    def _children(self) -> dict[int, list[int]]:
        children = collections.defaultdict(list)
        for number, parent in self._parents.items():
            children[parent].append(number)
        return dict(children)


def _is_of(frame: Frame, function: str) -> bool:
    return frame.function.rpartition(".")[2] == function


def field(text: str, name: str) -> int:
    """Returns a field of a row, such as 7 for `line` of `line=7 column=3`, or -1 if missing."""
    value = re.search(rf"\b{name}=(\d+)", text)
    return int(value[1]) if value else -1
