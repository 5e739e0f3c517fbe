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
    assert "│ all-gather │ fsdp      │" in table
    assert "Plan 1, in code:\n  mesh = sl.make_mesh(" in table
    up = names["arrays"]["params"]["up"]["kernel"]
    np.testing.assert_array_equal(up, names["state"].params["up"]["kernel"])


def test_it_opens_with_the_two_commands():
    commands = [block.strip() for block in blocks("bash")]
    assert commands == [
        "pip install -e . && shardlib train configs/quickstart.yaml",
        "pip install -e '.[dev]' && pytest -n 2 --dist loadfile",
    ]


def test_the_plan_is_what_the_command_prints(capsys):
    (shown,) = (block for block in blocks("console") if block.startswith("$ shardlib plan"))
    command, *lines = shown.splitlines()
    with pytest.raises(SystemExit):
        main(command.split()[2:])
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == printed[: len(lines)]


def test_the_report_is_what_the_command_prints(capsys, monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.chdir(README.parent)
    (shown,) = (block for block in blocks("console") if block.startswith("$ shardlib explain"))
    command, *lines = shown.splitlines()
    with pytest.raises(SystemExit):
        main(command.split()[2:])
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    # All but the table of buffers, and what follows that of collectives.
    start, end = lines.index("collectives of a step"), printed.index("collectives of a step")
    assert lines[:start] == printed[:start]
    # Some lines of the last column are those of who called the command.
    figures = [
        [
            line.rpartition("┃")[0] if "┃" in line else line.rstrip("│").rpartition("│")[0]
            for line in part
        ]
        for part in (lines[start:], printed[end : end + len(lines) - start])
    ]
    assert figures[0] == figures[1]


def test_every_file_and_command_it_names_exists():
    text = README.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (README.parent / target).exists(), target

    import typer

    from shardlib.cli import app

    known = set(typer.main.get_command(app).commands)
    assert set(re.findall(r"\| `shardlib (\w+)", text)) == known
