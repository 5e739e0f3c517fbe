"""Metrics loggers: TensorBoard, W&B, MLflow, classes of one's own, and what a faulty one may do."""

import contextlib
import math
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.config import load
from shardlib.errors import ConfigError, MissingExtraError
from shardlib.log.loggers import Loggers, RunInfo, check_loggers, logger_class
from shardlib.log.mlflow_logger import MLflowLogger
from shardlib.log.tensorboard_logger import TensorBoardLogger
from shardlib.log.wandb_logger import WandbLogger
from shardlib.train.config import TrainConfig

IDENTITY = "0123456789abcdef" * 2
CONFIG = {
    "model": {"name": "transformer", "num_layers": 2},
    "rules": {"paths": {"**/kernel": ["embed", None]}},
    "train": {"steps": 9, "label_smoothing": 0.0},
}


class Records:
    """A logger of one's own: it needs nothing of shardlib."""

    def __init__(self):
        self.calls = []

    def start(self, run):
        self.calls.append(("start", run))

    def log(self, step, metrics):
        self.calls.append(("log", step, metrics))

    def rewind(self, step):
        self.calls.append(("rewind", step))

    def close(self, failed):
        self.calls.append(("close", failed))


class Raises(Records):
    """A logger whose methods raise from a given one on."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    def __getattribute__(self, name):
        if name != "method" and name == self.method:
            raise RuntimeError("no route to https://me:hush@host")
        return super().__getattribute__(name)


def steps(loggers, run):
    loggers.start(run)
    loggers.log(1, {"loss": 0.5})
    loggers.rewind(0)
    loggers.log(1, {"loss": 0.25})
    loggers.close(failed=True)


def test_a_logger_gets_the_run_floats_by_step_rewinds_and_the_end(tmp_path):
    logger, run = Records(), RunInfo(CONFIG, tmp_path)
    loggers = Loggers(loggers=[logger])
    loggers.start(run)
    given = {"loss": jnp.float32(0.5), "count": 3, "skipped": False, "mfu": None, "x": math.inf}
    loggers.log(1, {**given, "rate": np.float64(0.1)})
    loggers.rewind(0)
    loggers.close(failed=False)
    loggers.close(failed=True)  # Once is enough.
    metrics = {"loss": 0.5, "count": 3.0, "skipped": 0.0, "x": math.inf, "rate": 0.1}
    assert logger.calls == [
        ("start", run), ("log", 1, metrics), ("rewind", 0), ("close", False)
    ]  # fmt: skip
    assert {type(value) for value in logger.calls[1][2].values()} == {float}


@pytest.mark.parametrize("method", ["start", "log", "rewind", "close"])
def test_a_logger_that_raises_is_left_out_and_said_once(tmp_path, method):
    said, faulty, sound = [], Raises(method), Records()
    steps(Loggers(loggers=[faulty, sound], warn=said.append), RunInfo(CONFIG, tmp_path))
    (text,) = said
    assert text.startswith(f"Raises.{method} failed")
    assert text.endswith("RuntimeError: no route to https://***@host")
    assert [name for name, *_ in sound.calls] == ["start", "log", "rewind", "log", "close"]
    names = [name for name, *_ in sound.calls]
    assert [name for name, *_ in faulty.calls] == names[: names.index(method)]


def test_objects_that_are_no_loggers_are_refused_at_once():
    check_loggers([Records()])
    with pytest.raises(ConfigError, match=r"(?s)loggers\[0\] is the class.*loggers\[2\].*Add them"):
        check_loggers([Records, Records(), "wandb"])


def test_names_of_loggers():
    config = load(TrainConfig, None, ["loggers=[mlflow, tensorboard, my.package:Mine]"])
    assert config.logger_names == ("mlflow", "tensorboard", "my.package:Mine")
    config = load(TrainConfig, None, ["loggers=[mlflow, tensorboard]", "tensorboard=true"])
    assert config.logger_names == ("tensorboard", "mlflow")
    assert TrainConfig().logger_names == ()
    with pytest.raises(ConfigError, match=r"(?s)'wandbb'. Did you mean 'wandb'.*':Mine'"):
        load(TrainConfig, None, ["loggers=[wandbb, ':Mine']"])


def test_a_class_of_ones_own_is_found_or_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    methods = "".join(f"\n    def {name}(self, *args): ..." for name in ("start", "log", "rewind"))
    (tmp_path / "mine_a.py").write_text(
        f"class Half:{methods}\n\nclass Whole(Half):\n    def close(self, failed): ...\n\n"
        "made = Whole()\n"
    )
    (tmp_path / "mine_b.py").write_text("raise ValueError('broken')\n")
    assert logger_class("mine_a:Whole").__name__ == "Whole"
    for name, text in {
        "mine_a:Half": "mine_a:Half' lacks methods of a metrics logger: close.\n  Add them",
        "mine_a:made": "mine_a:made is of type Whole, not a class.\n  Name a class",
        "mine_b:Mine": r"mine_b cannot be imported: ValueError: broken .*\n  Repair the module",
        "nowhere.loggers:Mine": "there is no module 'nowhere'",
    }.items():
        with pytest.raises(ConfigError, match=text):
            logger_class(name)


@pytest.mark.parametrize(
    ("name", "make", "package"),
    [
        ("tensorboard", TensorBoardLogger, "tensorboardX"),
        ("wandb", WandbLogger, "wandb"),
        ("mlflow", MLflowLogger, "mlflow"),
    ],
    ids=["tensorboard", "wandb", "mlflow"],
)
def test_a_missing_extra_is_named(monkeypatch, name, make, package):
    monkeypatch.setitem(sys.modules, package, None)  # Python's way to say: not there.
    rest = rf"needs {package!r}, which is not installed: pip install 'shardlib\[{name}\]'"
    for call in (make, lambda: logger_class(name)):
        with pytest.raises(MissingExtraError, match=rest):
            call()


@contextlib.contextmanager
def board(run_dir, warn=lambda text: None):
    """TensorBoard as a run has it."""
    loggers = Loggers([TensorBoardLogger], warn=warn)
    loggers.start(RunInfo(CONFIG, run_dir, warn=warn))
    yield loggers
    loggers.close(failed=False)


def records(path):
    from tensorboardX.proto import event_pb2

    data = path.read_bytes()
    while data:  # Length (8 bytes), its checksum (4), record, checksum (4).
        length = int.from_bytes(data[:8], "little")
        yield event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def events(run_dir):
    return [
        (event.step, value.tag, value.simple_value)
        for path in sorted((run_dir / "tensorboard").iterdir())
        for event in records(path)
        for value in event.summary.value
    ]


def hidden_from(path):
    """The steps from which on a file says that what was there before does not hold."""
    from tensorboardX.proto import event_pb2

    start = event_pb2.SessionLog.START
    return [event.step for event in records(path) if event.session_log.status == start]


def test_event_files_are_those_of_tensorboardx_byte_for_byte(tmp_path):
    from tensorboardX.event_file_writer import EventsWriter

    with board(tmp_path) as loggers:
        loggers.log(7, {"loss": 0.5, "count": 3})
        loggers.log(9, {"loss": math.nan})
    (path,) = (tmp_path / "tensorboard").iterdir()
    version, *rest = records(path)
    assert (version.file_version, len(rest)) == ("brain.Event:2", 3)
    theirs = EventsWriter(str(tmp_path / "theirs"))
    for event in rest:
        theirs.write_event(event)
    theirs.close()
    (expected,) = tmp_path.glob("theirs*")
    size = 16 + version.ByteSize()  # Theirs begins with a version too, at a time of its own.
    assert path.read_bytes()[size:] == expected.read_bytes()[size:]


def test_event_files_hide_what_a_rewind_takes_away(tmp_path):
    with board(tmp_path) as loggers:
        for step in (1, 2, 3):
            loggers.log(step, {"loss": 9.0})
        loggers.rewind(1)
        loggers.log(2, {"loss": 0.5})
    names = sorted(path.name for path in (tmp_path / "tensorboard").iterdir())
    assert len(names) == 2
    assert hidden_from(tmp_path / "tensorboard" / names[1]) == [2]
    assert events(tmp_path)[-1] == (2, "loss", 0.5)


def attempt(loggers, run_dir, step, *, steps=9):
    """Steps from one on, of which the first is taken again."""
    config = {**CONFIG, "train": {**CONFIG["train"], "steps": steps}}
    loggers.start(RunInfo(config, run_dir, IDENTITY, step))
    loggers.log(step + 1, {"loss": 9.0, "eval/loss": math.nan})
    loggers.rewind(step)
    loggers.log(step + 1, {"loss": 1 / (step + 1)})
    loggers.close(failed=False)


@pytest.mark.process
def test_wandb_has_the_config_and_every_row_of_all_attempts(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    said = []
    for step in (0, 1):
        attempt(Loggers([WandbLogger], warn=said.append), tmp_path, step)
        assert wandb.run is None
    assert said == []
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{IDENTITY}/*.wandb"))) >= 1
    # A run that is active is used, shows what is in it, and stays active.
    with wandb.init(dir=tmp_path / "wandb", config={"mine": 1}) as active:
        attempt(Loggers([WandbLogger], warn=said.append), tmp_path, 4)
        assert wandb.run is active
        assert dict(active.config) == {"mine": 1, **CONFIG}
        assert dict(active.summary)["rewound_to"] == 4
        assert (active.summary["step"], active.summary["loss"]) == (5, 0.2)
        assert math.isnan(float(active.summary["eval/loss"]))
        assert active.step == 2
    assert said == []


@pytest.mark.process
def test_mlflow_has_the_config_and_every_row_of_all_attempts(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    said = []
    attempt(Loggers([MLflowLogger], warn=said.append), tmp_path, 0)
    attempt(Loggers([MLflowLogger], warn=said.append), tmp_path, 1, steps=12)
    assert (said, mlflow.active_run()) == ([], None)
    (run,) = mlflow.search_runs(output_format="list")
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
    assert run.data.params == {
        "model.name": "transformer",
        "model.num_layers": "2",
        "rules.paths.__/kernel": "[embed, null]",
        "train.steps": "9",
        "train.label_smoothing": "0.0",
    }
    tags = {name: x for name, x in run.data.tags.items() if name.startswith("shardlib.")}
    assert tags == {
        "shardlib.run_id": IDENTITY, "shardlib.rewound_to": "1", "shardlib.now.train.steps": "12"
    }  # fmt: skip
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(x.step, x.value) for x in history] == [(1, 9.0), (1, 1.0), (2, 9.0), (2, 0.5)]
    # A run that is active is used and stays active.
    with mlflow.start_run() as active:
        attempt(Loggers([MLflowLogger], warn=said.append), tmp_path, 4)
        assert mlflow.active_run() is active
    assert mlflow.get_run(active.info.run_id).data.metrics["loss"] == 0.2
    assert said == []


@pytest.mark.process
def test_mlflow_reports_the_error_of_its_thread(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    said = []
    loggers = Loggers([MLflowLogger], warn=said.append)
    loggers.start(RunInfo(CONFIG, tmp_path, IDENTITY))
    loggers.log(1, {"a//b": 1.0})  # A name that MLflow refuses.
    loggers.close(failed=True)
    assert len(said) == 1
    assert said[0].startswith("MLflowLogger.")
    assert "failed, and the run goes on without this logger: MlflowException: " in said[0]
