"""In what two checkpoints differ, told by their manifests alone."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.tree import LeafSpec


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of what two checkpoints say of one thing. What one of them lacks is None."""

    name: str
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class CheckpointDiff:
    """In what two checkpoints differ.

    Attributes:
        shapes: Leaves that one of them lacks, or that have another shape or dtype.
        values: Leaves of other values, told by their fingerprints.
        unknown: Leaves whose values cannot be compared: one of the two has no fingerprints.
        same: How many leaves are equal.
        run: What the run says of itself: config, mesh, rules, position in the data.
        libraries: Versions.
    """

    shapes: list[Difference]
    values: list[str]
    unknown: list[str]
    same: int
    run: list[Difference]
    libraries: list[Difference]


def diff(first: Manifest, second: Manifest) -> CheckpointDiff:
    """Returns in what two checkpoints differ; reads no array."""
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
