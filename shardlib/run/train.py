"""The main job: a config in, a trained run directory out; the same again resumes."""

import dataclasses
import pathlib
from typing import Any

import jax

from shardlib import __version__, distributed
from shardlib.checkpoint import RunCheckpoints
from shardlib.config import load, to_dict, to_yaml
from shardlib.data import MapSource, Prefetcher
from shardlib.errors import DataError
from shardlib.explain import explain
from shardlib.hardware import chip_for
from shardlib.mesh import describe
from shardlib.placement import draw
from shardlib.run.config import RunConfig, check_resumable
from shardlib.run.devices import start_devices
from shardlib.run.generate import CHECKPOINTS, CONFIG_FILE, Sampler
from shardlib.run.setup import Setup, check_run_dir, model_maker, open_source, setup
from shardlib.train.display import Display, Header, StepStatus
from shardlib.train.evaluate import evaluate
from shardlib.train.loop import Loop, StepRecord
from shardlib.train.metrics import MetricsWriter, mfu, read_metrics
from shardlib.train.state import TrainState, init_state
from shardlib.train.step import make_eval_step, make_train_step


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a run ended. `evaluation` is the last one of this process, if there was any."""

    state: TrainState
    step: int
    evaluation: dict[str, float]


def train(config: RunConfig) -> TrainResult:
    """Trains until `config.train.steps`, from the newest checkpoint of `config.run_dir` if any.

    Everything is checked before anything is written. Ctrl-C and SIGTERM save and return.

    Raises:
        ConfigError: If the directory holds a run of another config or cannot be written, or model
            and data do not fit each other.
        DataError: If the data is missing, empty or malformed.
        MeshError: If mesh, devices and batch do not fit each other.
        RuleError: If tensors cannot be placed.
        CheckpointError: If the checkpoint is of another model, or cannot be read or written.
    """
    run_dir = pathlib.Path(config.run_dir)
    check_run_dir(run_dir)
    if (run_dir / CONFIG_FILE).exists():
        check_resumable(load(RunConfig, run_dir / CONFIG_FILE), config)
    group = start_devices(config)
    source = open_source(config, "train")
    held_out = None if config.eval.every_steps == 0 else open_source(config, "eval")
    parts = setup(config, source.spec, jax.devices())
    with RunCheckpoints(run_dir / CHECKPOINTS, config.checkpoint) as checkpoints:
        if config.checkpoint.enabled:
            checkpoints.check_writable()
        start = checkpoints.latest() or 0
        if start:
            _check_data(checkpoints.metadata(start), source, config)
        display = Display(
            config.train.steps,
            unit=parts.unit(),
            log_every=config.train.log_every,
            enabled=group.is_primary,
        )
        with display:
            run = _Run(parts, source, held_out, checkpoints, display, group.is_primary)
            result = run.go(start)
    distributed.barrier("shardlib/run/end")
    return result


def _check_data(metadata: dict[str, Any], source: MapSource, config: RunConfig) -> None:
    if metadata["data"]["fingerprint"] != source.fingerprint:
        raise DataError(
            f"the data of {config.run_dir} has changed since its last checkpoint.\n"
            "  Restore the files, or set run_dir to another directory."
        )


class _Run:
    """One process's part in a run, from the header to the closing card."""

    def __init__(
        self,
        parts: Setup,
        source: MapSource,
        held_out: MapSource | None,
        checkpoints: RunCheckpoints,
        display: Display,
        is_primary: bool,
    ):
        config = parts.config
        self.parts, self.config = parts, config
        self.source, self.held_out = source, held_out
        self.checkpoints, self.display, self.is_primary = checkpoints, display, is_primary
        self.run_dir = pathlib.Path(config.run_dir)
        self.evaluation: dict[str, float] = {}
        self._saved_step = -1
        self._held: tuple[int, dict[str, Any]] | None = None
        self._writer: MetricsWriter | None = None
        chip = chip_for(jax.devices()[0])
        flops = chip.flops_per_device() if chip else None
        self._peak_flops = flops and flops * jax.device_count()
        self._flops_per_step = parts.flops_per_step()
        self._eval_step = make_eval_step(
            parts.loss(train=False),
            precision=config.precision,
            batch_axes=parts.batch_axes,
            params_of=parts.best_params,
        )
        samples = parts.family.generate is not None and config.train.sample_length > 0
        self._sampler = (
            Sampler(parts, source.tokenizer) if samples and source.tokenizer is not None else None
        )

    def go(self, start: int) -> TrainResult:
        """Runs from step `start` to the end, or to a signal."""
        config = self.config
        self._header(start)
        self._stale_directory(start)
        state = self._state(start)
        if start >= config.train.steps:
            self.display.notice(
                f"already trained to step {start}; give a larger train.steps to go on"
            )
            self._saved_step = start
            self._close(state, stopped=None)
            return TrainResult(state, start, self.evaluation)
        self._open_writer(start)
        step = make_train_step(
            self.parts.loss(train=True),
            microbatches=config.train.microbatches,
            precision=config.precision,
            schedule=self.parts.optimizer.schedule,
            batch_axes=self.parts.batch_axes,
        )
        self.display.waiting("compiling the training step")
        with (
            distributed.StopRequest() as stop,
            Prefetcher(self.source, self.parts.shardings(self.source), start) as batches,
        ):
            self._stop, self._stop_step = stop, -1
            loop = Loop(
                step,
                batches,
                on_step=self._on_step,
                is_due=self._is_due,
                after_step=self._after_step,
            )
            state = loop.run(state, config.train.steps)
            self._write_held()
            number = int(state.step)
            self._save(number, state, wait=True)
        if self._writer:
            self._writer.close()
        self._close(state, stopped=stop.signal_name if number < config.train.steps else None)
        return TrainResult(state, number, self.evaluation)

    # What happens before the first step.

    def _header(self, start: int) -> None:
        report = explain(self.parts.abstract)
        extra = {"precision": self.config.precision}
        if start:
            extra["resumes"] = f"from step {start}"
        devices = jax.devices()
        chip = chip_for(devices[0])
        kind = chip.name if chip else devices[0].device_kind
        processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        mesh = self.parts.scope.mesh
        self.display.header(
            Header(
                devices=f"{len(devices)} x {kind}{processes}",
                mesh=f"{describe(mesh)}\n{draw(mesh)}",
                num_params=report.num_params(),
                param_bytes_per_device=report.bytes_per_device("params"),
                units_per_step=self.parts.units_per_step(),
                flops_per_step=self._flops_per_step,
                run_dir=str(self.run_dir),
                extra=extra,
            )
        )

    def _stale_directory(self, start: int) -> None:
        if not start and (self.run_dir / CONFIG_FILE).exists():
            self.display.notice(f"{self.run_dir} has no checkpoint yet: training from the start")

    def _state(self, start: int) -> TrainState:
        if start:
            return self.checkpoints.restore(start, self.parts.abstract)
        scope = self.parts.scope
        return init_state(
            model_maker(self.config, self.parts.family, self.parts.data),
            self.parts.optimizer.transform,
            seed=self.config.seed,
            precision=self.config.precision,
            mesh=scope.mesh,
            rules=scope.rules,
        )

    def _open_writer(self, start: int) -> None:
        if not self.is_primary:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._writer = MetricsWriter(
            self.run_dir, tensorboard=self.config.train.tensorboard, resume_step=start
        )
        (self.run_dir / CONFIG_FILE).write_text(to_yaml(self.config), encoding="utf-8")

    # What happens at each step.

    def _on_step(self, record: StepRecord) -> None:
        self._write_held()
        seconds = record.mean_step_seconds
        rate = self.parts.units_per_step() / seconds if seconds else None
        utilisation = mfu(self._flops_per_step, seconds, self._peak_flops)
        self._held = (
            record.step,
            {
                **record.metrics,
                f"{self.parts.unit()}_per_second": rate,
                "step_seconds": record.step_seconds,
                "data_wait_seconds": record.data_wait_seconds,
                "mfu": utilisation,
            },
        )
        self.display.step(
            StepStatus(
                step=record.step,
                loss=record.metrics["loss"],
                grad_norm=record.metrics["grad_norm"],
                units_per_second=rate,
                mfu=utilisation,
                memory_bytes=_peak_memory_bytes(),
                data_wait_seconds=record.data_wait_seconds,
                step_seconds=seconds,
            )
        )

    def _write_held(self) -> None:
        """Writes the last step's line, which waited for an evaluation of the same step."""
        if self._held is not None and self._writer is not None:
            self._writer.write(*self._held)
        self._held = None

    def _is_due(self, step: int) -> bool:
        if self._stop.agreed(step):
            self._stop_step = step
        return (
            step == self._stop_step
            or step == self.config.train.steps
            or self._saves_at(step)
            or _every(step, self.config.eval.every_steps)
            or _every(step, self.config.train.sample_every)
        )

    def _saves_at(self, step: int) -> bool:
        return self.config.checkpoint.enabled and _every(step, self.config.checkpoint.every_steps)

    def _after_step(self, step: int, state: TrainState) -> bool:
        if step == self._stop_step:
            return False
        is_last = step == self.config.train.steps
        if self._saves_at(step):
            self._save(step, state)
        if self.held_out is not None and (is_last or _every(step, self.config.eval.every_steps)):
            self._evaluate(step, state, self.held_out)
        if self._sampler and (is_last or _every(step, self.config.train.sample_every)):
            options = self.config.train
            text = self._sampler(
                state,
                options.sample_prompt,
                length=options.sample_length,
                temperature=options.sample_temperature,
                seed=self.config.seed,
            )
            self.display.sample(step, options.sample_prompt, text)
        return True

    def _evaluate(self, step: int, state: TrainState, source: MapSource) -> None:
        with Prefetcher(source, self.parts.shardings(source)) as batches:
            self.evaluation = evaluate(self._eval_step, state, batches)
        self.display.evaluation(step, self.evaluation)
        if self._held is not None:
            values = {f"eval/{name}": value for name, value in self.evaluation.items()}
            self._held[1].update(values)

    def _save(self, step: int, state: TrainState, *, wait: bool = False) -> None:
        if not self.config.checkpoint.enabled:
            return
        if step != self._saved_step:
            scope = self.parts.scope
            metadata = {
                "shardlib": __version__,
                "config": to_dict(self.config),
                "mesh": describe(scope.mesh),
                "rules": {
                    kind: dict(scope.rules.table(kind)) for kind in ("params", "activations")
                },
                "data": {
                    "samples_seen": step * self.config.train.global_batch,
                    "fingerprint": self.source.fingerprint,
                },
            }
            self.checkpoints.save(step, state, metadata)
            self._saved_step = step
        if wait:
            self.checkpoints.wait()

    def _close(self, state: TrainState, stopped: str | None) -> None:
        step = int(state.step)
        results: dict[str, float | str] = {
            f"eval {name}": value for name, value in self.evaluation.items()
        }
        rows = read_metrics(self.run_dir) if self.is_primary else []
        config = self.run_dir / CONFIG_FILE
        commands = {"resume": f"shardlib train {config}"}
        if stopped is None:
            commands = {"train on": f"shardlib train {config} train.steps={2 * step}"}
        if self._sampler:
            commands["sample"] = f"shardlib generate {self.run_dir}"
        commands["explain"] = f"shardlib explain {config}"
        if not self.config.checkpoint.enabled:
            commands = {"explain": commands["explain"]}
        self.display.closing(
            f"stopped by {stopped} at step {step}" if stopped else f"finished at step {step}",
            results=results,
            commands=commands,
            steps=[row["step"] for row in rows],
            losses=[row["loss"] for row in rows],
        )


def _every(step: int, period: int | None) -> bool:
    return bool(period) and step % period == 0


def _peak_memory_bytes() -> int | None:
    """Peak bytes in use on the fullest local device; None where the backend does not say."""
    peaks = [
        stats["peak_bytes_in_use"]
        for device in jax.local_devices()
        if (stats := device.memory_stats()) and "peak_bytes_in_use" in stats
    ]
    return max(peaks, default=None)
