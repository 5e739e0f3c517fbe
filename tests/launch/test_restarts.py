"""Groups that fail and are started again: real processes, which tell their progress by files."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from shardlib.runtime.exit_codes import DIVERGED, HUNG, WRONG_REQUEST
from shardlib.runtime.launch import (
    report_failure,
    report_progress,
    report_rewind,
    run_local,
    shardlib_command,
)
from shardlib.runtime.launch.group import Ending
from shardlib.runtime.launch.progress import Progress, read_progress
from shardlib.runtime.launch.restarts import RestartDecision, Restarts

PRELUDE = """
import os, pathlib, signal, sys, time
from shardlib.runtime.launch.progress import report_failure, report_progress, report_rewind
index = int(os.environ["SHARDLIB_PROCESS_ID"])
# How often this process has been started, counted in a file.
file = pathlib.Path(os.environ["COUNTS"], str(index))
attempt = len(file.read_text()) if file.exists() else 0
file.write_text("x" * (attempt + 1))
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Runs code in each process; returns the exit code and the lines of the launcher."""
    monkeypatch.setenv("COUNTS", str(tmp_path))

    def launch(code, *, processes=1, restarts=2, **options):
        output = io.StringIO()
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
        ended = run_local(command, processes, restarts=restarts, output=output, **options)
        said = [
            line.removeprefix("[launch] ")
            for line in output.getvalue().splitlines()
            if line.startswith("[launch] ")
        ]
        return ended, said

    return launch


@contextlib.contextmanager
def running(code):
    """A launcher in a process of its own, and what it writes."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout
        finally:
            process.kill()


def starts(tmp_path, index=0):
    return len((tmp_path / str(index)).read_text())


@pytest.mark.process
def test_a_group_is_started_again_until_it_ends_well(launch, tmp_path):
    code, said = launch(
        f"""
        if attempt == 0 and index == 1:
            sys.exit({HUNG})
        if attempt == 0:
            time.sleep(60)
        """,
        processes=2,
    )
    assert code == 0
    assert said == [
        "process 1 ended with exit code 75 (it hung, or lost its peers); ending the other 1",
        "starting again in 1 s: process 1 ended with exit code 75 (it hung, or lost its peers); "
        "nothing new was saved (1 of 2)",
    ]
    assert (starts(tmp_path, 0), starts(tmp_path, 1)) == (2, 2)


