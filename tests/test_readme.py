"""What the README shows runs as it stands."""

import pathlib
import re

import numpy as np
import pytest

from shardlib.cli import main

README = pathlib.Path(__file__).parents[1] / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="runs in the repository")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_python_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    batch = {name: rng.standard_normal((16, 64), dtype=np.float32) for name in "xy"}
    names = {"batches": [batch] * 3}
    for block in blocks("python"):
        exec(block, names)
    assert float(names["metrics"]["loss"]) > 0
    table = capsys.readouterr().out
    assert "up/kernel" in table
    assert "fsdp, tensor" in table
    assert re.search(r"│ all-gather +│ fsdp +│", table)
    assert "Plan 1, in code:\n  mesh = sl.make_mesh(" in table
    up = names["arrays"]["params"]["up"]["kernel"]
    np.testing.assert_array_equal(up, names["state"].params["up"]["kernel"])


def test_it_opens_with_the_two_commands():
    commands = [block.strip() for block in blocks("bash")]
    assert commands == [
        "pip install -e . && shardlib train configs/quickstart.yaml",
        "pip install -e '.[dev]' && pytest -n 2 --dist loadfile",
    ]


def assert_shown(lines, printed):
    """Asserts that lines were printed in this order; a line "…" stands for some left out."""
    parts = "\n".join(lines).split("\n…")
    at = 0
    for part in (part.strip("\n").splitlines() for part in parts if part):
        assert part[0] in printed[at:]
        at = printed.index(part[0], at)
        assert part == printed[at : at + len(part)]
        at += len(part)


def test_the_plan_is_what_the_command_prints(capsys):
    (shown,) = (block for block in blocks("console") if block.startswith("$ shardlib plan"))
    command, *lines = shown.splitlines()
    with pytest.raises(SystemExit):
        main(command.split()[2:])
    assert_shown(lines, [line.rstrip() for line in capsys.readouterr().out.splitlines()])


def without_sources(line):
    """A line, if of the table of collectives without its last column: some of the source lines in
    it are those of who called the command."""
    cells = re.split("[┃│┳╇]", line.strip().strip("┃│"))
    return "│".join(cells[:-1]) if len(cells) > 7 else line.rstrip()


def test_the_report_is_what_the_command_prints(capsys, monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.chdir(README.parent)
    (shown,) = (block for block in blocks("console") if block.startswith("$ shardlib explain"))
    command, *lines = shown.splitlines()
    with pytest.raises(SystemExit):
        main(command.split()[2:])
    printed = capsys.readouterr().out.splitlines()
    assert_shown(map(without_sources, lines), list(map(without_sources, printed)))


def test_every_file_and_command_it_names_exists():
    text = README.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (README.parent / target).exists(), target

    import typer

    from shardlib.cli import app

    known = set(typer.main.get_command(app).commands)
    assert set(re.findall(r"\| `shardlib (\w+)", text)) == known
