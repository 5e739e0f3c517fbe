"""Tensors of a checkpoint found by the names of a table, under any of their names."""

import dataclasses
import fnmatch
import functools
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from shardlib.errors import CheckpointError, ModelError
from shardlib.hf.architecture import Architecture
from shardlib.hf.description import Description
from shardlib.hf.safetensors import Tensors
from shardlib.hf.tensor_table import TensorTable

_LOG = logging.getLogger(__name__)
_CLASSES = "classes"
_VARIANCE = "running_var"


def matched(
    layout: TensorTable, tensors: Tensors, described: Architecture, config: Any
) -> dict[str, str]:
    """Returns the name in the files of each tensor of a table.

    Args:
        layout: The table of the tensors.
        tensors: The tensors of the files.
        described: The architecture of the table.
        config: The config of the model.

    Raises:
        CheckpointError: If tensors are missing, unknown, or of another shape or dtype. The message
            lists all of them.
    """
    expected = {name: shape for name, shape, _ in layout.tensors()}
    dtypes: dict[str, np.dtype] = {}
    ignored = [one.format_map(vars(config)) for one in described.ignored]
    names, faults = {}, []
    for name, shape, path in layout.tensors():
        held = next((one for one in _aliases(name, described, expected) if one in tensors), None)
        if held is None:
            faults.append(f"{name} is missing.")
            continue
        names[name] = held
        entry = tensors.entries[held]
        if entry.shape != shape:
            faults.append(f"{held} has shape {entry.shape}, expected {shape}.")
        if not is_floating(entry.dtype):
            faults.append(f"{held} is of dtype {entry.dtype}, expected floating-point numbers.")
        elif entry.dtype != dtypes.setdefault(path, entry.dtype):
            faults.append(f"{held} is of dtype {entry.dtype}, expected {dtypes[path]} as others.")
    copies = {copy for name in expected for copy in _aliases(name, described, expected)}
    known = {*names.values(), *copies}
    faults += [
        f"{name} is not a tensor of the model."
        for name in tensors
        if name not in known and not any(fnmatch.fnmatch(name, one) for one in ignored)
    ]
    if faults:
        raise CheckpointError(
            f"the tensors of {tensors.folder} do not fit its config.json:\n  "
            + "\n  ".join(_by_kind(faults))
            + "\n  Correct config.json, or export the checkpoint again."
        )
    return names


def _by_kind(faults: list[str]) -> list[str]:
    """Returns the first of the faults that differ in numbers of layers and experts alone."""
    kinds: dict[str, list[str]] = {}
    for fault in sorted(faults):
        kinds.setdefault(re.sub(r"\.\d+\.", ".N.", fault), []).append(fault)
    return [
        first + (f" The same holds for {len(more)} of other numbers." if more else "")
        for first, *more in kinds.values()
    ]


def _aliases(name: str, described: Architecture, expected: Collection[str]) -> Iterator[str]:
    """Yields the names under which a checkpoint may hold a tensor."""
    for one in (name, described.tied.get(name, name)):
        if one == name or one not in expected:
            yield one
            yield one.removeprefix(described.prefix)
    for end, older in described.older.items():
        if name.endswith(end):
            yield name.removesuffix(end) + older


def without_head(
    layout: TensorTable, tensors: Tensors, found: Description
) -> tuple[TensorTable, Architecture]:
    """Returns the table without the head of the model, and its architecture, which ignores the head
    of the folder: another one, or one of another number of classes. Logs both."""
    described, config = found.architecture, found.config
    held = found.held or described
    ours = {row.theirs for row in layout.rows.values()}
    # A folder without a head may leave out the prefix of the others.
    named = {row.theirs: described.prefix + row.theirs for row in held.table(config)}
    theirs = {long if long in ours else short for short, long in named.items()}
    lacking = {
        layout.rows[path].theirs
        for name, _, path in layout.tensors()
        if name not in tensors and name.removeprefix(described.prefix) not in tensors
    }
    new = {path for path, row in layout.rows.items() if row.theirs in lacking - theirs}
    left = {one for name in theirs - ours for one in _aliases(name, held, ())}
    if found.held is not None:
        left |= set(held.tied.values())
    if has_new_classes(layout, found):
        resized = {path for path, one in layout.params.items() if _CLASSES in one.axes}
        new |= resized
        left |= {layout.rows[path].theirs for path in resized}
    _LOG.warning(
        "%s holds a %s: the parameters %s are drawn at random, and the tensors %s are not read",
        *(found.folder, held.name),
        ", ".join(sorted(new)) or "(none)",
        ", ".join(name for name in tensors if name in left) or "(none)",
    )
    kept = {path: known for path, known in layout.params.items() if path not in new}
    ignored = (*described.ignored, *held.ignored, *left)
    table = TensorTable(described.table(config), kept)
    return table, dataclasses.replace(described, ignored=ignored)


def has_new_classes(layout: TensorTable, found: Description) -> bool:
    """Returns whether a model has another number of classes than the config.json of its folder."""
    told = getattr(found.config, "num_classes", None)
    sizes = {one.sizes[_CLASSES] for one in layout.params.values() if _CLASSES in one.axes}
    return told is not None and sizes != {told}


def is_floating(dtype: DTypeLike) -> bool:
    """Returns whether a value names a dtype of floating-point numbers."""
    try:
        return jnp.issubdtype(np.dtype(dtype), jnp.floating)
    except TypeError:
        return False


def check_floating(dtype: DTypeLike | None) -> None:
    """Raises `ModelError` for a dtype of other numbers; None stands for that of each parameter."""
    if dtype is not None and not is_floating(dtype):
        raise ModelError(
            f"dtype={dtype!r} is not a floating-point dtype.\n"
            "  Write it as 'bfloat16', or leave it out for the dtypes of the parameters."
        )


def refuse_overflow(arrays: Mapping[str, jax.Array], dtypes: Mapping[str, np.dtype]) -> None:
    """Raises `ModelError` if finite values would not be so in the dtypes to write, such as float16
    beyond 65,504."""
    largest = {path: jnp.finfo(dtype).max for path, dtype in dtypes.items()}
    beyond = [
        path
        for path, array in arrays.items()
        if jnp.issubdtype(array.dtype, jnp.floating)
        and jnp.finfo(array.dtype).max > largest[path]
        and _overflows(array, dtypes[path])
    ]
    if beyond:
        dtype = dtypes[beyond[0]]
        raise ModelError(
            f"values of {', '.join(beyond)} are beyond the range of {dtype}, at most "
            f"{float(largest[beyond[0]]):g}.\n  Write bfloat16 or float32: set dtype (--dtype)."
        )


@functools.partial(jax.jit, static_argnums=1)
def _overflows(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns whether a finite value is infinite or no number in another dtype."""
    return jnp.any(jnp.isfinite(array) & ~jnp.isfinite(array.astype(dtype)))


def counters(names: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns what torch keeps with each running variance, so that no tensor is missing there:
    the number of batches seen, on which nothing depends; here 0."""
    of = (name.removesuffix(_VARIANCE) for name in names if name.endswith(_VARIANCE))
    return {f"{one}num_batches_tracked": np.zeros((), np.int64) for one in of}
