"""Stopping one process; several are in test_distributed.py."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from shardlib.runtime.stopping import StopRequest


def test_a_signal_is_a_request(capfd):
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    for number in handled:
        again = "; Ctrl-C again ends at once" if number == signal.SIGINT else ""
        before = [signal.getsignal(each) for each in handled]
        with StopRequest() as stop:
            assert not stop.requested
            assert not stop.agreed(0)
            os.kill(os.getpid(), number)
            assert stop.requested
            assert stop.agreed(1)
            assert stop.reason == signal.Signals(number).name
        assert before == [signal.getsignal(each) for each in handled]
        assert capfd.readouterr().err == (
            f"\n{signal.Signals(number).name}: stopping after this step{again}.\n"
        )


def test_the_second_interrupt_ends_at_once():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_can_ask_too():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with StopRequest() as stop:
            seen.append(signal.getsignal(signal.SIGINT) is before)
            seen.append(stop.agreed(0))
            stop.request("a thread")
            seen.append(stop.agreed(1))
            seen.append(stop.reason)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True, False, True, "a thread"]


# While the main thread is out of reach


def test_in_an_event_loop_which_reads_signals_itself():
    async def main():
        with StopRequest(notices=[]) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
            return stop.agreed(0), stop.reason

    assert asyncio.run(main()) == (True, "SIGTERM")


DEAF = """
import ctypes, os, signal, time
from shardlib.runtime.stopping import StopRequest
libc = ctypes.CDLL(None)

def deaf():
    # In C, without the interpreter's lock, as a collective that waits for a peer that never comes.
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    print("deaf", flush=True)
    libc.pthread_mutex_lock(mutex)
"""


def python(code):
    return subprocess.Popen(
        [sys.executable, "-c", DEAF + textwrap.dedent(code)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.mesh
def test_a_process_that_hangs_in_c_hears_and_ends():
    with python("""
        with StopRequest(notices=[]) as stop:
            deaf()
    """) as process:
        try:
            assert process.stdout.readline() == "deaf\n"
            process.send_signal(signal.SIGTERM)
            said = [process.stderr.readline() for _ in range(2)]
            assert said == ["\n", "SIGTERM: stopping after this step.\n"]
            begun = time.monotonic()
            for _ in range(2):
                process.send_signal(signal.SIGINT)
                time.sleep(0.3)
            assert process.wait(30) == 130
            assert 2 < time.monotonic() - begun < 10
            assert process.stderr.read() == "\nSIGINT: ending at once.\n"
        finally:
            process.kill()


def test_the_signals_of_a_forked_child_are_its_own():
    with python("""
        import warnings
        warnings.simplefilter("ignore")  # JAX's, that forking is dangerous.
        with StopRequest(notices=[]) as stop:
            child = os.fork()
            if not child:
                while not stop.requested:
                    time.sleep(0.01)
                os._exit(5)
            time.sleep(0.3)
            os.kill(child, signal.SIGTERM)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            time.sleep(0.3)
            print(stop.requested)
    """) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "5\nFalse\n")
    # The child's.
    assert err == "\nSIGTERM: stopping after this step.\n"
