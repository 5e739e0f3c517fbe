"""What a run writes down of itself: events, rows with an account; and what a rewind does to it."""

import contextlib
import itertools
import math
import threading
import time

import jax
import pytest

from shardlib.errors import ShardlibError
from shardlib.log.events import last_account, read_events
from shardlib.log.metrics import read_metrics
from shardlib.run.directory import RunDirectory
from shardlib.run.log import RunLog
from shardlib.run.setup import make_scope, open_source, setup
from shardlib.runtime.distributed import ProcessGroup
from shardlib.runtime.phases import PhaseClock
from shardlib.train.loop import StepRecord

FIRST = ProcessGroup(count=1, index=0, started_by="single")


@pytest.fixture(scope="module")
def parts(lab):
    config = lab.config(lab.root / "logged")
    return setup(config, open_source(config, "train").spec, make_scope(config, jax.devices()))


class Attempt:
    """One attempt of a run that is said to take its steps, at 0.1 s of simulated time each."""

    def __init__(self, parts, run_dir, group=FIRST):
        self.now = 0.0
        self.clock = PhaseClock(lambda: self.now)
        self.directory = RunDirectory(run_dir)
        self.log = RunLog(parts, self.directory, group, self.clock)

    def go(self, start, steps):
        self.directory.path.mkdir(exist_ok=True)
        self.log.open(start)
        self.steps(start, steps)

    def steps(self, start, steps):
        for step in range(start + 1, steps + 1):
            self.spend("step", 0.1)
            metrics = {"loss": 10.0 / step, "grad_norm": 1.0, "learning_rate": 0.5}
            self.log.step(StepRecord(step, metrics, 0.1, 0.1, 0.0))

    def spend(self, phase, seconds):
        with self.clock.within(phase):
            self.now += seconds


def spent(record):
    return {share: pytest.approx(seconds, abs=2e-3) for share, seconds in record["spent"].items()}


def kinds(run_dir):
    return [(event["kind"], event["step"]) for event in read_events(run_dir)]


def test_events_wait_for_the_directory_and_are_one_line_each(parts, tmp_path, capsys):
    attempt = Attempt(parts, tmp_path / "run")
    with attempt.log as log:
        log.event("damaged", "step 30 is damaged: set aside", step=30, leaves=["a/b"])
        assert list(tmp_path.iterdir()) == []
        attempt.go(20, 22)
        log.event("skipped", loss=math.nan, samples=[[176, 184], [0, math.inf]], why=None)
        assert kinds(tmp_path / "run") == [("damaged", 30), ("start", 20), ("skipped", 22)]
    assert capsys.readouterr().out.splitlines()[0] == "step 30 is damaged: set aside"
    damaged, start, skipped, end = read_events(tmp_path / "run")
    assert damaged["time"] <= start["time"] <= skipped["time"] <= end["time"]
    assert damaged["facts"] == {"leaves": ["a/b"]}
    assert start["facts"] == {"mesh": "fsdp=8", "devices": "8 x cpu", "processes": 1}
    assert math.isnan(skipped["facts"].pop("loss"))
    assert skipped["facts"] == {"samples": [[176, 184], [0, math.inf]]}
    assert (end["kind"], end["step"], "facts" in end) == ("end", 22, False)
    account = last_account(tmp_path / "run")
    assert account is not None
    assert account["spent"] == end["spent"]


def test_an_error_of_others_ends_an_attempt_by_name_and_without_its_text(parts, tmp_path):
    attempt = Attempt(parts, tmp_path / "run")
    with contextlib.suppress(OSError), attempt.log:
        attempt.go(0, 3)
        raise OSError("hush")
    assert read_events(tmp_path / "run")[-1]["facts"] == {"error": "OSError"}
    assert "hush" not in (tmp_path / "run" / "events.jsonl").read_text()
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_an_event_after_the_end_is_written_or_said(parts, tmp_path, capsys):
    attempt = Attempt(parts, tmp_path / "run")
    with attempt.log as log:
        attempt.go(0, 1)
    ended = last_account(tmp_path / "run")
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write('{"ti')  # As a full disk leaves a line behind.
    log.event("save_failed", "no space")
    assert kinds(tmp_path / "run") == [("start", 0), ("end", 1), ("save_failed", 1)]
    assert last_account(tmp_path / "run") == ended
    (tmp_path / "run").rename(tmp_path / "moved")
    log.event("save_failed", step=7)
    said = capsys.readouterr().out.splitlines()[-1]
    assert "events.jsonl cannot be written: No such file or directory. It lacks" in said


