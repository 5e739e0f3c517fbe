"""Model families: the trainer's interface to models, found by entry point or by import path.

A package offers its models in `pyproject.toml`, in addition to the built-in ones:

```toml
[project.entry-points."shardlib.models"]
mymodel = "mypackage.mymodel:FAMILY"
```

A config may also name a family by where it is, as in `model.name: mypackage.mymodel:FAMILY`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shardlib.batch_kinds import EXAMPLES as EXAMPLES
from shardlib.batch_kinds import IMAGE_TEXT as IMAGE_TEXT
from shardlib.batch_kinds import IMAGES as IMAGES
from shardlib.batch_kinds import LABELED_TEXT as LABELED_TEXT
from shardlib.batch_kinds import LATENTS as LATENTS
from shardlib.batch_kinds import NUM_SIZES as NUM_SIZES
from shardlib.batch_kinds import PAIRS as PAIRS
from shardlib.batch_kinds import SPANS as SPANS
from shardlib.batch_kinds import TEXT as TEXT
from shardlib.batch_kinds import BatchKind as BatchKind
from shardlib.batch_kinds import DataSpec as DataSpec
from shardlib.errors import ModelError, did_you_mean
from shardlib.import_paths import imported, is_import_path

GROUP = "shardlib.models"


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How the engine runs the decoders of a family: pure functions of the module."""

    pages: Callable[..., Any]
    """`pages(model, num_groups, num_pages, page_size, dtype)`: zero `shardlib.nn.attention.Pages`
    of each stack of layers, in a tuple. `dtype` is int8, or None for that of the model."""
    step: Callable[..., Any]
    """`step(model, tokens, rows, pages, max_length) -> (hidden [groups, rows, embed], pages)`.

    `tokens: [groups, rows] int32`, `rows: shardlib.nn.attention.Rows`. A sequence has at most
    `max_length` positions."""
    logits: Callable[..., Any]
    """`logits(model, hidden [groups, n, embed]) -> [groups, n, vocab]`."""
    embedding: Callable[..., Any]
    """`embedding(model, hidden [groups, n, embed]) -> [groups, n, features]`: the input of the
    head."""
    max_length: Callable[..., int | None]
    """`max_length(config)`: the positions that the model has; None if any number."""
    keys_of_text: Callable[..., Any] | None = None
    """For a family with `encoding` too, whose decoder reads the encoder's output:
    `keys_of_text(model, hidden [b, n, embed]) -> ((key, value), ...)` for each stack of layers,
    [layers, b, n, kv_heads, dims] each. They are in the pages before the positions of the answer,
    and `rows.num_encoded` is their number."""
    start_token: Callable[..., int] | None = None
    """With `keys_of_text`, `start_token(config)`: the token before an answer."""


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How the engine runs the encoders of a family: pure functions of the module."""

    hidden: Callable[..., Any]
    """`hidden(model, tokens [b, n], segment_ids [b, n]) -> [b, n, embed]`: the last residual
    stream of texts; `segment_ids` are 1 for text and 0 for padding. Both are int32."""
    max_length: Callable[..., int | None]
    """`max_length(config)`: the positions that the model has; None if any number."""


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """One family of models: its config and the pure functions that make and use a model."""

    config: type
    """A configclass. Its field `name` is the name of the entry point, `name: Literal["..."]`, or
    for a family named by import path any text, `name: str`."""
    make: Callable[..., Any]
    """`make(config, data_spec, rngs) -> nnx.Module`. Values depend on the RNGs alone."""
    loss: Callable[..., Any]
    """`loss(model, batch, rng, *, train, label_smoothing=0.0, z_loss=0.0) -> (Mean, metrics)`.

    `metrics` is a dict of `losses.Mean`. `train` switches dropout and batch statistics. Without it,
    `losses.Output`s of rows go to the `score` of the data's source. A loss may leave out
    `label_smoothing` and `z_loss`, which a config then cannot set.
    """
    couples_rows: bool = False
    """Whether the loss of a row depends on the others of its batch, as a contrastive one does. A
    run does not split such a batch into microbatches or groups."""
    inputs: BatchKind = EXAMPLES
    """The kind of batch that `loss` takes: TEXT, IMAGES, EXAMPLES or one of your own."""
    validate: Callable[..., list[str]] | None = None
    """`validate(config, data_spec)`: every fault as a sentence; empty for a valid pair. `shardlib
    check` shrinks the sizes of a model as far as they are valid. None: every config is valid, and
    its sizes stay."""
    flops_per_example: Callable[..., float] | None = None
    """`flops_per_example(config, data_spec)`: model FLOPs of one example, forward and backward.
    None: a count by `dims`, or the matmuls and convolutions of the traced loss and its gradient."""
    generate: Callable[..., Any] | None = None
    """`generate(model, tokens, *, length, temperature, rng) -> [b, n + length] int32`: the tokens
    and what follows them.

    `tokens: [b, n] int32`. Pure and jittable: a run samples with it within its own mesh and state.
    None for families that do not generate.
    """
    decoding: Decoding | None = None
    """For `shardlib.engine`, which also writes the answers of evaluation on tasks; their scores
    come from `model(tokens, segment_ids=...)`, the logits, with 0 for padding. None for families
    that it does not run."""
    encoding: Encoding | None = None
    """For `shardlib.engine`: embeddings of a family without `decoding`, and the prompts of one with
    it. None for families without an encoder of texts."""
    choices: Callable[..., dict[str, str]] | None = None
    """`choices(config, data_spec, *, dtype)`: the model's own choices on the active mesh (an
    implementation of attention, say) by name, each with the reason. For people to read."""
    dims: Callable[..., Mapping[str, Any]] | None = None
    """`dims(config, data_spec)`: the planner's dims of a decoder-only transformer, by the field
    names of `shardlib.plan.Transformer`, with `experts` as a mapping of the field names of
    `shardlib.plan.Experts`. None for models of other kinds, whose steps are traced instead."""

    architectures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Architectures of Hugging Face that the family reads and writes: import paths of
    `shardlib.hf.Architecture` objects, by their names in `config.json`."""

    sizes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Fields of the config by the names of published models, as in `model: llama3-8b`."""

    def faults(self, config: Any, data: DataSpec) -> list[str]:
        """Returns the faults that `validate` finds."""
        return [] if self.validate is None else self.validate(config, data)


def families() -> dict[str, ModelFamily]:
    """Returns every installed model family by name, sorted by name.

    Raises:
        ModelError: If an installed entry point cannot be loaded or is not a `ModelFamily`.
    """
    return {name: _load(entry) for name, entry in sorted(_entries().items())}


def sizes() -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Returns the family and the fields of every published model by its name, as in `llama3-8b`."""
    return {
        size: (name, fields)
        for name, family in families().items()
        for size, fields in family.sizes.items()
    }


