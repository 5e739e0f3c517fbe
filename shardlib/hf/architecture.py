"""Architectures: how a family of models is written in the format of Hugging Face.

An architecture is data: a table of config fields and a table of tensors, each read to import and
written to export. The tables lie with their models, in `shardlib_models.hf`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from shardlib.errors import ConfigError, ModelError, did_you_mean
from shardlib.hf.tensor_table import TensorRow
from shardlib.import_paths import imported
from shardlib.registry import ModelFamily, families

REQUIRED = object()
"""The default of a field that every config.json of an architecture has."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of config.json that is a field of our config."""

    ours: str
    """Its name, with a dot for one of a nested config: `moe.num_experts`."""
    default: Any = REQUIRED
    """Its value where config.json lacks the field. If it is None, None is not written."""
    values: Mapping[Any, Any] | None = None
    """Their values by ours, where they differ; None: the values are the same."""
    others: bool = False
    """Whether all other values are the same in both, and not faults."""
    resolved: str | None = None
    """A property of our config with the value to write; None for the field itself."""
    aliases: tuple[str, ...] = ()
    """Other names that some versions write."""

    def read(self, value: object) -> Any:
        """Returns our value for theirs; `REQUIRED` if it is not supported."""
        if self.values is None:
            return value
        default = value if self.others else REQUIRED
        return next((own for own, other in self.values.items() if other == value), default)

    def write(self, value: object) -> Any:
        """Returns their value for ours; `REQUIRED` if it is not supported."""
        if self.values is None:
            return value
        return self.values.get(value, value if self.others else REQUIRED)


