"""The blocks of code, commands and printed lines of the README and the guides."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *GUIDES]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def examples(command):
    """Returns the lines of each example that begins with a command, the command first."""
    texts = [text for page in DOCUMENTS for text in blocks(page, "console")]
    return [text.splitlines() for text in texts if text.startswith(f"$ {command}")]


def assert_shown(lines, printed):
    """Asserts that lines were printed in this order; a line "…" stands for some left out."""
    lines, printed = list(map(without_sources, lines)), list(map(without_sources, printed))
    parts = "\n".join(lines).split("\n…")
    at = 0
    for part in (part.strip("\n").splitlines() for part in parts if part):
        assert part[0] in printed[at:]
        at = printed.index(part[0], at)
        assert part == printed[at : at + len(part)]
        at += len(part)


def without_sources(line):
    """A line, if of the table of collectives without its last column: some of the source lines in
    it are those of who called the command."""
    cells = re.split("[┃│┳╇]", line.strip().strip("┃│"))
    return "│".join(cells[:-1]) if len(cells) > 7 else line.rstrip()
