"""The account of a run's wall time, over kills, crashes and rewinds."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.log.goodput import Account, goodput, summary
from shardlib.log.metrics import read_metrics
from shardlib.runtime.phases import PhaseClock


class Run:
    """Attempts of one run in simulated time; what each writes is all that the next one knows."""

    def __init__(self):
        self.now = 1000.0
        self.rows = []
        self.event = None

    def attempt(self, step):
        self.clock = PhaseClock(lambda: self.now)
        self.account = Account(self.clock, now=lambda: self.now)
        self.spend("init", 3)
        self.spend("restore", 2)
        written = [record for record in (*self.rows, self.event) if record]
        last = max(written, key=lambda record: sum(record["spent"].values()), default=None)
        self.account.resume(self.row_of(step), last)
        self.keep(step)
        self.spend("compile", 10)

    def rewind(self, step):
        self.account.rewound(self.row_of(step))
        self.keep(step)

    def spend(self, phase, seconds):
        with self.clock.within(phase):
            self.now += seconds

    def step(self, number, seconds):
        self.spend("step", seconds)
        self.write(number)

    def write(self, number):
        row = {"step": number} | self.account.stamp()
        self.rows = [*self.rows, json.loads(json.dumps(row))]

    def keep(self, step):
        """As the run does: rows of later steps go, and an event says where the time has gone."""
        self.rows = [row for row in self.rows if row["step"] <= step]
        self.event = self.account.stamp()

    def row_of(self, step):
        return next((row for row in reversed(self.rows) if row["step"] <= step), None)

    @property
    def spent(self):
        return {share: s for share, s in self.account.seconds().items() if s}


def test_a_kill_loses_the_steps_after_the_one_restored():
    run = Run()
    run.attempt(0)
    for step in (1, 2):
        run.step(step, 4)
    run.spend("save", 5)
    run.rows.pop()
    run.write(2)  # Once all of the step is done: the save is before it.
    run.spend("data_wait", 1)
    run.step(3, 4)
    run.spend("evaluate", 6)
    run.step(4, 4)
    run.now += 2.5  # Killed within step 5, of which nobody knows.
    run.now += 100.0
    run.attempt(2)
    assert run.spent == {
        "init": 6.0,
        "restore": 4.0,
        "compile": 20.0,
        "save": 5.0,
        "step": 8.0,
        "lost": 4.0 + 4.0 + 6.0 + 1.0,
        "idle": 102.5,
    }
    assert sum(run.spent.values()) == run.now - 1000


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["step", "step", "step", "kill", "rewind"]), st.integers(0, 20)),
        st.tuples(st.sampled_from(["save", "evaluate", "data_wait"]), st.integers(0, 20)),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_whatever_befalls_a_run_its_shares_are_its_wall_time(actions):
    run, step, seconds_of = Run(), 0, {}
    run.attempt(0)
    for action, number in actions:
        if action == "step":
            step += 1
            seconds_of[step] = number
            run.step(step, number)
        elif action in ("kill", "rewind"):
            step = max(0, step - number)
            if action == "kill":
                run.now += number
                run.attempt(step)
            else:
                run.rewind(step)
        else:
            run.spend(action, number)
    spent = run.account.seconds()
    assert sum(spent.values()) == pytest.approx(run.now - 1000, abs=1e-6)
    assert all(seconds >= -1e-6 for seconds in spent.values())
    # Only the steps that count are left, once each.
    assert spent["step"] == pytest.approx(sum(seconds_of[n] for n in range(1, step + 1)), abs=1e-6)


def test_a_wall_clock_put_back_makes_no_time_negative():
    now = [50.0]
    account = Account(PhaseClock(lambda: 0.0), now=lambda: now[0])
    account.resume(None, {"time": 80.0, "spent": {"step": 4.0, "init": 1.0}})
    assert {k: v for k, v in account.seconds().items() if v} == {"init": 1.0, "lost": 4.0}


def test_summary():
    seconds = {"step": 655.0, "compile": 29.0, "data_wait": 14.0, "lost": 14.0, "save": 7.0}
    seconds["restore"] = 1.0
    assert goodput(seconds) == pytest.approx(655 / 720)
    assert summary(seconds) == "91 % of 12:00: compile 4 %, data wait 2 %, save 1 %, lost 2 %"


STEP_SECONDS, SAVE_EVERY, STEPS = 0.01, 10, 60

ATTEMPT = f"""
import sys, time
from shardlib.runtime.phases import PhaseClock
from shardlib.log.goodput import Account
from shardlib.log.metrics import MetricsWriter
start, run_dir = int(sys.argv[1]), sys.argv[2]
clock = PhaseClock()
print(time.time(), flush=True)
account = Account(clock)
with MetricsWriter(run_dir, resume_step=start) as writer:
    account.resume(writer.kept, writer.last)
    clock.enter("step")
    for step in range(start + 1, {STEPS} + 1):
        time.sleep({STEP_SECONDS})
        ended = time.time()
        writer.write(step, {{"loss": 1.0}}, account.stamp())
print(ended)
"""


def test_killed_processes_leave_an_account_that_adds_up(tmp_path):
    """Real processes and SIGKILLs: the shares against wall time, and steps against their number."""
    command = [sys.executable, "-c", ATTEMPT]
    start, began = 0, None
    for until in (15, 38, 47):
        process = subprocess.Popen(
            [*command, str(start), str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        began = began or float(process.stdout.readline())
        while len(read_metrics(tmp_path)) < until:
            assert process.poll() is None
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        start = len(read_metrics(tmp_path)) // SAVE_EVERY * SAVE_EVERY
    done = subprocess.run(
        [*command, str(start), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert began is not None
    wall = float(done.stdout.split()[1]) - began
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    spent = rows[-1]["spent"]
    assert sum(spent.values()) == pytest.approx(wall, rel=0.01)
    assert set(spent) <= {"init", "step", "lost", "idle"}
    # A sleep takes at least what it is asked for; each step that counts is counted once.
    assert spent["step"] >= STEPS * STEP_SECONDS
    assert spent["lost"] >= 20 * STEP_SECONDS  # Steps 11 to 15, 31 to 38, 41 to 47.
    assert spent["idle"] > 0