@pytest.mark.process
def test_only_attempts_in_vain_count(launch, tmp_path):
    code, said = launch(
        """
        if attempt < 2:
            report_progress(10 * (attempt + 1))
        if attempt == 3:
            report_progress(20)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        restarts=1,
    )
    assert code == 128 + signal.SIGKILL
    assert said == [
        "process 0 ended by SIGKILL",
        "starting again in 1 s: process 0 ended by SIGKILL; step 10 is saved",
        "process 0 ended by SIGKILL",
        "starting again in 1 s: process 0 ended by SIGKILL; step 20 is saved",
        "process 0 ended by SIGKILL",
        "starting again in 1 s: process 0 ended by SIGKILL; nothing new was saved (1 of 1)",
        "process 0 ended by SIGKILL",
        "not started again: 2 attempts in a row saved nothing new",
    ]


@pytest.mark.process
def test_a_run_that_went_back_gets_on(launch):
    """The process that was killed first could not tell."""
    code, said = launch(
        """
        if attempt < 2:
            report_progress(100)
        if attempt == 1 and index == 0:
            report_rewind(50)
            report_progress(60)
        if index == 1:
            time.sleep(0.5)  # The other has told by then.
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """,
        processes=2,
        restarts=1,
        grace_seconds=0.1,
    )
    assert code == 128 + signal.SIGKILL
    assert [line for line in said if "start" in line] == [
        "starting again in 1 s: process 1 ended by SIGKILL; step 100 is saved",
        "starting again in 1 s: process 1 ended by SIGKILL; step 60 is saved",
        "starting again in 1 s: process 1 ended by SIGKILL; nothing new was saved (1 of 1)",
        "not started again: 2 attempts in a row saved nothing new",
    ]


@pytest.mark.process
def test_what_cannot_work_is_tried_twice(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"run_dir: {tmp_path}/run\n"
        "model: {name: transformer}\n"
        f"data: {{path: {tmp_path}/corpus, tokenizer: bytes}}\n"
        "train: {steps: 2, global_batch: 8, cpu_devices: 1, compilation_cache: null}\n"
    )
    output = io.StringIO()
    command = shardlib_command(["train", str(config)])
    assert run_local(command, 1, restarts=9, output=output) == 1
    fault = f"DataError: data.path: there is nothing at '{tmp_path}/corpus'"
    assert output.getvalue().count(f"[0] {fault}.\n") == 2
    assert output.getvalue().splitlines()[-1] == (
        f"[launch] not started again: {fault}, for the second time"
    )


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_what_the_user_ends_is_not_started_again(launch, tmp_path, number):
    run = f"""
import sys
from shardlib.runtime.launch import run_local
sys.exit(run_local([sys.executable, "-c", {PRELUDE + 'print("up", flush=True); time.sleep(60)'!r}],
    2, restarts=3))
"""
    with running(run) as (process, lines):
        up = 0
        while up < 2:
            line = lines.readline()
            assert line
            up += "up" in line
        process.send_signal(number)
        rest = lines.read()
        assert process.wait(30) == 128 + number
    assert rest.endswith(f"[launch] not started again: {number.name} ended it\n")
    assert starts(tmp_path) == 1


@pytest.mark.process
def test_ctrl_c_between_two_attempts(tmp_path):
    run = """
import sys
from shardlib.runtime.launch import run_local
sys.exit(run_local([sys.executable, "-c", "import sys; sys.exit(7)"], 1, restarts=9))
"""
    with running(run) as (process, lines):
        while "starting again in 2 s" not in (line := lines.readline()):
            assert line
        asked = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert lines.read() == "[launch] not started again: SIGINT ended it\n"
        assert process.wait(30) == 7
    assert time.monotonic() - asked < 1.5


@pytest.mark.process
def test_who_lost_a_peer_is_not_who_failed(launch):
    code, said = launch(
        f"""
        if index == 1:
            time.sleep(0.5)
            sys.exit(3)
        sys.exit({HUNG})
        """,
        processes=2,
        restarts=0,
    )
    assert (code, said) == (3, ["process 1 ended with exit code 3"])


# What processes tell


def test_progress_and_failure_are_kept_together(tmp_path, monkeypatch):
    file = tmp_path / "told"
    monkeypatch.delenv("SHARDLIB_PROGRESS_FILE", raising=False)
    report_progress(1)
    report_failure("x", 1)
    assert os.listdir(tmp_path) == []
    monkeypatch.setenv("SHARDLIB_PROGRESS_FILE", str(file))
    assert read_progress(file) == Progress()
    report_progress(3)
    report_failure("not finite", 5)
    report_progress(4)
    assert read_progress(file) == Progress(4, ("not finite", 5))
    report_rewind(2)
    assert read_progress(file) == Progress(2, ("not finite", 5), 2)
    report_rewind(0)
    assert read_progress(file) == Progress(None, ("not finite", 5), 0)
    assert os.listdir(tmp_path) == ["told"]


@pytest.mark.parametrize(
    "text",
    ["", '{"saved_step": 3', "[]", '{"saved_step": "3", "failure": null}', '{"saved_step": 3}',
     '{"saved_step": 3, "failure": ["nan"], "rewound_to": null}',
     pytest.param("\udcff", id="not UTF-8")],
)  # fmt: skip
def test_a_broken_file_says_nothing(tmp_path, monkeypatch, text):
    file = tmp_path / "told"
    file.write_text(text, errors="surrogateescape")
    assert read_progress(file) == Progress()
    monkeypatch.setenv("SHARDLIB_PROGRESS_FILE", str(file))
    report_progress(7)
    assert read_progress(file) == Progress(7)


def test_a_run_goes_on_when_it_cannot_tell(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SHARDLIB_PROGRESS_FILE", str(tmp_path / "gone" / "told"))
    report_progress(1)
    report_failure("not finite", 3)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count(f"{tmp_path}/gone/told cannot be written: No such file or directory.") == 1


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_run_knows_how_often_it_may_be_started_again(launch, monkeypatch, restarts):
    monkeypatch.setenv("SHARDLIB_RESTARTS", "9")  # Of a launcher around this one.
    code = f'sys.exit(0 if os.environ["SHARDLIB_RESTARTS"] == "{restarts}" else 2)'
    assert launch(code, restarts=restarts) == (0, [])


# Verdicts


def test_waits_grow_to_half_a_minute_and_start_over_with_progress():
    judge = Restarts(100)
    failed = Ending(1)
    waits = [judge.judge(failed, Progress()).backoff_seconds for _ in range(7)]
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    assert judge.judge(failed, Progress(5)).backoff_seconds == 1
    assert judge.judge(failed, Progress(5)).backoff_seconds == 1
    assert judge.judge(failed, Progress(5)).backoff_seconds == 2


MISSING = ("data are missing", None)
IN_VAIN = "not started again: {} attempts in a row saved nothing new"


@pytest.mark.parametrize(
    ("allowed", "attempts", "end"),
    [
        # A damaged checkpoint may throw a run back: what it saves again is no progress.
        (1, [(1, Progress(50)), (1, Progress(40)), (1, Progress(50))], IN_VAIN.format(2)),
        # A run that went back on purpose makes progress from there.
        (
            0,
            [
                (1, Progress(100)),
                (1, Progress(60, None, 50)),
                (1, Progress(70)),
                (1, Progress(150, None, 120)),
                (1, Progress(150)),
            ],
            "not started again: 1 attempt saved nothing new",
        ),
        # Going back is no progress.
        (
            2,
            [(1, Progress(100)), (1, Progress(50, None, 50)), *[(1, Progress(None, None, 0))] * 2],
            IN_VAIN.format(3),
        ),
        # A failure outside of steps is the same until something is saved.
        (
            9,
            [
                (1, Progress(None, MISSING)),
                (1, Progress(10, MISSING)),
                (1, Progress(20, MISSING)),
                (1, Progress(None, ("another", None))),
                (1, Progress(20, MISSING)),
            ],
            "not started again: data are missing, for the second time",
        ),
        # Other failures in between do not hide the second time.
        (
            9,
            [
                (DIVERGED, Progress(10, ("nan", 12))),
                (DIVERGED, Progress(11, ("nan", 13))),
                (DIVERGED, Progress(11, ("spike", 12))),
                (HUNG, Progress()),
                (DIVERGED, Progress(12, ("nan", 12))),
            ],
            "not started again: nan at step 12 for the second time",
        ),
        # A divergence without a step counts at the last saved one.
        (
            9,
            [(DIVERGED, Progress(10)), (DIVERGED, Progress(20)), (DIVERGED, Progress())],
            "not started again: diverged at step 20 for the second time",
        ),
        (9, [(130, Progress())], "not started again: Ctrl-C ended it"),
        (
            9,
            [(WRONG_REQUEST, Progress())],
            "not started again: process 0 ended with exit code 2: the request is wrong",
        ),
    ],
    ids=[
        *("lost", "rewound", "going back", "no step", "in between", "diverged", "ctrl-c", "wrong"),
    ],
)
def test_the_last_attempt(allowed, attempts, end):
    judge = Restarts(allowed)
    *before, last = [judge.judge(Ending(status), progress) for status, progress in attempts]
    assert all(decision.again for decision in before)
    assert last == RestartDecision(False, end)


def test_how_processes_end():
    assert Ending(0, 3).code == 0
    assert Ending(-9, 3).code == 137
    assert Ending(-9, 3).who == "process 3 ended by SIGKILL"
    assert Ending(-40, 3).who == "process 3 ended by signal 40"
    assert Ending(1).who == "process 0 ended with exit code 1"
