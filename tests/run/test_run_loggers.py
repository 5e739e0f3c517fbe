"""Runs whose metrics go to loggers: of a config, of the caller, and faulty ones."""

import contextlib
import dataclasses

import jax
import pytest

from shardlib import run
from shardlib.config import load, to_dict
from shardlib.errors import ConfigError
from shardlib.log.metrics import read_metrics
from shardlib.run.directory import RunDirectory
from shardlib.run.log import RunLog
from shardlib.run.setup import make_scope, open_source, setup
from shardlib.runtime.distributed import ProcessGroup
from shardlib.train.loop import StepRecord

MODULE = """
class Lines:
    def start(self, run):
        self.path = run.run_dir / "lines.txt"
        self.say("start", run.step, run.config["train"]["loggers"])

    def say(self, *words):
        with self.path.open("a") as file:
            print(*words, file=file)

    def log(self, step, metrics):
        self.say("log", step, metrics["loss"])

    def rewind(self, step):
        self.say("rewind", step)

    def close(self, failed):
        self.say("close", failed)
"""
SHORT = ("train.steps=3", "train.sample_length=0", "eval.every_steps=2", "checkpoint.every_steps=2")


class Records:
    """A logger of the caller."""

    def __init__(self):
        self.rows, self.rewinds, self.ends = [], [], []

    def start(self, run):
        self.run = run

    def log(self, step, metrics):
        self.rows.append({"step": step, **metrics})

    def rewind(self, step):
        self.rewinds.append(step)

    def close(self, failed):
        self.ends.append(failed)


class Full(Records):
    """A logger that fails at the second step."""

    def log(self, step, metrics):
        super().log(step, metrics)
        if step == 2:
            raise OSError("no space left")


def drawn(row):
    """A row of metrics.jsonl as a logger gets it."""
    return {name: x for name, x in row.items() if x is not None and name not in ("time", "spent")}


@pytest.mark.mesh
def test_loggers_get_the_rows_of_a_run_and_of_the_run_that_resumes_it(
    lab, tmp_path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_lines.py").write_text(MODULE)
    run_dir, mine, full = tmp_path / "run", Records(), Full()
    config = lab.config(run_dir, "train.loggers=[my_lines:Lines, tensorboard]", *SHORT)
    run.train(config, loggers=[full, mine])
    rows = read_metrics(run_dir)
    assert mine.rows == [drawn(row) for row in rows]
    assert [row["step"] for row in mine.rows if "eval/loss" in row] == [2, 3]
    assert (mine.rewinds, mine.ends) == ([], [False])
    assert mine.run.config == to_dict(load(run.RunConfig, run_dir / "config.yaml"))
    assert (mine.run.run_dir, mine.run.step) == (run_dir, 0)
    assert mine.run.identity == RunDirectory(run_dir).identity
    assert (len(full.rows), full.ends) == (2, [])
    said = "Full.log failed, and the run goes on without this logger: OSError: no space left"
    assert capsys.readouterr().out.count(said) == 1
    # Where metrics go does not decide the numbers, so a run that resumes may change it.
    again = Records()
    run.train(lab.config(run_dir, *SHORT, "train.steps=4"), loggers=[again])
    assert again.rows == [drawn(read_metrics(run_dir)[-1])]
    assert (again.run.step, again.run.identity) == (3, mine.run.identity)
    assert (run_dir / "lines.txt").read_text().splitlines() == [
        "start 0 ['my_lines:Lines', 'tensorboard']",
        *(f"log {row['step']} {row['loss']}" for row in rows),
        "close False",
    ]
    assert len(list((run_dir / "tensorboard").iterdir())) == 1


def test_what_is_not_a_logger_is_refused_before_anything_is_written(lab, tmp_path):
    config = lab.config(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"loggers\[0\] is the class Records"):
        run.train(config, loggers=[Records])
    names = "train.loggers=[nowhere:Mine, pathlib:Path]"
    with pytest.raises(
        ConfigError, match=r"(?s)2 faults.*no module 'nowhere'.*'pathlib:Path' lacks"
    ):
        run.train(lab.config(tmp_path / "run", names))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def parts(lab):
    url = "https://me:hush@host/text"
    config = lab.config(lab.root / "logged", f"data.path={url}")
    text = dataclasses.replace(config, data=lab.config(lab.root / "logged").data)
    made = setup(text, open_source(text, "train").spec, make_scope(text, jax.devices()))
    return dataclasses.replace(made, recorded=config)


def attempt(parts, run_dir, logger, index=0):
    """Four steps, of which the last two are taken again; then the process fails."""
    group = ProcessGroup(count=2, index=index, started_by="launch")
    run_dir.mkdir()
    log = RunLog(parts, RunDirectory(run_dir), group, loggers=[logger])
    metrics = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.5}
    with contextlib.suppress(RuntimeError), log:
        log.open(0)
        for step in (1, 2, 3, 4):
            log.step(StepRecord(step, metrics, 1.0, 1.0, 0.0))
        log.rewind(2, "going back")
        for step in (3, 4):
            log.step(StepRecord(step, metrics, 1.0, 1.0, 0.0))
        log.evaluation(4, {"loss": 3.0})
        raise RuntimeError("hush")


def test_a_rewind_an_error_and_no_secret_reach_a_logger(parts, tmp_path):
    logger = Records()
    attempt(parts, tmp_path / "run", logger)
    # The first row of step 4 waited for an evaluation, and was void before it was written.
    assert [row["step"] for row in logger.rows] == [1, 2, 3, 3, 4]
    assert [row.get("eval/loss") for row in logger.rows] == [None] * 4 + [3.0]
    assert (logger.rewinds, logger.ends) == ([2], [True])
    assert logger.run.config["data"]["path"] == "https://***@host/text"
    assert logger.run.config["model"]["num_layers"] == 2


def test_only_the_first_process_logs(parts, tmp_path):
    logger = Records()
    attempt(parts, tmp_path / "run", logger, index=1)
    assert (logger.rows, logger.rewinds, logger.ends) == ([], [], [])
