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

import atexit
import logging
import operator
import os
import pathlib
import socket
import threading
import types
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Self

import jax
from jaxtyping import PyTree

from shardlib.checkpoint import fingerprint
from shardlib.checkpoint import manifest as manifests
from shardlib.checkpoint.config import CheckpointConfig
from shardlib.checkpoint.consensus import one_step
from shardlib.checkpoint.directory import Notify, SaveDirectory
from shardlib.checkpoint.errors import DamageError, first_line, listed
from shardlib.checkpoint.manifest import Manifest, Partial
from shardlib.checkpoint.reading import LOCAL, RUN, SavedCheckpoints
from shardlib.checkpoint.restoring import Restoring
from shardlib.checkpoint.saving import Saving
from shardlib.checkpoint.tree import Leaf, check_leaves, flatten, leaf_spec
from shardlib.errors import CheckpointError, ConfigError, SaveFailedError

if TYPE_CHECKING:
    from shardlib.checkpoint.arrays import ArrayWriter

Accept = Callable[[Manifest], bool | None]
"""Called with a manifest before any array is read: False skips the checkpoint, an error ends the
search."""


class RunCheckpoints(SavedCheckpoints):
    """Saves and restores the state of one run.

    With `config.local` a step is saved in one of two places: on the local disk if only
    `local.every_steps` divides it, otherwise in the run directory. A step saved with `wait`, such
    as the last one, goes to the run directory: the local disk may disappear with its machine. A
    restore uses the newest valid step of both places.

    With several processes, each makes its own instance on the same shared directory, and all
    call every method that saves, waits, restores or removes together. They agree over the
    coordination service: a failure on one process is raised on all, and no process is left waiting.

    It is a context manager; its exit waits for the save in flight.

    Args:
        directory: Holds the checkpoints, for example `run/checkpoints`; the first save creates it.
        config: The schedule and the retention policies. The schedule is for the caller's loop; see
            `is_due`.
        notify: Called with a text for each skipped entry and each error that does not end the run,
            in the thread that calls the methods. By default the text is logged as a warning.
        owner: The id of the run, saved in its checkpoints as `run["id"]`; None for a new run. The
            local directory must not hold checkpoints of another run.

    Raises:
        ConfigError: If the local directory and `directory` overlap.
        CheckpointError: If there is a local directory and the processes are on several hosts, or it
            holds checkpoints of another run.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        notify: Notify | None = None,
        owner: str | None = None,
    ) -> None:
        super().__init__(directory, notify=notify)
        self.config = config = config or CheckpointConfig()
        self._run = SaveDirectory(directory, config, self.notify)
        self._stores = {RUN: self._run}
        self._places = self._stores
        self._writer: ArrayWriter | None = None
        self._saving: tuple[SaveDirectory, Saving] | None = None
        self._unraised: SaveFailedError | None = None
        self._is_metric_missed = False
        if (local := config.local) is not None:
            _check_apart(pathlib.Path(directory), pathlib.Path(local.directory))
            frequent = CheckpointConfig(
                enabled=config.enabled,
                every_steps=local.every_steps,
                keep=local.keep,
                max_failures=config.max_failures,
            )
            place = SaveDirectory(local.directory, frequent, self.notify)
            self._stores[LOCAL] = place
            self.peers.decide("hosts", _host(), _check_one_host)
            self.peers.decide("owner", "", lambda _: _check_owner(place, owner))

    @property
    def last_saved(self) -> int | None:
        """The last step that this object knows to be saved completely, in any place; None once that
        checkpoint has been dropped or set aside."""
        steps = [place.last_saved for place in self._stores.values()]
        return max((step for step in steps if step is not None), default=None)

    @property
    def last_kept(self) -> int | None:
        """The last step that this object has saved in the run directory."""
        return self._run.last_saved

    def is_due(self, step: int) -> bool:
        """Whether the config schedules a checkpoint after this step, in any place."""
        return any(place.is_due(step) for place in self._stores.values())

    def check_writable(self) -> None:
        """Checks that checkpoints can be written, before training starts.

        Raises:
            SaveFailedError: If a directory cannot be created or written to.
        """
        for place in self._stores.values():
            place.check_writable()

    def prepare(self, state: PyTree) -> None:
        """Compiles the programs that a save of such a state needs, ahead of the first save. The
        state may be abstract, with shardings."""
        fingerprint.compile_ahead(flatten(state))

    def save(
        self,
        step: int,
        state: PyTree,
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
            step: Number of optimizer steps, also as an array such as `state.step`.
            state: Any pytree of arrays and numbers, including typed PRNG keys. A scalar on a
                single process is taken from the first process.
            metadata: Any JSON: config, mesh, position in the data. `healthy: false` marks a state
                not to go back to; the newest healthy checkpoint is never deleted.
            metrics: Metrics for `config.keep_best`; non-finite numbers are dropped.
            wait: Whether to return only once the checkpoint is complete, and to raise if it fails.

        Raises:
            CheckpointError: If the step is already saved or differs between processes, or the
                state or the metadata cannot be stored.
            SaveFailedError: If too many saves have failed; the message names the last good step.
        """
        step = operator.index(step)
        self.settle()

        def name_of_place(steps: list[str]) -> str:
            name = self._scheduled(int(one_step(steps)), wait)
            self._stores[name].check_new(step)
            return name

        leaves = flatten(state)
        check_leaves(leaves)
        _check_global(leaves)
        draft = manifests.describe(step, leaves, metadata, metrics)
        draft.to_json()
        if not any(leaf_spec(leaf).size for leaf in leaves.values()):
            raise CheckpointError(
                f"the state of step {step} holds no array.\n  Pass the state of the training step."
            )
        place = self._stores[self.peers.decide("save", str(step), name_of_place)]
        self._check_failures(place)
        self._unraised = None
        self._report_missed_metric(place, draft)
        saving = Saving(place, self.peers, self._open_writer(), draft, lambda: place.prune(step))
        try:
            saving.begin(leaves)
        except Exception as error:
            self._fail(place, step, error, is_raised=wait)
            self._check_failures(place)
            return
        self._saving = place, saving
        if wait or not self.config.asynchronous:
            self.settle(is_raised=wait)

    def _scheduled(self, step: int, wait: bool) -> str:
        """Returns the name of the place that a step is saved in."""
        is_local = LOCAL in self._stores and self._stores[LOCAL].is_due(step)
        return LOCAL if is_local and not self._run.is_due(step) and not wait else RUN

    def wait(self) -> None:
        """Blocks until the last save is complete and old checkpoints are being deleted.

        Raises:
            SaveFailedError: If that save failed; its partial files are removed.
        """
        self.settle(is_raised=True)
        failure, self._unraised = self._unraised, None
        if failure is not None:
            raise failure

    def settle(self, *, is_raised: bool = False) -> None:
        """Waits for the save in flight; reports or raises its failure."""
        if self._saving is None:
            return
        (place, saving), self._saving = self._saving, None
        failure = saving.finish()
        while self._later:
            self._tell(self._later.pop(0))
        if failure is None:
            place.failures, place.last_saved = 0, saving.step
        else:
            self._fail(place, saving.step, failure, is_raised=is_raised)

    def poll(self) -> None:
        """Reports a failed save without waiting. Any process may call it alone."""
        if self._saving is not None and self._saving[1].is_over:
            self.settle()

    @property
    def has_given_up(self) -> bool:
        """Whether `config.max_failures` saves in a row are known to have failed in a place."""
        return any(place.has_given_up() for place in self._stores.values())

    def check_failures(self) -> None:
        """Raises an error if `has_given_up` is true.

        Raises:
            SaveFailedError: If too many saves have failed; the message names the last good step.
        """
        for place in self._stores.values():
            self._check_failures(place)

    def _check_failures(self, place: SaveDirectory) -> None:
        if not place.has_given_up():
            return
        self._unraised = None
        last = place.complete_steps().split(", ")[-1]
        count = place.failures
        what = "a checkpoint" if count == 1 else f"{count} checkpoints in a row"
        raise SaveFailedError(
            f"{what} could not be written to {place.path}; the last good step is {last}.\n"
            "  Free space or restore access there, then start again."
        )

    def restore_newest(
        self,
        target: PyTree,
        *,
        accept: Accept = lambda manifest: None,
        partial: Partial = False,
    ) -> tuple[Manifest, PyTree] | None:
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
            CheckpointError: If there are checkpoints but all are damaged; they are left in place.
                Also if the newest one is from another model or in a later format, or one is a
                symbolic link.
        """
        self.clean()
        damaged: list[tuple[SaveDirectory, int]] = []
        rejected: list[tuple[SaveDirectory, int]] = []
        while (choice := self._newest_except([*damaged, *rejected])) is not None:
            place, step = choice
            try:
                restored = self._restore_accepted(place, step, target, accept, partial)
            except DamageError as error:
                reason = str(error).rpartition("\n")[0]  # The last line suggests this loop.
                self.notify(f"step {step} does not validate, trying the one before it: {reason}")
                damaged.append(choice)
                continue
            if restored is None:
                rejected.append(choice)
                continue
            for each in damaged:
                self._set_aside(*each)
            if damaged:
                self.notify(f"step {step} is restored in its place")
            return restored
        if damaged:
            raise CheckpointError(
                "none of the checkpoints validates:\n"
                + "".join(f"  {place.path}, step {step}\n" for place, step in damaged)
                + "  They are left as they are. Restore them from a copy, or train in another "
                "run_dir."
            )
        return None

    def _newest_except(
        self, tried: Collection[tuple[SaveDirectory, int]]
    ) -> tuple[SaveDirectory, int] | None:
        """Returns the newest untried checkpoint, the same on every process.

        If several places have the step, it is in the first of them.
        """
        places = list(self._stores.values())

        def newest(_: list[str]) -> str:
            for place in places:
                for step in place.links():  # Resuming from an older step would lose its target.
                    place.read(step)
            steps = [
                (step, -index)
                for index, place in enumerate(places)
                for step in place.candidates()
                if (place, step) not in tried
            ]
            step, index = max(steps, default=(-1, 0))
            return f"{step} {-index}"

        step, index = map(int, self.peers.decide("newest", "", newest).split())
        return None if step < 0 else (places[index], step)

    def _restore_accepted(
        self, place: SaveDirectory, step: int, target: PyTree, accept: Accept, partial: Partial
    ) -> tuple[Manifest, PyTree] | None:
        """Restores one step, or returns None if `accept` skips it."""
        manifest = self._same_manifest(place, step)
        refused: list[Exception] = []

        def is_accepted() -> bool:
            try:
                return accept(manifest) is not False
            except Exception as error:
                refused.append(error)
                raise

        try:
            if not self.peers.all_or_none("accept", is_accepted):
                return None
        except CheckpointError:
            if refused:
                raise refused[0] from None
            raise
        restoring = Restoring(
            place.of_step(step), manifest, self.peers, self.notify, partial=partial
        )
        return manifest, restoring.restore(target)

    def clean(self) -> None:
        """Removes the leftovers of killed processes; only the run itself may call it."""
        self.settle()
        if self.peers.is_first:
            for place in self._stores.values():
                place.tolerate("leftovers of killed processes remain", place.clean)

    def set_aside(self, step: int) -> None:
        """Moves a damaged checkpoint into `.damaged`."""
        self._set_aside(self._stores[self._name_of(step)], step)

    def _set_aside(self, place: SaveDirectory, step: int) -> None:
        def move() -> None:
            self.notify(f"step {step} is now {place.set_aside(step)}")

        if self.peers.is_first:
            place.tolerate(f"step {step} cannot be set aside", move)
        place.forget(step)
        self.peers.decide("aside", "", lambda _: "")

    def drop_after(self, step: int) -> None:
        """Removes every checkpoint after `step`, for a run that goes back to it."""
        self.settle()

        def drop() -> None:
            if self.peers.is_first:
                for place in self._stores.values():
                    place.drop_after(step)

        for place in self._stores.values():
            place.forget(step + 1)
        self.peers.all_or_none("drop", drop)

    def close(self) -> None:
        """Waits for the save in flight and for deletions, and stops all threads."""
        try:
            self.wait()
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()
            for place in self._stores.values():
                place.join()

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
            _close_at_exit(self)
        return self._writer

    def _report_missed_metric(self, place: SaveDirectory, draft: Manifest) -> None:
        best = place.config.keep_best
        if best is None or best.metric in draft.metrics or self._is_metric_missed:
            return
        self._is_metric_missed = True
        given = ", ".join(sorted(draft.metrics)) or "none"
        self.notify(
            f"step {draft.step} is saved without the metric {best.metric!r} (given: {given}): it "
            "cannot be kept as the best"
        )

    def _fail(self, place: SaveDirectory, step: int, error: Exception, *, is_raised: bool) -> None:
        place.failures += 1
        reason = str(error) if isinstance(error, CheckpointError) else first_line(error)
        failure = SaveFailedError(
            f"the checkpoint of step {step} could not be written to {place.path}: {reason}\n"
            f"  Free space or restore access there; complete steps: {place.complete_steps()}."
        )
        if is_raised:
            raise failure from error
        self._unraised = failure
        self.notify(str(failure))


def open_checkpoints(
    directory: str | os.PathLike[str],
    config: CheckpointConfig,
    *,
    notify: Notify | None = None,
    owner: str | None = None,
) -> RunCheckpoints:
    """Returns the checkpoints of a run, in one or two places as the config sets.

    It takes the arguments of `RunCheckpoints` and raises its errors.
    """
    return RunCheckpoints(directory, config, notify=notify, owner=owner)


def _close_at_exit(checkpoints: RunCheckpoints) -> None:
    """Completes the save in flight if the interpreter ends without `close`, or reports its loss.

    `atexit` runs too late: thread pools accept no work by then. `threading` has the earlier hook
    that `concurrent.futures` uses. Python 3.12 starts no threads even there, so a save may still
    fail; the failure is then reported.
    """
    reference = weakref.ref(checkpoints)

    def close() -> None:
        alive = reference()
        if alive is not None:
            try:
                alive.close()
            except CheckpointError as error:
                logging.getLogger(__name__).error(
                    "%s\n  Call close() before the process ends, or use a with statement.",
                    str(error).splitlines()[0],
                )

    register = getattr(threading, "_register_atexit", atexit.register)
    register(close)


def _check_apart(run: pathlib.Path, local: pathlib.Path) -> None:
    one, other = run.resolve(), local.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise ConfigError(
            f"checkpoint.local.directory {local} overlaps with the run's checkpoints in {run}.\n"
            "  Name a directory outside of run_dir, on a disk of this machine."
        )


def _check_owner(local: SaveDirectory, owner: str | None) -> str:
    if foreign := local.foreign_steps(owner):
        raise CheckpointError(
            f"checkpoint.local.directory {local.path} holds checkpoints of another run: "
            f"steps {listed(foreign)}.\n"
            "  Name another checkpoint.local.directory, or remove this one if that run is over."
        )
    return ""


def _host() -> str:
    """Returns an id of this machine: host name and boot id.

    Containers on one machine have their own names but share the boot id.
    """
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _check_one_host(hosts: list[str]) -> str:
    if len(set(hosts)) > 1:
        names = ", ".join(sorted({host.split()[0] for host in hosts}))
        raise CheckpointError(
            f"checkpoint.local is for one host, but the processes are on {len(set(hosts))}: "
            f"{names}.\n"
            "  Leave checkpoint.local out: every process must see the directory."
        )
    return ""


def _check_global(leaves: Mapping[str, Leaf]) -> None:
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