def test_events_of_many_threads_are_all_there(parts, tmp_path):
    """From before the directory is there until after the end."""
    attempt = Attempt(parts, tmp_path / "run")
    over = threading.Event()

    def tell(name):
        for number in itertools.count():
            attempt.log.event(name, step=number)
            if over.wait(0.002):
                return

    threads = [threading.Thread(target=tell, args=(name,)) for name in "ab"]
    with attempt.log:
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        attempt.go(0, 2)
        time.sleep(0.05)
    time.sleep(0.05)
    over.set()
    for thread in threads:
        thread.join()
    for name in "ab":
        steps = [event["step"] for event in read_events(tmp_path / "run") if event["kind"] == name]
        assert steps == list(range(len(steps)))
        assert len(steps) > 10


def test_other_processes_write_nothing(parts, tmp_path, capsys):
    group = ProcessGroup(count=2, index=1, started_by="launch")
    attempt = Attempt(parts, tmp_path / "run", group)
    with attempt.log as log:
        attempt.go(0, 2)
        log.event("skipped", "an update was skipped")
        log.rewind(1, "going back to step 1")
        log.closing("finished", is_finished=True, step=2, can_sample=False)
    assert list((tmp_path / "run").iterdir()) == []
    assert capsys.readouterr().out == ""


