"""Two live runs never share a directory; a dead one keeps nobody out."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from shardlib import cli, run
from shardlib.checkpoint import RunCheckpoints
from shardlib.errors import RunDirError
from shardlib.log.events import read_events
from shardlib.run.directory import hold
from shardlib.runtime.launch.local import group_variables

QUIET = ("eval.every_steps=0", "train.sample_length=0")
HOLDER = """
import os, pathlib, subprocess, sys, time
from shardlib.run.directory import hold
with hold(pathlib.Path(sys.argv[1]), print):
    {meanwhile}
    print("held", flush=True)
    sys.stdin.read()
"""
FORK = """subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
    if os.fork():
        time.sleep(60)"""


def refusal(run_dir, pid):
    return (
        f"run_dir {run_dir} is in use by another run: process {pid} on {socket.gethostname()}.\n"
        "  Wait until it has ended, or set run_dir to another directory."
    )


@contextlib.contextmanager
def holder(run_dir, meanwhile=""):
    """A process that holds a directory until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", HOLDER.format(meanwhile=meanwhile), run_dir],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.mesh
def test_the_second_is_refused_and_told_who_is_first(tmp_path):
    run_dir = tmp_path / "a" / "run"
    with holder(run_dir) as process:
        before = (run_dir / "run.lock").read_text()
        with pytest.raises(RunDirError) as refused, hold(run_dir, pytest.fail):
            pass
        assert str(refused.value) == refusal(run_dir, process.pid)
        assert [(path.name, path.read_text()) for path in run_dir.iterdir()] == [
            ("run.lock", before)
        ]
        process.stdin.close()
        assert process.wait(30) == 0
    assert list(run_dir.iterdir()) == []
    with hold(run_dir, pytest.fail):
        # Not even a second time within one process.
        with pytest.raises(RunDirError) as refused, hold(run_dir, pytest.fail):
            pass
        assert str(refused.value) == refusal(run_dir, os.getpid())
    assert list(run_dir.iterdir()) == []


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("meanwhile", ["", FORK], ids=["alone", "with children"])
def test_who_was_killed_keeps_nobody_out(tmp_path, meanwhile):
    with holder(tmp_path, meanwhile) as process:
        process.kill()
        process.wait(30)
        assert (tmp_path / "run.lock").exists()
        with hold(tmp_path, pytest.fail):
            text = (tmp_path / "run.lock").read_text()
            assert text == f"process {os.getpid()} on {socket.gethostname()}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mesh
def test_a_child_that_fails_does_not_give_the_lock_away(tmp_path):
    with hold(tmp_path, pytest.fail):
        code = """
            import os, pathlib, sys
            from shardlib.run.directory import hold
            with hold(pathlib.Path(sys.argv[1]), print):
                if child := os.fork():
                    os.waitpid(child, 0)
                    print(*os.listdir(sys.argv[1]))
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), tmp_path / "other"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout == "run.lock\n"


def test_never_two_at_once_though_the_file_comes_and_goes(tmp_path):
    inside, most, entered = [], [], []

    def enter():
        start = time.monotonic()
        # Longer than a second on a machine so busy that few have entered.
        while time.monotonic() < start + (1 if len(entered) > 100 else 60):
            with contextlib.suppress(RunDirError), hold(tmp_path, pytest.fail):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0)
                inside.pop()
                entered.append(1)

    threads = [threading.Thread(target=enter) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entered) > 100
    assert set(most) == {1}
    assert list(tmp_path.iterdir()) == []


def test_without_locks_it_is_said_and_the_run_goes_on(tmp_path, monkeypatch):
    # None is how Python itself marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "fcntl", None)
    told = []
    with hold(tmp_path, told.append), hold(tmp_path, told.append):
        assert told == 2 * [
            f"{tmp_path} cannot be locked (import of fcntl halted; None in sys.modules): make sure "
            "that no other run uses it"
        ]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    fault = r"file/run cannot be written: Not a directory.\n  Free space or restore access"
    with pytest.raises(RunDirError, match=fault), hold(tmp_path / "file" / "run", pytest.fail):
        pass


@pytest.mark.mesh
def test_every_process_of_a_group_is_refused(tmp_path):
    code = """
        import pathlib, sys
        from shardlib.runtime import distributed
        from shardlib.errors import RunDirError
        from shardlib.run.directory import hold
        distributed.initialize()
        for run_dir in sys.argv[1:]:
            try:
                with hold(pathlib.Path(run_dir), print):
                    print("in", (pathlib.Path(run_dir) / "run.lock").exists())
                    distributed.barrier("seen")
            except RunDirError as error:
                print(error)
        distributed.shutdown()
    """
    own = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    with holder(tmp_path / "taken") as process:
        group = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(code), tmp_path / "taken", tmp_path / "new"],
                env=variables,
                stdout=subprocess.PIPE,
                text=True,
            )
            for variables in group_variables(own, 2)
        ]
        said = [each.communicate(timeout=60)[0] for each in group]
        assert [each.returncode for each in group] == [0, 0]
        for text in said:
            lines = [line for line in text.splitlines() if "[Gloo]" not in line]
            assert "\n".join(lines) == f"{refusal(tmp_path / 'taken', process.pid)}\nin True"


@pytest.mark.mesh
def test_a_run_beside_a_live_one(lab, tmp_path, rows):
    """Neither one process nor a group gets in; readers do; and the run goes on as if alone."""
    run_dir, output = tmp_path / "run", tmp_path / "output.txt"
    words = ("train", lab.config_file, f"run_dir={run_dir}", "train.steps=100000", *QUIET)
    metrics, lock = run_dir / "metrics.jsonl", run_dir / "run.lock"
    with (
        output.open("w") as file,
        subprocess.Popen(lab.command(*words), stdout=file, stderr=file) as first,
    ):
        try:
            deadline = time.monotonic() + 110
            while not metrics.exists() or metrics.read_text().count("\n") < 15:
                assert time.monotonic() < deadline
                assert first.poll() is None, output.read_text()
                time.sleep(0.02)
            text = refusal(run_dir, first.pid)
            with pytest.raises(RunDirError) as refused:
                run.train(lab.config(run_dir, "train.steps=100000", *QUIET))
            assert str(refused.value) == text
            group = lab.shardlib("launch", "--processes", 2, "--", *words)
            assert group.returncode == 1
            assert f"[0] RunDirError: {text.splitlines()[0]}\n" in group.stdout
            with pytest.raises(SystemExit) as ended:
                cli.main(["checkpoint", "ls", str(run_dir)])
            assert not ended.value.code
            assert lock.read_text() == f"process {first.pid} on {socket.gethostname()}\n"
            assert first.poll() is None
        finally:
            first.kill()
    assert "warning" not in output.read_text()
    assert {event["kind"] for event in read_events(run_dir)} <= {"start", "saved"}
    assert [row["step"] for row in rows(run_dir)] == list(range(1, len(rows(run_dir)) + 1))
    with RunCheckpoints(run_dir / "checkpoints") as checkpoints:
        newest = checkpoints.latest()
    # It was killed: its file is there, and keeps nobody out.
    assert lock.exists()
    result = run.train(lab.config(run_dir, f"train.steps={newest + 1}", *QUIET))
    assert result.step == newest + 1
    assert not lock.exists()
