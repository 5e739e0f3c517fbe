"""Checkpoints in two places: often on a fast local disk, now and then in the run directory."""

import os
import pathlib
import socket
import types
from collections.abc import Mapping
from typing import Any, Self

import jax

from shardlib.checkpoint import newest
from shardlib.checkpoint.agreement import one_step
from shardlib.checkpoint.config import CheckpointConfig, LocalTier
from shardlib.checkpoint.damage import listed
from shardlib.checkpoint.directory import Notify
from shardlib.checkpoint.manifest import Manifest, Partial
from shardlib.checkpoint.reading import SavedCheckpoints
from shardlib.checkpoint.store import RunCheckpoints
from shardlib.errors import CheckpointError, ConfigError

# Names of the places, for people.
RUN, LOCAL = "run", "local"


def open_checkpoints(
    directory: str | os.PathLike[str],
    config: CheckpointConfig,
    *,
    notify: Notify | None = None,
    owner: str | None = None,
) -> "RunCheckpoints | TieredCheckpoints":
    """Returns the checkpoints of a run, in one place or two as the config says.

    Args:
        directory: Holds the checkpoints of the run.
        config: The policies.
        notify: As of `RunCheckpoints`.
        owner: The id of the run, which its checkpoints give as `run["id"]`; None for a new run.

    Raises:
        ConfigError: If there is to be a local place, and it overlaps with that of the run.
        CheckpointError: If there is to be one, and the processes are on several hosts, or it holds
            checkpoints of another run.
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
    """Returns the checkpoints of a run to someone who only reads, from one place or two.

    A local place that is not there, on another machine for example, or that holds checkpoints of
    another run, is told of through `notify` and left out.

    Args:
        directory: As of `open_checkpoints`.
        config: That of the run.
        notify: As of `RunCheckpoints`.
        owner: As of `open_checkpoints`.
    """
    far = SavedCheckpoints(directory, notify=notify)
    if config.local is None:
        return SavedTiers({RUN: far})
    near = SavedCheckpoints(config.local.directory, notify=notify)
    if not near.directory.is_dir():
        far.notify(f"checkpoint.local.directory is not here, and left out: {near.directory}")
    elif _foreign_steps(near, owner):
        far.notify(
            f"checkpoint.local.directory holds checkpoints of another run, and is left out: "
            f"{near.directory}"
        )
    else:
        return SavedTiers({RUN: far, LOCAL: near})
    return SavedTiers({RUN: far})


class SavedTiers:
    """`SavedCheckpoints` in several places, with the interface of one.

    Args:
        tiers: The places by name. Of two checkpoints of one step, that of the first is taken.
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
        """Returns the newest step, or None without any; the same on every process."""
        found = [place.latest() for place in self._places]
        return max((step for step in found if step is not None), default=None)

    def manifest(self, step: int) -> Manifest:
        """As of `SavedCheckpoints`, wherever the step is."""
        return self._places[self._index_of(step)].manifest(step)

    def metadata(self, step: int) -> dict[str, Any]:
        """As of `SavedCheckpoints`, wherever the step is."""
        return self.manifest(step).run

    def check(self, step: int, target: Any) -> None:
        """As of `SavedCheckpoints`, wherever the step is."""
        self._places[self._index_of(step)].check(step, target)

    def stored(
        self, step: int, target: Any
    ) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, tuple[int, ...]]]:
        """As of `SavedCheckpoints`, wherever the step is."""
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
        """As of `SavedCheckpoints`, wherever the step is."""
        peers = self._places[0].peers
        index = int(peers.decide("place", "", lambda _: str(self._index_of(step))))
        return self._places[index].restore(
            step, target, cast=cast, partial=partial, on_difference=on_difference
        )

    def _index_of(self, step: int) -> int:
        """Returns which place has a step: complete if possible, damaged otherwise.

        Raises:
            CheckpointError: If none has it.
        """
        for has in (SavedCheckpoints.steps, SavedCheckpoints.candidates):
            for index, place in enumerate(self._places):
                if step in has(place):
                    return index
        where = " and ".join(str(place.directory) for place in self._places)
        raise CheckpointError(
            f"there is no checkpoint of step {step} in {where}.\n"
            f"  Steps there: {listed(self.steps())}."
        )


class TieredCheckpoints(SavedTiers):
    """Two `RunCheckpoints` with the interface of one.

    A step is saved once: in the run directory if `config.every_steps` divides it or nothing else
    asks for it (the last one, say), on the local disk otherwise. Restoring takes the newest step
    that validates, wherever it is.

    Args:
        directory: Holds the checkpoints of the run.
        config: The policies of the run directory.
        local: Those of the local disk.
        notify: As of `RunCheckpoints`.
        owner: As of `open_checkpoints`.

    Raises:
        ConfigError: If one of the directories lies within the other.
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
        """As of `RunCheckpoints`, in either place."""
        return max(
            (store.last_saved for store in self._both if store.last_saved is not None), default=None
        )

    @property
    def last_kept(self) -> int | None:
        """The last step that this object has saved in the run directory."""
        return self.far.last_saved

    def is_due(self, step: int) -> bool:
        """Whether either place asks for a checkpoint after this step."""
        return self.far.is_due(step) or (self.config.enabled and self.near.is_due(step))

    def check_writable(self) -> None:
        """As of `RunCheckpoints`, of both places."""
        for store in self._both:
            store.check_writable()

    def prepare(self, state: Any) -> None:
        """As of `RunCheckpoints`."""
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
        """As of `RunCheckpoints`, in the place that asks for the step; in the run directory if it
        is waited for, as the last one is: the local disk may go away with its machine."""
        self.far.peers.decide("tier", str(step), one_step)
        is_near = self.near.is_due(step) and not self.far.is_due(step) and not wait
        store, other = (self.near, self.far) if is_near else (self.far, self.near)
        # One copy of the state on the host at a time.
        other.settle()
        store.save(step, state, metadata, metrics=metrics, wait=wait)

    def wait(self) -> None:
        """As of `RunCheckpoints`, for both places."""
        for store in self._both:
            store.wait()

    def settle(self, *, is_raised: bool = False) -> None:
        """As of `RunCheckpoints`, for both places."""
        for store in self._both:
            store.settle(is_raised=is_raised)

    def poll(self) -> None:
        """As of `RunCheckpoints`, for both places."""
        for store in self._both:
            store.poll()

    @property
    def has_given_up(self) -> bool:
        """As of `RunCheckpoints`, of either place."""
        return any(store.has_given_up for store in self._both)

    def check_failures(self) -> None:
        """As of `RunCheckpoints`, for both places."""
        for store in self._both:
            store.check_failures()

    def restore_newest(
        self,
        target: Any,
        *,
        accept: newest.Accept = lambda manifest: None,
        partial: Partial = False,
    ) -> tuple[Manifest, Any] | None:
        """As of `RunCheckpoints`, of both places together."""
        for store in self._both:
            store.clean()
        return newest.restore_newest(self._both, target, accept, partial)

    def drop_after(self, step: int) -> None:
        """As of `RunCheckpoints`, in both places."""
        for store in self._both:
            store.drop_after(step)

    def close(self) -> None:
        """As of `RunCheckpoints`, for both places."""
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
            f"checkpoint.local.directory {near} and the checkpoints of the run, in {far}, lie in "
            "each other.\n"
            "  Name a directory outside of run_dir, on a disk of this machine."
        )


def _foreign_steps(store: SavedCheckpoints, owner: str | None) -> list[int]:
    """Returns the steps that another run says to have saved; one without an id may be anyone's."""
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
    """Names this machine; containers of one machine have names of their own but one boot."""
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
