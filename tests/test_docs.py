"""The README and the guides in `docs/`: their code and commands are run."""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from documents import DOCUMENTS, GUIDES, README, ROOT, assert_shown, blocks, examples

from shardlib.cli import main

pytestmark = pytest.mark.skipif(not README.exists(), reason="runs in the repository")
PAGES = pytest.mark.parametrize("page", DOCUMENTS, ids=[page.stem for page in DOCUMENTS])


def run(sources):
    """Runs blocks of Python in order; returns their names."""
    names: dict[str, Any] = {}
    for source in sources:
        exec(source, names)
    return names


def example():
    """Returns the example of the README, which the guides continue."""
    return blocks(README, "python")[:3]


@pytest.mark.docs
def test_the_python_of_the_readme_runs(capsys):
    names = run(blocks(README, "python"))
    assert float(names["metrics"]["loss"]) > 0
    table = capsys.readouterr().out
    assert "up/kernel" in table
    assert "fsdp, tensor" in table
    assert re.search(r"│ all-gather +│ fsdp +│", table)
    assert re.search(r"^\{'loss': \d+\.\d+\}$", table, re.MULTILINE)


CONTINUES = "The code continues the example of the [README](../README.md)."
CONTINUED = [page for page in GUIDES if CONTINUES in page.read_text()]


def test_every_guide_with_code_is_run():
    # Tests of the same name run each program of these pages.
    assert {page for page in GUIDES if blocks(page, "python")} - {*CONTINUED} == {
        ROOT / "docs" / "xla_faults.md",
        ROOT / "docs" / "xla_traffic.md",
    }


@pytest.mark.docs
@pytest.mark.parametrize("page", CONTINUED, ids=lambda page: page.stem)
def test_the_python_of_a_guide_runs(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page.stem == "configs":
        (tmp_path / "tiny.yaml").write_text(blocks(page, "yaml")[0])
    names = run([*example(), *blocks(page, "python")])
    shown = capsys.readouterr().out
    if page.stem == "know_before_you_rent":
        assert "Plan 1, in code:\n  mesh = sl.make_mesh(" in shown
    if page.stem == "configs":
        assert "train.steps: 100 -> 3\n" in shown
        assert "lst: " in shown
        assert "Did you mean 'last'?" in shown
    if page.stem == "data":
        assert "'tokens': (1, 64)" in shown
    if page.stem == "extending":
        assert "('shards', 'model')" in shown
    if page.stem == "long_runs":
        up = names["arrays"]["params"]["up"]["kernel"]
        np.testing.assert_array_equal(up, names["state"].params["up"]["kernel"])
    if page.stem == "losses_and_steps":
        losses = [names["eval_step"](names["state"], x)["loss"].value for x in names["batches"]]
        assert f"\nloss: {np.mean(losses):.4f}\n" in shown


@pytest.mark.docs
def test_the_loop_of_a_guide_resumes_at_the_batch_where_it_was_killed(tmp_path, monkeypatch):
    names = run(example())
    loop = blocks(ROOT / "docs" / "long_runs.md", "python")[0]
    start, seen = names["state"], []

    def trained(folder, killed_at=None):
        def step(state, batch):
            number = next(i for i, x in enumerate(names["batches"]) if x is batch)
            if number == killed_at:
                raise KeyboardInterrupt
            seen.append(number)
            return names["step"](state, batch)

        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        mine = {**names, "state": jax.tree.map(jnp.copy, start), "step": step}
        exec(loop, mine)
        return mine["state"]

    whole = trained("whole")
    with pytest.raises(KeyboardInterrupt):
        trained("killed", killed_at=1)
    resumed = trained("killed")
    assert seen == [0, 1, 2, 0, 1, 2]
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)


@pytest.mark.docs
def test_the_model_of_a_guide_trains_by_its_path(capfd, tmp_path, monkeypatch):
    page = ROOT / "docs" / "extending.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(blocks(page, "python")[0])
    (tmp_path / "mine.yaml").write_text(blocks(page, "yaml")[0])
    words = ["train.cpu_devices=8", "train.compilation_cache=null", "mesh=fsdp=4,tensor=2"]
    with pytest.raises(SystemExit) as exited:
        main(["train", "mine.yaml", "train.steps=3", *words])
    out, err = capfd.readouterr()
    assert exited.value.code == 0, err
    assert "finished at step 3" in out
    assert (tmp_path / "runs" / "mine" / "checkpoints").is_dir()


def test_the_readme_opens_with_the_two_commands_and_is_short():
    commands = [block.strip() for block in blocks(README, "bash")]
    assert commands == [
        "pip install -e . && shardlib train configs/quickstart.yaml",
        "pip install -e '.[dev]' && pytest -n 2 --dist loadfile",
    ]
    assert len(README.read_text().splitlines()) <= 180
    assert max(len(block.splitlines()) for block in blocks(README, "python")) <= 15


@pytest.mark.docs
def test_plans_are_what_the_command_prints(capsys):
    for command in {first for first, *_ in examples("shardlib plan")}:
        with pytest.raises(SystemExit):
            main(command.split()[2:])
        printed = capsys.readouterr().out.splitlines()
        for _, *lines in examples(command.removeprefix("$ ")):
            assert_shown(lines, printed)


@pytest.mark.soak
def test_the_report_is_what_the_command_prints(capsys, monkeypatch):
    """With its fixes, each of which is compiled. `explain/test_llama_traffic.py` has the rest."""
    pytest.importorskip("libtpu")
    monkeypatch.chdir(ROOT)
    ((command, *lines),) = examples("shardlib explain")
    with pytest.raises(SystemExit):
        main(command.split()[2:])
    assert_shown(lines, capsys.readouterr().out.splitlines())


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
