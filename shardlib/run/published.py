"""Published models in a config: by the name of their size, or by the folder of their weights."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardlib.config import from_dict
from shardlib.config.classes import fields_of
from shardlib.data.latents.config import LATENT_CHANNELS, LATENT_SIZE
from shardlib.data.tokenizer import VOCABULARY
from shardlib.errors import ConfigError, did_you_mean
from shardlib.registry import families, family, sizes

TOKENIZER = "tokenizer.json"
_FREE = ("dropout", "num_classes")
"""Fields of which the weights fit another value; a head of other classes is drawn at random."""


def implied(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a model that its size or its folder implies, nested as in YAML.

    A model whose keys are all given, as in the config of a run, needs no folder.

    Raises:
        ConfigError: If the size is unknown, or given keys contradict the folder.
        CheckpointError: If the folder or its config.json cannot be read.
    """
    if "size" in model and model.get("init_from") is not None:
        raise ConfigError("model: size and init_from are two sources of one model; give one.")
    if "size" in model:
        return sized(str(model["size"]), model.get("name"))
    folder = model["init_from"]
    if folder is None or _is_complete(model):
        return {}
    from shardlib import hf

    found = hf.describe(folder, family=model.get("name"))
    fields = {"name": found.family.config().name, **found.fields}
    if model.get("name", fields["name"]) != fields["name"]:
        raise ConfigError(
            f"model: {folder} holds a {fields['name']!r}, but name is {model['name']!r}; "
            "leave it out."
        )
    try:
        given = from_dict(found.family.config, _merged(fields, model), "model")
    except ConfigError:
        return fields  # The reader reports the faults of the keys.
    check_agrees(found, given)
    return fields


def sized(size: str, name: str | None = None) -> dict[str, Any]:
    """Returns the keys of a published model by its name, in any case and with `_` for `-`, in a
    family or in any.

    Raises:
        ConfigError: If no family has the size.
    """
    known = {key: found for key, found in sizes().items() if name in (None, found[0])}
    key = size.strip().lower().replace("_", "-")
    if key not in known:
        fix = f" Write model.name={size}." if size in families() else ""
        fix = fix or did_you_mean(key, known)
        fix = fix or did_you_mean(size, families() if name is None else ())
        fix = fix or f" Known: {', '.join(known) or 'none'}."
        raise ConfigError(f"model: no published size is called {size!r}.{fix}")
    chosen, fields = known[key]
    return {"name": chosen, **fields}


def check_agrees(found: Any, model: Any) -> None:
    """Raises `ConfigError` with every field of a model that differs from its folder.

    Fields that `config.json` does not decide, such as remat, are free, and so are dropout and
    the number of classes.
    """
    faults = list(_differences(found.fields, found.config, model, ""))
    if faults:
        raise ConfigError(
            f"model: the keys contradict {found.folder / 'config.json'}: {'; '.join(faults)}. "
            "Leave them out."
        )


def implied_data(
    model: Mapping[str, Any], data: Mapping[str, Any], kinds: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the keys of data that a model with a folder implies: the kind of data that it takes,
    its tokenizer, the size and the scale of its images, and the sizes of its latents and texts.

    Raises:
        ConfigError: If the data need a tokenizer, and the folder has none.
        CheckpointError: If preprocessor_config.json is malformed.
    """
    from shardlib import hf
    from shardlib.hf.pixels import read_pixels

    takes = family(model["name"]).inputs.name
    name = next((name for name, one in kinds.items() if one.gives == takes), "text")
    implied: dict[str, Any] = {"kind": name}
    kind = kinds.get(data.get("kind", name))
    # A folder of the hub is downloaded only if the data leave a key out; a kept run has all.
    folder = functools.partial(hf.folder_of, model["init_from"], weights=False)
    if hasattr(kind, "tokenizer") and "tokenizer" not in data:
        implied["tokenizer"] = _tokenizer_file(folder())
    if hasattr(kind, "image_size"):
        sizes = model.get("image") or model
        implied |= {key: sizes[key] for key in ("image_size", "channels") if sizes.get(key)}
        if not {"mean", "std"} & data.keys() and (found := read_pixels(folder())):
            implied |= dict(zip(("mean", "std"), found, strict=True))
    if hasattr(kind, "latent_shape"):
        implied |= {key: model[key] for key in ("context_dim", "pooled_dim") if model.get(key)}
        implied["latent_shape"] = [*LATENT_SIZE, model.get("channels") or LATENT_CHANNELS]
    return {key: value for key, value in implied.items() if key not in data}


def _tokenizer_file(folder: Path) -> str:
    for path in (folder / TOKENIZER, folder / VOCABULARY):
        if path.is_file():
            return str(path)
    # One of the data's own would not fit the weights.
    raise ConfigError(
        f"{folder} has no tokenizer.json, and data.tokenizer is not the path of one.\n"
        "  Add data.tokenizer=PATH."
    )


def _merged(fields: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested fields with the given ones in their place."""
    merged = {**fields, **given}
    for name in fields.keys() & given.keys():
        if isinstance(fields[name], Mapping) and isinstance(given[name], Mapping):
            merged[name] = _merged(fields[name], given[name])
    return merged


def _is_complete(model: Mapping[str, Any]) -> bool:
    return "name" in model and fields_of(family(model["name"]).config).keys() <= model.keys()


def _differences(fields: Mapping[str, Any], held: Any, given: Any, path: str) -> Iterator[str]:
    for name, value in fields.items():
        theirs, ours = getattr(held, name), getattr(given, name)
        if isinstance(value, Mapping) and theirs is not None and ours is not None:
            yield from _differences(value, theirs, ours, f"{path}{name}.")
        elif theirs != ours and name not in _FREE:
            yield f"{path}{name} is {ours!r}, there {theirs!r}"
