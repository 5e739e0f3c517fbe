"""Loading a Hugging Face checkpoint onto the active mesh, shard by shard."""

import dataclasses
import fnmatch
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from shardlib.errors import CheckpointError, ModelError
from shardlib.functional import FunctionalModule, functional
from shardlib.functional.protocol import nested
from shardlib.hf.architecture import Architecture
from shardlib.hf.description import Description, describe
from shardlib.hf.loaded import Loaded
from shardlib.hf.mxfp4 import unpacked
from shardlib.hf.safetensors import Tensors
from shardlib.hf.tensor_table import Index, Parameter, TensorTable
from shardlib.hf.torch_files import open_tensors
from shardlib.paths import named_leaves
from shardlib.registry import DataSpec
from shardlib.sharding.constrain import Scope, active
from shardlib.sharding.partition import place, shardings

_LOG = logging.getLogger(__name__)


def load(folder: str | Path, *, dtype: DTypeLike | None = None, allow_bin: bool = False) -> Loaded:
    """Loads a model from a folder in the format of Hugging Face.

    Under `sl.use(mesh, rules)` each parameter is placed as the rules say; otherwise the model is
    loaded onto the default device. Each process reads its own shards, one at a time, so that the
    host holds one shard at most beyond the result.

    Args:
        folder: A folder with `config.json` and safetensors files, or its name on the hub of
            Hugging Face, such as `org/name`, which is downloaded (with `huggingface_hub`).
        dtype: The dtype of the parameters; None for the dtype of each tensor.
        allow_bin: Whether torch's `.bin` files of a folder without safetensors are read, without
            torch and without running what they hold.

    Raises:
        CheckpointError: If files are missing or malformed, or tensors are missing, unknown, or have
            another shape or dtype. The message lists all of them, and nothing is allocated.
        ModelError: If no installed family reads the architecture, or `dtype` is not a
            floating-point dtype.
        ConfigError: If config.json describes a model that its family does not have.
        RuleError: If parameters cannot be placed.
    """
    if dtype is not None and not _is_floating(dtype):
        raise ModelError(
            f"dtype={dtype!r} is not a floating-point dtype.\n"
            "  Write it as jnp.bfloat16, or leave it out for the dtypes of the checkpoint."
        )
    found = describe(folder, weights=True)
    module = functional(lambda rngs: found.family.make(found.config, DataSpec(), rngs))
    scope = active()
    placed = placements(module, scope, state=True)
    arrays = read_params(found, module, placed, lambda path: dtype, allow_bin)
    params, model_state = (
        nested({tuple(path.split("/")): arrays[path] for path in named_leaves(tree)})
        for tree in module.shapes()
    )
    model = module.merge(params, model_state, jax.random.key(0))
    model.eval()
    made = found.family, found.architecture, found.source, found.folder
    return Loaded(model, found.config, *made, scope)


def read_params(
    found: Description,
    module: FunctionalModule,
    placed: Mapping[str, Sharding],
    dtype: Callable[[str], DTypeLike | None],
    allow_bin: bool = False,
) -> dict[str, jax.Array]:
    """Returns arrays of a folder by path, each on its shards.

    If the folder holds another architecture than the model, the parameters of the model's own head
    are left out, and so are the tensors of the other head; both are logged.

    Args:
        found: The folder.
        module: The model, made from its config.
        placed: The sharding of each array to read; see `placements`.
        dtype: Returns the dtype of a parameter; None for that of the tensor.
        allow_bin: As in `load`.

    Raises:
        CheckpointError: As in `load`.
    """
    known = parameters(module, state=True)
    layout = TensorTable(found.architecture.table(found.config), known)
    tensors = unpacked(open_tensors(found.folder, allow_bin=allow_bin), found.source)
    if found.held is None:
        names = _check(layout, tensors, found.architecture, found.config)
        return read_parameters(layout, tensors, names, placed, dtype)
    new, left = _heads(layout, tensors, found.held, found.config)
    kept = {path: known[path] for path in known.keys() - new}
    layout = TensorTable(found.architecture.table(found.config), kept)
    described = dataclasses.replace(
        found.architecture, ignored=(*found.architecture.ignored, *found.held.ignored, *left)
    )
    names = _check(layout, tensors, described, found.config)
    _LOG.warning(
        "%s holds a %s: the parameters %s are drawn at random, and the tensors %s are not read",
        *(found.folder, found.held.name),
        ", ".join(sorted(new)) or "(none)",
        ", ".join(name for name in tensors if name in left) or "(none)",
    )
    placed = {path: sharding for path, sharding in placed.items() if path in kept}
    return read_parameters(layout, tensors, names, placed, dtype)


