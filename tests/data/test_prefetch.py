"""Prefetching: the batches of the source, on the devices, each row read once."""

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.data import MapSource, Prefetcher
from shardlib.registry import DataSpec
from shardlib.runtime.phases import PhaseClock
from shardlib.train.loop import Loop

PADDING = {"tokens": np.zeros((6,), np.int32), "weight": np.zeros((), np.float32)}


class Numbers:
    """Examples that tell their index; may be slow, fail, and keep count."""

    def __init__(self, *, delay=0.0, fails_at=None):
        self.asked = []
        self._delay = delay
        self._fails_at = fails_at

    def __getitem__(self, index):
        self.asked.append(index)
        time.sleep(self._delay)
        if index == self._fails_at:
            raise RuntimeError(f"example {index} is broken")
        return {
            "tokens": np.arange(6, dtype=np.int32) + 100 * index,
            "weight": np.array(index, np.float32),
        }


def source(examples, *, num_examples=None, global_batch=8):
    return MapSource(
        lambda: examples,
        spec=DataSpec(),
        global_batch=global_batch,
        padding=PADDING,
        num_examples=num_examples,
    )


def shardings(tokens=("data", "context"), weight=("data",)):
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    return {
        "tokens": NamedSharding(mesh, PartitionSpec(*tokens)),
        "weight": NamedSharding(mesh, PartitionSpec(*weight)),
    }


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "shardlib-prefetch"]


@pytest.mark.parametrize(
    "tokens",
    [("data", "context"), (("data", "context"),), ("context", None), (None, "context"), ()],
    ids=str,
)
def test_batches_equal_those_of_the_source(tokens):
    numbers = Numbers()
    with Prefetcher(source(numbers), shardings(tokens), start_step=3) as batches:
        for step in (3, 4, 5):
            batch = next(batches)
            expected = source(Numbers()).read(step, 0, 8)
            assert batch.keys() == expected.keys()
            for name, values in expected.items():
                np.testing.assert_array_equal(np.asarray(batch[name]), values)
                assert batch[name].dtype == values.dtype
                assert batch[name].sharding == shardings(tokens)[name]
    # Each row once, though several devices hold it.
    assert numbers.asked[:24] == list(range(24, 48))
    assert threads() == []


def test_a_pass_ends_with_a_padded_batch():
    with Prefetcher(source(Numbers(), num_examples=11), shardings()) as batches:
        weights = [np.asarray(batch["weight"]).tolist() for batch in batches]
        assert weights == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 0, 0, 0, 0, 0]]
        assert list(batches) == []


def test_reading_goes_on_ahead_and_no_further():
    numbers = Numbers()
    with Prefetcher(source(numbers), shardings(), depth=2) as batches:
        next(batches)
        deadline = time.monotonic() + 10
        # One used, two ready, and one that waits for room.
        while len(numbers.asked) < 32 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert len(numbers.asked) == 32


def test_an_error_is_raised_where_its_batch_would_be():
    with Prefetcher(source(Numbers(fails_at=19)), shardings()) as batches:
        next(batches)
        next(batches)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^example 19 is broken$"):
                next(batches)
    assert threads() == []


def test_closing_ends_the_thread_while_it_waits_for_room():
    batches = Prefetcher(source(Numbers()), shardings(), depth=1)
    next(batches)
    time.sleep(0.05)
    batches.close()
    batches.close()
    assert threads() == []
    with pytest.raises(ValueError, match=r"^this Prefetcher is closed$"):
        next(batches)


@pytest.mark.mesh
def test_a_forgotten_prefetcher_is_collected():
    batches = Prefetcher(source(Numbers()), shardings())
    next(batches)
    del batches
    gc.collect()
    assert threads() == []


def test_faults_are_found_before_the_thread_starts():
    both = shardings()
    with pytest.raises(
        ValueError,
        match=r"^shardings are for \['tokens'\] but a batch holds \['tokens', 'weight'\]$",
    ):
        Prefetcher(source(Numbers()), {"tokens": both["tokens"]})
    with pytest.raises(ValueError, match=r"^depth must be at least 1, not 0$"):
        Prefetcher(source(Numbers()), both, depth=0)
    with pytest.raises(ValueError, match="should evenly divide the shape"):
        Prefetcher(source(Numbers(), global_batch=6), both)
    assert threads() == []


