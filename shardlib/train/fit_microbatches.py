"""`microbatches: auto`: the smallest number of microbatches for which a step fits into memory.

Candidates are compiled before any state is allocated. A compiled step reports the bytes that it
needs on each device, and on TPU the compiler rejects programs that do not fit. A failed attempt
therefore costs only a compilation. If the devices report their memory, the chosen number is then
run once on a temporary state, because the compiler does not know about fragmentation or library
allocations. Multi-process runs skip this trial: one process could run out of memory while the
others wait for it in a collective.

The number affects dropout masks and batch statistics, so record it and resume with the same number.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import PyTree

from shardlib import humanize
from shardlib.errors import MeshError, ModelError, RuleError
from shardlib.train.batches import batch_shardings, microbatch_shapes
from shardlib.train.state import TrainState, materialize
from shardlib.train.step import TrainStep

_SPENT = "RESOURCE_EXHAUSTED"


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of trying one number of microbatches.

    `needed_bytes` is the memory needed on each device, or None if the compiler failed before it was
    known. `at_least` marks it as a lower bound, derived from the previous attempt. `problem` is the
    reason why it does not fit, or None.
    """

    microbatches: int
    needed_bytes: int | None
    problem: str | None = None
    at_least: bool = False


@dataclasses.dataclass(frozen=True)
class Fit:
    """The chosen number of microbatches, its step and all attempts. `str()` gives a one-line
    summary.

    `limit_bytes` is the memory of a device, or None if unknown.
    """

    microbatches: int
    step: TrainStep
    limit_bytes: int | None
    attempts: tuple[Trial, ...]

    def __str__(self) -> str:
        chosen = self.attempts[-1]
        parts = "microbatch" if self.microbatches == 1 else "microbatches"
        text = f"{self.microbatches} {parts}: "
        if len(self.attempts) > 1:
            before = self.attempts[-2]
            return f"{text}{before.microbatches} {before.problem}"
        if chosen.needed_bytes is None or self.limit_bytes is None:
            return f"{text}the devices do not say how much memory they have"
        need, limit = humanize.size(chosen.needed_bytes), humanize.size(self.limit_bytes)
        return f"{text}the fewest possible need {need} of {limit}"


def fit_microbatches(
    make_step: Callable[[int], TrainStep],
    state: TrainState,
    batch: PyTree,
    *,
    multiple_of: int = 1,
    limit_bytes: int | None = None,
    tries_out: bool | None = None,
) -> Fit:
    """Returns the smallest number of microbatches for which a step fits into memory.

    All processes of a run must call it together. They agree on each attempt.

    Args:
        make_step: `make_step(microbatches)` returns the step.
        state: The abstract state, from `abstract_state`.
        batch: A batch, as arrays or `ShapeDtypeStruct`s.
        multiple_of: Required divisor of the number, such as the stages of a pipeline.
        limit_bytes: Memory of a device in bytes; reported by the devices if left out.
        tries_out: Whether to run the chosen step once on the devices. By default it runs if the
            devices report their memory and there is only one process.

    Raises:
        MeshError: If no number fits, or no number splits the batch evenly on this mesh.
    """
    if limit_bytes is None:
        limit_bytes = _limit_bytes(state.definition.scope.mesh)
        if tries_out is None:
            tries_out = limit_bytes is not None and jax.process_count() == 1
    attempts: list[Trial] = []
    needs: _Needs | None = None
    for number in counts(make_step(multiple_of), state, batch, multiple_of=multiple_of):
        attempt = _hopeless(needs, number, limit_bytes)
        if _all_agree(attempt is None):
            step = make_step(number)
            attempt, needs = _attempt(step, state, batch, limit_bytes, tries_out)
            if _all_agree(attempt.problem is None):
                return Fit(number, step, limit_bytes, (*attempts, attempt))
        if attempt is None or attempt.problem is None:
            attempt = Trial(number, None, "did not fit in another process")
        attempts.append(attempt)
    raise MeshError(_nothing_fits(attempts))


