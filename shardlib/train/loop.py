"""The training loop, with one dispatch per step and metrics read one step late.

While the devices run a step, the host dispatches the next and reads the metrics of the previous
one. In phase `step` it waits for the devices. If no batch is ready, it first reads the metrics of
the step in flight. It then waits for the batch in phase `data_wait`, during which the devices are
idle.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
from jaxtyping import PyTree

from shardlib.log.metrics import StepTimer
from shardlib.runtime.distributed import must_block
from shardlib.runtime.phases import PhaseClock


def read_scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns scalar metrics on the host, blocking until ready. Arrays are left out."""
    scalars = {name: value for name, value in metrics.items() if not jax.numpy.ndim(value)}
    return {name: float(value) for name, value in jax.device_get(scalars).items()}


class Batches(Protocol):
    """An ordered iterator of batches that records the wait for the last batch."""

    wait_seconds: float

    @property
    def is_ready(self) -> bool:
        """Whether the next batch is available without waiting."""
        ...

    def __next__(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """Metrics and timings of one step, created when its metrics arrive on the host.

    `step_seconds` is the time since the metrics of the previous step arrived, without time spent
    outside of training. The first step of a process includes compilation.
    `mean_step_seconds` is the mean over the latest steps, `None` at the first.
    `data_wait_seconds` is the time that the devices were idle, waiting for the batch of this step.
    """

    step: int
    metrics: Mapping[str, float]
    step_seconds: float
    mean_step_seconds: float | None
    data_wait_seconds: float


@dataclasses.dataclass
class Loop:
    """Runs training steps. The device runs one step while the host prepares the next.

    Args:
        step: The step from `make_train_step`.
        batches: Iterator of batches, starting with the batch for the state's current step.
        on_step: Called with each step's record, in order, one step late.
        is_due: Whether there is work to do after a step, such as a checkpoint. Called once per
            step.
        after_step: Called with the state if work is due, after the records of all steps up to this
            one. Returns whether to continue.
        read: Copies metrics to the host; scalars only if left out.
        clock: Enters `compile` until the metrics of the first step have arrived, then `step` and
            `data_wait`, and finally the previous phase. It records progress with the metrics of
            each step. `after_step` marks its own phases.
        is_compiled: Whether the step has already run in this process, for example before a rewind,
            so that no time counts as `compile`.
    """

    step: Callable[[Any, Any], tuple[Any, Mapping[str, Any]]]
    batches: Batches
    _: dataclasses.KW_ONLY
    on_step: Callable[[StepRecord], None]
    is_due: Callable[[int], bool]
    after_step: Callable[[int, Any], bool]
    read: Callable[[Mapping[str, Any]], dict[str, float]] | None = None
    clock: PhaseClock = dataclasses.field(default_factory=PhaseClock)
    is_compiled: bool = False
    _pending: tuple[int, Mapping[str, Any], float] | None = dataclasses.field(
        default=None, init=False
    )
    """Number, metrics and wait for the batch of the step in flight."""

    def run(self, state: PyTree, steps: int) -> PyTree:
        """Returns the state after `steps` total optimizer steps, or earlier if told to stop."""
        with self.clock.within("step" if self.is_compiled else "compile"):
            return self._run(state, steps)

    def _run(self, state: PyTree, steps: int) -> PyTree:
        start = int(state.step)
        blocks = must_block()
        self._timer = StepTimer()
        for number in range(start + 1, steps + 1):
            batch = self._next_batch()
            # Profilers take their steps from these.
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                state, metrics = self.step(state, batch)
            if blocks:
                jax.block_until_ready(metrics)
            self._flush()
            self._pending = (number, metrics, self.batches.wait_seconds)
            if self.is_due(number):
                self._flush()
                if not self.after_step(number, state):
                    break
                self._timer.restart()
        self._flush()
        return state

    def _next_batch(self) -> Any:
        if self.batches.is_ready:
            return next(self.batches)
        self._flush()
        with self.clock.within("data_wait"):
            return next(self.batches)

    def _flush(self) -> None:
        if self._pending is None:
            return
        number, metrics, wait = self._pending
        self._pending = None
        values = (self.read or read_scalars)(metrics)
        seconds = self._timer.tick()
        if self.is_compiled:
            self.clock.progress()
        else:
            self.is_compiled = True
            self.clock.enter("step")
        self.on_step(StepRecord(number, values, seconds, self._timer.mean_step_seconds, wait))