def family(name: str) -> ModelFamily:
    """Returns one model family, without importing the others.

    Args:
        name: Name of an entry point, or an import path `module:name`.

    Raises:
        ModelError: If no installed package offers `name`, or its entry point cannot be loaded.
        ConfigError: If an import path does not lead to a model family.
    """
    if is_import_path(name):
        expected = "a shardlib.registry.ModelFamily"
        return imported(name, expected, lambda found: isinstance(found, ModelFamily))
    entries = _entries()
    if name not in entries:
        known = ", ".join(sorted(entries)) or "none"
        hint = did_you_mean(name, entries)
        raise ModelError(
            f"no model family is called {name!r}; installed: {known}.{hint}\n"
            f"  Choose one of them, or install the package that offers {name!r} "
            f"as an entry point of group {GROUP!r}."
        )
    return _load(entries[name])


def _entries() -> dict[str, EntryPoint]:
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = entries.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ModelError(
                f"two packages offer the model family {entry.name!r}: "
                f"{other.value} and {entry.value}.\n"
                f"  Uninstall one of them or rename its entry point."
            )
    return entries


def _load(entry: EntryPoint) -> ModelFamily:
    try:
        loaded = entry.load()
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"the model family {entry.name!r} cannot be loaded from {entry.value}: {error}\n"
            f"  Repair or reinstall the package that offers it."
        ) from error
    if not isinstance(loaded, ModelFamily):
        raise ModelError(
            f"the entry point {entry.name!r} = {entry.value} of group {GROUP!r} is a "
            f"{type(loaded).__name__}, not a shardlib.registry.ModelFamily.\n"
            f"  Point it at a ModelFamily object."
        )
    declared = getattr(loaded.config, "name", None)
    if declared != entry.name:
        raise ModelError(
            f"the model family {entry.name!r} ({entry.value}) has a config whose name is "
            f"{declared!r}.\n"
            f'  Declare `name: Literal["{entry.name}"] = "{entry.name}"` in '
            f"{loaded.config.__name__}."
        )
    return loaded
