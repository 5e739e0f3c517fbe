"""Verified restore of one checkpoint onto the devices.

Every process runs the same stages, and a stage begins once all processes have finished the previous
one: a process that cannot read must not leave the others inside a collective. The first stage
compares the sizes of all files and the contents of small ones with the manifest. The second reads
the arrays. The third computes their fingerprints in place.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from shardlib.checkpoint import fingerprint
from shardlib.checkpoint import manifest as manifests
from shardlib.checkpoint.checksums import SMALL_FILE_BYTES, check_contents
from shardlib.checkpoint.consensus import Peers
from shardlib.checkpoint.errors import DamageError, first_line
from shardlib.checkpoint.manifest import Manifest, Partial
from shardlib.checkpoint.tree import check_leaves, flatten, is_key, leaf_spec, unflatten
from shardlib.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Restoring:
    """A restore of one checkpoint.

    Attributes:
        place: Directory of the checkpoint.
        manifest: Its manifest.
        peers: The processes.
        notify: Called if the values cannot be verified.
        on_difference: Called for each leaf that is cast, kept or dropped; `notify` by default.
        cast: Whether dtypes may differ from the saved dtypes.
        partial: Whether leaves may be missing from the checkpoint, or unexpected.
    """

    place: pathlib.Path
    manifest: Manifest
    peers: Peers
    notify: Callable[[str], None]
    on_difference: Callable[[str], None] | None = None
    cast: bool = False
    partial: Partial = False

    def check(self, target: Any) -> list[str]:
        """Checks the leaves of `target` against the manifest; returns accepted differences."""
        targets = flatten(target)
        check_leaves(targets)
        accepted = manifests.check_same_leaves(
            self.place,
            self.manifest.leaves,
            {path: leaf_spec(leaf) for path, leaf in targets.items()},
            cast=self.cast,
            partial=self.partial,
        )
        _check_given({path: x for path, x in targets.items() if path not in self.manifest.leaves})
        return accepted

    def restore(self, target: Any) -> Any:
        """Returns the state, on the shardings of `target`.

        Raises:
            DamageError: If the checkpoint is damaged; damaged files or leaves are listed.
            CheckpointError: If its leaves differ from `target`.
        """
        for line in self.peers.all_or_none("check", lambda: self.check(target)):
            (self.on_difference or self.notify)(f"restoring step {self.manifest.step}: {line}")
        targets = flatten(target)
        wanted = {
            path: self._as_saved(path, leaf)
            for path, leaf in targets.items()
            if path in self.manifest.leaves
        }
        self.peers.all_or_none("files", self._check_files)
        found = self._read(wanted)
        self._verify(found)
        leaves = {
            path: _cast(found.pop(path), leaf) if path in found else leaf
            for path, leaf in targets.items()
        }
        return unflatten(leaves, target)

    def _as_saved(self, path: str, target: Any) -> Any:
        """Returns the target that an array is read into, with its saved dtype."""
        spec = self.manifest.leaves[path]
        sharding = getattr(target, "sharding", None)
        if is_key(target):
            return target
        dtype = np.dtype(spec.dtype)
        is_wide = dtype != jax.dtypes.canonicalize_dtype(dtype)
        if leaf_spec(target) == spec:
            if is_wide and sharding is not None:
                raise CheckpointError(
                    f"{path}: {spec} cannot be restored onto devices while jax_enable_x64 is off.\n"
                    "  Turn it on, leave the sharding out, or ask for another dtype with cast=True."
                )
            return target
        if is_wide:
            sharding = None  # Devices cannot hold this dtype without x64.
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding)

    def _check_files(self) -> None:
        if self.peers.is_first and self.manifest.is_verifiable:
            check_contents(self.place, self.manifest.files, largest=SMALL_FILE_BYTES)

    def _read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        from shardlib.checkpoint import arrays

        try:
            return self.peers.all_or_none("read", lambda: arrays.read(self.place, wanted))
        except DamageError:
            raise
        except Exception as error:
            failure = error
        self.peers.all_or_none("blame", lambda: self._blame(failure))
        raise AssertionError("unreachable")

    def _blame(self, error: Exception) -> None:
        """Raises the reason why the arrays cannot be read: changed files, or another error."""
        if not self.peers.is_first:
            return
        reason = str(error) if isinstance(error, CheckpointError) else first_line(error)
        text = f"checkpoint {self.place} cannot be read: {reason}"
        if not self.manifest.is_verifiable:
            raise DamageError(f"{text}\n  Restore another step.") from error
        check_contents(self.place, self.manifest.files)
        raise CheckpointError(
            f"{text}\n  Its files match their checksums; look for the cause on this machine."
        ) from error

    def _verify(self, leaves: Mapping[str, Any]) -> None:
        if not self.manifest.is_verifiable:
            self.notify(
                f"checkpoint {self.place} has format {self.manifest.schema}, without fingerprints: "
                "its values are not verified"
            )
            return
        found = fingerprint.dispatch(leaves)
        self.peers.all_or_none(
            "verify", lambda: check_fingerprints(self.place, self.manifest, found.result())
        )


def check_fingerprints(place: pathlib.Path, manifest: Manifest, found: Mapping[str, str]) -> None:
    """Raises a `DamageError` that lists all leaves whose fingerprints differ from the save."""
    changed = [path for path in found if found[path] != manifest.fingerprints[path]]
    if changed:
        raise DamageError(
            f"checkpoint {place} is damaged: {len(changed)} of {len(found)} leaves are "
            "not what was saved:\n"
            + "".join(f"  {path}: {manifest.leaves[path]}\n" for path in changed)
            + "  Restore another step."
        )


def _check_given(leaves: Mapping[str, Any]) -> None:
    """Rejects abstract leaves that are missing from the checkpoint."""
    abstract = [path for path, leaf in leaves.items() if isinstance(leaf, jax.ShapeDtypeStruct)]
    if abstract:
        raise CheckpointError(
            "leaves that are missing from the checkpoint have no values:\n"
            + "".join(f"  {path}: {leaf_spec(leaves[path])}\n" for path in abstract)
            + "  Pass arrays for them in the target, such as freshly initialised ones."
        )


def _cast(leaf: Any, target: Any) -> Any:
    """Returns a saved leaf with the dtype and placement of `target`."""
    if leaf_spec(leaf) == leaf_spec(target):
        return leaf
    sharding = getattr(target, "sharding", None)
    if isinstance(leaf, jax.Array):
        return leaf.astype(target.dtype)
    if not hasattr(target, "dtype"):
        return type(target)(leaf.item())
    array = np.asarray(leaf).astype(target.dtype)
    if sharding is None:
        return array[()] if isinstance(target, np.generic) else array
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
