"""The manifest of a checkpoint: one JSON document that is readable without the arrays.

    {
      "schema": 2,                      version of this format
      "step": 1200,
      "saved_at": "2026-01-31T12:00:00+00:00",
      "run": {...},                     metadata of the run: config, mesh, rules, position in
                                        the data; nested at most 64 levels deep
      "metrics": {"eval/loss": 2.31},   finite numbers; they select the best checkpoints
      "leaves": {"params/layers/kernel":
          {"shape": [4, 8], "dtype": "bfloat16", "fingerprint": "6f2b68c7"}, ...},
      "files": {"state/manifest.ocdbt": {"bytes": 240, "crc32": "0c3e5ab1"}, ...},
      "libraries": {"jax": "...", ...},
      "processes": 2,
      "devices": 8,
      "digest": "..."                   SHA-256 of the rest
    }

`fingerprint.py` defines the fingerprints. `files` lists all other files of the checkpoint by
relative path, with zlib's CRC-32. The digest covers the document without the digest, as JSON with
sorted keys, no spaces and only ASCII. A change of spacing is harmless; any other change is damage.

Schema 1 has no fingerprints, metrics, files or digest. Unknown keys are ignored, so a later version
may add keys; the schema number changes when an older reader would misread the document.

A manifest is untrusted input: its size is bounded, every field is checked, and no path leads out of
the checkpoint.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from shardlib.checkpoint.checksums import FileRecord
from shardlib.checkpoint.errors import DamageError
from shardlib.checkpoint.tree import STORABLE, LeafSpec, is_storable_path, leaf_spec
from shardlib.errors import CheckpointError

Partial = bool | Callable[[str], bool]
"""Whether leaves may be missing or unexpected: all leaves, or a predicate on their paths."""

SCHEMA = 2
FILE_NAME = "manifest.json"
# Grain sets the order of the samples.
LIBRARIES = ("shardlib", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain")
# A leaf takes about 150 bytes; a million leaves fit.
MAX_BYTES = 2**28
# The limit on the nesting of `run` keeps recursion over it safe.
MAX_DEPTH = 64

_KEY_DTYPE = re.compile(r"key<\w+>")
_FINGERPRINT = re.compile(r"([0-9a-f]{8}){1,4}")
_CRC = re.compile(r"[0-9a-f]{8}")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of one checkpoint; see the module for the meaning of the fields.

    `fingerprints` is empty for schema 1, and has all leaves otherwise.
    """

    step: int
    leaves: dict[str, LeafSpec]
    run: dict[str, Any]
    libraries: dict[str, str]
    saved_at: str
    processes: int
    devices: int
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    files: dict[str, FileRecord] = dataclasses.field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def is_verifiable(self) -> bool:
        """Whether the manifest has fingerprints and checksums to verify the checkpoint."""
        return self.schema >= 2

    @property
    def state_bytes(self) -> int:
        """Bytes of all files of the checkpoint except the manifest; 0 for schema 1."""
        return sum(record.bytes for record in self.files.values())

    def to_json(self) -> str:
        """Returns the document.

        Raises:
            CheckpointError: If `run` holds values that JSON cannot hold (an array, NaN, a set), or
                is nested too deep.
        """
        document = self._document()
        return json.dumps(document | {"digest": digest(document)}, indent=1)

    @property
    def identity(self) -> str:
        """SHA-256 of the content, equal on all processes that read the same checkpoint."""
        return digest(self._document())

    def _document(self) -> dict[str, Any]:
        try:
            document = {"schema": self.schema, **dataclasses.asdict(self)}
            fingerprints = document.pop("fingerprints")
            for path, leaf in document["leaves"].items():
                leaf["fingerprint"] = fingerprints.get(path)
            # The JSON round trip turns tuples into lists and keys into text.
            document = json.loads(json.dumps(document, allow_nan=False))
            _check_depth(document["run"])
            return document
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"the metadata of step {self.step} is not JSON: {error}.\n"
                "  Pass dicts, lists, strings, finite numbers, booleans and None."
            ) from None


