"""The ids of tests and their times: what is refused, and that pytest refuses it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ids import LONGEST, faulty_ids

REFUSED = {
    "bytes": ("\\x1f\\x8b\\x08", "it holds bytes"),
    "not printable": ("\x01", "it holds what cannot be printed"),
    "half a character": ("\\udcff", "it holds bytes"),
    "address": ("0x7f32a8c01d90-1", "it holds an address"),
    "object": ("<builtins.object object at", "it holds an address"),
    "seconds": (str(time.time()), "it holds a time"),
    "clock": ("12:41:07", "it holds a time"),
    "long": ("x" * (LONGEST + 1), f"its part in brackets has {LONGEST + 1} characters, more than"),
}
ALLOWED = ["8xh100-data=8-<lambda>", "10x1xrtx4090-rtx4090-10-10-1-1", "8030261248", "x" * LONGEST]


@pytest.mark.parametrize(("case", "fault"), REFUSED.values(), ids=REFUSED)
def test_what_two_processes_may_not_agree_on_is_refused(case, fault):
    (line,) = faulty_ids([*(f"t.py::test_b[{name}]" for name in ALLOWED), f"t.py::test_a[{case}]"])
    assert line.startswith("t.py::test_a[")
    assert f": {fault}" in line
    assert line.isprintable()
    assert len(line) < LONGEST


def run_planted(folder, text, *words, **environment):
    """Runs pytest with the hooks of these tests on a file of its own."""
    (folder / "test_planted.py").write_text(f"import pytest\n{text}")
    command = ["-m", "pytest", "-p", "conftest", "-q", "--rootdir", folder, *words, folder]
    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.mark.mesh
def test_collection_refuses_it(tmp_path):
    cases = "@pytest.mark.parametrize('x', [b'\\xff', 'fine'])\ndef test_bytes(x): pass\n"
    done = run_planted(tmp_path, cases, "--collect-only")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "1 test ids are not short printable text that is always the same:" in done.stderr
    assert "test_planted.py::test_bytes[\\xff]: it holds bytes" in done.stderr
    assert "Name these cases: pytest.param(..., id='cut short'), or ids=[...]." in done.stderr


@pytest.mark.mesh
def test_a_slow_test_without_a_tier_fails(tmp_path):
    slow = "import time\ndef test_slow(): time.sleep(0.2)\n@pytest.mark.mesh\n"
    slow += "def test_marked(): time.sleep(0.2)\ndef test_quick(): pass\n"
    words = ("-m", "", "--durations=0", "--durations-min=0.1")
    done = run_planted(tmp_path, slow, *words, SLOWEST_TEST_SECONDS="0.1")
    assert re.search(r"It took [\d.]+ s; a test without a tier may take 0.1 s\.", done.stdout)
    assert "1 failed, 2 passed" in done.stdout
    assert "s call     test_planted.py::test_slow" in done.stdout  # Each time is printed.
