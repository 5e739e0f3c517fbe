"""Tables: aligned text, for a terminal of any width, and HTML."""

import dataclasses
import html
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderableType

_STACKED_BELOW = 110
"""Columns of a terminal below which a table that does not fit is written row by row."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=([KMGT]i?B|B|GB/s|µs|ms|s|hours|days)\b)")


def aligned(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Returns rows as lines with aligned columns; columns in `right` are right-aligned."""
    rows = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def fitted(text: str, width: int) -> str:
    """Returns a text with its longer lines folded at spaces, where they get a deeper indent."""
    lines = []
    for line in text.splitlines():
        lines += _folded(line, width, " " * (len(line) - len(line.lstrip()) + 4)) or [""]
    return "\n".join(lines)


def _folded(text: str, width: int, indent: str) -> list[str]:
    """Returns lines without breaks in words, or between a number and its unit."""
    text = _BEFORE_UNIT.sub("\u00a0", text)
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\u00a0", " ") for line in lines]


def captured(*renderables: "RenderableType", width: int = 160) -> str:
    """Returns what rich would print in a terminal of this width, without colours."""
    from rich.console import Console, Group

    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(Group(*renderables))
    return capture.get()


class Report:
    """Base of reports that print as lines and tables. `str()` returns them as text."""

    def parts(self) -> Iterable[Any]:
        """Yields the lines and tables of the report."""
        raise NotImplementedError

    def render(self) -> Any:
        """Returns the report as a rich renderable."""
        from rich.console import Group
        from rich.text import Text

        parts = self.parts()
        return Group(*(Text(part) if isinstance(part, str) else part for part in parts))

    def __str__(self) -> str:
        return captured(self.render())


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells under named columns, which rich can print.

    A table that is too wide for a narrow terminal is printed row by row, since folded cells break
    words. A column whose name ends with `>` is right-aligned, as numbers are. Notes are lines below
    the table.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __rich_console__(self, console: object, options: "ConsoleOptions") -> Iterator[Any]:
        from rich.text import Text

        if options.max_width < min(self._width(), _STACKED_BELOW):
            yield Text("\n".join(self._stacked(options.max_width)))
        else:
            yield self._grid()
        yield from map(Text, self.notes)

    def _width(self) -> int:
        lines = [
            max(len(line) for cell in column for line in cell.split("\n"))
            for column in zip(self._names(), *self.rows, strict=True)
        ]
        return sum(lines) + 3 * len(lines) + 1

    def _names(self) -> list[str]:
        return [column.rstrip(">") for column in self.columns]

    def _grid(self) -> Any:
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title or None, title_justify="left")
        for column, name in zip(self.columns, self._names(), strict=True):
            right = column.endswith(">")
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def _stacked(self, width: int) -> Iterator[str]:
        if self.title:
            yield self.title
        for first, *others in self.rows:
            title = first.replace("\n", "; ") or "-"
            yield f"{self._names()[0]} {title}" if first.isdigit() else title
            cells = [
                f"{name} {cell}".strip().replace("\n", "; ")
                for name, cell in zip(self._names()[1:], others, strict=True)
                if cell not in ("", "-")
            ]
            yield from _folded("    " + ", ".join(cells), width, "    ") if cells else ()

    def html(self) -> str:
        """Returns the table as HTML."""
        sides = ["right" if column.endswith(">") else "left" for column in self.columns]
        head = "".join(
            f'<th class="{side}">{html.escape(name)}</th>'
            for side, name in zip(sides, self._names(), strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f'<td class="{side}">{html.escape(cell)}</td>'
                for side, cell in zip(sides, row, strict=True)
            )
            + "</tr>"
            for row in self.rows
        )
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return (
            f"<h2>{html.escape(self.title)}</h2><div class='scroll'><table><thead><tr>{head}</tr>"
            f"</thead><tbody>{body}</tbody></table></div>{notes}"
        )
