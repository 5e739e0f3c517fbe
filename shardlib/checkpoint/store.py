"""The checkpoints of one run: saved while it trains, listed, and restored onto any mesh.

On disk:

    run/checkpoints/
      00000500/            one checkpoint; the name is the step
        manifest.json      what it is: step, config, mesh, leaves, files, versions (`manifest.py`)
        state/             the arrays (Orbax: OCDBT, zarr, not compressed)
          ocdbt.process_0/   what each process wrote
          ...
      00001000/
      .trash/              checkpoints on their way out
      .damaged/            checkpoints that did not validate

What comes and goes in it, and why a kill does no harm, is said in `directory.py` and `saving.py`;
what proves a checkpoint on its way back, in `restoring.py`.
"""

import errno
import os
import types
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import jax

from shardlib.checkpoint import fingerprint, newest
from shardlib.checkpoint import manifest as manifests
from shardlib.checkpoint.agreement import one_step
from shardlib.checkpoint.at_exit import close_at_exit
from shardlib.checkpoint.config import CheckpointConfig
from shardlib.checkpoint.damage import first_line, listed
from shardlib.checkpoint.directory import PROBE, Notify
from shardlib.checkpoint.files import sync
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

    Under several processes each makes its own instance on the same shared directory, and all
    call every method that saves, waits, restores or removes together. They agree over the
    coordination service: what fails on one process fails on all, and no process is left waiting.

    Usable as a context manager: leaving it waits for the save in flight.

    Args:
        directory: Holds the checkpoints, for example `run/checkpoints`; made by the first save.
        config: How many to keep. `every_steps` is for the caller's loop; see `is_due`.
        notify: Told, in the thread that calls the methods, what went wrong without ending the run,
            and what was skipped: one text each. By default it is logged as a warning.
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
        """The last step that this object has saved completely, as far as it has looked; None once
        that checkpoint has been dropped or set aside."""
        self._is_metric_missed = False

    @property
    def last_kept(self) -> int | None:
        """The last step that this object has saved where it outlives this machine."""
        return self.last_saved

    def is_due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after this step."""
        return self.config.enabled and step % self.config.every_steps == 0

    def check_writable(self) -> None:
        """Proves that checkpoints can be written, before any training is spent on them.

        Raises:
            SaveFailedError: If the directory cannot be made, or no file can be written there.
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
        """Compiles what saves of such a state need, so that the first one need not.

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
        """Starts saving `state`; returns when its arrays are copied to the host.

        The state may be donated to the next step at once. A save still in flight is waited for
        first. One that failed, this or the one before, is told of through `notify`, its space is
        given back, and nothing is raised until `config.max_failures` in a row have failed.

        Args:
            step: Number of optimizer steps that led to the state; not saved before.
            state: Any pytree of arrays and numbers, typed PRNG keys among them. A scalar that
                lives on one process only is taken from the first process.
            metadata: Any JSON: config, mesh, rules, position in the data. `healthy: false` in it
                marks a state that is none to go back to: the newest other one is never deleted.
            metrics: What `config.keep_best` may go by; numbers that are not finite are left out.
            wait: Whether to return only when the checkpoint is complete, and to raise if it fails.

        Raises:
            CheckpointError: If the step is saved already, or is not the same on every process; or
                the state or the metadata cannot be stored.
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
        """Blocks until the last save is complete and what is not to be kept is being deleted.

        Raises:
            SaveFailedError: If that save failed; what it had written is removed.
        """
        self.settle(is_raised=True)
        failure, self._untold = self._untold, None
        if failure is not None:
            raise failure

    def settle(self, *, is_raised: bool = False) -> None:
        """Waits for the save in flight; tells of its failure, or raises it."""
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
        """Tells of a save that has failed meanwhile; never waits. Any process may call it alone."""
        if self._saving is not None and self._saving.is_over:
            self.settle()

    @property
    def has_given_up(self) -> bool:
        """Whether `config.max_failures` saves in a row have failed, as far as it has looked."""
        return self._failures >= self.config.max_failures

    def check_failures(self) -> None:
        """Raises if it has given up.

        Raises:
            SaveFailedError: Names the last good step.
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
        accept: newest.Accept = lambda manifest: None,
        partial: Partial = False,
    ) -> tuple[Manifest, Any] | None:
        """Returns the newest step that validates, or None if there is no checkpoint but those that
        are passed over.

        Each newer step that is damaged is named through `notify`, and set aside in `.damaged` once
        an older one is restored, so that its step can be saved again. What processes that were
        killed have left is removed.

        Args:
            target: As of `restore`.
            accept: Sees the manifest before any array is read. False passes the checkpoint over;
                what it raises is passed on: one of another config is not a damaged one.
            partial: As of `restore`.

        Raises:
            CheckpointError: If there are checkpoints and none validates, or the newest one is of
                another model.
        """
        self.clean()
        return newest.restore_newest([self], target, accept, partial)

    def clean(self) -> None:
        """Removes what processes that were killed have left: for the run itself, not a reader."""
        self.settle()
        if self.peers.is_first:
            self._tolerate("what is left of former processes stays", self._steps.clean)

    def set_aside(self, step: int) -> None:
        """Moves a damaged checkpoint into `.damaged`."""

        def move() -> None:
            self.notify(f"step {step} is now {self._steps.set_aside(step)}")

        if self.peers.is_first:
            self._tolerate(f"step {step} cannot be set aside", move)
        self._forget_saved(step)
        self.peers.decide("aside", "", lambda _: "")

    def drop_after(self, step: int) -> None:
        """Removes every checkpoint later than `step`, as a run does that goes back to it."""
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
        """Waits for the save in flight and for deletions; ends all threads."""
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
            # What ended the run matters more than the save that failed after it.
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
            return ""  # The save will find out why.
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
            return "unknown, for the directory cannot be listed"

    def _prune(self, step: int) -> None:
        def prune() -> None:
            # First: the new checkpoint is to outlive a loss of power before old ones go.
            sync(self.directory)
            found = self._steps.manifests()
            metrics = {step: manifest.metrics for step, manifest in found.items()}
            sick = {step for step, each in found.items() if not each.run.get("healthy", True)}
            stay = {step, *kept(metrics, self.config, sick)}
            self._steps.discard([self._steps.of_step(step) for step in found if step not in stay])

        self._tolerate("old checkpoints stay", prune)

    def _tolerate(self, consequence: str, work: Callable[[], None]) -> None:
        """Does what a run can go on without."""
        try:
            work()
        except (OSError, CheckpointError) as error:
            self.notify(f"{consequence} in {self.directory}: {first_line(error)}")


def _check_global(leaves: Mapping[str, Any]) -> None:
    """Refuses arrays that live on one process of several, of which each may hold another."""
    if jax.process_count() == 1:
        return
    local = [
        f"  {path}: {leaf_spec(leaf)}\n"
        for path, leaf in leaves.items()
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable and leaf.ndim
    ]
    if local:
        raise CheckpointError(
            "arrays live on one process only, so that it is not clear which one to save:\n"
            + "".join(local)
            + "  Place them on the mesh: jax.device_put(array, NamedSharding(mesh, P()))."
        )