def _heads(
    layout: TensorTable, tensors: Tensors, held: Architecture, config: Any
) -> tuple[set[str], set[str]]:
    """Returns the parameters of a head that a folder of another architecture lacks, and the names
    of the tensors of its own head."""
    theirs = {row.theirs for row in held.table(config)}
    ours = {row.theirs for row in layout.rows.values()}
    lacking = {
        layout.rows[path].theirs for name, _, path in layout.tensors() if name not in tensors
    }
    new = {path for path, row in layout.rows.items() if row.theirs in lacking - theirs}
    left = {one for name in theirs - ours for one in _aliases(name, held, ())}
    return new, left | set(held.tied.values())


def _is_floating(dtype: DTypeLike) -> bool:
    try:
        return jnp.issubdtype(np.dtype(dtype), jnp.floating)
    except TypeError:
        return False


def parameters(module: FunctionalModule, *, state: bool = False) -> dict[str, Parameter]:
    """Returns the axes and the shape of each parameter by path, and with `state` of other variables
    too, such as running statistics."""
    return {
        path: Parameter(tuple(map(str, module.axes[path] or ())), tuple(leaf.shape))
        for tree in module.shapes()[: 1 + state]
        for path, leaf in named_leaves(tree).items()
    }


def _check(
    layout: TensorTable, tensors: Tensors, described: Architecture, config: Any
) -> dict[str, str]:
    """Returns the name in the files of each tensor of a layout; raises all faults at once."""
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
        if not _is_floating(entry.dtype):
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


def placements(
    module: FunctionalModule, scope: Scope | None, *, state: bool = False
) -> dict[str, Sharding]:
    """Returns the sharding of each parameter by path, and with `state` of other variables too;
    without a scope the default device."""
    found: dict[str, Sharding] = {}
    for tree in module.shapes()[: 1 + state]:
        if scope is None:
            device = jnp.zeros(()).device
            assert isinstance(device, jax.Device)
            found |= dict.fromkeys(named_leaves(tree), SingleDeviceSharding(device))
        else:
            placed = place(tree, module.axes, scope.rules.of("params"), scope.mesh)
            found |= named_leaves(shardings(tree, placed, scope.mesh))
    return found


def read_parameters(
    layout: TensorTable,
    tensors: Tensors,
    names: Mapping[str, str],
    placed: Mapping[str, Sharding],
    dtype: Callable[[str], DTypeLike | None] = lambda path: None,
) -> dict[str, jax.Array]:
    """Returns the parameters by path, read shard by shard.

    Args:
        layout: The table of the tensors.
        tensors: The tensors, mapped.
        names: The name in `tensors` of each tensor of the table.
        placed: The sharding of each parameter by path.
        dtype: Returns the dtype of a parameter; None for that of the tensor.
    """

    def shard(path: str, index: Index) -> np.ndarray:
        values = tensors.shard(layout, path, index, names)
        for name in layout.names(path, index):
            tensors.drop(names[name])
        wanted = dtype(path)
        return values if wanted is None else values.astype(wanted)

    arrays = {}
    for path, sharding in placed.items():
        shape, pieces = layout.params[path].shape, []
        for index, devices in _by_index(sharding, shape):
            values = shard(path, index)
            pieces += [jax.device_put(values, device) for device in devices]
            # The next shard is read when this one has left the host.
            jax.block_until_ready(pieces)
        arrays[path] = jax.make_array_from_single_device_arrays(shape, sharding, pieces)
    return arrays


def _by_index(sharding: Sharding, shape: tuple[int, ...]) -> Iterator[tuple[Index, list[Any]]]:
    """Yields each slice that devices of this process hold, and these devices."""
    held: dict[tuple[tuple[int, int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        whole = index or ()
        key = tuple(part.indices(size) for part, size in zip(whole, shape, strict=True))
        held.setdefault(key, []).append(device)
    for key, devices in held.items():
        yield tuple(slice(start, stop) for start, stop, _ in key), devices
