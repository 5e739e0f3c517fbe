"""One attempt at a run on one process, from the header to the closing card."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from shardlib.checkpoint import Manifest, RunCheckpoints
from shardlib.data import MapSource, Prefetcher
from shardlib.log.step_profile import StepProfiler
from shardlib.paths import path_string
from shardlib.run.directory import RunDirectory
from shardlib.run.initial import start_state
from shardlib.run.log import RunLog
from shardlib.run.position import Standing, check_same_run
from shardlib.run.setup import Setup
from shardlib.run.trace_programs import Programs
from shardlib.runtime import distributed
from shardlib.runtime.launch.progress import report_progress, report_rewind
from shardlib.runtime.phases import PhaseClock
from shardlib.train.evaluate import evaluate
from shardlib.train.guards import GuardPolicy, GuardsConfig, Rewind
from shardlib.train.local_sgd.outer import LocalSGD, group_means, merged
from shardlib.train.loop import Loop, StepRecord
from shardlib.train.state import TrainState

_State = Any
"""A `TrainState`, or the state of the groups of local SGD."""
AfterStep = Callable[[int], str | None]
"""Callback that gets the number of each dispatched step; a returned text is a reason to stop."""


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of a run. `evaluation` is the last evaluation of this process, if any."""

    state: TrainState
    step: int
    evaluation: dict[str, float]


