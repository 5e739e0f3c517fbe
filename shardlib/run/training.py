"""The main job: a config in, a trained run directory out; the same again resumes."""

import dataclasses
from typing import Any

import jax

from shardlib import __version__, distributed
from shardlib.checkpoint import RunCheckpoints
from shardlib.config import from_dict, to_dict
from shardlib.data import MapSource, Prefetcher
from shardlib.errors import DataError
from shardlib.mesh import describe
from shardlib.run.checks import check_config
from shardlib.run.config import RunConfig, check_resumable
from shardlib.run.decide import as_recorded, decide
from shardlib.run.devices import start_devices
from shardlib.run.directory import RunDirectory
from shardlib.run.log import RunLog
from shardlib.run.programs import Programs, traced
from shardlib.run.setup import Setup, make_scope, open_source, setup
from shardlib.train.evaluate import evaluate
from shardlib.train.local_sgd import LocalSGD, group_means, merged
from shardlib.train.loop import Loop
from shardlib.train.state import TrainState, materialize


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
        MissingExtraError: If something asked for is not installed.
    """
    directory = RunDirectory(config.run_dir)
    directory.check_writable()
    saved = directory.read_config()
    asked, config = config, as_recorded(config, saved)
    if saved is not None:
        check_resumable(saved, config)
    group = start_devices(config)
    check_config(config, lambda: make_scope(config, jax.devices()))
    source = open_source(config, "train")
    held_out = None if config.eval.every_steps == 0 else open_source(config, "eval")
    parts = decide(setup(config, source.spec, make_scope(config, jax.devices())), source, asked)
    config = parts.config
    evaluated = None if held_out is None else held_out.element_spec()
    programs = traced(parts, source.element_spec(), evaluated, source.tokenizer)
    with RunCheckpoints(directory.checkpoints, config.checkpoint) as checkpoints:
        start = checkpoints.latest() or 0
        if start:
            _check_checkpoint(checkpoints, start, parts, source)
        if config.checkpoint.enabled and start < config.train.steps:
            checkpoints.check_writable()
        with RunLog(parts, directory, group) as log:
            run = _Run(parts, programs, source, held_out, checkpoints, directory, log)
            result = run.go(start, is_new=saved is None)
    distributed.barrier("shardlib/run/end")
    return result


def _check_checkpoint(
    checkpoints: RunCheckpoints, step: int, parts: Setup, source: MapSource
) -> None:
    """Raises what keeps the run from going on at a checkpoint; reads none of its arrays."""
    metadata = checkpoints.metadata(step)
    place = f"{checkpoints.directory}, step {step}"
    check_resumable(from_dict(RunConfig, metadata["config"], place), parts.config)
    checkpoints.check(step, parts.saved_state())
    if metadata["data"]["fingerprint"] != source.fingerprint:
        raise DataError(
            f"the data of {parts.config.run_dir} has changed since its last checkpoint.\n"
            "  Restore the files, or set run_dir to another directory."
        )


class _Run:
    """One process's part in a run, from the header to the closing card."""

    def __init__(
        self,
        parts: Setup,
        programs: Programs,
        source: MapSource,
        held_out: MapSource | None,
        checkpoints: RunCheckpoints,
        directory: RunDirectory,
        log: RunLog,
    ):
        config = parts.config
        self.parts, self.config = parts, config
        self.source, self.held_out = source, held_out
        self.checkpoints, self.directory, self.log = checkpoints, directory, log
        self.evaluation: dict[str, float] = {}
        self._saved_step = -1
        self._stop_step = -1
        self._step, self._eval_step, self._sampler = programs

    def go(self, start: int, *, is_new: bool) -> TrainResult:
        """Runs from step `start` to the end, or to a signal."""
        steps = self.config.train.steps
        self.log.header(start)
        if not is_new and not start:
            self.log.notice(f"{self.directory} has no checkpoint yet: training from the start")
        with distributed.StopRequest() as stop:
            if start < steps:
                state = self._train(start, stop)
            else:
                state = self._state(start)
                self.log.notice(
                    f"already trained to step {start}; give a larger train.steps to go on"
                )
        step = int(state.step)
        is_finished = step >= steps
        by = f" by {stop.signal_name}" if stop.signal_name else ""
        saved = "and saved " if self.config.checkpoint.enabled else ""
        self.log.closing(
            f"finished at step {step}" if is_finished else f"stopped{by} {saved}at step {step}",
            is_finished=is_finished,
            step=step,
            can_sample=self._sampler is not None,
        )
        return TrainResult(merged(self._step, state), step, self.evaluation)

    def _state(self, start: int) -> Any:
        if start:
            self.log.waiting(f"restoring step {start}")
            return self.checkpoints.restore(start, self.parts.saved_state())
        state = materialize(self.parts.abstract, seed=self.config.seed)
        return self._step.init(state) if isinstance(self._step, LocalSGD) else state

    def _train(self, start: int, stop: distributed.StopRequest) -> Any:
        rows = self.parts.rows(self.source)
        shardings = self.parts.shardings(rows)
        # Opened first: its thread reads while the state is made and the step compiles.
        with Prefetcher(rows, shardings, start) as batches:
            state = self._state(start)
            if jax.process_index() == 0:
                self.directory.write(self.config, self.source.tokenizer)
            self.log.open(start)
            self.log.waiting("compiling the training step")
            loop = Loop(
                self._step,
                batches,
                on_step=self.log.step,
                is_due=lambda step: self._is_due(step, stop),
                after_step=self._after_step,
                read=group_means if isinstance(self._step, LocalSGD) else None,
            )
            state = loop.run(state, self.config.train.steps)
        self._save(int(state.step), state)
        self.checkpoints.wait()
        return state

    def _is_due(self, step: int, stop: distributed.StopRequest) -> bool:
        if stop.agreed(step):
            self._stop_step = step
        return step in (self._stop_step, self.config.train.steps) or any(
            _every(step, period)
            for period in (
                self.config.checkpoint.every_steps,
                self.config.eval.every_steps,
                self.config.train.sample_every,
            )
        )

    def _after_step(self, step: int, state: Any) -> bool:
        is_last = step == self.config.train.steps
        if step == self._stop_step and not is_last:
            return False
        if is_last or _every(step, self.config.checkpoint.every_steps):
            self._save(step, state)
        if self.held_out is not None and (is_last or _every(step, self.config.eval.every_steps)):
            self._evaluate(step, state, self.held_out)
        if self._sampler and (is_last or _every(step, self.config.train.sample_every)):
            options = self.config.train
            text = self._sampler(
                merged(self._step, state),
                options.sample_prompt,
                length=options.sample_length,
                temperature=options.sample_temperature,
                seed=self.config.seed,
            )
            self.log.sample(step, options.sample_prompt, text)
        # Before the checkpoint is complete: a run that goes on from it has this line already.
        self.log.flush()
        return True

    def _evaluate(self, step: int, state: Any, source: MapSource) -> None:
        with Prefetcher(source, self.parts.shardings(source)) as batches:
            self.evaluation = evaluate(self._eval_step, merged(self._step, state), batches)
        self.log.evaluation(step, self.evaluation)

    def _save(self, step: int, state: Any) -> None:
        if not self.config.checkpoint.enabled or step == self._saved_step:
            return
        rules = self.parts.scope.rules
        metadata: dict[str, Any] = {
            "shardlib": __version__,
            "config": to_dict(self.config),
            "mesh": describe(self.parts.scope.mesh),
            "rules": {kind: dict(rules.table(kind)) for kind in ("params", "activations")},
            "data": {
                "samples_seen": step * self.config.train.global_batch,
                "fingerprint": self.source.fingerprint,
            },
        }
        self.checkpoints.save(step, state, metadata)
        self._saved_step = step


def _every(step: int, period: int | None) -> bool:
    return bool(period) and step % period == 0
