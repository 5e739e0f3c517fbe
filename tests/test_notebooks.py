"""Every notebook runs from top to bottom, and is the pair of its text."""

import os
import pathlib
import subprocess
import sys

import jupytext
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path):
    return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


def test_every_notebook_has_its_text():
    assert NOTEBOOKS
    assert {p.stem for p in NOTEBOOKS} == {p.stem for p in FOLDER.glob("*.py")}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_and_text_are_in_sync(path):
    assert cells(path) == cells(path.with_suffix(".py")), f"run: jupytext --sync {path}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_kept_without_outputs(path):
    code = [cell for cell in jupytext.read(path).cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)


# The strategies of this one are all compared with one device in `equivalence/`.
SOAK = {"02_parallelism"}


@pytest.mark.docs
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.soak] * (path.stem in SOAK), id=path.stem)
        for path in NOTEBOOKS
    ],
)
def test_notebook_runs(path, tmp_path):
    """On virtual CPU devices, in a kernel of its own, within the two minutes that it promises."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    command = [sys.executable, "-m", "pytest", "-q", "--nbmake", "--nbmake-timeout=120"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}", str(path)]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={**environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
