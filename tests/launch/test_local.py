import errno
import io
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from shardlib.errors import DistributedError
from shardlib.runtime.launch import run_local, shardlib_command
from shardlib.runtime.launch.local import gpu_shares

INDEX = 'int(os.environ["SHARDLIB_PROCESS_ID"])'


def python(code):
    return [sys.executable, "-c", textwrap.dedent(code)]


def launch(code, processes=2, **options):
    output = io.StringIO()
    code = run_local(python(code), processes, output=output, **options)
    return code, output.getvalue()


def test_what_gloo_says_of_its_connections_is_left_out():
    said = "Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    code, text = launch(
        f"""
        print("[Gloo] {said}")
        print("[Gloo] Rank 0[Gloo] {said}")
        print("[Gloo] something went wrong")
    """,
        1,
    )
    assert (code, text) == (0, "[0] [Gloo] something went wrong\n")


def test_every_line_tells_its_process():
    code, text = launch(f"""
        import os, sys
        print("out", {INDEX})
        print("err", {INDEX}, file=sys.stderr)
        sys.stdout.write("no newline")
    """)
    assert code == 0
    assert sorted(text.splitlines()) == [
        f"[{i}] {line}" for i in (0, 1) for line in (f"err {i}", "no newline", f"out {i}")
    ]


def test_the_environment_describes_the_group():
    code, text = launch(
        """
        import os
        print(*(os.environ[name] for name in (
            "SHARDLIB_COORDINATOR", "SHARDLIB_NUM_PROCESSES",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION", "MINE")))
        """,
        processes=3,
        environment={**os.environ, "MINE": "kept"},
    )
    assert code == 0
    values = {tuple(line.split()[1:]) for line in text.splitlines()}
    assert len(values) == 1
    coordinator, count, collectives, mine = values.pop()
    host, port = coordinator.split(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 65536
    assert (count, collectives, mine) == ("3", "gloo", "kept")


def test_the_first_failure_ends_the_others():
    start = time.monotonic()
    code, text = launch(f"""
        import os, sys, time
        if {INDEX} == 1:
            sys.exit(7)
        time.sleep(60)
    """)
    assert code == 7
    assert text == "[launch] process 1 ended with exit code 7; ending the other 1\n"
    assert time.monotonic() - start < 10


@pytest.mark.process
def test_what_ignores_sigterm_is_killed_after_the_grace():
    code, text = launch(
        f"""
        import os, signal, sys, time
        if {INDEX} == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        """,
        grace_seconds=0.3,
    )
    assert code == 128 + signal.SIGKILL
    assert text == "[launch] process 1 ended by SIGKILL; ending the other 1\n"


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on_once(number):
    """The launcher itself gets the signal, as from a terminal or a scheduler."""
    child = """
import signal, time
got = []
for n in (signal.SIGINT, signal.SIGTERM):
    signal.signal(n, lambda n, _: got.append(n))
print("ready")
end = time.monotonic() + 20
while not got and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(0.3)
print("got", *(signal.Signals(n).name for n in got))
"""
    launcher = f"""
import sys
from shardlib.runtime.launch import run_local
sys.exit(run_local([sys.executable, "-c", {child!r}], 2))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None
    ready = sorted(process.stdout.readline() for _ in range(2))
    assert ready == ["[0] ready\n", "[1] ready\n"]
    # To the whole group of the launcher, as a terminal does.
    os.killpg(process.pid, number)
    rest = sorted(process.stdout.read().splitlines())
    assert rest == [f"[{i}] got {signal.Signals(number).name}" for i in (0, 1)]
    assert process.wait(10) == 0
    process.stdout.close()


def test_an_output_that_closes_ends_the_group():
    launcher = """
import sys
from shardlib.runtime.launch import run_local
loop = "import time\\nwhile True: print('line'); time.sleep(0.01)"
code = run_local([sys.executable, "-c", loop], 2)
print(code, file=sys.stderr)
import os; os._exit(0)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read().strip() == str(128 + signal.SIGPIPE)
    process.wait(10)
    process.stderr.close()


def test_a_full_disk_of_the_output_does_not_end_the_group():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    assert run_local(python("print('x\\n' * 50_000)"), 1, output=Full()) == 0


def test_what_cannot_be_started():
    with pytest.raises(DistributedError, match=r"'no-such-program': No such .*\n  Give a program"):
        run_local(["no-such-program"], 2)
    with pytest.raises(DistributedError, match=r"0 processes cannot be .*\n  Start at least one"):
        run_local(["true"], 0)
    with pytest.raises(DistributedError, match=r"-1 restarts are impossible\.\n  Give 0 for none"):
        run_local(["true"], 1, restarts=-1)


def test_the_command_of_shardlib_itself():
    assert shardlib_command(["shardlib", "train"]) == shardlib_command(["train"])
    assert shardlib_command(["train", "a.yaml"]) == [
        sys.executable, "-m", "shardlib.cli", "train", "a.yaml"
    ]  # fmt: skip


def test_gpus_are_shared_out():
    assert gpu_shares({}, 8, 2) == ["0,1,2,3", "4,5,6,7"]
    assert gpu_shares({"CUDA_VISIBLE_DEVICES": "3, 5"}, 8, 2) == ["3", "5"]
    assert gpu_shares({"JAX_PLATFORMS": "cuda,cpu"}, 2, 1) == ["0,1"]
    assert gpu_shares({"JAX_PLATFORMS": "cpu"}, 8, 3) is None
    assert gpu_shares({"CUDA_VISIBLE_DEVICES": ""}, 8, 3) is None
    assert gpu_shares({}, 0, 3) is None
    with pytest.raises(DistributedError, match=r"2 processes cannot share .*\n  Start as many"):
        gpu_shares({}, 1, 2)
