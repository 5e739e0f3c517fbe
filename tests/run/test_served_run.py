"""`shardlib serve RUN` as a process: it answers what is open before it ends."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from shardlib.cli import main

TOKENS = 120


@contextlib.contextmanager
def served(lab, finished, *, waits=True, cache="cache"):
    """Yields the process and a client: once the server is ready, or has an address."""
    command = lab.command("serve", finished.run_dir, "--port", 0, "--slots", 4, "--context", 160)
    environment = os.environ | {"SHARDLIB_CACHE": str(lab.root / cache)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = process.stderr.readline()
            address = re.search(r"http://\S+:\d+", line)
            assert address, line + process.stderr.read()
            with httpx.Client(base_url=address[0], timeout=60, trust_env=False) as client:
                end = time.monotonic() + 90
                while waits and client.get("/ready").status_code != 200:
                    assert time.monotonic() < end
                    time.sleep(0.1)
                yield process, client
        finally:
            process.kill()


def streamed(client, started):
    """Returns the events of an answer; `started` gets an item after the first."""
    body = {"prompt": "the ", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    events = []
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            events += [line] if line else []
            if len(events) == 1:
                started.append(client)
    return events


@pytest.mark.process
def test_sigterm_answers_what_is_open(lab, finished):
    with served(lab, finished) as (process, client), ThreadPoolExecutor(8) as pool:
        started = []
        # Four run, and two wait for a slot.
        futures = [pool.submit(streamed, client, started) for _ in range(6)]
        while len(started) < 4:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        while client.get("/ready").status_code == 200:
            time.sleep(0.01)
        refused = client.post("/v1/completions", json={"prompt": "the "})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert client.get("/health").status_code == 200
        for one in futures:
            events = one.result()
            assert events[-1] == "data: [DONE]"
            last = json.loads(events[-2].removeprefix("data: "))
            assert last["choices"][0]["finish_reason"] == "length"
        assert process.wait(20) == 0


@pytest.mark.process
def test_sigterm_while_programs_compile(lab, finished):
    with served(lab, finished, waits=False, cache="empty") as (process, client):
        assert client.get("/ready").status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "terminate called" not in process.stderr.read()


@pytest.mark.soak
def test_a_second_signal_ends_at_once(lab, finished):
    with served(lab, finished) as (process, client), ThreadPoolExecutor(1) as pool:
        started = []
        future = pool.submit(streamed, client, started)
        while not started:
            time.sleep(0.01)
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)  # The system keeps one signal of a kind.
        assert process.wait(10) == 128 + signal.SIGTERM
        with contextlib.suppress(httpx.HTTPError):
            assert "data: [DONE]" not in future.result()


@pytest.mark.process
def test_a_port_that_is_taken(finished, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as ended:
            main(["serve", str(finished.run_dir), "--port", port])
    assert ended.value.code == 2
    assert "cannot be used: Address already in use" in capsys.readouterr().err
