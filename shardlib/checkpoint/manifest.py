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
from collections.abc import Callable, Mapping
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
    if schema >= 2 and document["digest"] != digest(document):
        raise ValueError("digest mismatch")
    for key, is_valid in _FIELDS.items():
        _check(is_valid(document[key]), key, document[key])
    _check_depth(document["run"])
    leaves, fingerprints = {}, {}
    for path, leaf in document["leaves"].items():
        leaves[path], fingerprint = _leaf(path, leaf, schema)
        if fingerprint is not None:
            fingerprints[path] = fingerprint
    manifest = Manifest(
        leaves=leaves, schema=schema, **{key: document[key] for key in _FIELDS if key != "leaves"}
    )
    if schema == 1:
        return manifest
    metrics, files = document["metrics"], document["files"]
    _check(isinstance(metrics, dict) and all(map(_is_number, metrics.values())), "metrics", metrics)
    _check(isinstance(files, dict), "files", files)
    return dataclasses.replace(
        manifest,
        metrics={name: float(value) for name, value in metrics.items()},
        fingerprints=fingerprints,
        files={name: _file(name, record) for name, record in files.items()},
    )


def _leaf(path: str, leaf: Any, schema: int) -> tuple[LeafSpec, str | None]:
    _check(is_storable_path(path), "the name of a leaf", path)
    shape, dtype = leaf["shape"], leaf["dtype"]
    _check(isinstance(shape, list) and all(map(_is_count, shape)), f"shape of {path}", shape)
    is_known = isinstance(dtype, str) and (dtype in STORABLE or _KEY_DTYPE.fullmatch(dtype))
    _check(bool(is_known), f"dtype of {path}", dtype)
    fingerprint = None
    if schema >= 2:
        fingerprint = leaf["fingerprint"]
        is_text = isinstance(fingerprint, str) and _FINGERPRINT.fullmatch(fingerprint)
        _check(bool(is_text), f"fingerprint of {path}", fingerprint)
    return LeafSpec(tuple(shape), dtype), fingerprint


def _file(name: str, record: Any) -> FileRecord:
    parts = name.split("/")
    is_inside = all(part not in ("", ".", "..") for part in parts) and "\\" not in name
    _check(is_inside and name.isprintable(), "the name of a file", name)
    _check(_is_count(record["bytes"]), f"bytes of {name}", record["bytes"])
    crc = record["crc32"]
    _check(isinstance(crc, str) and bool(_CRC.fullmatch(crc)), f"crc32 of {name}", crc)
    return FileRecord(record["bytes"], crc)


def _is_count(value: Any, *, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _is_text_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


_FIELDS = {
    "step": _is_count,
    "leaves": lambda value: isinstance(value, dict) and len(value) > 0,
    "run": lambda value: isinstance(value, dict),
    "libraries": _is_text_by_name,
    "saved_at": lambda value: isinstance(value, str),
    "processes": lambda value: _is_count(value, least=1),
    "devices": lambda value: _is_count(value, least=1),
}


def _check(is_valid: bool, what: str, value: Any) -> None:
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


def check_same_leaves(
    directory: pathlib.Path,
    found: Mapping[str, LeafSpec],
    expected: Mapping[str, LeafSpec],
    *,
    cast: bool = False,
    partial: Partial = False,
) -> list[str]:
    """Rejects a checkpoint whose leaves differ from the leaves of the target state.

    Args:
        directory: The checkpoint.
        found: Its leaves.
        expected: The leaves of the state.
        cast: Accepts other dtypes, except for PRNG keys.
        partial: Accepts missing and unexpected leaves: all, or those that it returns True for.

    Returns:
        A line for each accepted difference.

    Raises:
        CheckpointError: If any other leaf is missing, unexpected, or has another shape or dtype;
            all such leaves are listed with their expected and found specs.
    """
    is_optional = partial if callable(partial) else lambda path: partial
    faults, accepted, means = [], [], set()
    for path in sorted({*found, *expected}):
        line, mean = _difference(path, found.get(path), expected.get(path))
        if line is None:
            continue
        is_accepted = (mean == "cast" and cast) or (mean == "partial" and is_optional(path))
        (accepted if is_accepted else faults).append(line)
        if not is_accepted:
            means.add(mean)
    if faults:
        asked = " and ".join(f"{mean}=True" for mean in sorted(filter(None, means)))
        raise CheckpointError(
            f"checkpoint {directory} is of another model or optimizer: "
            f"{len(faults)} of {len({*found, *expected})} leaves differ:\n"
            + "".join(f"  {fault}\n" for fault in faults)
            + "  Restore it with the configuration it was saved with, or start another run"
            + (
                f"; in code, restore(..., {asked}) accepts these."
                if asked and None not in means
                else "."
            )
        )
    return accepted


def _difference(
    path: str, found: LeafSpec | None, expected: LeafSpec | None
) -> tuple[str | None, str | None]:
    """Returns a line about the difference of a leaf, and the `restore` option that accepts it.

    The line is None if the leaf is as expected; the option is None if no option accepts it.
    """
    if found is None:
        return f"{path}: expected {expected}, missing from the checkpoint", "partial"
    if expected is None:
        return f"{path}: not expected, found {found}", "partial"
    if found == expected:
        return None, None
    is_cast = found.shape == expected.shape and "key<" not in found.dtype + expected.dtype
    return f"{path}: expected {expected}, found {found}", "cast" if is_cast else None
