"""What a run shows to a person and writes down of its steps."""

import shlex
from collections.abc import Mapping
from typing import Any

import jax

from shardlib.distributed import ProcessGroup
from shardlib.explain import explain
from shardlib.hardware import chip_for
from shardlib.mesh import describe
from shardlib.placement import draw
from shardlib.run.directory import RunDirectory
from shardlib.run.setup import Setup
from shardlib.train.display import Display, Header, StepStatus
from shardlib.train.loop import StepRecord
from shardlib.train.metrics import MetricsWriter, mfu, read_metrics

_EVAL = "eval/"


class RunLog:
    """The display and the metrics file of a run: silent on every process but the first.

    A context manager; leaving it ends the display and closes the files, whatever has happened.

    Args:
        parts: The run.
        directory: Where it is written.
        group: Which process this is.
    """

    def __init__(self, parts: Setup, directory: RunDirectory, group: ProcessGroup):
        config = parts.config
        self._parts, self._directory, self._group = parts, directory, group
        self._display = Display(
            config.train.steps,
            unit=parts.unit(),
            log_every=config.train.log_every,
            enabled=group.is_primary,
        )
        self.notice = self._display.notice
        self.waiting = self._display.waiting
        self.sample = self._display.sample
        chip = chip_for(jax.devices()[0])
        flops = chip.flops_per_device() if chip else None
        self._peak_flops = flops and flops * jax.device_count()
        self._flops_per_step = parts.flops_per_step()
        self._writer: MetricsWriter | None = None
        self._held: tuple[int, dict[str, Any]] | None = None

    def __enter__(self) -> "RunLog":
        self._display.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._display.__exit__(*exc_info)
        self.flush()
        if self._writer is not None:
            self._writer.close()

    def header(self, start: int) -> None:
        """Prints what is known before the first step."""
        report = explain(self._parts.abstract)
        extra = {"precision": self._parts.config.precision, **self._parts.choices()}
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
        """Opens the metrics file, without the lines of steps after `start`."""
        if self._group.is_primary:
            tensorboard = self._parts.config.train.tensorboard
            self._writer = MetricsWriter(
                self._directory.path, tensorboard=tensorboard, resume_step=start
            )

    def step(self, record: StepRecord) -> None:
        """Shows a step and writes the one before, which may have waited for an evaluation."""
        self.flush()
        metrics = dict(record.metrics)
        seconds = record.mean_step_seconds
        rate = self._parts.units_per_step() / seconds if seconds else None
        utilisation = mfu(self._flops_per_step, seconds, self._peak_flops)
        row = {
            "loss": metrics.pop("loss"),
            "grad_norm": metrics.pop("grad_norm"),
            "learning_rate": metrics.pop("learning_rate"),
            f"{self._parts.unit()}_per_second": rate,
            "step_seconds": record.step_seconds,
            "data_wait_seconds": record.data_wait_seconds,
            "mfu": utilisation,
        }
        self._held = (record.step, row | metrics)
        self._display.step(
            StepStatus(
                step=record.step,
                loss=row["loss"],
                grad_norm=row["grad_norm"],
                units_per_second=rate,
                mfu=utilisation,
                memory_bytes=_peak_memory_bytes(),
                data_wait_seconds=record.data_wait_seconds,
                step_seconds=seconds,
            )
        )

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Shows an evaluation, and adds it to the line of its step."""
        self._display.evaluation(step, values)
        if self._held is not None:
            self._held[1].update({f"{_EVAL}{name}": value for name, value in values.items()})

    def flush(self) -> None:
        """Writes the line of the last step, which waited for an evaluation."""
        held, self._held = self._held, None
        if held is not None and self._writer is not None:
            self._writer.write(*held)

    def closing(self, title: str, *, is_finished: bool, step: int, can_sample: bool) -> None:
        """Prints the closing card, of all steps that the metrics file holds, and what to do next.

        Args:
            title: How the run has ended.
            is_finished: Whether it has taken all of its steps.
            step: How many it has taken.
            can_sample: Whether `shardlib generate` has something to say.
        """
        self.flush()
        rows = read_metrics(self._directory.path) if self._group.is_primary else []
        last = next((row for row in reversed(rows) if any(k.startswith(_EVAL) for k in row)), {})
        results = {
            f"eval {name.removeprefix(_EVAL)}": value
            for name, value in last.items()
            if name.startswith(_EVAL)
        }
        self._display.closing(
            title,
            results=results,
            commands=self._commands(is_finished, step, can_sample),
            steps=[row["step"] for row in rows],
            losses=[row["loss"] for row in rows],
        )

    def _commands(self, is_finished: bool, step: int, can_sample: bool) -> dict[str, str]:
        launch = (
            f"launch --processes {self._group.count} -- "
            if self._group.started_by == "launch"
            else ""
        )
        config = shlex.quote(str(self._directory.config_file))
        train = f"shardlib {launch}train {config}"
        commands = {"train on": f"{train} train.steps={2 * step}"} if is_finished else {}
        commands = commands or {"resume": train}
        if not self._parts.config.checkpoint.enabled:
            commands, can_sample = {}, False
        if can_sample:
            commands["sample"] = f"shardlib generate {shlex.quote(str(self._directory))}"
        return commands | {"explain": f"shardlib explain {config}"}


def _devices_text() -> str:
    devices = jax.devices()
    chip = chip_for(devices[0])
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{len(devices)} x {chip.name if chip else devices[0].device_kind}{processes}"


def _peak_memory_bytes() -> int | None:
    """Peak bytes in use on the fullest local device; None where the backend does not say."""
    peaks = [
        stats["peak_bytes_in_use"]
        for device in jax.local_devices()
        if (stats := device.memory_stats()) and "peak_bytes_in_use" in stats
    ]
    return max(peaks, default=None)
