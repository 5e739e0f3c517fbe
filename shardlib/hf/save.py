"""Saving a model as a Hugging Face folder, one tensor at a time."""

import functools
import itertools
import json
import operator
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from shardlib.functional import functional
from shardlib.hf.architecture import described_as
from shardlib.hf.load import parameters
from shardlib.hf.loaded import Loaded
from shardlib.hf.matching import check_floating, counters, refuse_overflow
from shardlib.hf.new_folder import filled, on_first_process, refuse_full
from shardlib.hf.safetensors import DIFFUSERS, MAX_FILE_BYTES, SINGLE, check_dtypes, write
from shardlib.hf.tensor_table import TensorTable
from shardlib.hf.tiled_copy import copy

COPIED = (
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files that an export takes over from the folder that the model was loaded from."""


def save(
    source: Any,
    folder: str | Path,
    *,
    architecture: str | None = None,
    kept: Mapping[str, Any] | None = None,
    dtype: DTypeLike | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Saves a model in the format of Hugging Face, for `AutoModel.from_pretrained`.

    Tensors are gathered and written one at a time. On several processes all must call it, and the
    first one writes.

    Args:
        source: The result of `load`, a training state, or an NNX module of a family, with its
            config as `config`.
        folder: A folder that does not exist or is empty. It gets its files when all are complete.
        architecture: The name in `architectures` of config.json; None for the one that the model
            was loaded as, or else the first that can express its config.
        kept: The contents of a config.json, whose keys that the architecture does not decide are
            kept; None for that of the folder that the model was loaded from.
        dtype: What the tensors are rounded to while they are written, but for those that the model
            keeps in float32; None for the dtype of each parameter.
        max_file_bytes: Size of the tensors of one file at most, unless one tensor is larger.

    Raises:
        CheckpointError: If the folder is not empty, or cannot be written.
        ModelError: If no architecture can express the model, files of safetensors hold no numbers
            of a dtype, or finite values of parameters are beyond its range.
    """
    check_floating(dtype)
    folder, model = Path(folder).resolve(), getattr(source, "model", source)
    loaded = source if isinstance(source, Loaded) else None
    on_first_process(lambda: refuse_full(folder), folder)
    described = described_as(model, loaded, architecture)
    kept = kept or (loaded.source if loaded else {})
    config = _updated(kept, described.write(model.config))
    module, arrays = functional(model), arrays_of(model, nnx.Not(nnx.RngState))
    layout = TensorTable(described.table(model.config), parameters(module, state=True))
    dtypes = {path: array.dtype for path, array in arrays.items()}
    if dtype is not None:
        dtypes |= dict.fromkeys(arrays.keys() - module.float32, np.dtype(dtype))
        refuse_overflow(arrays, dtypes)
    config.pop("dtype", None)
    single = SINGLE
    if described.library == "diffusers":
        single = DIFFUSERS
    else:
        stored = dtypes[next(path for path in arrays if path not in module.float32)]
        config["torch_dtype"] = str(stored)
    # The tensors that are written have all their bits.
    config.pop("quantization_config", None)
    copied = [loaded.folder / name for name in COPIED] if loaded else []
    named = folder, layout, arrays, "config.json", config, copied, dtypes
    write_folder(*named, max_file_bytes=max_file_bytes, single=single)


def _updated(source: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json with new fields, and in the configs of its parts, such as text_config,
    too."""
    parts = {
        name: {**source[name], **fields}
        for name, fields in written.items()
        if name.endswith("_config") and isinstance(source.get(name), Mapping)
    }
    return {**source, **written, **parts}


def write_folder(
    folder: Path,
    layout: TensorTable,
    arrays: Mapping[str, jax.Array],
    config_name: str,
    config: Mapping[str, Any],
    copied: Sequence[Path] = (),
    dtypes: Mapping[str, np.dtype] | None = None,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    single: str = SINGLE,
) -> None:
    """Writes parameters and a config; all processes must call it.

    Args:
        folder: A folder that does not exist or is empty.
        layout: The table of the tensors.
        arrays: The parameters by path.
        config_name: The name of the JSON file of `config`.
        config: Its contents.
        copied: Files to copy, where they exist.
        dtypes: Those to write, by path; None for the dtypes of the arrays.
        max_file_bytes: See `save`.
        single: The name of the file where one file holds all tensors.

    Raises:
        CheckpointError: If the folder cannot be written.
        ModelError: If files of safetensors hold no numbers of a dtype.
    """
    dtypes = dtypes or {path: array.dtype for path, array in arrays.items()}
    specs = {name: (shape, dtypes[path]) for name, shape, path in layout.tensors()}
    check_dtypes(dtype for _, dtype in specs.values())
    tensors = layout.write(lambda view, path, at: _fill(view, arrays[path], at), specs)
    added = counters(specs)
    specs |= {name: (array.shape, array.dtype) for name, array in added.items()}
    tensors = itertools.chain(tensors, added.items())

    def gather_rest() -> None:
        for _ in tensors if jax.process_count() > 1 else ():
            pass

    def write_files() -> None:
        try:
            with filled(folder, last=config_name) as partial:
                write(partial, specs, tensors, max_file_bytes, single)
                (partial / config_name).write_text(json.dumps(config, indent=2) + "\n")
                for file in copied:
                    if file.is_file():
                        shutil.copyfile(file, partial / file.name)
        finally:
            gather_rest()  # The others wait for it, also if a file cannot be written.

    if jax.process_index() > 0:
        gather_rest()
    on_first_process(write_files, folder)


def arrays_of(model: nnx.Module, kind: Any) -> dict[str, jax.Array]:
    """Returns the variables of a kind, or of another filter of NNX, by path."""
    params = nnx.state(model, kind)
    return {
        "/".join(map(str, path)): variable.get_value()
        for path, variable in nnx.to_flat_state(params)
    }


def _fill(view: np.ndarray, array: jax.Array, at: tuple[int, ...]) -> None:
    """Writes an array at leading indices; all processes that hold parts of it must take part."""
    if not array.is_fully_addressable:
        whole = np.asarray(_slice(array.sharding)(array, at).addressable_data(0))
        copy(view, whole.astype(view.dtype, copy=False))
        return
    for shard in array.addressable_shards:
        ranges = [range(*part.indices(n)) for part, n in zip(shard.index, array.shape, strict=True)]
        if shard.replica_id == 0 and all(map(operator.contains, ranges, at)):
            local = tuple(each.index(one) for each, one in zip(ranges, at, strict=False))
            part = _part(shard.data, local).astype(view.dtype, copy=False)
            copy(view[(*shard.index[len(at) :], ...)], part)


def _part(array: jax.Array, at: tuple[int, ...]) -> np.ndarray:
    """Returns an array of one device at leading indices, on the host."""
    # Memory of the host is read in place. From elsewhere only the part travels, by one program for
    # all indices.
    if next(iter(array.devices())).platform == "cpu":
        return np.asarray(array)[at]
    return np.asarray(_at(array, at))


_at = jax.jit(lambda array, at: array[at])


@functools.cache
def _slice(sharding: NamedSharding) -> Any:
    """Returns a program that gathers an array at leading indices on every device."""
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.jit(lambda array, at: array[at], out_shardings=whole)
