"""Metrics loggers: receivers of the metrics of a run, in addition to `metrics.jsonl`.

A logger is any object with the methods of `MetricsLogger`. `train.loggers` names loggers in a
config, and `shardlib.run.train(config, loggers=[...])` takes objects:

```python
class Prints:
    def start(self, run):
        print(run.config["model"]["name"], "from step", run.step)

    def log(self, step, metrics):
        print(step, metrics["loss"])

    def rewind(self, step):
        print("the steps after", step, "are repeated")

    def close(self, failed):
        print("failed" if failed else "done")
```
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from shardlib.errors import ConfigError, did_you_mean, require, without_credentials
from shardlib.import_paths import imported

# The package that each logger needs, which the extra of the logger's name installs; its class.
_BUILT_IN = {
    "tensorboard": ("tensorboardX", "shardlib.log.tensorboard_logger:TensorBoardLogger"),
    "wandb": ("wandb", "shardlib.log.wandb_logger:WandbLogger"),
    "mlflow": ("mlflow", "shardlib.log.mlflow_logger:MLflowLogger"),
}
_METHODS = ("start", "log", "rewind", "close")


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """Facts about a run, given to its loggers once at the start of an attempt."""

    config: Mapping[str, Any]
    """The config as `config.yaml` holds it: dicts, lists and scalars, without the credentials of
    URLs."""
    run_dir: Path
    """The directory of the run, which exists."""
    identity: str | None = None
    """The id of the run, 32 hex digits, the same for all attempts; None if unknown."""
    step: int = 0
    """The step that the run resumes from; 0 for a new run. Later steps of an earlier attempt are
    void."""
    warn: Callable[[str], None] = lambda text: None
    """Shows a warning to the person who follows the run."""


class MetricsLogger(Protocol):
    """A receiver of the metrics of a run.

    The first process calls it, in the thread of the training loop, so each method should return
    soon. If a method raises, the run warns once and goes on without the logger.
    """

    def start(self, run: RunInfo) -> None:
        """Begins an attempt at a run; called once, before the first step."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives the metrics of a step, as its row in `metrics.jsonl` has them.

        Args:
            step: The number of the step. Numbers increase, except after a rewind.
            metrics: Floats by name, which may be NaN or infinite: `loss`, `learning_rate` and so
                on, and after an evaluation `eval/loss` and so on. Unknown values are left out.
        """
        ...

    def rewind(self, step: int) -> None:
        """Learns that all steps after `step` are void; they are repeated on other data."""
        ...

    def close(self, failed: bool) -> None:
        """Ends the attempt; `failed` tells whether an error ended it."""
        ...


class Loggers:
    """Passes the metrics of a run to loggers, and drops each logger that raises. Classes are called
    without arguments. `warn` is called once with the error of each logger that raises."""

    def __init__(
        self,
        classes: Iterable[type[MetricsLogger]] = (),
        loggers: Iterable[MetricsLogger] = (),
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._warn = warn
        self._loggers: list[MetricsLogger] = []
        for one in classes:
            self._try(lambda one=one: self._loggers.append(one()), f"{one.__name__}()")
        self._loggers += loggers

    def start(self, run: RunInfo) -> None:
        """Calls `start` of all loggers."""
        self._call("start", run)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Calls `log` of all loggers, with numbers (including 0-d arrays) by name; None is left
        out."""
        if self._loggers:
            floats = {name: float(x) for name, x in metrics.items() if x is not None}
            self._call("log", step, floats)

    def rewind(self, step: int) -> None:
        """Calls `rewind` of all loggers."""
        self._call("rewind", step)

    def close(self, failed: bool) -> None:
        """Calls `close` of all loggers, once."""
        self._call("close", failed)
        self._loggers = []

    def _call(self, method: str, *args: object) -> None:
        self._loggers = [
            logger
            for logger in self._loggers
            if self._try(
                lambda logger=logger: getattr(logger, method)(*args),
                f"{type(logger).__name__}.{method}",
            )
        ]

    def _try(self, call: Callable[[], object], what: str) -> bool:
        """Calls a function; warns and returns False if it raises."""
        try:
            call()
        except Exception as error:
            text = without_credentials(f"{type(error).__name__}: {error}")
            self._warn(f"{what} failed, and the run goes on without this logger: {text}")
            return False
        return True


def unknown_loggers(names: Iterable[str]) -> list[str]:
    """Returns the fault of each name that is neither a built-in logger nor names a class."""
    return [
        f"loggers: no logger is called {name!r}.{did_you_mean(name, _BUILT_IN)} Choose "
        f"{', '.join(_BUILT_IN)} or a class of your own, as package.module:Name"
        for name in names
        if name not in _BUILT_IN and not all(name.partition(":"))
    ]


def logger_class(name: str) -> type[MetricsLogger]:
    """Returns the class of a logger in `train.loggers`: `tensorboard`, `wandb`, `mlflow`, or
    `package.module:Name`.

    Raises:
        ConfigError: If the class cannot be imported or lacks methods of a logger.
        MissingExtraError: If a required package is not installed.
    """
    if name in _BUILT_IN:
        package, path = _BUILT_IN[name]
        require(package, name, f"train.loggers={name}")
    else:
        path = name
    try:
        cls = imported(path, "a class", lambda value: isinstance(value, type))
    except ConfigError as error:
        raise ConfigError(f"train.loggers: {error}") from error
    if missing := _missing(cls):
        raise ConfigError(f"train.loggers: {name!r} {missing}")
    return cls


def check_loggers(loggers: Iterable[Any]) -> None:
    """Raises `ConfigError` with every fault of `loggers`, whose items must be `MetricsLogger`s."""
    faults = []
    for index, logger in enumerate(loggers):
        if isinstance(logger, type):
            faults.append(
                f"loggers[{index}] is the class {logger.__name__}, but an object is expected.\n"
                f"  Pass {logger.__name__}(...)."
            )
        elif missing := _missing(logger):
            faults.append(f"loggers[{index}] ({type(logger).__name__}) {missing}")
    if faults:
        raise ConfigError("\n".join(faults))


def _missing(logger: object) -> str:
    """Returns the methods of a logger that a class or object lacks, and a fix, or an empty text."""
    names = [name for name in _METHODS if not callable(getattr(logger, name, None))]
    if not names:
        return ""
    return (
        f"lacks methods of a metrics logger: {', '.join(names)}.\n"
        "  Add them as shardlib.log.loggers.MetricsLogger describes."
    )
