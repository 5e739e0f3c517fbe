"""Extension of Sphinx: files of the repository as pages, Markdown docstrings, keys and commands."""

import itertools
import json
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command
from typer.testing import CliRunner

from shardlib.cli import app as commands
from shardlib.config import Key, keys
from shardlib.run import RunConfig

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FILES += sorted(ROOT.glob("notebooks/*.ipynb"))
PAGES = {file: DOCS / "pages" / f"{file.stem.lower()}.md" for file in FILES}
"""Files outside of `docs/` that the site shows, and their copies, which git ignores."""

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_EXAMPLE = r"^( *)```(\w+)\n(.*?)^ *```$"
_MARKDOWN = re.compile(rf"{_EXAMPLE}|`([^`]+)`(\w)?", re.MULTILINE | re.DOTALL)


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers hooks and directives."""
    app.connect("builder-inited", copy_pages)
    app.connect("source-read", link_pages)
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # Before napoleon, at 500.
    app.add_directive("config-keys", ConfigKeys)
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}


def copy_pages(app: Sphinx) -> None:
    """Writes the copies that are new or have changed."""
    for file, page in PAGES.items():
        text = _notebook(file, page) if file.suffix == ".ipynb" else file.read_text()
        text = relink(text, file, page)
        page.parent.mkdir(exist_ok=True)
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def _notebook(file: Path, page: Path) -> str:
    """Returns a notebook without outputs as Markdown, with a link to the file below its title."""
    parts = []
    for cell in json.loads(file.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
    title, _, rest = "\n\n".join(parts).partition("\n")
    return f"{title}\n\n{{download}}`The notebook <{_path(page, file)}>`\n{rest}\n"


def link_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """Changes the links of a guide to files outside of `docs/`."""
    if (page := DOCS / f"{name}.md").exists():
        source[0] = relink(source[0], page, page)


def relink(text: str, file: Path, page: Path) -> str:
    """Returns the text of a file with its links changed to those of a page of the site.

    A link to a file that is not a page downloads it. A link to a folder becomes its text.
    """

    def link(found: re.Match[str]) -> str:
        name, target, heading = found.groups(default="")
        at = Path(os.path.normpath(file.parent / target))
        if at.is_dir():
            return name
        return f"[{name}]({_path(page, PAGES.get(at, at))}{heading})" if at.exists() else found[0]

    return _LINK.sub(link, text)


def _path(page: Path, to: Path) -> str:
    return Path(os.path.relpath(to, page.parent)).as_posix()


def as_rst(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Changes the Markdown of a docstring, code in backticks and fenced examples, to RST."""
    text = _MARKDOWN.sub(_rst, "\n".join(lines))
    if text.startswith("Alias for field number"):  # Python's own text.
        text = ""
    # Napoleon takes the words before the first colon for a type: an empty one precedes them.
    text = re.sub(r"^((?:Returns|Yields):\n +)", r"\1: ", text, flags=re.MULTILINE)
    is_value = text and what in ("attribute", "data", "property")
    lines[:] = (f": {text}" if is_value else text).splitlines()


def _rst(found: re.Match[str]) -> str:
    indent, language, example, code, after = found.groups(default="")
    if language:
        return f"{indent}.. code-block:: {language}\n\n{textwrap.indent(example, '   ')}"
    is_name = code.replace(".", "").isidentifier()
    return (f"`{code}`" if is_name else f"``{code}``") + (after and f"\\ {after}")


class ConfigKeys(SphinxDirective):
    """Shows every key of a run's config by section and variant."""

    def run(self) -> Sequence[nodes.Node]:
        """Returns a section of the page for each section of the config."""
        found = keys(RunConfig)
        top = [key for key in found if "." not in key.path]
        rest = [key for key in found if "." in key.path]
        groups = itertools.groupby(rest, _title)
        return [_keys("The run", top), *(_keys(title, group) for title, group in groups)]


def _title(key: Key) -> str:
    section = key.path.partition(".")[0]
    return f"{section}, with {key.when}" if key.when else section


def _keys(title: str, group: Iterable[Key]) -> nodes.section:
    listed = nodes.definition_list("", *map(_definition, group))
    return nodes.section("", nodes.title(text=title), listed, ids=[nodes.make_id(f"keys {title}")])


def _definition(key: Key) -> nodes.definition_list_item:
    default = [nodes.Text(", default "), nodes.literal(text=key.default_text)]
    if key.required:
        default = [nodes.Text(", required")]
    parts = enumerate(key.doc.split("`"))
    doc = [nodes.literal(text=part) if i % 2 else nodes.Text(part) for i, part in parts]
    return nodes.definition_list_item(
        "",
        nodes.term("", "", nodes.literal(text=key.path)),
        nodes.definition(
            "",
            nodes.paragraph("", "", nodes.literal(text=key.type_text), *default),
            nodes.paragraph("", "", *doc),
        ),
    )


class Commands(SphinxDirective):
    """Shows the help of every command, without the keys of the config."""

    def run(self) -> Sequence[nodes.Node]:
        """Returns a section for each command."""
        return [_help(words) for words in _commands(get_command(commands), ())]


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if not hasattr(command, "commands"):
        yield words
        return
    for name, inner in command.commands.items():
        yield from _commands(inner, (*words, name))


def _help(words: tuple[str, ...]) -> nodes.section:
    name = " ".join(("shardlib", *words))
    options: dict[str, Any] = {"prog_name": "shardlib", "terminal_width": 88}
    shown = CliRunner().invoke(commands, [*words, "--help"], **options).output
    text = shown.partition("Keys of the config")[0].strip()
    block = nodes.literal_block(text, text, language="text")
    return nodes.section("", nodes.title(text=name), block, ids=[nodes.make_id(name)])
