"""One checkpoint back on the devices, proved to be what was saved.

Every process goes through the same stages, and no stage begins before all processes are through the
one before: a process that cannot read must not leave the others within a collective. First sizes
of files and contents of small ones are compared with the manifest, then the arrays are read, then
their fingerprints are computed where they are.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from shardlib.checkpoint import fingerprint
from shardlib.checkpoint import manifest as manifests
from shardlib.checkpoint.agreement import Peers
from shardlib.checkpoint.damage import DamageError, first_line
from shardlib.checkpoint.files import SMALL_FILE_BYTES, check_contents
from shardlib.checkpoint.manifest import Manifest, Partial
from shardlib.checkpoint.tree import check_leaves, flatten, is_key, leaf_spec, unflatten
from shardlib.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Restoring:
    """How a checkpoint is to be restored.

    Attributes:
        place: Its directory.
        manifest: What it says of itself.
        peers: The processes.
        notify: Told of what cannot be verified.
        on_difference: Told of each leaf that changes, stays as it is or is left out.
        cast: Whether dtypes may differ from those saved.
        partial: Whether leaves may be missing from the checkpoint, or unexpected.
    """

    place: pathlib.Path
    manifest: Manifest
    peers: Peers
    notify: Callable[[str], None]
    on_difference: Callable[[str], None]
    cast: bool = False
    partial: Partial = False

    def check(self, target: Any) -> list[str]:
        """Proves that the leaves of `target` are there; returns accepted differences as lines."""
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
            DamageError: If the checkpoint is damaged; files or leaves are named.
            CheckpointError: If it has other leaves than `target`.
        """
        for line in self.peers.all_or_none("check", lambda: self.check(target)):
            self.on_difference(f"restoring step {self.manifest.step}: {line}")
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
        """Returns the target that the arrays are read into: of the dtype that they have."""
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
            sharding = None  # Without x64 there are no such arrays on devices.
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
        """Raises why the arrays cannot be read: changed files by name, or something else."""
        if not self.peers.is_first:
            return
        reason = str(error) if isinstance(error, CheckpointError) else first_line(error)
        text = f"checkpoint {self.place} cannot be read: {reason}"
        if not self.manifest.is_verifiable:
            raise DamageError(f"{text}\n  Restore another step.") from error
        check_contents(self.place, self.manifest.files)
        raise CheckpointError(
            f"{text}\n  Its files are as they were saved: look at what this machine lacks."
        ) from error

    def _verify(self, leaves: Mapping[str, Any]) -> None:
        if not self.manifest.is_verifiable:
            self.notify(
                f"checkpoint {self.place} has format {self.manifest.schema}, without fingerprints: "
                "its values are not verified"
            )
            return
        found = fingerprint.dispatch(leaves)
        self.peers.all_or_none("verify", lambda: self._compare(found.result()))

    def _compare(self, found: Mapping[str, str]) -> None:
        check_fingerprints(self.place, self.manifest, found)


def check_fingerprints(place: pathlib.Path, manifest: Manifest, found: Mapping[str, str]) -> None:
    """Raises `DamageError`, naming them all, for leaves that are not what was saved."""
    changed = [path for path in found if found[path] != manifest.fingerprints[path]]
    if changed:
        raise DamageError(
            f"checkpoint {place} is damaged: {len(changed)} of {len(found)} leaves are "
            "not what was saved:\n"
            + "".join(f"  {path}: {manifest.leaves[path]}\n" for path in changed)
            + "  Restore another step."
        )


def _check_given(leaves: Mapping[str, Any]) -> None:
    """Refuses leaves that are neither in the checkpoint nor at hand."""
    abstract = [path for path, leaf in leaves.items() if isinstance(leaf, jax.ShapeDtypeStruct)]
    if abstract:
        raise CheckpointError(
            "leaves that are missing from the checkpoint have no values:\n"
            + "".join(f"  {path}: {leaf_spec(leaves[path])}\n" for path in abstract)
            + "  Pass arrays for them in the target, such as freshly initialised ones."
        )


def _cast(leaf: Any, target: Any) -> Any:
    """Returns a leaf as it was saved in the dtype and place of `target`."""
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
