"""Tables of text for the terminal and the HTML page."""

import dataclasses
import html
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells under named columns.

    Attributes:
        title: Title of the table.
        columns: Column names. A column whose name ends with `>` is right-aligned, as numbers are.
        rows: Rows with one text for each column.
        notes: Lines below the table.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def render(self) -> Any:
        """Returns the table as a rich renderable."""
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title, title_justify="left")
        for column in self.columns:
            right = column.endswith(">")
            table.add_column(
                column.rstrip(">"), justify="right" if right else "left", overflow="fold"
            )
        for row in self.rows:
            table.add_row(*map(Text, row))
        return Group(table, *map(Text, self.notes))

    def html(self) -> str:
        """Returns the table as HTML."""
        sides = ["right" if column.endswith(">") else "left" for column in self.columns]
        head = "".join(
            f'<th class="{side}">{html.escape(column.rstrip(">"))}</th>'
            for side, column in zip(sides, self.columns, strict=True)
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
