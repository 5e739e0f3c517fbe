"""Training of a run from its config into its directory; a second call resumes."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import jax

from shardlib.checkpoint import RunCheckpoints
from shardlib.data import MapSource
from shardlib.errors import DivergedError, RunDirError, SaveFailedError, ShardlibError
from shardlib.log.loggers import MetricsLogger, check_loggers
from shardlib.run.checks import check_config, check_is_config
from shardlib.run.config import RunConfig, check_resumable
from shardlib.run.devices import make_deterministic, start_devices
from shardlib.run.directory import RunDirectory, hold
from shardlib.run.log import RunLog
from shardlib.run.position import check_not_lost
from shardlib.run.resolve_auto import as_recorded, fitted, resolve
from shardlib.run.runner import AfterStep, Attempt
from shardlib.run.runner import TrainResult as TrainResult
from shardlib.run.setup import Setup, make_scope, open_source
from shardlib.run.trace_programs import traced
from shardlib.runtime import distributed, preemption
from shardlib.runtime.launch.progress import report_failure
from shardlib.runtime.peers import lost_peers
from shardlib.runtime.phases import PhaseClock
from shardlib.runtime.preemption import Notice
from shardlib.runtime.watchdog import Watchdog


def train(
    config: RunConfig,
    *,
    clock: PhaseClock | None = None,
    notices: Sequence[Notice] = (),
    after_step: AfterStep | None = None,
    loggers: Sequence[MetricsLogger] = (),
) -> TrainResult:
    """Trains until `config.train.steps`, from the newest checkpoint of `config.run_dir` if any.

    Everything is checked before anything is written. Ctrl-C, SIGTERM and notices of preemption save
    and return.

    Args:
        config: The config.
        clock: The clock of the run's time; default: one that starts with this call.
        notices: Further sources of preemption notices, in addition to the machine's own; see
            `shardlib.runtime.preemption`.
        after_step: Called with the number of each step once it is dispatched, in the thread and
            process that runs it. A text that it returns requests a stop and gives the reason.
        loggers: Objects that receive the metrics of each step, in addition to those that
            `train.loggers` names; see `shardlib.log.loggers`.

    Raises:
        ConfigError: If the directory holds a run of another config or cannot be written, model and
            data do not fit each other, or a logger lacks a method.
        DataError: If the data is missing, empty or malformed.
        MeshError: If mesh, devices and batch do not fit each other.
        RuleError: If tensors cannot be placed.
        CheckpointError: If the checkpoint holds another model, no checkpoint can be read, or all
            saved checkpoints are missing.
        SaveFailedError: If saving has failed too often.
        DivergedError: If training does not recover within the limits of `train.guards`.
        MissingExtraError: If a required package is not installed.
        RunDirError: If another run is using the directory.
        PeerLostError: If other processes of the group have gone.
    """
    try:
        check_is_config(config)
        check_loggers(loggers)
        return _train(config, clock or PhaseClock(), notices, after_step, loggers)
    except ShardlibError as error:
        _tell_launcher(error)
        raise


def _train(
    config: RunConfig,
    clock: PhaseClock,
    notices: Sequence[Notice],
    after_step: AfterStep | None,
    loggers: Sequence[MetricsLogger],
) -> TrainResult:
    directory = RunDirectory(config.run_dir)
    directory.check_writable()
    saved = directory.read_config()
    if saved is not None:
        check_resumable(saved, as_recorded(config, saved), by_command=True)
    group = start_devices(config)
    stop = distributed.StopRequest(notices=(*preemption.notices(), *notices))
    with (
        Watchdog(clock, config.watchdog, directory.path) as watchdog,
        contextlib.ExitStack() as stopping,
    ):
        parts, source, held_out = _built(config, saved)
        evaluated = None if held_out is None else held_out.element_spec()
        programs = traced(parts, source.element_spec(), evaluated, source.tokenizer)
        log = RunLog(parts, directory, group, clock, loggers)
        watchdog.on_end = lambda phase: log.event("hung", phase=phase)
        with (
            # The directory is written from here on.
            hold(directory.path, functools.partial(log.event, "lock")),
            log,
            RunCheckpoints(
                directory.checkpoints,
                parts.config.checkpoint,
                notify=functools.partial(log.event, "checkpoint"),
                owner=directory.identity,
            ) as checkpoints,
        ):
            newest = checkpoints.latest() or 0
            if not newest:
                check_not_lost(directory)
            if parts.config.checkpoint.enabled and newest < config.train.steps:
                checkpoints.check_writable()
            attempt = Attempt(
                parts,
                programs,
                source,
                held_out,
                checkpoints,
                directory,
                log,
                clock,
                stop,
                after_step,
            )
            # Until here a signal ends the process: there is no step to stop after.
            stopping.enter_context(stop)
            try:
                result = attempt.go(newest, is_new=saved is None)
            finally:
                # Pending reads and writes are waited for.
                clock.enter("save")
        distributed.barrier("shardlib/run/end", timeout_seconds=None)
    return result


def _built(config: RunConfig, saved: RunConfig | None) -> tuple[Setup, MapSource, MapSource | None]:
    """Returns the parts of a run, its training data, and its held-out data if it is evaluated."""
    run = resolve(config, jax.devices(), began=saved)
    scope = check_config(run.config, lambda: make_scope(run.config, jax.devices()), reads_data=True)
    source = open_source(config, "train")
    held_out = None if config.eval.every_steps == 0 else open_source(config, "eval")
    parts = run.build(source.spec, scope)
    if run.leaves_microbatches:
        parts = fitted(parts, source)
    if config.deterministic:
        decided = {**parts.decided, "deterministic": make_deterministic()}
        parts = dataclasses.replace(parts, decided=decided)
    return parts, source, held_out


def _tell_launcher(error: ShardlibError) -> None:
    """Reports a failure that may be deterministic; if it repeats, it is.

    Errors of the operating system are not reported: they may pass, for example with a disk that
    comes back.
    """
    if isinstance(error, DivergedError):
        report_failure("diverged", error.step)
        return
    is_of_system = isinstance(error.__cause__ or error.__context__, OSError)
    may_pass = is_of_system or isinstance(error, RunDirError | SaveFailedError)
    if not (may_pass or lost_peers(error)):
        text = str(error).partition("\n")[0].rstrip(".:")
        report_failure(f"{type(error).__name__}: {text}")