@dataclasses.dataclass(eq=False)
class Attempt:
    """Trains from the newest checkpoint that validates to the end, a stop or an error."""

    parts: Setup
    programs: Programs
    source: MapSource
    held_out: MapSource | None
    """The evaluation data, if the run evaluates."""
    checkpoints: RunCheckpoints
    directory: RunDirectory
    log: RunLog
    clock: PhaseClock
    """The clock of phases, driven by the attempt."""
    stop: distributed.StopRequest
    after_step: AfterStep | None = None
    """See `shardlib.run.train`."""

    def __post_init__(self) -> None:
        self.config = self.parts.config
        self.evaluation: dict[str, float] = {}
        self._step, self._eval_step, self._sampler = self.programs
        self._standing = Standing()
        self._acts_on_guards = not isinstance(self._step, LocalSGD) or jax.process_count() == 1
        self._policy = GuardPolicy(self._guards(), self._samples_of)
        self._latest: dict[str, float] = {}
        self._reported_step: int | None = None
        self._recorded_step: int | None = None
        self._asked = 0
        self._stopping = False
        self._is_save_put_off = False

    def go(self, newest: int, *, is_new: bool) -> TrainResult:
        """Runs to the end, or to a stop. `newest` is the step of the newest checkpoint, 0 without
        any; `is_new` says that the directory held no run."""
        self.log.header(newest)
        if not self._acts_on_guards and self.config.train.guards.refuses:
            self.log.notice(
                "local SGD in several processes: each process sees only the metrics of its own "
                "groups, so skipped updates are reported, but the run does not go back for them"
            )
        state = self._restored()
        if not is_new and not self.checkpoints.steps():
            self.log.notice(f"{self.directory} has no checkpoint yet: training from the start")
        saved = ""
        if int(state.step) >= self.config.train.steps and self._policy.rewind is None:
            self.log.notice(
                f"already trained to step {int(state.step)}; give a larger train.steps to go on"
            )
        elif not self._is_stopped():
            state = self._train(state)
            saved = "and saved " if self.config.checkpoint.enabled else ""
        step = int(state.step)
        is_finished = step >= self.config.train.steps and self._policy.rewind is None
        by = f" by {self.stop.reason}" if self.stop.reason else ""
        self.log.closing(
            f"finished at step {step}" if is_finished else f"stopped{by} {saved}at step {step}",
            is_finished=is_finished,
            step=step,
            can_sample=self._sampler is not None,
        )
        return TrainResult(merged(self._step, state), step, self.evaluation)

    def _restored(self) -> _State:
        """Returns the state of the newest valid checkpoint, or of step 0, and sets the progress of
        the run."""
        with self.clock.within("restore"):
            if steps := self.checkpoints.steps():
                self.log.waiting(f"restoring step {steps[-1]}")
            restored = self.checkpoints.restore_newest(
                self._target(),
                accept=check_same_run(self.parts, self.source),
                partial=_is_of_window,
            )
        state = self._begun_at(restored)
        if restored is not None:
            self._tell_batch(restored[0])
        where = self.directory.path / "profile"
        self._profiler = StepProfiler(
            self.config.train.profile, where, int(state.step), writes=jax.process_index() == 0
        )
        return state

    def _begun_at(self, restored: tuple[Manifest, _State] | None) -> _State:
        """Returns the state of a checkpoint, or of step 0, and sets the progress of the run."""
        if restored is not None:
            manifest, state = restored
            self._standing = Standing.of(manifest)
            self._policy.resume(manifest.run.get("guards", {}))
            self._is_save_put_off = manifest.run.get("save_put_off", False)
            return state
        self._standing = Standing()
        state = start_state(self.parts)
        return self._step.init(state) if isinstance(self._step, LocalSGD) else state

    def _target(self) -> _State:
        """Returns the target of a restore. It has an empty spike window for checkpoints that were
        saved without one."""

        def target(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> Any:
            if not _is_of_window(path_string(path)):
                return leaf
            return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

        return jax.tree_util.tree_map_with_path(target, self.parts.saved_state())

    def _tell_batch(self, manifest: Manifest) -> None:
        before = manifest.run["config"]["train"]["global_batch"]
        now, seen = self.config.train.global_batch, self._standing.position.samples_seen
        if before != now:
            text = f"the global batch was {before} and is {now} from sample {seen} on"
            self.log.event("batch", text, step=manifest.step, before=before, now=now, sample=seen)

    def _train(self, state: _State) -> _State:
        if jax.process_index() == 0:
            self.directory.write(self.parts.recorded, self.source.tokenizer)
        self.log.open(self._standing.position.step)
        self.log.waiting("compiling the training step")
        if self.config.checkpoint.enabled:
            with self.clock.within("compile"):
                self.checkpoints.prepare(self.parts.saved_state())
        is_compiled, is_over = False, False
        while not is_over:
            if rewind := self._policy.rewind:  # At first, a rewind that the last attempt left.
                # Two states would not fit into device memory.
                for leaf in jax.tree.leaves(state):
                    leaf.delete()
                state = self._gone_back(rewind)
            state = self._loop(state, is_compiled=is_compiled)
            is_compiled = True
            is_over = self._stopping or self._policy.rewind is None
        if left := self._profiler.steps:
            self.log.notice(f"no step is profiled: the profile would have begun at step {left[0]}")
        self._save_at_last(int(state.step), state)
        return state

    def _loop(self, state: _State, *, is_compiled: bool) -> _State:
        position = self._standing.position
        rows = self.parts.rows(self.source.at(position))
        with Prefetcher(rows, self.parts.shardings(rows), position.step) as batches:
            loop = Loop(
                self._step,
                batches,
                on_step=self._saw,
                is_due=self._is_due,
                after_step=self._finish_step,
                read=group_means if isinstance(self._step, LocalSGD) else None,
                clock=self.clock,
                is_compiled=is_compiled,
            )
            try:
                return loop.run(state, self.config.train.steps)
            finally:
                self._end_profile()

    def _saw(self, record: StepRecord) -> None:
        self._latest = {"loss": record.metrics["loss"]}
        self.log.step(record)
        self._policy.saw(record)
        if self._policy.fault is not None:
            first, end = self._samples_of(record.step)
            self.log.event(
                "skipped_update",
                f"step {record.step}: its update is skipped because {self._policy.fault} "
                f"(samples {first} to {end - 1})",
                step=record.step,
                samples=[first, end],
            )

    def _is_stopped(self) -> bool:
        """Whether to stop now. All processes ask equally often, and get the same answer."""
        # A counter and not the step, which falls on a rewind and stands still in an evaluation.
        self._asked += 1
        self._stopping = self._stopping or self.stop.agreed(self._asked)
        return self._stopping

    def _is_due(self, step: int) -> bool:
        self.checkpoints.poll()
        if self.checkpoints.has_given_up:
            self.stop.request("saves that failed")
        if self.after_step is not None and (reason := self.after_step(step)):
            self.stop.request(reason)
        self._report_progress()
        is_profile_due = self._profiler.is_due(step)
        return (
            self._is_stopped()
            or step == self.config.train.steps
            or self._policy.rewind is not None
            or self._is_save_put_off
            or is_profile_due
            or self.checkpoints.is_due(step)
            or _every(step, self.config.eval.every_steps)
            or _every(step, self.config.train.sample_every)
        )

    def _finish_step(self, step: int, state: _State) -> bool:
        self._end_profile(step)
        is_last = step == self.config.train.steps
        # A checkpoint between refused updates would be useless for a rewind.
        is_asked = self._is_save_put_off or self.checkpoints.is_due(step)
        self._is_save_put_off = is_asked and self._acts_on_guards and not self._policy.healthy
        if self._policy.rewind:
            return False
        if self._stopping and not is_last:
            self.log.flush()
            return False
        evaluated = {}
        if self.held_out is not None and (is_last or _every(step, self.config.eval.every_steps)):
            evaluated = self._evaluate(step, state, self.held_out)
        # Before the checkpoint is complete: a run that resumes from it already has this row.
        self.log.flush()
        if self._stopping:
            return False
        if is_last or (is_asked and not self._is_save_put_off):
            self._save(step, state, evaluated)
        if self._sampler and (is_last or _every(step, self.config.train.sample_every)):
            self._sample(step, state)
        self._profiler.start(step)
        return True

    def _end_profile(self, step: int | None = None) -> None:
        if steps := self._profiler.end(step):
            first, last = steps[0], steps[-1]
            text = f"steps {first} to {last} are profiled in {self._profiler.directory}"
            self.log.event("profiled", text, steps=[first, last])

    def _evaluate(self, step: int, state: _State, source: MapSource) -> dict[str, float]:
        with (
            self.clock.within("evaluate"),
            Prefetcher(source, self.parts.shardings(source)) as batches,
        ):
            model = merged(self._step, state)
            stream = self._until_stopped(batches)
            metrics = {}
            if not self._is_stopped():
                metrics = evaluate(self._eval_step, model, stream, score=source.score)
        if self._stopping:
            self.log.notice(f"the evaluation of step {step} is skipped, to stop in time")
            return {}
        self.evaluation = metrics
        self.log.evaluation(step, metrics)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def _until_stopped(self, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        """Yields a batch, and more until a stop: a preempted machine must not wait for an
        evaluation."""
        for index, batch in enumerate(batches):
            # The watchdog's limit is for one batch, not for all of them.
            self.clock.progress()
            if index and self._is_stopped():
                return
            yield batch

    def _sample(self, step: int, state: _State) -> None:
        options = self.config.train
        assert self._sampler is not None
        with self.clock.within("evaluate"):
            text = self._sampler(
                merged(self._step, state),
                options.sample_prompt,
                length=options.sample_length,
                temperature=options.sample_temperature,
                seed=self.config.seed,
            )
        self.log.sample(step, options.sample_prompt, text)

    def _save(
        self, step: int, state: _State, evaluated: dict[str, float], *, wait: bool = False
    ) -> None:
        if not self.config.checkpoint.enabled:
            return
        metadata = self._standing.metadata(step, self.parts, self.source, self._policy)
        metadata["id"] = self.directory.identity
        metadata["save_put_off"] = self._is_save_put_off
        metrics = {**self._latest, **evaluated}
        with self.clock.within("save"):
            self.checkpoints.save(step, state, metadata, metrics=metrics, wait=wait)

    def _save_at_last(self, step: int, state: _State) -> None:
        """Makes sure that the last step is saved, or raises; a failed save is tried again."""
        with self.clock.within("save"):
            self.checkpoints.settle()
        if self.checkpoints.last_kept != step:
            self._save(step, state, {}, wait=True)
        self._report_progress()
        self.checkpoints.check_failures()

    def _report_progress(self) -> None:
        """Reports the newest complete step to the launcher, and records the one in the run's
        directory: a later start can then tell that checkpoints are missing.
        """
        saved, kept = self.checkpoints.last_saved, self.checkpoints.last_kept
        if saved is not None and saved != self._reported_step:
            self._reported_step = saved
            report_progress(saved)
        if kept is not None and kept != self._recorded_step:
            self._recorded_step = kept
            self.log.event("saved", step=kept)

    def _gone_back(self, rewind: Rewind) -> _State:
        """Returns the state of the last healthy checkpoint, and skips the data since: the same data
        would cause the same fault again."""
        rewinds = self._policy.rewinds
        with self.clock.within("restore"):
            restored = self.checkpoints.restore_newest(
                self._target(),
                accept=lambda manifest: manifest.run.get("healthy", True),
                partial=_is_of_window,
            )
            state = self._begun_at(restored)
            self.checkpoints.drop_after(int(state.step) if restored else -1)
        self._reported_step = self._recorded_step = None
        report_rewind(int(state.step))
        self._policy.rewinds = rewinds
        self._policy.rewound()
        self._is_save_put_off = False
        step, first = int(state.step), self._standing.position.samples_seen
        self._standing = self._standing.past(rewind.end)
        self.log.rewind(
            step,
            f"went back from step {rewind.step} to step {step} because {rewind.why}; "
            f"samples {first} to {rewind.end - 1} are skipped",
            samples=[first, rewind.end],
        )
        return state

    def _guards(self) -> GuardsConfig:
        """Returns the guards. Local SGD in several processes never rewinds: each process knows the
        metrics of its own groups alone, and the processes would not rewind together."""
        guards = self.config.train.guards
        if self._acts_on_guards:
            return guards
        return dataclasses.replace(guards, patience=self.config.train.steps + 1)

    def _samples_of(self, step: int) -> tuple[int, int]:
        position, batch = self._standing.position, self.config.train.global_batch
        return position.samples_at(step - 1, batch), position.samples_at(step, batch)


def _is_of_window(path: str) -> bool:
    return "spike_window" in path.split("/")


def _every(step: int, period: int | None) -> bool:
    return bool(period) and step % period == 0
