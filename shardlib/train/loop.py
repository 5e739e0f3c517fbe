"""The training loop: one dispatch a step, and metrics read a step late.

While the devices work on a step, the host dispatches the next and reads the metrics of the one
before; it is the devices that it waits for, in phase `step`. Only where no batch is ready does it
read the metrics of the step in flight first, having nothing else to do: what it then waits for the
batch, in phase `data_wait`, is time in which the devices have no work.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax

from shardlib.phases import PhaseClock
from shardlib.train.metrics import StepTimer


def must_block() -> bool:
    """Whether each step must be over before the next is dispatched.

    Fake devices of several CPU processes deadlock when many collective steps are in flight.
    """
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def read_scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns scalars on the host; waits until they are there. Arrays stay on the devices."""
    scalars = {name: value for name, value in metrics.items() if not jax.numpy.ndim(value)}
    return {name: float(value) for name, value in jax.device_get(scalars).items()}


class Batches(Protocol):
    """Batches in order, with the time that the last one was waited for."""

    wait_seconds: float

    @property
    def is_ready(self) -> bool:
        """Whether the next batch is there already."""
        ...

    def __next__(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What is known of one step once its metrics have arrived on the host.

    `step_seconds` is the time since the metrics of the step before arrived, less what was spent
    outside of training; the first step of a process includes its compilation.
    `mean_step_seconds` is the mean over the latest steps, `None` at the first.
    `data_wait_seconds` is how long the devices had no work, for want of this step's batch.
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
        clock: Driven through `compile`, until the first step's metrics have arrived, `step` and
            `data_wait`, and back to the phase before; makes progress with each step's metrics.
            What is done after a step is marked by who does it.
        is_compiled: Whether the step has run in this process before, so that none of it is
            `compile`: as after a rewind.
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
        clock: PhaseClock | None = None,
        is_compiled: bool = False,
    ):
        self._step = step
        self._batches = batches
        self._on_step = on_step
        self._is_due = is_due
        self._after_step = after_step
        self._read = read or read_scalars
        self._clock = clock or PhaseClock()
        self._is_compiled = is_compiled
        self._pending: tuple[int, Mapping[str, Any], float] | None = None

    def run(self, state: Any, steps: int) -> Any:
        """Returns the state after `steps` optimizer steps in all, or earlier when told to stop."""
        with self._clock.within("step" if self._is_compiled else "compile"):
            return self._run(state, steps)

    def _run(self, state: Any, steps: int) -> Any:
        start = int(state.step)
        blocks = must_block()
        self._timer = StepTimer()
        for number in range(start + 1, steps + 1):
            state, metrics = self._step(state, self._next_batch())
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

    def _next_batch(self) -> Any:
        if self._batches.is_ready:
            return next(self._batches)
        self._flush()
        with self._clock.within("data_wait"):
            return next(self._batches)

    def _flush(self) -> None:
        if self._pending is None:
            return
        number, metrics, wait = self._pending
        self._pending = None
        values = self._read(metrics)
        seconds = self._timer.tick()
        if self._is_compiled:
            self._clock.progress()
        else:
            self._is_compiled = True
            self._clock.enter("step")
        self._on_step(StepRecord(number, values, seconds, self._timer.mean_step_seconds, wait))