@dataclasses.dataclass(frozen=True)
class Converter:
    """Fields of config.json that are converted together, as for rotary positions."""

    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    """`read(config_json)`: our fields. Raises `ValueError` for values that cannot be expressed."""
    write: Callable[[Any], dict[str, Any]]
    """`write(config)`: their fields."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture of the `transformers` or `diffusers` library, as a variant of one of our
    families."""

    name: str
    """Its name in `architectures` of config.json, as in LlamaForCausalLM, or in `_class_name` of
    diffusers."""
    model_type: str
    """Its `model_type` in config.json, as in llama; diffusers writes none."""
    library: Literal["transformers", "diffusers"] = "transformers"
    """The library, which decides the names of the files and where config.json has `name`."""
    fields: Mapping[str, Field]
    """Fields of config.json by name, with a dot for one of a part: `text_config.vocab_size`."""
    fixed: Mapping[str, Any]
    """Fields of config.json that must have one value, which is also their default."""
    ours: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of our config that have one value, by name as in `Field.ours`."""
    converters: tuple[Converter, ...] = ()
    table: Callable[[Any], tuple[TensorRow, ...]]
    """`table(config)`: the rows of the tensors. Rows of absent parameters have no effect."""
    prefix: str = ""
    """A prefix of names that some checkpoints leave out, as in `transformer.`."""
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of copies of tensors, which checkpoints may hold and we do not, by name."""
    older: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Ends of names in the first checkpoints, by the ends today."""
    inputs: Literal["tokens", "images", "latents"] = "tokens"
    """What the model is called with, as `Loaded.logits` takes it."""
    attention_dropout: str | None = None
    """The field of dropout in config.json that there also drops weights of attention."""
    ignored: tuple[str, ...] = ()
    """Patterns of the names of tensors that are not read, such as masks; `{num_layers}` stands for
    that field of the config."""

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of our config, nested as in YAML.

        Raises:
            ConfigError: If fields are missing or have values that the family cannot express. The
                message lists all of them.
        """
        faults, flat = [], dict(self.ours)
        for name, field in self.fields.items():
            held = [_held(theirs, one, REQUIRED) for one in (name, *field.aliases)]
            value = next((one for one in held if one is not REQUIRED), field.default)
            if value is REQUIRED:
                faults.append(f"{name} is missing.")
            elif (own := field.read(value)) is not REQUIRED:
                flat[field.ours] = own
            else:
                known = ", ".join(map(repr, (field.values or {}).values()))
                faults.append(f"{name} is {value!r}; supported: {known}.")
        faults += [
            f"{name} is {_held(theirs, name, None)!r}; supported: {value!r}."
            for name, value in self.fixed.items()
            # Null, false and nothing mean the same.
            if (_held(theirs, name, value) or None) != (value or None)
        ]
        for converter in self.converters:
            fields = _Fields(theirs)
            try:
                flat |= converter.read(fields)
            except KeyError as error:
                faults.append(f"{error.args[0]} is missing.")
            except ValueError as error:
                faults.append(str(error))
            except (TypeError, AttributeError, ArithmeticError) as error:
                values = ", ".join(f"{name}={theirs[name]!r}" for name in fields.known)
                faults.append(f"{values}: a value of another type or size ({error}).")
        if faults:
            raise ConfigError(
                f"config.json of {self.name} does not describe a model that shardlib has:\n  "
                + "\n  ".join(dict.fromkeys(faults))
                + "\n  Choose a checkpoint without them, or add them to the family's table."
            )
        return _nested(flat)

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the fields of config.json for one of our configs.

        Raises:
            ModelError: If the architecture cannot express the config. The message lists all fields.
        """
        faults = [
            f"{name} is {_get(config, name)!r}, not {value!r}."
            for name, value in self.ours.items()
            if _get(config, name) != value
        ]
        theirs: dict[str, Any] = {"architectures": [self.name], "model_type": self.model_type}
        if self.library == "diffusers":
            theirs = {"_class_name": self.name}
        theirs |= self.fixed
        for name, field in self.fields.items():
            value = _get(config, field.resolved or field.ours)
            if value is None and field.default is None:
                continue
            if (written := field.write(value)) is REQUIRED:
                faults.append(f"{field.ours} is {value!r}.")
            else:
                theirs[name] = written
        if faults:
            raise ModelError(
                f"{self.name} cannot express this model:\n  "
                + "\n  ".join(faults)
                + "\n  Export it as another architecture."
            )
        for converter in self.converters:
            theirs |= converter.write(config)
        return _nested(theirs)


class _Fields(dict[str, Any]):
    """Fields of config.json that note which of them a converter reads."""

    def __init__(self, fields: Mapping[str, Any]):
        super().__init__(fields)
        self.known: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.known[name] = None
        return value

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


def _held(theirs: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns a field of config.json, or a default if the field or its part is not there."""
    value: Any = theirs
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        outer, _, inner = name.rpartition(".")
        (tree.setdefault(outer, {}) if outer else tree)[inner] = value
    return tree


def _get(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part, None)
    return config


def architectures() -> dict[str, tuple[ModelFamily, str]]:
    """Returns the installed architectures by name: the family, and the import path."""
    return {
        name: (family, path)
        for family in families().values()
        for name, path in family.architectures.items()
    }


def find_architecture(name: str) -> tuple[ModelFamily, Architecture]:
    """Returns an architecture by its name in config.json, and its family.

    Raises:
        ModelError: If no installed family has it.
    """
    known = architectures()
    if name not in known:
        stem = name.partition("For")[0]
        same = [one for one in known if one.startswith(f"{stem}For")]
        hint = did_you_mean(name, same or known)
        if same and not hint:
            hint = f" Of {stem}, {', '.join(same)} is read."
        hint = hint or f" Known: {', '.join(sorted(known)) or 'none'}."
        raise ModelError(
            f"no model family reads the architecture {name!r}.{hint}\n"
            "  Add it to the `architectures` of a family, as CONTRIBUTING.md describes."
        )
    family, path = known[name]
    expected = "a shardlib.hf.Architecture"
    return family, imported(path, expected, lambda value: isinstance(value, Architecture))


def described_as(model: Any, loaded: Any, name: str | None) -> Architecture:
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
    reasons = tried or [f"{kind} belongs to no model family with architectures."]
    raise ModelError(
        "no architecture of Hugging Face can express this model:\n  "
        + "\n  ".join(reasons)
        + "\n  Save it with shardlib's own checkpoints, or add an architecture to its family."
    )
