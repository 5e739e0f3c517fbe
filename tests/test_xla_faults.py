"""The faults of XLA in docs/xla_faults.md are still there, and the check of programs finds them."""

import pathlib
import re

import jax
import numpy as np
import pytest

from shardlib.explain.wrong_numbers import wrong_numbers

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "xla_faults.md"
pytestmark = pytest.mark.skipif(not DOCUMENT.exists(), reason="runs in the repository")

MENDED = {"SL209": (0, 12)}
"""The version of JAX from which on a fault is mended, by its code."""


def faults():
    """Returns title, code and program of each fault; no code where the check does not tell it."""
    text = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    program = r"^## ([^\n]*?)(?: \((SL\d+)\))?$.*?```python\n(.*?)```"
    return re.findall(program, text, re.DOTALL | re.MULTILINE)


def run(program):
    """Runs a program and returns its names."""
    names = {}
    exec(compile(program, "fault.py", "exec"), names)
    return names


def error(expected, got):
    """Returns the largest relative error of a leaf."""
    return max(
        np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(a))
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True)
    )


def test_every_fault_is_documented():
    assert {code for _, code, _ in faults() if code} == {f"SL2{n:02}" for n in range(5, 11)}


@pytest.mark.docs
@pytest.mark.parametrize(("title", "code", "program"), faults(), ids=[f[0] for f in faults()])
def test_the_fault_is_still_there(title, code, program, capsys):
    assert len(program.splitlines()) <= 15
    names = run(program)
    assert capsys.readouterr().out
    found = error(names["expected"], names["f"](*names["arguments"]))
    if code in MENDED and jax.__version_info__ >= MENDED[code]:
        assert found < 1e-5
        return
    assert found > 1e-3, (
        f"XLA has mended a fault: {title}. Say so in {DOCUMENT.name}, and remove what works around "
        f"it, and its lint {code}, once this version of JAX is the oldest that is supported."
    )


@pytest.mark.docs
@pytest.mark.parametrize(("title", "code", "program"), faults(), ids=[f[0] for f in faults()])
def test_the_check_finds_it(title, code, program):
    names = run(program)
    traced = names["f"].trace(*names["arguments"])
    told = wrong_numbers(traced.lower().compile(), names["mesh"], traced.jaxpr)
    is_mended = code in MENDED and jax.__version_info__ >= MENDED[code]
    assert {fault.code for fault in told} == ({code} if code and not is_mended else set())
    assert {fault.where.source.rpartition(":")[0] for fault in told} <= {"fault.py"}
