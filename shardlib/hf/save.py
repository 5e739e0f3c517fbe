"""Saving a model as a Hugging Face folder, one tensor at a time."""

import contextlib
import functools
import json
import operator
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.errors import CheckpointError, ModelError
from shardlib.functional import functional
from shardlib.hf.architecture import Architecture, architectures, find_architecture
from shardlib.hf.load import Loaded, parameters
from shardlib.hf.safetensors import MAX_FILE_BYTES, SINGLE, write
from shardlib.hf.tensor_table import TensorTable, copy

COPIED = (
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
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
        max_file_bytes: Size of the tensors of one file at most, unless one tensor is larger.

    Raises:
        CheckpointError: If the folder is not empty, or cannot be written.
        ModelError: If no architecture of its family can express the model.
    """
    folder, model = Path(folder).resolve(), getattr(source, "model", source)
    loaded = source if isinstance(source, Loaded) else None
    refuse_full(folder)
    described = described_as(model, loaded, architecture)
    config = {**(loaded.source if loaded else {}), **described.write(model.config)}
    layout = TensorTable(described.table(model.config), parameters(functional(model), state=True))
    arrays = arrays_of(model, nnx.Not(nnx.RngState))
    config["torch_dtype"] = str(next(iter(arrays.values())).dtype)
    config.pop("dtype", None)
    # The tensors that are written have all their bits.
    config.pop("quantization_config", None)
    copied = [loaded.folder / name for name in COPIED] if loaded else []
    write_folder(
        folder, layout, arrays, "config.json", config, copied, max_file_bytes=max_file_bytes
    )


def write_folder(
    folder: Path,
    layout: TensorTable,
    arrays: Mapping[str, jax.Array],
    config_name: str,
    config: Mapping[str, Any],
    copied: Sequence[Path] = (),
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
        max_file_bytes: See `save`.
        single: The name of the file where one file holds all tensors.

    Raises:
        CheckpointError: If the folder cannot be written.
    """
    specs = {name: (shape, arrays[path].dtype) for name, shape, path in layout.tensors()}
    tensors = layout.write(
        lambda view, path, at: _fill(view, arrays[path], at), lambda path: arrays[path].dtype
    )
    if jax.process_index() == 0:
        with _filled(folder) as partial:
            write(partial, specs, tensors, max_file_bytes, single)
            (partial / config_name).write_text(json.dumps(config, indent=2) + "\n")
            for file in copied:
                if file.is_file():
                    shutil.copyfile(file, partial / file.name)
    else:
        for _ in tensors:  # takes part in gathering
            pass
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {folder.name}")


def refuse_full(folder: Path) -> None:
    """Raises `CheckpointError` unless a folder is absent or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{folder} is not an empty folder.\n  Choose another folder, or remove its contents."
        )


@contextlib.contextmanager
def _filled(folder: Path) -> Iterator[Path]:
    """Gives a folder to fill, whose files move to `folder` when all are complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():  # It may be the working directory or a mount, which stay in place.
            for file in partial.iterdir():
                shutil.move(file, folder)
        else:
            os.replace(partial, folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error.strerror}.\n"
            "  Free space or restore access there, or choose another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def described_as(model: Any, loaded: Loaded | None, name: str | None) -> Architecture:
    """Returns the architecture of a name, that a model was loaded as, or else the first that can
    express its config."""
    if name is not None:
        return find_architecture(name)[1]
    if loaded is not None:
        return loaded.architecture
    config, tried = getattr(model, "config", None), []
    for known, (family, _) in architectures().items():
        if not isinstance(config, family.config):
            continue
        described = find_architecture(known)[1]
        try:
            described.write(config)
        except ModelError as error:
            lines = str(error).splitlines()
            tried.append(f"{known}: {lines[min(1, len(lines) - 1)].strip()}")
            continue
        return described
    kind = type(model).__name__
    reasons = tried or [f"a {kind} is not of a family with architectures."]
    raise ModelError(
        "no architecture of Hugging Face can express this model:\n  "
        + "\n  ".join(reasons)
        + "\n  Save it with shardlib's own checkpoints, or add an architecture to its family."
    )


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
        copy(view, np.asarray(_slice(array.sharding)(array, at).addressable_data(0)))
        return
    for shard in array.addressable_shards:
        ranges = [range(*part.indices(n)) for part, n in zip(shard.index, array.shape, strict=True)]
        if shard.replica_id == 0 and all(map(operator.contains, ranges, at)):
            local = tuple(each.index(one) for each, one in zip(ranges, at, strict=False))
            copy(view[shard.index[len(at) :]], np.asarray(shard.data[local]))


@functools.cache
def _slice(sharding: NamedSharding) -> Any:
    """Returns a program that gathers an array at leading indices on every device."""
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.jit(lambda array, at: array[at], out_shardings=whole)