def digest(document: Mapping[str, Any]) -> str:
    """Returns the digest of a document, which must be as parsed from JSON."""
    content = {key: value for key, value in document.items() if key != "digest"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def describe(
    step: int,
    leaves: Mapping[str, Any],
    run: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
) -> Manifest:
    """Returns the manifest of a state to be saved, given as leaves by path.

    Non-finite metrics are dropped: JSON cannot hold them, and they are never the best.
    """
    finite = {name: float(value) for name, value in (metrics or {}).items()}
    return Manifest(
        step=step,
        leaves={path: leaf_spec(leaf) for path, leaf in leaves.items()},
        run=dict(run),
        metrics={name: value for name, value in finite.items() if math.isfinite(value)},
        libraries={name: _version(name) for name in LIBRARIES}
        | {"python": platform.python_version()},
        saved_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        processes=jax.process_count(),
        devices=jax.device_count(),
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # Imported from a source tree.


def read(directory: pathlib.Path) -> Manifest:
    """Reads the manifest of the checkpoint in `directory`.

    Raises:
        CheckpointError: If the manifest is missing or damaged, or a newer shardlib wrote it.
    """
    path = directory / FILE_NAME
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is not a regular file")
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        document = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
        _check(isinstance(document, dict), "the document", document)
        schema = document["schema"]
        _check(_is_count(schema, least=1), "schema", schema)
        if schema > SCHEMA:
            raise CheckpointError(
                f"checkpoint {directory} has format {schema}; "
                f"this shardlib reads formats up to {SCHEMA}.\n"
                f"  Use the shardlib that wrote it: {document['libraries']['shardlib']}."
            )
        return _parsed(document)
    except OSError as error:
        # A missing manifest is damage; an unreadable one may be a temporary fault.
        is_gone = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        fix = "Restore another step; remove this one." if is_gone else "Make it readable."
        raise (DamageError if is_gone else CheckpointError)(
            f"{directory} cannot be read as a checkpoint: {error.strerror}: {path}.\n  {fix}"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamageError(
            f"the manifest {path} is damaged: {type(error).__name__}: {error}.\n"
            "  Restore another step; remove this one."
        ) from error


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file without blocking: a FIFO would wait for a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _parsed(document: dict[str, Any]) -> Manifest:
    """Returns the manifest in a document of schema 1 or 2; raises an error if it is invalid."""
    schema = document["schema"]
    has_marks = schema >= 2
    if has_marks and document["digest"] != digest(document):
        raise ValueError("digest mismatch")
    fields = _FIELDS | _LATER_FIELDS if has_marks else _FIELDS
    for key, is_valid in fields.items():
        _check(is_valid(document[key]), key, document[key])
    _check_depth(document["run"])
    leaves = document["leaves"]
    values = {key: document[key] for key in fields} | {
        "schema": schema,
        "leaves": {path: _leaf(path, leaf) for path, leaf in leaves.items()},
    }
    if has_marks:
        values |= {
            "metrics": {name: float(value) for name, value in document["metrics"].items()},
            "fingerprints": {path: _fingerprint(path, leaf) for path, leaf in leaves.items()},
            "files": {name: _file(name, record) for name, record in document["files"].items()},
        }
    return Manifest(**values)


def _leaf(path: str, leaf: dict[str, Any]) -> LeafSpec:
    _check(is_storable_path(path), "the name of a leaf", path)
    shape, dtype = leaf["shape"], leaf["dtype"]
    _check(isinstance(shape, list) and all(map(_is_count, shape)), f"shape of {path}", shape)
    is_storable = isinstance(dtype, str) and (dtype in STORABLE or _KEY_DTYPE.fullmatch(dtype))
    _check(bool(is_storable), f"dtype of {path}", dtype)
    return LeafSpec(tuple(shape), dtype)


def _fingerprint(path: str, leaf: dict[str, Any]) -> str:
    value = leaf["fingerprint"]
    _check(_matches(_FINGERPRINT, value), f"fingerprint of {path}", value)
    return value


def _file(name: str, record: dict[str, Any]) -> FileRecord:
    parts = name.split("/")
    is_inside = all(part not in ("", ".", "..") for part in parts) and "\\" not in name
    _check(is_inside and name.isprintable(), "the name of a file", name)
    _check(_is_count(record["bytes"]), f"bytes of {name}", record["bytes"])
    _check(_matches(_CRC, record["crc32"]), f"crc32 of {name}", record["crc32"])
    return FileRecord(record["bytes"], record["crc32"])


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_count(value: object, *, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _is_dict(value: object, is_valid: Callable[[object], bool] = lambda value: True) -> bool:
    return isinstance(value, dict) and all(map(is_valid, value.values()))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "leaves": lambda value: _is_dict(value) and len(value) > 0,
    "run": _is_dict,
    "libraries": lambda value: _is_dict(value, _is_text),
    "saved_at": _is_text,
    "processes": lambda value: _is_count(value, least=1),
    "devices": lambda value: _is_count(value, least=1),
}
_LATER_FIELDS: dict[str, Callable[[Any], bool]] = {
    "metrics": lambda value: _is_dict(value, _is_number),
    "files": _is_dict,
}


def _check(is_valid: bool, what: str, value: object) -> None:
    if not is_valid:
        raise ValueError(f"{what} is {str(value)[:80]!r}")


def _check_depth(run: dict[str, Any]) -> None:
    level: list[Any] = [run]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if level:
        raise ValueError(f"run is nested more than {MAX_DEPTH} deep")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


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
    specs = [{path: str(x) for path, x in each.leaves.items()} for each in (first, second)]
    shapes = [
        Difference(path, specs[0].get(path), specs[1].get(path))
        for path in dict.fromkeys([*first.leaves, *second.leaves])
        if specs[0].get(path) != specs[1].get(path)
    ]
    common = [path for path in first.leaves if specs[0][path] == specs[1].get(path)]
    marks = {path: (first.fingerprints.get(path), second.fingerprints.get(path)) for path in common}
    unknown = [path for path in common if None in marks[path]]
    values = [path for path in common if path not in unknown and len(set(marks[path])) > 1]
    return CheckpointDiff(
        shapes,
        values,
        unknown,
        same=len(common) - len(unknown) - len(values),
        run=list(_differences(first.run, second.run)),
        libraries=list(_differences(first.libraries, second.libraries)),
    )


def _differences(
    first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = ""
) -> Iterator[Difference]:
    for key in sorted({*first, *second}):
        a, b = first.get(key), second.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield Difference(f"{prefix}{key}", a, b)
