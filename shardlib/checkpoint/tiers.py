"""Checkpoints in two places: frequent ones on a local disk, others in the run directory."""

import os
import pathlib
import socket
import types
from collections.abc import Mapping
from typing import Any, Self

import jax

from shardlib.checkpoint import fallback
from shardlib.checkpoint.config import CheckpointConfig, LocalTier
from shardlib.checkpoint.consensus import one_step
from shardlib.checkpoint.directory import Notify
from shardlib.checkpoint.errors import listed
from shardlib.checkpoint.manifest import Manifest, Partial
from shardlib.checkpoint.reading import SavedCheckpoints
from shardlib.checkpoint.store import RunCheckpoints
from shardlib.errors import CheckpointError, ConfigError

# Displayed names of the places.
RUN, LOCAL = "run", "local"


def open_checkpoints(
    directory: str | os.PathLike[str],
    config: CheckpointConfig,
    *,
    notify: Notify | None = None,
    owner: str | None = None,
) -> "RunCheckpoints | TieredCheckpoints":
    """Returns the checkpoints of a run, in one or two places as the config sets.

    Args:
        directory: Holds the checkpoints of the run.
        config: The policies.
        notify: As in `RunCheckpoints`.
        owner: The id of the run, saved in its checkpoints as `run["id"]`; None for a new run.

    Raises:
        ConfigError: If the config has a local directory that overlaps with `directory`.
        CheckpointError: If the config has a local directory and the processes are on several
            hosts, or the local directory holds checkpoints of another run.
    """
    if config.local is None:
        return RunCheckpoints(directory, config, notify=notify)
    return TieredCheckpoints(directory, config, config.local, notify=notify, owner=owner)


def open_saved(
    directory: str | os.PathLike[str],
    config: CheckpointConfig,
    *,
    notify: Notify | None = None,
    owner: str | None = None,
) -> "SavedTiers":
    """Returns the checkpoints of a run from one or two places, for reading only.

    A local directory that does not exist, for example on another machine, or that holds checkpoints
    of another run is skipped and reported through `notify`.

    Args:
        directory: As in `open_checkpoints`.
        config: Checkpoint config of the run.
        notify: As in `RunCheckpoints`.
        owner: As in `open_checkpoints`.
    """
    far = SavedCheckpoints(directory, notify=notify)
    if config.local is None:
        return SavedTiers({RUN: far})
    near = SavedCheckpoints(config.local.directory, notify=notify)
    if not near.directory.is_dir():
        far.notify(f"checkpoint.local.directory does not exist, skipped: {near.directory}")
    elif _foreign_steps(near, owner):
        far.notify(
            f"checkpoint.local.directory holds checkpoints of another run, skipped: "
            f"{near.directory}"
        )
    else:
        return SavedTiers({RUN: far, LOCAL: near})
    return SavedTiers({RUN: far})


