"""Verified restore of one checkpoint onto the devices.

Every process runs the same stages, and a stage begins once all processes have finished the previous
one: a process that cannot read must not leave the others inside a collective. The first stage
compares the sizes of all files and the contents of small ones with the manifest. The second reads
the arrays. The third computes their fingerprints in place.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jaxtyping import PyTree

from shardlib.checkpoint import fingerprint
from shardlib.checkpoint.checksums import SMALL_FILE_BYTES, check_contents
from shardlib.checkpoint.consensus import Peers
from shardlib.checkpoint.errors import DamageError, first_line
from shardlib.checkpoint.manifest import Manifest, Partial
from shardlib.checkpoint.tree import (
    Leaf,
    LeafSpec,
    check_leaves,
    flatten,
    is_key,
    leaf_spec,
    sharding_of,
)
from shardlib.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Restoring:
    """A restore of one checkpoint.

    Attributes:
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

    def check(self, target: PyTree) -> list[str]:
        """Checks the leaves of `target` against the manifest; returns accepted differences."""
        targets = flatten(target)
        check_leaves(targets)
        accepted = check_same_leaves(
            self.place,
            self.manifest.leaves,
            {path: leaf_spec(leaf) for path, leaf in targets.items()},
            cast=self.cast,
            partial=self.partial,
        )
        _check_given({path: x for path, x in targets.items() if path not in self.manifest.leaves})
        return accepted

    def restore(self, target: PyTree) -> PyTree:
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
        restored = self._read(wanted)
        self._verify(restored)
        leaves = [
            _cast(restored.pop(path), leaf) if path in restored else leaf
            for path, leaf in targets.items()
        ]
        return jax.tree.unflatten(jax.tree.structure(target), leaves)

    def _as_saved(self, path: str, target: Leaf) -> Leaf:
        """Returns the target that an array is read into, with its saved dtype."""
        spec = self.manifest.leaves[path]
        sharding = sharding_of(target)
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

    def _read(self, wanted: Mapping[str, Leaf]) -> dict[str, Leaf]:
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

    def _verify(self, leaves: Mapping[str, Leaf]) -> None:
        if not self.manifest.is_verifiable:
            self.notify(
                f"checkpoint {self.place} has format {self.manifest.schema}, without fingerprints: "
                "its values are not verified"
            )
            return
        pending = fingerprint.dispatch(leaves)
        self.peers.all_or_none(
            "verify", lambda: check_fingerprints(self.place, self.manifest, pending.result())
        )


def check_fingerprints(place: pathlib.Path, manifest: Manifest, actual: Mapping[str, str]) -> None:
    """Raises a `DamageError` that lists all leaves whose fingerprints differ from the save."""
    changed = [path for path in actual if actual[path] != manifest.fingerprints[path]]
    if changed:
        raise DamageError(
            f"checkpoint {place} is damaged: {len(changed)} of {len(actual)} leaves are "
            "not what was saved:\n"
            + "".join(f"  {path}: {manifest.leaves[path]}\n" for path in changed)
            + "  Restore another step."
        )


def _check_given(leaves: Mapping[str, Leaf]) -> None:
    """Rejects abstract leaves that are missing from the checkpoint."""
    abstract = [path for path, leaf in leaves.items() if isinstance(leaf, jax.ShapeDtypeStruct)]
    if abstract:
        raise CheckpointError(
            "leaves that are missing from the checkpoint have no values:\n"
            + "".join(f"  {path}: {leaf_spec(leaves[path])}\n" for path in abstract)
            + "  Pass arrays for them in the target, such as freshly initialised ones."
        )


def _cast(leaf: Leaf, target: Leaf) -> Leaf:
    """Returns a saved leaf with the dtype and placement of `target`."""
    if leaf_spec(leaf) == leaf_spec(target):
        return leaf
    sharding = sharding_of(target)
    if isinstance(leaf, jax.Array):
        return leaf.astype(target.dtype)
    if not hasattr(target, "dtype"):
        return type(target)(leaf.item())
    array = np.asarray(leaf).astype(target.dtype)
    if sharding is None:
        return array[()] if isinstance(target, np.generic) else array
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def check_same_leaves(
    directory: pathlib.Path,
    saved: Mapping[str, LeafSpec],
    expected: Mapping[str, LeafSpec],
    *,
    cast: bool = False,
    partial: Partial = False,
) -> list[str]:
    """Rejects a checkpoint whose leaves differ from the leaves of the target state. Returns a line
    for each accepted difference.

    Args:
        directory: The checkpoint, for the error.
        saved: The leaves of the checkpoint by path.
        expected: The leaves of the target state by path.
        cast: Whether leaves may have another dtype, except keys of `jax.random`.
        partial: Whether leaves may be missing or unexpected, or which ones by path.

    Raises:
        CheckpointError: If any other leaf is missing, unexpected, or has another shape or dtype;
            all such leaves are listed with their expected and found specs.
    """
    is_optional = partial if callable(partial) else lambda path: partial
    faults, accepted, options = [], [], set()
    for path in sorted({*saved, *expected}):
        line, option = _difference(path, saved.get(path), expected.get(path))
        if line is None:
            continue
        if (option == "cast" and cast) or (option == "partial" and is_optional(path)):
            accepted.append(line)
        else:
            faults.append(line)
            options.add(option)
    if faults:
        fix = "Restore it with the configuration it was saved with, or start another run"
        if None not in options:
            named = " and ".join(f"{option}=True" for option in sorted(options))
            fix += f"; in code, restore(..., {named}) accepts these"
        raise CheckpointError(
            f"checkpoint {directory} is of another model or optimizer: "
            f"{len(faults)} of {len({*saved, *expected})} leaves differ:\n"
            + "".join(f"  {fault}\n" for fault in faults)
            + f"  {fix}."
        )
    return accepted


def _difference(
    path: str, saved: LeafSpec | None, expected: LeafSpec | None
) -> tuple[str | None, str | None]:
    """Returns a line about the difference of a leaf, and the `restore` option that accepts it.

    The line is None if the leaf is as expected; the option is None if no option accepts it.
    """
    if saved is None:
        return f"{path}: expected {expected}, missing from the checkpoint", "partial"
    if expected is None:
        return f"{path}: not expected, found {saved}", "partial"
    if saved == expected:
        return None, None
    is_cast = saved.shape == expected.shape and "key<" not in saved.dtype + expected.dtype
    return f"{path}: expected {expected}, found {saved}", "cast" if is_cast else None