def test_a_foreign_line_is_named_and_keeps_no_run_from_going_on(parts, tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    path.parent.mkdir()
    path.write_text('{"time": "2026-01-01T00:00:00.000Z", "kind": "end"}\nhello\n{"ti')
    attempt = Attempt(parts, tmp_path / "run")
    with attempt.log:
        attempt.go(0, 1)
    with pytest.raises(ShardlibError, match=r"events.jsonl:2: not an event: 'hello'\.\n  Remove"):
        read_events(tmp_path / "run")
    path.write_text(path.read_text().replace("hello\n", ""))
    assert [event["kind"] for event in read_events(path.parent)] == ["end", "start", "end"]
    assert read_events(tmp_path / "nowhere") == []


def test_a_row_holds_the_account_up_to_its_step(parts, tmp_path):
    attempt = Attempt(parts, tmp_path / "run")
    with attempt.log as log:
        attempt.spend("restore", 2.0)
        attempt.go(0, 2)
        attempt.spend("save", 1.0)
        attempt.spend("evaluate", 0.5)
        log.evaluation(2, {"loss": 3.0})
        log.flush()
        attempt.steps(2, 4)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert spent(rows[0]) == {"restore": 2.0, "step": 0.1}
    assert spent(rows[1]) == {"restore": 2.0, "step": 0.2, "save": 1.0, "evaluate": 0.5}
    assert spent(rows[2]) == {"restore": 2.0, "step": 0.3, "save": 1.0, "evaluate": 0.5}
    assert rows[1]["eval/loss"] == 3.0
    assert rows[3]["goodput"] == round(0.4 / 3.9, 4)
    assert abs(rows[3]["time"] - time.time()) < 60


def test_a_rewind_takes_rows_back_and_counts_them_as_lost(parts, tmp_path, capsys):
    attempt = Attempt(parts, tmp_path / "run")
    with attempt.log as log:
        attempt.go(0, 7)
        log.rewind(4, "going back to step 4", samples=[32, 56])
        attempt.steps(4, 6)
        log.closing("stopped", is_finished=False, step=6, can_sample=False)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert spent(rows[-1]) == {"step": 0.6, "lost": 0.3}
    rewound = read_events(tmp_path / "run")[1]
    assert (rewound["kind"], rewound["step"]) == ("rewind", 4)
    assert rewound["facts"] == {"lost_steps": 3, "samples": [32, 56]}
    out = capsys.readouterr().out
    assert "going back to step 4" in out
    assert "goodput  67 % of 0:01: lost 33 %" in out


def test_an_attempt_takes_over_where_the_one_before_was_killed(parts, tmp_path):
    killed = Attempt(parts, tmp_path / "run")
    killed.log.__enter__()
    killed.go(0, 8)  # The row of step 8 waits, and is lost with the process.
    last = read_metrics(tmp_path / "run")[-1]
    time.sleep(0.3)
    attempt = Attempt(parts, tmp_path / "run")
    with attempt.log:
        attempt.go(5, 6)
    (row,) = [row for row in read_metrics(tmp_path / "run") if row["step"] == 6]
    assert row["spent"]["step"] == pytest.approx(0.6)
    assert row["spent"]["lost"] == pytest.approx(last["spent"]["step"] - 0.5)
    # Written to the millisecond.
    assert 0.298 <= row["spent"]["idle"] <= row["time"] - last["time"] + 0.002


def test_what_follows_the_last_row_is_in_the_account_of_a_run_that_ended(parts, tmp_path):
    first = Attempt(parts, tmp_path / "run")
    with first.log as log:
        first.go(0, 3)
        log.flush()
        first.spend("save", 9.0)
    second = Attempt(parts, tmp_path / "run")
    with second.log:
        second.go(3, 4)
    row = read_metrics(tmp_path / "run")[-1]
    assert row["spent"]["save"] == 9.0
    assert "lost" not in row["spent"]
    assert row["spent"]["step"] == pytest.approx(0.4)


def test_the_time_before_a_finished_run_is_given_more_steps_is_not_its_own(parts, tmp_path):
    first = Attempt(parts, tmp_path / "run")
    with first.log as log:
        first.go(0, 3)
        log.flush()
        log.closing("finished", is_finished=True, step=3, can_sample=False)
    facts = read_events(tmp_path / "run")[-1]["facts"]
    assert facts == {"finished": True, "how": "finished"}
    with Attempt(parts, tmp_path / "run").log as log:
        log.closing("finished", is_finished=True, step=3, can_sample=False)
    time.sleep(0.1)
    second = Attempt(parts, tmp_path / "run")
    with second.log as log:
        second.go(3, 4)
        log.closing("stopped", is_finished=False, step=4, can_sample=False)
    assert spent(read_metrics(tmp_path / "run")[-1]) == {"step": 0.4}
    assert read_events(tmp_path / "run")[-1]["facts"] == {"how": "stopped"}
    time.sleep(0.1)
    third = Attempt(parts, tmp_path / "run")
    with third.log:
        third.go(4, 5)
    assert read_metrics(tmp_path / "run")[-1]["spent"]["idle"] >= 0.098


def test_who_launched_a_run_resumes_it_alike(parts, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SHARDLIB_RESTARTS", "3")
    attempt = Attempt(parts, tmp_path / "run", ProcessGroup(0, 2, "launch"))
    with attempt.log as log:
        attempt.go(0, 3)
        log.closing("stopped", is_finished=False, step=3, can_sample=False)
    config = tmp_path / "run" / "config.yaml"
    resume = f"resume   shardlib launch --processes 2 --restarts 3 -- train {config}"
    assert resume in capsys.readouterr().out.replace("\n", "")


def test_a_run_with_nothing_left_to_do_shows_its_account(parts, tmp_path, capsys):
    first = Attempt(parts, tmp_path / "run")
    with first.log:
        first.go(0, 20)
        first.spend("save", 6.0)
    again = Attempt(parts, tmp_path / "run")
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    with again.log as log:
        again.spend("restore", 50.0)
        log.closing("finished", is_finished=True, step=20, can_sample=False)
    assert "goodput  25 % of 0:08: save 75 %" in capsys.readouterr().out
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


def test_a_foreign_line_does_not_fail_a_run_at_its_end(parts, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    lines = ['{"step": 1, "loss": 1.0}', "hello", '{"step": 2}', '{"step": 3, "spent": "5"}']
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    attempt = Attempt(parts, tmp_path / "run")
    with attempt.log as log:
        attempt.go(2, 4)
        log.closing("finished", is_finished=True, step=4, can_sample=False)
    out = capsys.readouterr().out
    assert "metrics.jsonl:2: not the metrics of a step" in out
    assert "finished" in out