class SavedTiers:
    """`SavedCheckpoints` in several places, with the interface of one.

    Args:
        tiers: The places by name. If several have a step, the first of them is used.
    """

    def __init__(self, tiers: Mapping[str, SavedCheckpoints]) -> None:
        self.tiers = dict(tiers)
        self._places = tuple(self.tiers.values())

    @property
    def directory(self) -> pathlib.Path:
        """The directory of the run's checkpoints."""
        return self._places[0].directory

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints of all places, oldest first."""
        return sorted({step for place in self._places for step in place.steps()})

    def latest(self) -> int | None:
        """Returns the newest step, the same on every process; None without checkpoints."""
        found = [place.latest() for place in self._places]
        return max((step for step in found if step is not None), default=None)

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of a step; see `SavedCheckpoints.manifest`."""
        return self._places[self._index_of(step)].manifest(step)

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns the metadata of a step; see `SavedCheckpoints.metadata`."""
        return self.manifest(step).run

    def check(self, step: int, target: Any) -> None:
        """Checks a step against a target; see `SavedCheckpoints.check`."""
        self._places[self._index_of(step)].check(step, target)

    def stored(
        self, step: int, target: Any
    ) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, tuple[int, ...]]]:
        """Returns the stored structs and chunk shapes; see `SavedCheckpoints.stored`."""
        return self._places[self._index_of(step)].stored(step, target)

    def restore(
        self,
        step: int,
        target: Any,
        *,
        cast: bool = False,
        partial: Partial = False,
        on_difference: Notify | None = None,
    ) -> Any:
        """Returns the state saved at a step; see `SavedCheckpoints.restore`."""
        peers = self._places[0].peers
        index = int(peers.decide("place", "", lambda _: str(self._index_of(step))))
        return self._places[index].restore(
            step, target, cast=cast, partial=partial, on_difference=on_difference
        )

    def _index_of(self, step: int) -> int:
        """Returns the index of the place that has a step, preferring a complete checkpoint.

        Raises:
            CheckpointError: If the step has no checkpoint.
        """
        for has in (SavedCheckpoints.steps, SavedCheckpoints.candidates):
            for index, place in enumerate(self._places):
                if step in has(place):
                    return index
        where = " and ".join(str(place.directory) for place in self._places)
        raise CheckpointError(
            f"step {step} has no checkpoint in {where}.\n  Steps there: {listed(self.steps())}."
        )


class TieredCheckpoints(SavedTiers):
    """Two `RunCheckpoints` with the interface of one.

    A step is saved once: on the local disk if only `local.every_steps` divides it, otherwise in the
    run directory. A step saved with `wait` goes to the run directory, such as the last one. A
    restore uses the newest valid step of both places.

    Args:
        directory: Holds the checkpoints of the run.
        config: The policies of the run directory.
        local: The policies of the local disk.
        notify: As in `RunCheckpoints`.
        owner: As in `open_checkpoints`.

    Raises:
        ConfigError: If one directory lies inside the other.
        CheckpointError: If the processes are on several hosts, or the local directory holds
            checkpoints of another run.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig,
        local: LocalTier,
        *,
        notify: Notify | None = None,
        owner: str | None = None,
    ) -> None:
        _check_apart(pathlib.Path(directory), pathlib.Path(local.directory))
        self.config = config
        self.far = RunCheckpoints(directory, config, notify=notify)
        fast = CheckpointConfig(
            every_steps=local.every_steps,
            keep=local.keep,
            asynchronous=config.asynchronous,
            max_failures=config.max_failures,
        )
        self.near = RunCheckpoints(local.directory, fast, notify=notify)
        self._both = (self.far, self.near)
        super().__init__({RUN: self.far, LOCAL: self.near})
        self.far.peers.decide("hosts", _host(), _check_one_host)
        self.far.peers.decide("owner", "", lambda _: _check_owner(self.near, owner))

    @property
    def last_saved(self) -> int | None:
        """The last step that this object has saved in either place."""
        return max(
            (store.last_saved for store in self._both if store.last_saved is not None), default=None
        )

    @property
    def last_kept(self) -> int | None:
        """The last step that this object has saved in the run directory."""
        return self.far.last_saved

    def is_due(self, step: int) -> bool:
        """Whether either place schedules a checkpoint after this step."""
        return self.far.is_due(step) or (self.config.enabled and self.near.is_due(step))

    def check_writable(self) -> None:
        """Checks that checkpoints can be written in both places."""
        for store in self._both:
            store.check_writable()

    def prepare(self, state: Any) -> None:
        """Compiles the programs of a save; see `RunCheckpoints.prepare`."""
        self.far.prepare(state)

    def save(
        self,
        step: int,
        state: Any,
        metadata: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
    ) -> None:
        """Starts saving a state in the place that schedules the step; see `RunCheckpoints.save`.

        A save with `wait`, such as the last one, goes to the run directory: the local disk may
        disappear with its machine.
        """
        self.far.peers.decide("tier", str(step), one_step)
        is_near = self.near.is_due(step) and not self.far.is_due(step) and not wait
        store, other = (self.near, self.far) if is_near else (self.far, self.near)
        # One copy of the state on the host at a time.
        other.settle()
        store.save(step, state, metadata, metrics=metrics, wait=wait)

    def wait(self) -> None:
        """Blocks until the last saves in both places are complete; see `RunCheckpoints.wait`."""
        for store in self._both:
            store.wait()

    def settle(self, *, is_raised: bool = False) -> None:
        """Waits for the saves in flight in both places; reports or raises their failures."""
        for store in self._both:
            store.settle(is_raised=is_raised)

    def poll(self) -> None:
        """Reports failed saves in both places without waiting."""
        for store in self._both:
            store.poll()

    @property
    def has_given_up(self) -> bool:
        """Whether either place has given up; see `RunCheckpoints.has_given_up`."""
        return any(store.has_given_up for store in self._both)

    def check_failures(self) -> None:
        """Raises an error if either place has given up."""
        for store in self._both:
            store.check_failures()

    def restore_newest(
        self,
        target: Any,
        *,
        accept: fallback.Accept = lambda manifest: None,
        partial: Partial = False,
    ) -> tuple[Manifest, Any] | None:
        """Restores the newest valid step of both places; see `RunCheckpoints.restore_newest`."""
        for store in self._both:
            store.clean()
        return fallback.restore_newest(self._both, target, accept, partial)

    def drop_after(self, step: int) -> None:
        """Removes every checkpoint after `step` in both places."""
        for store in self._both:
            store.drop_after(step)

    def close(self) -> None:
        """Closes both places; see `RunCheckpoints.close`."""
        try:
            self.near.close()
        finally:
            self.far.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        try:
            self.near.__exit__(kind, error, traceback)
        finally:
            self.far.__exit__(kind, error, traceback)


def _check_apart(far: pathlib.Path, near: pathlib.Path) -> None:
    one, other = far.resolve(), near.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise ConfigError(
            f"checkpoint.local.directory {near} overlaps with the run's checkpoints in {far}.\n"
            "  Name a directory outside of run_dir, on a disk of this machine."
        )


def _foreign_steps(store: SavedCheckpoints, owner: str | None) -> list[int]:
    """Returns the steps saved by another run; checkpoints without a run id do not count."""
    ids = {step: manifest.run.get("id") for step, manifest in store.manifests().items()}
    return [step for step, found in ids.items() if found is not None and found != owner]


def _check_owner(near: SavedCheckpoints, owner: str | None) -> str:
    if foreign := _foreign_steps(near, owner):
        raise CheckpointError(
            f"checkpoint.local.directory {near.directory} holds checkpoints of another run: "
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
