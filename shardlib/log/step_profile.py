"""Profiles of a few training steps, for XProf, TensorBoard and Perfetto."""

from pathlib import Path

import jax

from shardlib.config import configclass


@configclass
class ProfileConfig:
    """A profile of some steps, each time that a run starts or resumes, by its first process."""

    skip: int = 10
    """Steps before the profile, of which the first compiles."""
    steps: int = 3
    """Steps in the profile."""

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be at least 1, not {getattr(self, name)}"
            for name in ("skip", "steps")
            if getattr(self, name) < 1
        ]
        if faults:
            raise ValueError("; ".join(faults))


class StepProfiler:
    """Starts and ends the profile of a run between two steps.

    Args:
        config: Which steps; None for no profile.
        directory: The directory of the profile, below which XLA writes
            `plugins/profile/TIME/HOST.xplane.pb`.
        step: The step from which the run goes on.
        writes: Whether this process writes it. All processes keep the same account, or one would
            stop between two steps where the others go on.
    """

    def __init__(self, config: ProfileConfig | None, directory: Path, step: int, *, writes: bool):
        self.directory = directory
        self.steps = range(0) if config is None else range(config.steps)
        """The steps of the profile; empty for none, or once it has ended."""
        if config is not None:
            first = step + config.skip + 1
            self.steps = range(first, first + config.steps)
        self._is_open, self._newest, self._writes = False, step, writes

    def is_due(self, step: int) -> bool:
        """Returns whether the profile starts or ends after a step. Call it for each step."""
        self._newest = step
        return bool(self.steps) and step in (self.steps[0] - 1, self.steps[-1])

    def start(self, step: int) -> None:
        """Starts the profile if its first step is the next one."""
        if self.steps and step + 1 == self.steps[0]:
            self._is_open = True
            if self._writes:
                options = jax.profiler.ProfileOptions()
                # Records of every Python call would slow down what is measured.
                options.python_tracer_level = 0
                jax.profiler.start_trace(self.directory, profiler_options=options)

    def end(self, step: int | None = None) -> range:
        """Ends the profile after its last step, or at once if `step` is None; returns its steps, or
        none if there was no profile to end."""
        if not self._is_open or step not in (None, self.steps[-1]):
            return range(0)
        steps = range(self.steps[0], self._newest + 1)
        self._is_open, self.steps = False, range(0)
        if self._writes:
            jax.profiler.stop_trace()
        return steps
