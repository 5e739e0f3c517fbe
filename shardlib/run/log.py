"""The display, metrics, loggers and events of a run."""

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from shardlib import humanize
from shardlib.config import to_dict
from shardlib.errors import ShardlibError, without_credentials
from shardlib.explain import explain
from shardlib.hardware import chip_for
from shardlib.log.display import Display, Header
from shardlib.log.events import Events, last_account
from shardlib.log.goodput import Account, goodput, summary
from shardlib.log.loggers import Loggers, MetricsLogger, RunInfo, logger_class
from shardlib.log.metrics import MetricsWriter, mfu, read_metrics
from shardlib.mesh import describe
from shardlib.mesh.device_order import draw
from shardlib.run.directory import RunDirectory
from shardlib.run.plans.planning import flops_per_step
from shardlib.run.setup import Setup
from shardlib.runtime.distributed import ProcessGroup
from shardlib.runtime.launch.progress import RESTARTS_VARIABLE
from shardlib.runtime.phases import PhaseClock
from shardlib.train.loop import StepRecord

_EVAL = "eval/"


@dataclasses.dataclass
class _Row:
    """The metrics row of a step that may still wait for its evaluation."""

    step: int
    metrics: dict[str, Any]
    account: dict[str, Any]


class RunLog:
    """The display, metrics, loggers and events of a run: silent on all processes except the first.

    A context manager; leaving it ends the display and closes the files in every case.
    """

    def __init__(
        self,
        parts: Setup,
        directory: RunDirectory,
        group: ProcessGroup,
        clock: PhaseClock | None = None,
        loggers: Sequence[MetricsLogger] = (),
    ):
        config = parts.config
        self._parts, self._directory, self._group = parts, directory, group
        self._display = Display(
            config.train.steps,
            unit=parts.inputs.unit,
            log_every=config.train.log_every,
            enabled=group.is_primary,
        )
        self.notice = self._display.notice
        self.warning = self._display.warning
        self.waiting = self._display.waiting
        self.sample = self._display.sample
        chip = chip_for(jax.devices()[0])
        flops = chip.flops_per_device() if chip else None
        self._peak_flops = flops and flops * jax.device_count()
        self._flops_per_step = flops_per_step(config, parts.data)
        self._writer: MetricsWriter | None = None
        self._given = loggers
        self._loggers = Loggers()
        self._held: _Row | None = None
        self._account = Account(clock or PhaseClock())
        self._events = Events()
        self._at_step = 0
        self._is_finished = False
        self._ending: str | None = None

    def __enter__(self) -> "RunLog":
        self._display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        self._display.__exit__(kind, error, traceback)
        self._write_held()
        if self._writer is not None:
            facts: dict[str, Any] = {"how": self._ending, "finished": self._is_finished or None}
            if kind is not None:
                facts["error"] = kind.__name__
            if isinstance(error, ShardlibError):  # Other messages may hold anything.
                facts["message"] = str(error).partition("\n")[0]
            self.event("end", **facts)
            self._writer.close()
        elif self._events.is_waiting and self._directory.path.is_dir():
            self._events.open(self._directory.path, self.warning)
        self._events.close()
        self._loggers.close(failed=kind is not None)

    def header(self, start: int) -> None:
        """Prints what is known before the first step."""
        report = explain(self._parts.abstract)
        extra = {"precision": self._parts.config.precision, **self._parts.choices()}
        if self._parts.config.finetune is not None:
            frozen = humanize.size(report.bytes_per_device("model_state"))
            extra["frozen"] = f"{frozen} per device, besides the parameters of adapters"
        if 0 < start < self._parts.config.train.steps:
            extra["resumes"] = f"from step {start}"
        mesh = self._parts.scope.mesh
        self._display.header(
            Header(
                devices=_devices_text(),
                mesh=f"{describe(mesh)}\n{draw(mesh)}",
                num_params=report.num_params(),
                param_bytes_per_device=report.bytes_per_device("params"),
                units_per_step=self._parts.units_per_step(),
                flops_per_step=self._flops_per_step,
                run_dir=str(self._directory),
                extra=extra,
            )
        )

    def open(self, start: int) -> None:
        """Opens the files in the existing directory, to continue from a step.

        Removes the metrics of later steps, takes over the time account of earlier attempts, and
        writes the events so far.
        """
        self._at_step = start
        if not self._group.is_primary:
            return
        path = self._directory.path
        self._writer = MetricsWriter(path, resume_step=start, warn=self.warning)
        written = [x for x in (last_account(path), self._writer.last) if x and "spent" in x]
        # An account only grows, so the larger one is newer; timestamps of two hosts, or within a
        # millisecond, say less. In a tie the event knows more: whether the run had ended.
        last = max(written, key=lambda x: sum(x["spent"].values()), default=None)
        self._account.resume(self._writer.kept, last)
        self._events.open(path, self.warning)
        mesh = describe(self._parts.scope.mesh)
        self.event("start", mesh=mesh, devices=_devices_text(), processes=self._group.count)
        self._start_loggers(start)

    def _start_loggers(self, start: int) -> None:
        named = [logger_class(name) for name in self._parts.config.train.logger_names]
        self._loggers = Loggers(named, self._given, self.warning)
        config = _without_credentials(to_dict(self._parts.recorded))
        path, identity = self._directory.path, self._directory.identity
        self._loggers.start(RunInfo(config, path, identity, start, self.warning))

    def event(self, kind: str, text: str = "", *, step: int | None = None, **facts: object) -> None:
        """Shows an event on the terminal, and writes it to `events.jsonl`.

        May be called from any thread, and before `open`: events are held back until then. `kind`
        names it for programs; `text` is a line for people. The step is the last finished one by
        default. Facts are numbers, texts, and lists and dicts of them; None is dropped.
        """
        if text:
            self.notice(text)
        if self._group.is_primary:
            given = {name: value for name, value in facts.items() if value is not None}
            step = self._at_step if step is None else step
            spent = self._account.stamp()["spent"] if self._events.is_open else None
            self._events.add(kind, step=step, text=text, facts=given, spent=spent)

    def rewind(self, step: int, text: str, **facts: Any) -> None:
        """Reports that the run goes back to a step, and drops the rows of later steps.

        Their rows leave the metrics file, and the time spent on them counts as lost. An event of
        kind `rewind` records the rest; its `lost_steps` is the number of dropped steps.
        """
        self._held = None
        facts = {"lost_steps": self._at_step - step, **facts}
        self._display.forget(self._at_step - step)
        if self._writer is not None:
            self._account.rewound(self._writer.rewind(step))
        self._loggers.rewind(step)
        self._at_step = step
        self.event("rewind", text, **facts)

    def step(self, record: StepRecord) -> None:
        """Shows a step and writes the previous one, which may have waited for an evaluation."""
        self._write_held()
        self._at_step = record.step
        metrics = dict(record.metrics)
        seconds = record.mean_step_seconds
        rate = self._parts.units_per_step() / seconds if seconds else None
        row = {
            "loss": metrics.pop("loss"),
            "grad_norm": metrics.pop("grad_norm"),
            "learning_rate": metrics.pop("learning_rate"),
            f"{self._parts.inputs.unit}_per_second": rate,
            "step_seconds": record.step_seconds,
            "data_wait_seconds": record.data_wait_seconds,
            "mfu": mfu(self._flops_per_step, seconds, self._peak_flops),
        }
        self._held = _Row(record.step, row | metrics, self._account.stamp())
        memory = _peak_memory_bytes()
        self._display.step(record.step, row, mean_seconds=seconds, memory_bytes=memory)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Shows an evaluation, and adds it to the row of its step."""
        self._display.evaluation(step, values)
        if self._held is not None:
            self._held.metrics.update({f"{_EVAL}{name}": value for name, value in values.items()})

    def flush(self) -> None:
        """Writes the row of the last step, once all work of the step is done.

        The time since the step counts towards it, so that a run that resumes from it has that time
        in its account.
        """
        if self._held is not None:
            self._held.account = self._account.stamp()
            self._write_held()

    def _write_held(self) -> None:
        held, self._held = self._held, None
        if held is not None and self._writer is not None:
            row = held.metrics | {"goodput": round(goodput(held.account["spent"]), 4)}
            self._writer.write(held.step, row, held.account)
            self._loggers.log(held.step, row)

    def closing(self, title: str, *, is_finished: bool, step: int, can_sample: bool) -> None:
        """Prints the closing card of all steps in the metrics file, and the next commands."""
        self._write_held()
        self._is_finished, self._ending = is_finished, title
        rows: list[dict[str, Any]] = []
        if self._group.is_primary:  # `open` has warned of lines that are not a step's metrics.
            rows = read_metrics(self._directory.path, on_fault=lambda fault: None)
        curve = [row for row in rows if isinstance(row.get("loss"), int | float)]
        last = next((row for row in reversed(rows) if any(k.startswith(_EVAL) for k in row)), {})
        results: dict[str, float | str] = {
            f"eval {name.removeprefix(_EVAL)}": value
            for name, value in last.items()
            if name.startswith(_EVAL)
        }
        if self._writer is not None:
            results["goodput"] = summary(self._account.seconds())
        elif self._group.is_primary and (account := last_account(self._directory.path)):
            results["goodput"] = summary(account["spent"])
        self._display.closing(
            title,
            results=results,
            commands=self._commands(is_finished, step, can_sample),
            steps=[row["step"] for row in curve],
            losses=[row["loss"] for row in curve],
        )

    def _commands(self, is_finished: bool, step: int, can_sample: bool) -> dict[str, str]:
        launch = ""
        if self._group.started_by == "launch":
            restarts = os.environ.get(RESTARTS_VARIABLE, "0")
            again = "" if restarts == "0" else f"--restarts {shlex.quote(restarts)} "
            launch = f"launch --processes {self._group.count} {again}-- "
        config = shlex.quote(str(self._directory.config_file))
        train = f"shardlib {launch}train {config}"
        commands = {"train on": f"{train} train.steps={2 * step}"} if is_finished else {}
        commands = commands or {"resume": train}
        if not self._parts.config.checkpoint.enabled:
            commands, can_sample = {}, False
        if can_sample:
            commands["sample"] = f"shardlib generate {shlex.quote(str(self._directory))}"
        return commands | {"explain": f"shardlib explain {config}"}


def _without_credentials(value: object) -> Any:
    """Returns plain data with the credentials of URLs as `***`, for loggers that send it away."""
    if isinstance(value, dict):
        return {name: _without_credentials(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_without_credentials(child) for child in value]
    return without_credentials(value) if isinstance(value, str) else value


def _devices_text() -> str:
    devices = jax.devices()
    chip = chip_for(devices[0])
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{len(devices)} x {chip.name if chip else devices[0].device_kind}{processes}"


def _peak_memory_bytes() -> int | None:
    """Peak bytes in use on the fullest local device; None if the backend does not report it."""
    peaks = [
        stats["peak_bytes_in_use"]
        for device in jax.local_devices()
        if (stats := device.memory_stats()) and "peak_bytes_in_use" in stats
    ]
    return max(peaks, default=None)
