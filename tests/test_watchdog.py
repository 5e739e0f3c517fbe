"""Real processes that hang: each takes about a second to start."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from shardlib.config import from_dict
from shardlib.errors import ConfigError
from shardlib.runtime.exit_codes import HUNG
from shardlib.runtime.phases import PHASES, PhaseClock
from shardlib.runtime.watchdog import Watchdog, WatchdogConfig

PRELUDE = """
import os, signal, sys, threading, time
from shardlib.runtime.phases import PhaseClock
from shardlib.runtime.watchdog import Watchdog, WatchdogConfig
clock = PhaseClock()

def watched(directory, **limits):
    return Watchdog(clock, WatchdogConfig(**limits), directory)

def say(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()
"""


@pytest.fixture
def start(tmp_path):
    """Starts a process with its stacks going to `stacks/`."""
    started = []

    def start(code, **options):
        options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE} | options
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code), tmp_path / "stacks"],
            stdout=subprocess.PIPE, text=True, **options,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def ended(process):
    """Exit code, stdout and stderr."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.mesh
def test_a_phase_that_hangs_leaves_its_stacks(start, tmp_path):
    code, out, err = ended(
        start("""
            def stuck():
                lock = threading.Lock()
                lock.acquire()
                say("stuck")
                lock.acquire()

            with watched(sys.argv[1], data_wait=0.5, step=0.1):
                clock.enter("data_wait")
                # It goes on after all: each beat starts the time anew.
                for _ in range(8):
                    time.sleep(0.1)
                    clock.progress()
                say("went on")
                threading.Thread(target=time.sleep, args=(100,), name="other").start()
                stuck()
        """)
    )
    report = tmp_path / "stacks" / "stacks-process0.txt"
    assert (code, out) == (HUNG, "went on\nstuck\n")
    said = (
        r"process 0: no progress in phase 'data_wait' for \d+ s \(its limit: 0.5 s\); stacks in "
        + re.escape(str(report))
        + f", exit code {HUNG}\n"
    )
    assert re.match(r"\n" + said, err)
    text = report.read_text()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d " + said, text)
    for stacks in (err, text):
        assert stacks.count("Thread 0x") >= 3
        assert re.search(r'File "<string>", line \d+ in stuck\n', stacks)


def test_stacks_that_cannot_be_written_change_nothing(start, tmp_path):
    (tmp_path / "stacks").write_text("a file where the directory should be")
    # A loop of Python is watched as well as a wait.
    code, _, err = ended(
        start("""
            with watched(sys.argv[1], init=0.2):
                while True:
                    pass
        """)
    )
    assert code == HUNG
    assert "no progress in phase 'init'" in err
    assert re.search(r"stacks cannot be written to .*-process0.txt: .*File exists", err)


@pytest.mark.mesh
def test_what_holds_the_interpreters_lock_is_ended_all_the_same(start):
    """By faulthandler, which knows no exit code but 1."""
    code, _, err = ended(
        start("""
            import ctypes
            with watched(sys.argv[1], step=0.2):
                clock.enter("step")
                time.sleep(0.1)
                # Unlike CDLL, this one does not release the lock.
                ctypes.PyDLL(None).sleep(100)
        """)
    )
    assert code == 1
    assert err.startswith("Timeout (0:00:0")
    assert re.search(r'File "<string>", line \d+ in <module>\n', err)


@pytest.mark.mesh
def test_no_limit_and_no_phase_too_long(start):
    code, out, err = ended(
        start("""
            none = dict.fromkeys(
                ("init", "compile", "data_wait", "step", "evaluate", "save", "restore"))
            with watched(sys.argv[1], **none):
                time.sleep(0.1)
            with watched(sys.argv[1], **none | {"step": 0.3}):
                time.sleep(0.6)
                for _ in range(4):
                    clock.enter("step")
                    time.sleep(0.05)
                    clock.enter("save")
                    time.sleep(0.05)
            say(str([thread.name for thread in threading.enumerate()]))
            # Nothing is left that could go off.
            clock.enter("step")
            time.sleep(1.5)
        """)
    )
    assert (code, out, err) == (0, "['MainThread']\n", "")


@pytest.mark.mesh
def test_a_process_that_was_stopped_has_not_hung(start):
    process = start("""
        with watched(sys.argv[1], step=1.0):
            clock.enter("step")
            say("ready")
            time.sleep(0.5)
            clock.progress()
            time.sleep(0.5)
    """)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    # Longer than the limit, shorter than the last resort waits.
    time.sleep(1.7)
    process.send_signal(signal.SIGCONT)
    assert ended(process) == (0, "", "")


@pytest.mark.mesh
def test_a_person_in_the_debugger_has_not_hung(start):
    process = start(
        """
        with watched(sys.argv[1], step=0.2):
            clock.enter("step")
            breakpoint()
            say("done")
        """,
        stdin=subprocess.PIPE,
    )
    time.sleep(2.5)
    assert process.poll() is None
    process.stdin.write("c\n")
    code, out, err = ended(process)
    assert (code, err) == (0, "")
    assert out.endswith("(Pdb) done\n")


@pytest.mark.soak
def test_nobody_reads_what_it_says(start):
    """The pipe is full, and writing to it holds the interpreter's lock."""
    read, write = os.pipe()
    process = start(
        """
        os.set_blocking(2, False)
        try:
            while True:
                os.write(2, b"x" * 4096)
        except BlockingIOError:
            pass
        os.set_blocking(2, True)
        say("full")
        with watched(sys.argv[1], init=0.2):
            time.sleep(100)
        """,
        stderr=write,
    )
    try:
        assert process.stdout.readline() == "full\n"
        begun = time.monotonic()
        assert process.wait(60) == HUNG
        assert time.monotonic() - begun < 15
    finally:
        os.close(read)
        os.close(write)


def test_limits():
    limits = {phase: WatchdogConfig(save=None).limit(phase) for phase in PHASES}
    assert (limits["save"], limits["step"], limits["compile"]) == (None, 900, 3600)
    fault = r"(?s)init is 0, but must be above 0, or null for no limit.*save is -1"
    with pytest.raises(ConfigError, match=fault):
        from_dict(WatchdogConfig, {"save": -1, "init": 0}, "run.yaml")


def test_it_is_no_burden(tmp_path):
    """Neither to start nor to end: a run may be short."""
    begun = time.monotonic()
    with Watchdog(PhaseClock(), WatchdogConfig(), tmp_path):
        pass
    assert time.monotonic() - begun < 0.5
    assert list(pathlib.Path(tmp_path).iterdir()) == []
