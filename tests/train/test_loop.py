"""The loop's phases: what the host waits for, with a device that works while the host goes on."""

import dataclasses
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardlib.runtime.phases import PhaseClock
from shardlib.train.loop import Loop

COMPILE_SECONDS = 7.0


class World:
    """A host and a device in simulated time: the device works off what was dispatched, in order.

    Args:
        work: Seconds that the device takes for each step.
        reads: Seconds that making each batch takes; one begins when the one before is there.
    """

    def __init__(self, work, reads):
        self.now = 0.0
        self.work = work
        self.there_at = list(itertools.accumulate(reads))
        self.taken = 0
        self.free_at = 0.0
        self.device_idle = 0.0
        self.wait_seconds = 0.0
        self.clock = PhaseClock(lambda: self.now)

    def until(self, time):
        self.now = max(self.now, time)

    @property
    def is_ready(self):
        return self.there_at[self.taken] <= self.now

    def __iter__(self):
        return self

    def __next__(self):
        started = self.now
        self.until(self.there_at[self.taken])
        self.taken += 1
        self.wait_seconds = self.now - started

    def step(self, state, batch):
        number = state.step + 1
        if number == 1:
            self.now += COMPILE_SECONDS
        else:
            self.device_idle += max(0.0, self.now - self.free_at)
        self.free_at = max(self.free_at, self.now) + self.work[number - 1]
        return State(number), {"done_at": self.free_at}

    def read(self, metrics):
        self.until(metrics["done_at"])
        return metrics

    def loop(self, step=None, **given):
        keys = {
            "on_step": lambda record: None,
            "is_due": lambda step: False,
            "after_step": lambda step, state: True,
        }
        return Loop(step or self.step, self, read=self.read, clock=self.clock, **keys | given)


@dataclasses.dataclass
class State:
    step: int


def steps_of_a_run():
    step = st.tuples(st.integers(1, 9), st.integers(0, 20))
    return st.lists(step, min_size=2, max_size=12)


@settings(max_examples=200, deadline=None)
@given(steps_of_a_run())
@example([(2, 5), (2, 5), (2, 5)])  # The device waits for data.
@example([(5, 2), (5, 2), (5, 2)])  # It never does: what takes 2 s is hidden behind 5.
def test_waiting_for_data_is_when_the_device_has_nothing_to_do(steps):
    work, reads = zip(*steps, strict=True)
    world = World(work, reads)
    assert world.loop().run(State(0), len(steps)).step == len(steps)
    spent = world.clock.seconds()
    assert spent["compile"] == COMPILE_SECONDS + work[0]
    assert spent["data_wait"] == reads[0] + world.device_idle
    assert spent["step"] == sum(work[1:])
    assert sum(spent.values()) == world.now
    assert world.clock.present[0] == "init"


def test_data_is_read_ahead_of_a_step_in_flight():
    """As long as a batch is ready, the next step is dispatched before metrics are waited for."""
    world = World([5, 5, 5], [0, 0, 0])
    dispatched = []
    at_record = []

    def step(state, batch):
        dispatched.append(state.step + 1)
        return world.step(state, batch)

    world.loop(step, on_step=lambda record: at_record.append((record.step, len(dispatched)))).run(
        State(0), 3
    )
    assert at_record == [(1, 2), (2, 3), (3, 3)]


def test_what_is_done_after_a_step_is_neither_step_nor_data():
    world = World([2] * 6, [1] * 6)
    records = []

    def after_step(step, state):
        with world.clock.within("save"):
            world.now += 100
        return True

    world.loop(
        on_step=records.append, is_due=lambda step: step % 2 == 0, after_step=after_step
    ).run(State(0), 6)
    spent = world.clock.seconds()
    assert spent["save"] == 300.0
    assert spent["step"] + spent["data_wait"] + spent["compile"] == world.now - 300
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(record.step_seconds < 100 for record in records)


def test_a_run_that_goes_on_after_a_rewind_compiles_nothing():
    world = World([2] * 4, [0] * 4)
    world.taken = 1
    world.loop(is_compiled=True).run(State(1), 4)
    spent = world.clock.seconds()
    assert (spent["compile"], spent["step"]) == (0.0, 6.0)


def test_an_error_leaves_the_phase():
    world = World([1, 1], [0, 0])

    def fail(record):
        raise OSError("no space")

    with pytest.raises(OSError, match=r"^no space$"):
        world.loop(on_step=fail).run(State(0), 2)
    assert world.clock.present[0] == "init"
