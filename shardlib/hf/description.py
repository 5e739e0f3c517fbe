"""The model of a folder, by its config.json alone."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlib.config import from_dict
from shardlib.errors import CheckpointError, ConfigError
from shardlib.hf.architecture import Architecture, architectures, find_architecture
from shardlib.hf.hub import folder_of
from shardlib.registry import ModelFamily


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
            # Of several fields for one of ours, the last counts.
            for theirs, field in reversed([*self.architecture.fields.items()]):
                text = text.replace(f": {field.ours}: ", f": {theirs}: ")
            raise ConfigError(text) from None

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer; see the function."""
        return end_tokens(self.folder, self.source)


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


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the contents of config.json.

    Raises:
        CheckpointError: If it is missing or malformed.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{path} does not exist.\n  Give a folder that `save_pretrained` wrote."
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.\n  Download it again.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} does not hold a JSON object.\n  Download it again.")
    return config


def end_tokens(folder: Path, source: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the tokens that end an answer, by generation_config.json or else config.json.

    Args:
        folder: The folder of the model.
        source: The contents of config.json.

    Raises:
        CheckpointError: If generation_config.json is malformed.
    """
    file = folder / "generation_config.json"
    try:
        chosen = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.\n  Download it again.") from None
    ends = source.get("eos_token_id") if chosen is None else chosen
    listed = ends if isinstance(ends, list) else [ends]
    return tuple(one for one in listed if isinstance(one, int))


def _name_of(config: Mapping[str, Any], folder: Path) -> str:
    # The key of diffusers.
    names = [config["_class_name"]] if "_class_name" in config else config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(
            f"{folder / 'config.json'} has architectures={names!r}, expected one name.\n"
            '  Write the class of the model, as in "architectures": ["LlamaForCausalLM"].'
        )
    return names[0]
