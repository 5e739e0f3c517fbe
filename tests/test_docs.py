"""The README and the guides in `docs/`: their code and commands are run."""

import pathlib
import re
from typing import Any

import numpy as np
import pytest

from shardlib.cli import main

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *GUIDES]
pytestmark = pytest.mark.skipif(not README.exists(), reason="runs in the repository")
PAGES = pytest.mark.parametrize("page", DOCUMENTS, ids=[page.stem for page in DOCUMENTS])


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def run(sources):
    """Runs blocks of Python in order; returns their names."""
    names: dict[str, Any] = {}
    for source in sources:
        exec(source, names)
    return names


@pytest.mark.docs
def test_the_python_of_the_readme_runs(capsys):
    names = run(blocks(README, "python"))
    assert float(names["metrics"]["loss"]) > 0
    table = capsys.readouterr().out
    assert "up/kernel" in table
    assert "fsdp, tensor" in table
    assert re.search(r"│ all-gather +│ fsdp +│", table)


CONTINUES = "The code continues the example of the [README](../README.md)."
CONTINUED = [page for page in GUIDES if CONTINUES in page.read_text()]


def test_every_guide_with_code_is_run():
    # tests/test_xla_faults.py runs each program of xla_faults.md.
    assert {page for page in GUIDES if blocks(page, "python")} - {*CONTINUED} == {
        ROOT / "docs" / "xla_faults.md"
    }


@pytest.mark.docs
@pytest.mark.parametrize("page", CONTINUED, ids=lambda page: page.stem)
def test_the_python_of_a_guide_runs(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run([blocks(README, "python")[0], *blocks(page, "python")])
    shown = capsys.readouterr().out
    if page.stem == "know_before_you_rent":
        assert "Plan 1, in code:\n  mesh = sl.make_mesh(" in shown
    if page.stem == "long_runs":
        up = names["arrays"]["params"]["up"]["kernel"]
        np.testing.assert_array_equal(up, names["state"].params["up"]["kernel"])


def test_the_readme_opens_with_the_two_commands_and_is_short():
    commands = [block.strip() for block in blocks(README, "bash")]
    assert commands == [
        "pip install -e . && shardlib train configs/quickstart.yaml",
        "pip install -e '.[dev]' && pytest -n 2 --dist loadfile",
    ]
    assert len(README.read_text().splitlines()) <= 180


def assert_shown(lines, printed):
    """Asserts that lines were printed in this order; a line "…" stands for some left out."""
    parts = "\n".join(lines).split("\n…")
    at = 0
    for part in (part.strip("\n").splitlines() for part in parts if part):
        assert part[0] in printed[at:]
        at = printed.index(part[0], at)
        assert part == printed[at : at + len(part)]
        at += len(part)


def examples(command):
    """Returns the lines of each example that begins with a command, the command first."""
    texts = [text for page in DOCUMENTS for text in blocks(page, "console")]
    return [text.splitlines() for text in texts if text.startswith(f"$ {command}")]


@pytest.mark.docs
def test_plans_are_what_the_command_prints(capsys):
    for command, *lines in examples("shardlib plan"):
        with pytest.raises(SystemExit):
            main(command.split()[2:])
        assert_shown(lines, [line.rstrip() for line in capsys.readouterr().out.splitlines()])


def without_sources(line):
    """A line, if of the table of collectives without its last column: some of the source lines in
    it are those of who called the command."""
    cells = re.split("[┃│┳╇]", line.strip().strip("┃│"))
    return "│".join(cells[:-1]) if len(cells) > 7 else line.rstrip()


@pytest.mark.docs
def test_the_report_is_what_the_command_prints(capsys, monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.chdir(ROOT)
    ((command, *lines),) = examples("shardlib explain")
    with pytest.raises(SystemExit):
        main(command.split()[2:])
    printed = capsys.readouterr().out.splitlines()
    assert_shown(map(without_sources, lines), list(map(without_sources, printed)))


def prose(page):
    """Returns the text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """Returns the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def links(page):
    """Returns the files and anchors that a page links to, apart from those of other sites."""
    targets = re.findall(r"\]\(([^)\s:]+)\)", prose(page))
    return [
        (page.parent / file if file else page, anchor)
        for file, _, anchor in (target.partition("#") for target in targets)
    ]


@PAGES
def test_every_file_and_heading_that_a_page_names_exists(page):
    for file, anchor in links(page):
        assert file.exists(), file
        assert not anchor or anchor in anchors(file), f"{file}#{anchor}"


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "index.md"], ids=lambda page: page.stem)
def test_every_guide_is_linked(page):
    linked = {file.resolve() for file, _ in links(page)}
    assert {*GUIDES} - linked <= {ROOT / "docs" / "index.md"}


def test_every_command_is_listed():
    import typer

    from shardlib.cli import app

    known = set(typer.main.get_command(app).commands)
    listed = (ROOT / "docs" / "commands.md").read_text()
    assert set(re.findall(r"\| `shardlib (\w+)", listed)) == known
