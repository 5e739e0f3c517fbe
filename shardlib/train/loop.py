"""The training loop: one dispatch a step, and metrics read a step late."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax

from shardlib.train.metrics import StepTimer


def must_block() -> bool:
    """Whether each step must be over before the next is dispatched.

    Fake devices of several CPU processes deadlock when many collective steps are in flight.
    """
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def read_scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns scalars on the host; waits until they are there."""
    return {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}


class Batches(Protocol):
    """Batches in order, with the time that the last one was waited for."""

    wait_seconds: float

    def __next__(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What is known of one step once its metrics have arrived on the host.

    `step_seconds` is the time since the metrics of the step before arrived, less what was spent
    outside of training; the first step of a process includes its compilation.
    `mean_step_seconds` is the mean over the latest steps, `None` at the first.
    """

    step: int
    metrics: Mapping[str, float]
    step_seconds: float
    mean_step_seconds: float | None
    data_wait_seconds: float


class Loop:
    """Runs steps; the device works on one while the host prepares the next.

    Args:
        step: What `make_train_step` returns.
        batches: Where batches come from, the first for the state's present step.
        on_step: Called with each step's record, in order, one step late.
        is_due: Whether something is to be done after a step, such as a checkpoint. Called once a
            step.
        after_step: Does what is due, with the state; every record up to the step has been given.
            Returns whether to go on.
        read: Brings metrics to the host; scalars, when left out.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], tuple[Any, Mapping[str, Any]]],
        batches: Batches,
        *,
        on_step: Callable[[StepRecord], None],
        is_due: Callable[[int], bool],
        after_step: Callable[[int, Any], bool],
        read: Callable[[Mapping[str, Any]], dict[str, float]] | None = None,
    ):
        self._step = step
        self._batches = batches
        self._on_step = on_step
        self._is_due = is_due
        self._after_step = after_step
        self._read = read or read_scalars
        self._pending: tuple[int, Mapping[str, Any], float] | None = None

    def run(self, state: Any, steps: int) -> Any:
        """Returns the state after `steps` optimizer steps in all, or earlier when told to stop."""
        start = int(state.step)
        blocks = must_block()
        self._timer = StepTimer()
        for number in range(start + 1, steps + 1):
            state, metrics = self._step(state, next(self._batches))
            if blocks:
                jax.block_until_ready(metrics)
            self._flush()
            self._pending = (number, metrics, self._batches.wait_seconds)
            if self._is_due(number):
                self._flush()
                if not self._after_step(number, state):
                    break
                self._timer.restart()
        self._flush()
        return state

    def _flush(self) -> None:
        if self._pending is None:
            return
        number, metrics, wait = self._pending
        self._pending = None
        values = self._read(metrics)
        seconds = self._timer.tick()
        self._on_step(StepRecord(number, values, seconds, self._timer.mean_step_seconds, wait))
