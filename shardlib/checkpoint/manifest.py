"""What a checkpoint says of itself: one JSON document beside the arrays, readable without them.

    {
      "schema": 1,                      version of this format
      "step": 1200,
      "saved_at": "2026-01-31T12:00:00+00:00",
      "run": {...},                     whatever the run wants to know: config, mesh, rules,
                                        position in the data
      "leaves": {"params/layers/kernel": {"shape": [4, 8], "dtype": "bfloat16"}, ...},
      "libraries": {"jax": "...", ...},
      "processes": 2,
      "devices": 8
    }

Unknown keys are ignored, so that a later version may add some (a fingerprint of each leaf, say)
without changing the number of the schema; it changes when an older reader would misread.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import jax

from shardlib.checkpoint.tree import LeafSpec, leaf_spec
from shardlib.errors import CheckpointError

SCHEMA = 1
FILE_NAME = "manifest.json"
LIBRARIES = ("shardlib", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of one checkpoint; see the module for the meaning of the fields."""

    step: int
    leaves: dict[str, LeafSpec]
    run: dict[str, Any]
    libraries: dict[str, str]
    saved_at: str
    processes: int
    devices: int
    schema: int = SCHEMA

    def to_json(self) -> str:
        """Returns the document.

        Raises:
            CheckpointError: If `run` holds what JSON cannot (an array, NaN, a set).
        """
        try:
            return json.dumps(dataclasses.asdict(self), allow_nan=False, indent=1)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the metadata of step {self.step} is not JSON: {error}.\n"
                "  Pass dicts, lists, strings, finite numbers, booleans and None."
            ) from None


def describe(step: int, leaves: Mapping[str, Any], run: Mapping[str, Any]) -> Manifest:
    """Returns the manifest of a state about to be saved, given as leaves by path."""
    return Manifest(
        step=step,
        leaves={path: leaf_spec(leaf) for path, leaf in leaves.items()},
        run=dict(run),
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
        return "not installed"  # imported from a source tree


def read(directory: pathlib.Path) -> Manifest:
    """Reads the manifest of the checkpoint in `directory`.

    Raises:
        CheckpointError: If there is none, it is damaged, or a newer shardlib wrote it.
    """
    path = directory / FILE_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        schema = document["schema"]
        if schema > SCHEMA:
            raise CheckpointError(
                f"checkpoint {directory} has format {schema}; "
                f"this shardlib reads formats up to {SCHEMA}.\n"
                f"  Use the shardlib that wrote it: {document['libraries']['shardlib']}."
            )
        fields = {field.name: document[field.name] for field in dataclasses.fields(Manifest)}
        fields["leaves"] = {
            name: LeafSpec(tuple(leaf["shape"]), leaf["dtype"])
            for name, leaf in fields["leaves"].items()
        }
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read as a checkpoint: {error.strerror}: {path}.\n"
            "  Name the directory of a step, for example run/checkpoints/00000100."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the manifest {path} is damaged: {type(error).__name__}: {error}.\n"
            "  Restore another step; remove this one."
        ) from error
    return Manifest(**fields)


def check_same_leaves(
    directory: pathlib.Path, found: Mapping[str, LeafSpec], expected: Mapping[str, LeafSpec]
) -> None:
    """Refuses a checkpoint whose leaves are not those of the state it should be restored into.

    Raises:
        CheckpointError: If any leaf is missing, unexpected, or has another shape or dtype; all
            such leaves are listed with what was expected and what was found.
    """
    faults = []
    for path in sorted({*found, *expected}):
        if path not in found:
            faults.append(f"{path}: expected {expected[path]}, missing from the checkpoint")
        elif path not in expected:
            faults.append(f"{path}: not expected, found {found[path]}")
        elif found[path] != expected[path]:
            faults.append(f"{path}: expected {expected[path]}, found {found[path]}")
    if faults:
        raise CheckpointError(
            f"checkpoint {directory} is of another model or optimizer: "
            f"{len(faults)} of {len({*found, *expected})} leaves differ:\n"
            + "".join(f"  {fault}\n" for fault in faults)
            + "  Restore it with the configuration it was saved with, or start another run."
        )