def counts(step: TrainStep, state: TrainState, batch: PyTree, *, multiple_of: int = 1) -> list[int]:
    """Returns the numbers of microbatches that split a batch evenly on a mesh, smallest first.

    Raises:
        MeshError: If no number splits the batch evenly.
    """
    least = min(leaf.shape[0] for leaf in jax.tree.leaves(batch))
    numbers = [
        number
        for number in range(multiple_of, least + 1, multiple_of)
        if least % number == 0 and _divides_evenly(step, state, batch, number)
    ]
    if not numbers:
        multiple = f", a multiple of {multiple_of}," if multiple_of > 1 else ""
        raise MeshError(
            f"no number of microbatches{multiple} splits a batch of {least} evenly on this mesh.\n"
            "  Choose a larger batch, or another mesh."
        )
    return numbers


def _divides_evenly(step: TrainStep, state: TrainState, batch: PyTree, number: int) -> bool:
    with contextlib.suppress(RuleError, ModelError):
        part = microbatch_shapes(batch, number)
        batch_shardings(part, state.definition.scope, step.batch_axes)
        return True
    return False


class _Needs(NamedTuple):
    """Memory of a step on each device in bytes: arguments and outputs, and temporaries."""

    microbatches: int
    held: int
    temporary: int

    def at_least(self, microbatches: int) -> int:
        """Returns a lower bound on the bytes for more microbatches, where only temporaries
        shrink."""
        return self.held + self.temporary * self.microbatches // microbatches


def _hopeless(needs: _Needs | None, number: int, limit_bytes: int | None) -> Trial | None:
    """Returns a failed attempt if the needs of a smaller number rule this one out, or None."""
    if needs is None or limit_bytes is None or needs.at_least(number) <= limit_bytes:
        return None
    least = needs.at_least(number)
    problem = f"would need at least {humanize.size(least)} of {humanize.size(limit_bytes)}"
    return Trial(number, least, problem, at_least=True)


def _attempt(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    limit_bytes: int | None,
    tries_out: bool | None,
) -> tuple[Trial, _Needs | None]:
    """Compiles a step, and runs it once if requested and if it may fit."""
    number = step.microbatches
    lowered = step.lower(state, batch)
    try:
        stats: Any = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        return Trial(number, None, _refusal(error)), None
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    temporary = stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
    problem = None
    if limit_bytes is not None and held + temporary > limit_bytes:
        problem = f"needed {humanize.size(held + temporary)} of {humanize.size(limit_bytes)}"
    elif tries_out:
        problem = _try_out(step, state, batch)
    return Trial(number, held + temporary, problem), _Needs(number, held, temporary)


def _refusal(error: Exception) -> str:
    """Returns a description of an out-of-memory error. Other errors are raised again."""
    if _SPENT not in str(error):
        raise error
    reason = str(error).partition(f"{_SPENT}: ")[2].splitlines()[0].strip()
    return f"ran out of memory ({reason.rstrip('.')})"


def _try_out(step: TrainStep, state: TrainState, batch: PyTree) -> str | None:
    """Runs a step on a temporary state and batch. Returns the out-of-memory problem, or None."""
    placed = batch_shardings(batch, state.definition.scope, step.batch_axes)
    try:
        made = materialize(state)
        zeros = jax.tree.map(
            lambda x, placed: jnp.zeros(x.shape, x.dtype, device=placed), batch, placed
        )
        jax.block_until_ready(step(made, zeros))
    except jax.errors.JaxRuntimeError as error:
        return _refusal(error)
    return None


def _limit_bytes(mesh: Mesh) -> int | None:
    """Returns the memory of the smallest device of this process, or None if one does not report
    it."""
    mine = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    try:
        return min((device.memory_stats() or {}).get("bytes_limit", 0) for device in mine) or None
    except jax.errors.JaxRuntimeError:  # Compile-only devices.
        return None


def _all_agree(here: bool) -> bool:
    """Returns whether a condition holds in every process."""
    if jax.process_count() == 1:
        return here
    return bool(np.all(multihost_utils.process_allgather(np.int32(here))))


def _nothing_fits(attempts: list[Trial]) -> str:
    tried = ", ".join(f"{attempt.microbatches} {attempt.problem}" for attempt in attempts)
    return (
        f"the step does not fit into memory with any number of microbatches: {tried}.\n"
        "  Shard over more devices, remat more layers, or keep the optimizer state in host memory."
    )
