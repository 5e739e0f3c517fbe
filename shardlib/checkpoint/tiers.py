"""Checkpoints in two places: often on a fast local disk, now and then in the run directory."""

import os
import pathlib
import socket
import types
from collections.abc import Mapping
from typing import Any, Self

from shardlib.checkpoint import newest
from shardlib.checkpoint.config import CheckpointConfig, LocalTier
from shardlib.checkpoint.directory import Notify
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.store import RunCheckpoints
from shardlib.errors import CheckpointError


def open_checkpoints(
    directory: str | os.PathLike[str], config: CheckpointConfig, *, notify: Notify | None = None
) -> "RunCheckpoints | TieredCheckpoints":
    """Returns the checkpoints of a run, in one place or two as the config says.

    Raises:
        CheckpointError: If there is to be a local place, and the processes are on several hosts.
    """
    if config.local is None:
        return RunCheckpoints(directory, config, notify=notify)
    return TieredCheckpoints(directory, config, config.local, notify=notify)


class TieredCheckpoints:
    """Two `RunCheckpoints` with the interface of one.

    A step is saved once: in the run directory if `config.every_steps` divides it or nothing else
    asks for it (the last one, say), on the local disk otherwise. Restoring takes the newest step
    that validates, wherever it is.

    Args:
        directory: Holds the checkpoints of the run.
        config: The policies of the run directory.
        local: Those of the local disk.
        notify: As of `RunCheckpoints`.

    Raises:
        CheckpointError: If the processes are on several hosts.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig,
        local: LocalTier,
        *,
        notify: Notify | None = None,
    ) -> None:
        self.config, self._tier = config, local
        self.far = RunCheckpoints(directory, config, notify=notify)
        fast = CheckpointConfig(
            every_steps=local.every_steps,
            keep=local.keep,
            asynchronous=config.asynchronous,
            max_failures=config.max_failures,
        )
        self.near = RunCheckpoints(local.directory, fast, notify=notify)
        self._both = (self.far, self.near)
        self.far.peers.decide("hosts", _host(), _check_one_host)

    @property
    def directory(self) -> pathlib.Path:
        """The directory of the run's checkpoints."""
        return self.far.directory

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints of both places, oldest first."""
        return sorted({step for store in self._both for step in store.steps()})

    def latest(self) -> int | None:
        """Returns the newest step, or None without any; the same on every process."""
        return max(
            (step for store in self._both if (step := store.latest()) is not None), default=None
        )

    @property
    def last_saved(self) -> int | None:
        """As of `RunCheckpoints`, in either place."""
        return max(
            (store.last_saved for store in self._both if store.last_saved is not None), default=None
        )

    def is_due(self, step: int) -> bool:
        """Whether either place asks for a checkpoint after this step."""
        return self.far.is_due(step) or (self.config.enabled and self.near.is_due(step))

    def manifest(self, step: int) -> Manifest:
        """As of `RunCheckpoints`, wherever the step is."""
        return self._place_of(step).manifest(step)

    def metadata(self, step: int) -> dict[str, Any]:
        """As of `RunCheckpoints`, wherever the step is."""
        return self._place_of(step).metadata(step)

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
        """As of `RunCheckpoints`, in the place that asks for the step."""
        is_near = self.near.is_due(step) and not self.far.is_due(step)
        store, other = (self.near, self.far) if is_near else (self.far, self.near)
        # One copy of the state on the host at a time.
        other.settle()
        store.save(step, state, metadata, metrics=metrics, wait=wait)

    def wait(self) -> None:
        """As of `RunCheckpoints`, for both places."""
        for store in self._both:
            store.wait()

    def poll(self) -> None:
        """As of `RunCheckpoints`, for both places."""
        for store in self._both:
            store.poll()

    def check(self, step: int, target: Any) -> None:
        """As of `RunCheckpoints`, wherever the step is."""
        self._place_of(step).check(step, target)

    def restore(self, step: int, target: Any, *, cast: bool = False, partial: bool = False) -> Any:
        """As of `RunCheckpoints`, wherever the step is."""
        return self._place_of(step).restore(step, target, cast=cast, partial=partial)

    def restore_newest(
        self, target: Any, *, accept: newest.Accept = lambda manifest: None
    ) -> tuple[Manifest, Any] | None:
        """As of `RunCheckpoints`, of both places together."""
        for store in self._both:
            store.clean()
        return newest.restore_newest(self._both, target, accept)

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

    def _place_of(self, step: int) -> RunCheckpoints:
        def place(_: list[str]) -> str:
            return "near" if step in self.near.steps() and step not in self.far.steps() else "far"

        return self.near if self.far.peers.decide("place", "", place) == "near" else self.far


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
