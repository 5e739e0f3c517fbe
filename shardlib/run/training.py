"""The main job: a config in, a trained run directory out; the same again resumes."""

import dataclasses
import functools
from collections.abc import Sequence

import jax

from shardlib import distributed, preemption
from shardlib.checkpoint import RunCheckpoints, TieredCheckpoints, open_checkpoints
from shardlib.errors import DivergedError, RunDirError, SaveFailedError, ShardlibError
from shardlib.launch.progress import report_failure
from shardlib.peers import lost_peers
from shardlib.phases import PhaseClock
from shardlib.preemption import Notice
from shardlib.run.attempt import AfterStep, Attempt
from shardlib.run.attempt import TrainResult as TrainResult
from shardlib.run.checks import check_config
from shardlib.run.config import RunConfig, check_resumable
from shardlib.run.decide import as_recorded, decide
from shardlib.run.devices import make_deterministic, start_devices
from shardlib.run.directory import RunDirectory
from shardlib.run.lock import hold
from shardlib.run.log import RunLog
from shardlib.run.programs import traced
from shardlib.run.setup import Setup, make_scope, open_source, setup
from shardlib.run.standing import check_not_lost
from shardlib.watchdog import Watchdog


def train(
    config: RunConfig,
    *,
    clock: PhaseClock | None = None,
    notices: Sequence[Notice] = (),
    after_step: AfterStep | None = None,
) -> TrainResult:
    """Trains until `config.train.steps`, from the newest checkpoint of `config.run_dir` if any.

    Everything is checked before anything is written. Ctrl-C, SIGTERM and notices of preemption save
    and return.

    Args:
        config: The config.
        clock: What the time of the run counts from; this call, when left out.
        notices: What else to ask whether this machine goes away, beside what it offers itself; see
            `shardlib.preemption`.
        after_step: Called with the number of each step, by the thread and process that runs it,
            once it is on its way to the devices. A text that it returns asks to stop, and says why.

    Raises:
        ConfigError: If the directory holds a run of another config or cannot be written, or model
            and data do not fit each other.
        DataError: If the data is missing, empty or malformed.
        MeshError: If mesh, devices and batch do not fit each other.
        RuleError: If tensors cannot be placed.
        CheckpointError: If the checkpoint is of another model, none can be read, or the run has
            saved some and none is there.
        SaveFailedError: If saving has failed too often.
        DivergedError: If training does not recover by what `train.guards` may do.
        MissingExtraError: If something asked for is not installed.
        RunDirError: If another run is using the directory.
        PeerLostError: If other processes of the group have gone.
    """
    try:
        return _train(config, clock or PhaseClock(), notices, after_step)
    except ShardlibError as error:
        _tell_launcher(error)
        raise


def _train(
    config: RunConfig, clock: PhaseClock, notices: Sequence[Notice], after_step: AfterStep | None
) -> TrainResult:
    directory = RunDirectory(config.run_dir)
    directory.check_writable()
    saved = directory.read_config()
    asked, config = config, as_recorded(config, saved)
    if saved is not None:
        check_resumable(saved, config)
    group = start_devices(config)
    stop = distributed.StopRequest(notices=(*preemption.notices(), *notices))
    with Watchdog(clock, config.watchdog, directory.path) as watchdog, stop:
        check_config(config, lambda: make_scope(config, jax.devices()))
        source = open_source(config, "train")
        held_out = None if config.eval.every_steps == 0 else open_source(config, "eval")
        parts = decide(setup(config, source.spec, make_scope(config, jax.devices())), source, asked)
        if config.deterministic:
            decided = {**parts.decided, "deterministic": make_deterministic()}
            parts = dataclasses.replace(parts, decided=decided)
        evaluated = None if held_out is None else held_out.element_spec()
        programs = traced(parts, source.element_spec(), evaluated, source.tokenizer)
        log = RunLog(parts, directory, group, clock)
        watchdog.on_end = lambda phase: log.event("hung", phase=phase)
        with (
            # From here on it is written to.
            hold(directory.path, functools.partial(log.event, "lock")),
            log,
            _checkpoints(parts, directory, log) as checkpoints,
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
            try:
                result = attempt.go(newest, is_new=saved is None)
            finally:
                # What is on its way to the disk, or from it, is waited for.
                clock.enter("save")
        distributed.barrier("shardlib/run/end", timeout_seconds=None)
    return result


def _tell_launcher(error: ShardlibError) -> None:
    """Reports a failure that may be bound to happen again, which the second time will show.

    What the system has refused is not: it may allow it once a disk is back.
    """
    if isinstance(error, DivergedError):
        report_failure("diverged", error.step)
        return
    is_of_system = isinstance(error.__cause__ or error.__context__, OSError)
    may_pass = is_of_system or isinstance(error, RunDirError | SaveFailedError)
    if not (may_pass or lost_peers(error)):
        text = str(error).partition("\n")[0].rstrip(".:")
        report_failure(f"{type(error).__name__}: {text}")


def _checkpoints(
    parts: Setup, directory: RunDirectory, log: RunLog
) -> RunCheckpoints | TieredCheckpoints:
    return open_checkpoints(
        directory.checkpoints,
        parts.config.checkpoint,
        notify=functools.partial(log.event, "checkpoint"),
        owner=directory.identity,
    )
