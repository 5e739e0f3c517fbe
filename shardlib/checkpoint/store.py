"""The checkpoints of one run: saved during training, listed, and restored onto any mesh.

On disk:

    run/checkpoints/
      00000500/            one checkpoint; the name is the step
        manifest.json      step, config, mesh, leaves, files and versions (`manifest.py`)
        state/             the arrays (Orbax: OCDBT, zarr, not compressed)
          ocdbt.process_0/   the files of each process
          ...
      00001000/
      .trash/              checkpoints being deleted
      .damaged/            checkpoints that did not validate

`directory.py` and `saving.py` describe how checkpoints appear and disappear, and why a kill does no
harm. `restoring.py` describes the verification of a restore.
"""

import errno
import os
import types
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import jax

from shardlib.checkpoint import fallback, fingerprint
from shardlib.checkpoint import manifest as manifests
from shardlib.checkpoint.at_exit import close_at_exit
from shardlib.checkpoint.checksums import sync
from shardlib.checkpoint.config import CheckpointConfig
from shardlib.checkpoint.consensus import one_step
from shardlib.checkpoint.directory import PROBE, Notify
from shardlib.checkpoint.errors import first_line, listed
from shardlib.checkpoint.manifest import Manifest, Partial
from shardlib.checkpoint.reading import SavedCheckpoints
from shardlib.checkpoint.retention import kept
from shardlib.checkpoint.saving import Saving
from shardlib.checkpoint.tree import check_leaves, flatten, leaf_spec
from shardlib.errors import CheckpointError, SaveFailedError

if TYPE_CHECKING:
    from shardlib.checkpoint.arrays import ArrayWriter


