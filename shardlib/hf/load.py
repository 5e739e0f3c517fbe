"""Loading a Hugging Face checkpoint onto the active mesh, shard by shard."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from shardlib.functional import FunctionalModule, functional
from shardlib.functional.protocol import nested
from shardlib.hf.description import Description, describe
from shardlib.hf.loaded import Loaded
from shardlib.hf.matching import check_floating, has_new_classes, matched, without_head
from shardlib.hf.mxfp4 import unpacked
from shardlib.hf.safetensors import Tensors
from shardlib.hf.tensor_table import Index, Parameter, TensorTable
from shardlib.hf.torch_files import open_tensors
from shardlib.paths import named_leaves
from shardlib.registry import DataSpec
from shardlib.sharding.constrain import Scope, active
from shardlib.sharding.partition import place, shardings


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
    check_floating(dtype)
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

    If the folder has another head than the model, the parameters of the model's own are left out,
    and so are the tensors of the other; both are logged.

    Args:
        found: The folder.
        module: The model, made from its config.
        placed: The sharding of each array to read; see `placements`.
        dtype: Returns the dtype of a parameter; None for that of the tensor.
        allow_bin: As in `load`.

    Raises:
        CheckpointError: As in `load`.
    """
    known, described = parameters(module, state=True), found.architecture
    layout = TensorTable(described.table(found.config), known)
    tensors = unpacked(open_tensors(found.folder, allow_bin=allow_bin), found.source)
    if found.held is not None or has_new_classes(layout, found):
        layout, described = without_head(layout, tensors, found)
        placed = {path: sharding for path, sharding in placed.items() if path in layout.params}
    names = matched(layout, tensors, described, found.config)
    return read_parameters(layout, tensors, names, placed, dtype)


def parameters(module: FunctionalModule, *, state: bool = False) -> dict[str, Parameter]:
    """Returns the axes and the shape of each parameter by path, and with `state` of other variables
    too, such as running statistics."""
    return {
        path: Parameter(tuple(map(str, module.axes[path] or ())), tuple(leaf.shape))
        for tree in module.shapes()[: 1 + state]
        for path, leaf in named_leaves(tree).items()
    }


def placements(
    module: FunctionalModule, scope: Scope | None, *, state: bool = False
) -> dict[str, Sharding]:
    """Returns the sharding of each parameter by path, and with `state` of other variables too;
    without a scope the default device."""
    found: dict[str, Sharding] = {}
    for tree in module.shapes()[: 1 + state]:
        if scope is None:
            found |= dict.fromkeys(named_leaves(tree), jnp.zeros(()).sharding)
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
