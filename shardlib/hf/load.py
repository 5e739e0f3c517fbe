"""Loading a Hugging Face checkpoint onto the active mesh, shard by shard."""

import contextlib
import dataclasses
import fnmatch
import functools
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from shardlib.config import from_dict
from shardlib.errors import CheckpointError, ConfigError, ModelError, did_you_mean
from shardlib.functional import FunctionalModule, functional
from shardlib.functional.protocol import nested
from shardlib.hf.architecture import Architecture, architectures, find_architecture
from shardlib.hf.hub import folder_of
from shardlib.hf.mxfp4 import unpacked
from shardlib.hf.safetensors import Tensors
from shardlib.hf.tensor_table import Index, Parameter, TensorTable
from shardlib.hf.torch_files import open_tensors
from shardlib.paths import named_leaves
from shardlib.registry import DataSpec, ModelFamily
from shardlib.sharding.constrain import Scope, active, use
from shardlib.sharding.partition import place, shardings

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """A model that was loaded from a Hugging Face folder."""

    model: nnx.Module
    """The module in evaluation mode, its parameters on their devices."""
    config: Any
    """The config of its family."""
    architecture: Architecture
    source: Mapping[str, Any]
    """The contents of its config.json."""
    folder: Path
    """The folder that it was loaded from."""
    scope: Scope | None
    """The mesh and the rules that it was loaded under."""

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer (of the package `tokenizers`); None if the folder has no tokenizer.json."""
        path = self.folder / "tokenizer.json"
        if not path.exists():
            return None
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path))

    def logits(self, inputs: ArrayLike, **arrays: ArrayLike) -> Float[Array, "batch ..."]:
        """Returns the float32 logits of a batch: [batch, length, vocab] of a language model.

        The program is compiled once for each shape. Rows are added where the mesh cuts a batch into
        more parts than it has rows, and their logits are left out.

        Args:
            inputs: Token ids [batch, length] int32, or images [batch, height, width, channels].
            arrays: Further arrays [batch, ...] that the model takes by name, such as `segment_ids`.

        Raises:
            ModelError: If the inputs are of another kind or rank, or too long for the model.
        """
        inputs, of = jnp.asarray(inputs), _INPUTS[self.architecture.inputs]
        if inputs.ndim != of.rank or not jnp.issubdtype(inputs.dtype, of.dtype):
            raise ModelError(
                f"the {of.name} are {inputs.dtype}{list(inputs.shape)}, expected {of.expected}.\n"
                f"  {of.fix}"
            )
        num_rows = inputs.shape[0]
        with _scoped(self.scope):
            parts = self.scope.parts("batch", self.scope.mesh.size) if self.scope else 1
            added = -num_rows % parts
            padded = jax.tree.map(
                lambda x: jnp.pad(x, ((0, added), *[(0, 0)] * (jnp.ndim(x) - 1))), (inputs, arrays)
            )
            return self._forward(nnx.state(self.model), *padded)[:num_rows]

    @functools.cached_property
    def _forward(self) -> Any:
        graphdef = nnx.graphdef(self.model)

        def forward(state: nnx.State, inputs: jax.Array, arrays: dict[str, Any]) -> jax.Array:
            model: Any = nnx.merge(graphdef, state)
            with _scoped(self.scope):
                return model(inputs, **arrays).astype(jnp.float32)

        return jax.jit(forward)


class _Inputs(NamedTuple):
    name: str
    rank: int
    dtype: Any
    expected: str
    fix: str


_INPUTS = {
    "tokens": _Inputs(
        "token ids",
        2,
        jnp.integer,
        "integers [batch, length]",
        "Give one row for each text, as in tokens[None].",
    ),
    "images": _Inputs(
        "images",
        4,
        jnp.floating,
        "floating-point numbers [batch, height, width, channels]",
        "Scale the pixels as the preprocessor_config.json says, channels last.",
    ),
}


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
    return Loaded(model, found.config, found.architecture, found.source, found.folder, scope)


@dataclasses.dataclass(frozen=True)
class Description:
    """The model of a folder, by its config.json alone."""

    folder: Path
    source: Mapping[str, Any]
    """The contents of config.json."""
    family: ModelFamily
    architecture: Architecture
    fields: Mapping[str, Any]
    """The fields of our config that config.json decides, nested as in YAML."""
    held: Architecture | None = None
    """The architecture of the tensors, if the model is another one with a head of its own."""

    @functools.cached_property
    def config(self) -> Any:
        """The config of the family.

        Raises:
            ConfigError: If a field of config.json has a value of another type.
        """
        try:
            return from_dict(self.family.config, self.fields, str(self.folder / "config.json"))
        except ConfigError as error:
            text = str(error)
            for theirs, field in self.architecture.fields.items():
                text = text.replace(f": {field.ours}: ", f": {theirs}: ")
            raise ConfigError(text) from None


def describe(
    folder: str | Path, *, weights: bool = False, family: str | None = None
) -> Description:
    """Returns the model of a folder; reads config.json alone.

    Args:
        folder: The path of a folder, or a name on the hub of Hugging Face, which is downloaded.
        weights: Whether a download includes the tensors.
        family: The name of the wanted family; None for that of the folder. One that has an
            architecture of the same `model_type` is described, as for a new head on BERT.

    Raises:
        CheckpointError: If config.json is missing or malformed.
        ModelError: If no installed family reads the architecture.
        ConfigError: If config.json describes a model that its family does not have.
    """
    folder = folder_of(folder, weights=weights)
    source = read_config(folder)
    of_folder, held = find_architecture(_name_of(source, folder))
    fields = held.read(source)
    wanted = None if family in (None, of_folder.config().name) else _sibling(family, held)
    if wanted is None:
        return Description(folder, source, of_folder, held, fields)
    other, described = wanted
    # What only the new head needs, such as its number of classes, is free.
    shared = {name: value for name, value in described.read(source).items() if name in fields}
    return Description(folder, source, other, described, shared, held)


def _sibling(family: str, held: Architecture) -> tuple[ModelFamily, Architecture] | None:
    """Returns the architecture of a family with the `model_type` of another; None without one."""
    for name, (other, _) in architectures().items():
        if other.config().name == family:
            found = find_architecture(name)
            if found[1].model_type == held.model_type:
                return found
    return None


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


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the contents of config.json.

    Raises:
        CheckpointError: If it is missing or malformed.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist.\n  Give a folder that `save_pretrained` wrote."
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.\n  Download it again.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} does not hold a JSON object.\n  Download it again.")
    return config


def _name_of(config: Mapping[str, Any], folder: Path) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(
            f"{folder / 'config.json'} has architectures={names!r}, expected one name.\n"
            '  Write the class of the model, as in "architectures": ["LlamaForCausalLM"].'
        )
    return names[0]


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
    ignored = [one.format_map(vars(config)) for one in described.ignored]
    names, faults = {}, []
    for name, shape in expected.items():
        held = next((one for one in _aliases(name, described, expected) if one in tensors), None)
        if held is None:
            left = [one for one in tensors if one not in expected]
            faults.append(f"{name} is missing.{did_you_mean(name, left)}")
            continue
        names[name] = held
        entry = tensors.entries[held]
        if entry.shape != shape:
            faults.append(f"{held} has shape {entry.shape}, expected {shape}.")
        if not _is_floating(entry.dtype):
            faults.append(f"{held} is of dtype {entry.dtype}, expected floating-point numbers.")
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
            + "\n  ".join(sorted(faults))
            + "\n  Correct config.json, or export the checkpoint again."
        )
    return names


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


def _scoped(scope: Scope | None) -> Any:
    return contextlib.nullcontext() if scope is None else use(scope.mesh, scope.rules)