class RunCheckpoints(SavedCheckpoints):
    """Saves and restores the state of one run.

    With several processes, each makes its own instance on the same shared directory, and all
    call every method that saves, waits, restores or removes together. They agree over the
    coordination service: a failure on one process is raised on all, and no process is left waiting.

    It is a context manager; its exit waits for the save in flight.

    Args:
        directory: Holds the checkpoints, for example `run/checkpoints`; the first save creates it.
        config: The retention policies. `every_steps` is for the caller's loop; see `is_due`.
        notify: Called with a text for each skipped entry and each error that does not end the run,
            in the thread that calls the methods. By default the text is logged as a warning.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        notify: Notify | None = None,
    ) -> None:
        super().__init__(directory, notify=notify)
        self.config = config or CheckpointConfig()
        self._writer: ArrayWriter | None = None
        self._saving: Saving | None = None
        self._failures = 0
        self._untold: SaveFailedError | None = None
        self.last_saved: int | None = None
        """The last step that this object knows to be saved completely; None once that checkpoint
        has been dropped or set aside."""
        self._is_metric_missed = False

    @property
    def last_kept(self) -> int | None:
        """The last step that this object has saved in the run directory."""
        return self.last_saved

    def is_due(self, step: int) -> bool:
        """Whether the config schedules a checkpoint after this step."""
        return self.config.enabled and step % self.config.every_steps == 0

    def check_writable(self) -> None:
        """Checks that checkpoints can be written, before training starts.

        Raises:
            SaveFailedError: If the directory cannot be created or written to.
        """
        probe = self.directory / f"{PROBE}{uuid.uuid4().hex}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"shardlib")
            probe.unlink()
        except OSError as error:
            fix = "Name a directory that this user may write"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                fix = "Free space there"
            raise SaveFailedError(
                f"checkpoints cannot be written: {error.strerror}: {self.directory}.\n"
                f"  {fix}, or set checkpoint.enabled=false."
            ) from error

    def prepare(self, state: Any) -> None:
        """Compiles the programs that a save of such a state needs, ahead of the first save.

        Args:
            state: The state, or its `jax.ShapeDtypeStruct`s with shardings.
        """
        fingerprint.compile_ahead(flatten(state))

    def save(
        self,
        step: int,
        state: Any,
        metadata: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
    ) -> None:
        """Starts saving `state`; returns once its arrays are copied to the host.

        The state may then be donated to the next step. A save still in flight is waited for first.
        A failure of this save or the previous one is reported through `notify`, and its partial
        files are removed. It is raised only after `config.max_failures` failed saves in a row.

        Args:
            step: Number of optimizer steps that led to the state; not saved before.
            state: Any pytree of arrays and numbers, including typed PRNG keys. A scalar on a
                single process is taken from the first process.
            metadata: Any JSON: config, mesh, rules, position in the data. `healthy: false` in it
                marks a state that is not fit to go back to; the newest healthy checkpoint is never
                deleted.
            metrics: Metrics for `config.keep_best`; non-finite numbers are dropped.
            wait: Whether to return only once the checkpoint is complete, and to raise if it fails.

        Raises:
            CheckpointError: If the step is already saved or differs between processes, or the
                state or the metadata cannot be stored.
            SaveFailedError: If too many saves have failed; the message names the last good step.
        """
        self.settle()
        self.check_failures()
        self._untold = None
        leaves = flatten(state)
        check_leaves(leaves)
        _check_global(leaves)
        draft = manifests.describe(step, leaves, metadata, metrics)
        draft.to_json()
        if not any(leaf_spec(leaf).size for leaf in leaves.values()):
            raise CheckpointError(
                f"the state of step {step} holds no array.\n  Pass the state of the training step."
            )
        self.peers.decide("save", str(step), lambda steps: self._check_new(int(one_step(steps))))
        self._tell_missed_metric(draft)
        saving = Saving(
            self._steps, self.peers, self._open_writer(), draft, lambda: self._prune(step)
        )
        try:
            saving.begin(leaves)
        except Exception as error:
            self._fail(step, error, is_raised=wait)
            self.check_failures()
            return
        self._saving = saving
        if wait or not self.config.asynchronous:
            self.settle(is_raised=wait)

    def wait(self) -> None:
        """Blocks until the last save is complete and old checkpoints are being deleted.

        Raises:
            SaveFailedError: If that save failed; its partial files are removed.
        """
        self.settle(is_raised=True)
        failure, self._untold = self._untold, None
        if failure is not None:
            raise failure

    def settle(self, *, is_raised: bool = False) -> None:
        """Waits for the save in flight; reports or raises its failure."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        failure = saving.finish()
        while self._later:
            self._tell(self._later.pop(0))
        if failure is None:
            self._failures, self.last_saved = 0, saving.step
        else:
            self._fail(saving.step, failure, is_raised=is_raised)

    def poll(self) -> None:
        """Reports a failed save without waiting. Any process may call it alone."""
        if self._saving is not None and self._saving.is_over:
            self.settle()

    @property
    def has_given_up(self) -> bool:
        """Whether `config.max_failures` saves in a row are known to have failed."""
        return self._failures >= self.config.max_failures

    def check_failures(self) -> None:
        """Raises an error if `has_given_up` is true.

        Raises:
            SaveFailedError: If too many saves have failed; the message names the last good step.
        """
        if self.has_given_up:
            self._untold = None
            last = self._good_steps().split(", ")[-1]
            count = self._failures
            what = "a checkpoint" if count == 1 else f"{count} checkpoints in a row"
            raise SaveFailedError(
                f"{what} could not be written to {self.directory}; the last good step is {last}.\n"
                "  Free space or restore access there, then start again."
            )

    def restore_newest(
        self,
        target: Any,
        *,
        accept: fallback.Accept = lambda manifest: None,
        partial: Partial = False,
    ) -> tuple[Manifest, Any] | None:
        """Returns the newest valid step, or None if every checkpoint is skipped.

        Each newer damaged step is reported through `notify`. It is set aside in `.damaged` once an
        older step is restored, so that the step can be saved again. The leftovers of killed
        processes are removed.

        Args:
            target: As in `restore`.
            accept: Called with the manifest before any array is read. False skips the checkpoint.
                Its errors are raised: a checkpoint of another config is not damaged.
            partial: As in `restore`.

        Raises:
            CheckpointError: If there are checkpoints but all are damaged, or the newest one is
                from another model.
        """
        self.clean()
        return fallback.restore_newest([self], target, accept, partial)

    def clean(self) -> None:
        """Removes the leftovers of killed processes; only the run itself may call it."""
        self.settle()
        if self.peers.is_first:
            self._tolerate("leftovers of killed processes remain", self._steps.clean)

    def set_aside(self, step: int) -> None:
        """Moves a damaged checkpoint into `.damaged`."""

        def move() -> None:
            self.notify(f"step {step} is now {self._steps.set_aside(step)}")

        if self.peers.is_first:
            self._tolerate(f"step {step} cannot be set aside", move)
        self._forget_saved(step)
        self.peers.decide("aside", "", lambda _: "")

    def drop_after(self, step: int) -> None:
        """Removes every checkpoint after `step`, for a run that goes back to it."""
        self.settle()

        def drop() -> None:
            later = [found for found in self._steps.candidates() if found > step]
            self._steps.discard([self._steps.of_step(found) for found in reversed(later)])

        self._forget_saved(step + 1)
        self.peers.all_or_none("drop", drop if self.peers.is_first else lambda: None)

    def _forget_saved(self, since: int) -> None:
        if self.last_saved is not None and self.last_saved >= since:
            self.last_saved = None

    def close(self) -> None:
        """Waits for the save in flight and for deletions, and stops all threads."""
        try:
            self.wait()
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()
            self._steps.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            # The error that ended the run matters more than the save that failed after it.
            error.add_note(str(failure))

    def _open_writer(self) -> "ArrayWriter":
        if self._writer is None:
            from shardlib.checkpoint.arrays import ArrayWriter

            self._writer = ArrayWriter()
            close_at_exit(self)
        return self._writer

    def _check_new(self, step: int) -> str:
        if step < 0:
            raise CheckpointError(
                f"step {step} is negative.\n  Save each step once, counted from 0."
            )
        try:
            steps = self.steps()
        except CheckpointError:
            return ""  # The save raises the reason.
        if step in steps:
            raise CheckpointError(
                f"step {step} is already saved in {self.directory}.\n"
                "  Save each step once, counted from 0."
            )
        return ""

    def _tell_missed_metric(self, draft: Manifest) -> None:
        best = self.config.keep_best
        if best is None or best.metric in draft.metrics or self._is_metric_missed:
            return
        self._is_metric_missed = True
        given = ", ".join(sorted(draft.metrics)) or "none"
        self.notify(
            f"step {draft.step} is saved without the metric {best.metric!r} (given: {given}): it "
            "cannot be kept as the best"
        )

    def _fail(self, step: int, error: Exception, *, is_raised: bool) -> None:
        self._failures += 1
        reason = str(error) if isinstance(error, CheckpointError) else first_line(error)
        failure = SaveFailedError(
            f"the checkpoint of step {step} could not be written to {self.directory}: {reason}\n"
            f"  Free space or restore access there; complete steps: {self._good_steps()}."
        )
        if is_raised:
            raise failure from error
        self._untold = failure
        self.notify(str(failure))

    def _good_steps(self) -> str:
        try:
            return listed(self.steps())
        except CheckpointError:
            return "unknown (the directory cannot be listed)"

    def _prune(self, step: int) -> None:
        def prune() -> None:
            # The new checkpoint must survive a power loss before old ones are deleted.
            sync(self.directory)
            found = self._steps.manifests()
            metrics = {step: manifest.metrics for step, manifest in found.items()}
            sick = {step for step, each in found.items() if not each.run.get("healthy", True)}
            stay = {step, *kept(metrics, self.config, sick)}
            self._steps.discard([self._steps.of_step(step) for step in found if step not in stay])

        self._tolerate("old checkpoints remain", prune)

    def _tolerate(self, consequence: str, work: Callable[[], None]) -> None:
        """Runs `work` and reports its failure, which does not end the run."""
        try:
            work()
        except (OSError, CheckpointError) as error:
            self.notify(f"{consequence} in {self.directory}: {first_line(error)}")


def _check_global(leaves: Mapping[str, Any]) -> None:
    """Rejects arrays on a single process of several: each process may hold another array."""
    if jax.process_count() == 1:
        return
    local = [
        f"  {path}: {leaf_spec(leaf)}\n"
        for path, leaf in leaves.items()
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable and leaf.ndim
    ]
    if local:
        raise CheckpointError(
            "arrays live on one process only, so it is unclear which one to save:\n"
            + "".join(local)
            + "  Place them on the mesh: jax.device_put(array, NamedSharding(mesh, P()))."
        )
