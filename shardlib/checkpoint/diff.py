"""Differences between two checkpoints, from their manifests alone."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.tree import LeafSpec


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two different entries of one name in two checkpoints; None if one lacks it."""

    name: str
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class CheckpointDiff:
    """The differences between two checkpoints.

    Attributes:
        shapes: Leaves that one of them lacks, or that differ in shape or dtype.
        values: Leaves whose fingerprints differ.
        unknown: Leaves that cannot be compared, because a checkpoint has no fingerprints.
        same: Number of equal leaves.
        run: Differences in the run's metadata: config, mesh, rules, position in the data.
        libraries: Differences in library versions.
    """

    shapes: list[Difference]
    values: list[str]
    unknown: list[str]
    same: int
    run: list[Difference]
    libraries: list[Difference]


def diff(first: Manifest, second: Manifest) -> CheckpointDiff:
    """Returns the differences between two checkpoints without reading arrays."""
    shapes: list[Difference] = []
    values: list[str] = []
    unknown: list[str] = []
    same = 0
    for path in dict.fromkeys([*first.leaves, *second.leaves]):
        a, b = first.leaves.get(path), second.leaves.get(path)
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            shapes.append(Difference(path, _text(a), _text(b)))
            continue
        marks = first.fingerprints.get(path), second.fingerprints.get(path)
        if None in marks:
            unknown.append(path)
        elif marks[0] != marks[1]:
            values.append(path)
        else:
            same += 1
    return CheckpointDiff(
        shapes=shapes,
        values=values,
        unknown=unknown,
        same=same,
        run=list(_differences(first.run, second.run)),
        libraries=list(_differences(first.libraries, second.libraries)),
    )


def _text(spec: LeafSpec | None) -> str | None:
    return None if spec is None else str(spec)


def _differences(
    first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = ""
) -> Iterator[Difference]:
    for key in sorted({*first, *second}):
        a, b = first.get(key), second.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield Difference(f"{prefix}{key}", a, b)