class Gate:
    """Examples that do not come before the gate is opened, which may be never."""

    def __init__(self):
        self.opened = threading.Event()

    def __getitem__(self, index):
        assert self.opened.wait(60)
        return Numbers()[index]


def test_a_read_without_end_is_time_waited_for_data():
    """What a watchdog sees of it: the phase, and that nothing has moved since."""
    clock, gate = PhaseClock(), Gate()
    with Prefetcher(source(gate), shardings()) as batches:
        loop = Loop(
            lambda state, batch: (state, {"loss": np.float32(0)}),
            batches,
            on_step=lambda record: None,
            is_due=lambda step: False,
            after_step=lambda step, state: True,
            clock=clock,
        )
        seen = []

        def watch():
            while not (clock.present[0] == "data_wait" and clock.present[1] > 0.2):
                time.sleep(0.01)
            seen.append(clock.present[0])
            gate.opened.set()

        watchdog = threading.Thread(target=watch, daemon=True)
        watchdog.start()
        loop.run(SimpleNamespace(step=0), 2)
        watchdog.join(10)
        assert seen == ["data_wait"]


PROGRAM = """
import sys, jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from shardlib.data import MapSource, Prefetcher
from shardlib.registry import DataSpec
asked = []
class Numbers:
    def __getitem__(self, index):
        asked.append(index)
        return {"x": np.arange(4, dtype=np.int32) + 10 * index}
source = MapSource(Numbers, spec=DataSpec(), global_batch=8, padding={"x": np.zeros(4, np.int32)},
                   num_examples=16)
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "context"),
            axis_types=(AxisType.Auto,) * 2)
with Prefetcher(source, {"x": NamedSharding(mesh, PartitionSpec("data", "context"))}) as batches:
    total = jax.jit(lambda x: (x * np.arange(1, 33, dtype=np.int32).reshape(8, 4)).sum())
    print([int(total(batch["x"])) for batch in batches], asked, flush=True)
jax.distributed.shutdown()
"""


@pytest.mark.mesh
def test_each_process_reads_only_its_rows():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(index)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(2)
    ]
    # Gloo writes lines of its own.
    outputs = [process.communicate(timeout=120)[0].splitlines()[-1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    rows = [np.arange(4)[None] + 10 * np.arange(8 * step, 8 * step + 8)[:, None] for step in (0, 1)]
    expected = [int((values * np.arange(1, 33).reshape(8, 4)).sum()) for values in rows]
    assert outputs == [
        f"{expected} {[0, 1, 2, 3, 8, 9, 10, 11]}",
        f"{expected} {[4, 5, 6, 7, 12, 13, 14, 15]}",
    ]


FORGETFUL = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shardlib.data import MapSource, Prefetcher
from shardlib.registry import DataSpec
class Numbers:
    def __getitem__(self, index):
        return {"x": np.full(1000, index, np.int32)}
padding = {"x": np.zeros(1000, np.int32)}
source = MapSource(Numbers, spec=DataSpec(), global_batch=8, padding=padding)
mesh = Mesh(np.array(jax.devices()), ("data",))
batches = Prefetcher(source, {"x": NamedSharding(mesh, PartitionSpec("data"))})
print(next(batches)["x"].shape)
"""


def test_an_interpreter_exits_cleanly_though_nothing_was_closed():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", FORGETFUL]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(8, 1000)\n", "")


STUCK = """
import threading, numpy as np, jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from shardlib.data import MapSource, Prefetcher, prefetch
from shardlib.registry import DataSpec
prefetch.MOST_CLOSE_SECONDS = 0.2
begun = threading.Barrier(THREADS + 1)
class Stuck:
    def __getitem__(self, index):
        begun.wait()
        threading.Event().wait()
padding = {"x": np.zeros(4, np.int32)}
source = MapSource(Stuck, spec=DataSpec(), global_batch=8, padding=padding, threads=THREADS)
mesh = Mesh(np.array(jax.devices()), ("data",))
batches = Prefetcher(source, {"x": NamedSharding(mesh, PartitionSpec("data"))})
begun.wait()
print("over", flush=True)
"""


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("threads", [1, 4])
def test_an_interpreter_exits_though_a_read_never_ends(threads):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    program = STUCK.replace("THREADS", str(threads))
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (0, "over\n")
    assert done.stderr == (
        "the thread that reads the batch of step 0 has not ended within 0.2 s and is left behind; "
        "its open files stay open\n"
    )
