"""Kinds of batches: what a model family takes and a data source gives."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class DataSpec:
    """Properties of the data that a model needs. None for fields that do not apply.

    A data source of your own may give a subclass with further fields of plain values.
    """

    vocab_size: int | None = None
    """Number of token ids: every token is in [0, vocab_size)."""
    sequence_length: int | None = None
    """Tokens in one row of a batch."""
    num_classes: int | None = None
    """Number of labels: every label is in [0, num_classes)."""
    image_shape: tuple[int, int, int] | None = None
    """Height, width and channels of one image, or of its latents."""
    loss_mask: bool = False
    """Whether batches of text have a `loss_mask`, of the targets that the loss counts."""
    num_types: int | None = None
    """Number of kinds of tokens, as of a question and its text: every type is in [0, num_types)."""
    target_length: int | None = None
    """Tokens in one row of targets, where they are rows of their own."""
    end_token: int | None = None
    """Id of the token that ends each text, where a model reads a text at its end."""
    context_dim: int | None = None
    """Dims of the embedding of a token, where texts come as embeddings."""
    pooled_dim: int | None = None
    """Dims of the embedding of a whole text, where texts have one."""


@dataclasses.dataclass(frozen=True)
class BatchKind:
    """The meaning of the arrays of a batch."""

    name: str
    """Name of the kind. A family trains on data whose `gives` is the same name."""
    axes: Mapping[str, tuple[str | None, ...]] = dataclasses.field(default_factory=dict)
    """Logical axes of the arrays by path; others have the axes `("batch", None, ...)`."""
    masked_axes: Mapping[str, tuple[str | None, ...]] = dataclasses.field(default_factory=dict)
    """The same of the arrays that only data with a `loss_mask` have."""
    unit: str = "examples"
    """Unit of throughput, in the plural."""
    units_per_example: Callable[[DataSpec], int] = lambda data: 1
    """`units_per_example(data_spec)`: number of units in one row of a batch."""
    example: Callable[[np.random.Generator, int, DataSpec], dict[str, np.ndarray]] | None = None
    """`example(random, rows, data_spec)`: a random batch for `shardlib check`. None: the check
    reads the data."""
    reduced: Callable[[DataSpec, Any], DataSpec] | None = None
    """`reduced(data_spec, model_config)`: the spec of a small example, all of whose fields are
    known. None: the whole spec."""

    def axes_for(self, data: DataSpec) -> dict[str, tuple[str | None, ...]]:
        """Returns the logical axes of the arrays of some data."""
        return {**self.axes, **(self.masked_axes if data.loss_mask else {})}


EXAMPLES = BatchKind("examples")
"""Arrays [batch, ...] of any meaning."""

_LENGTH, _VOCABULARY, _CLASSES, _PIXELS = 32, 64, 8, 16


def _reduced_text(data: DataSpec, model: Any) -> DataSpec:
    length = min(data.sequence_length or _LENGTH, _LENGTH)
    return DataSpec(getattr(model, "vocab_size", None) or _VOCABULARY, length)


def _text(random: np.random.Generator, rows: int, data: DataSpec) -> dict[str, np.ndarray]:
    """Returns rows of up to three documents each."""
    length, vocabulary = data.sequence_length or _LENGTH, data.vocab_size or _VOCABULARY
    tokens = random.integers(0, vocabulary, (2, rows, length), dtype=np.int32)
    segments = np.sort(random.integers(1, 4, (rows, length)), axis=1).astype(np.int32)
    starts = np.stack([np.searchsorted(row, row) for row in segments])
    return {
        "tokens": tokens[0],
        "targets": tokens[1],
        "segment_ids": segments,
        "positions": (np.arange(length)[None] - starts).astype(np.int32),
        "num_bytes": np.full(rows, length, np.int32),
    }


TEXT = BatchKind(
    "text",
    axes=dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), ("batch", "length")),
    masked_axes={"loss_mask": ("batch", "length")},
    unit="tokens",
    units_per_example=lambda data: data.sequence_length or 1,
    example=_text,
    reduced=_reduced_text,
)
"""Packed rows of tokens; see `shardlib.data.open_data`."""


def _padded(random: np.random.Generator, rows: int, data: DataSpec) -> dict[str, np.ndarray]:
    """Returns texts of at least half the length each, and padding."""
    length, vocabulary = data.sequence_length or _LENGTH, data.vocab_size or _VOCABULARY
    sizes = random.integers(length - length // 2, length + 1, (rows, 1))
    return {
        "tokens": random.integers(0, vocabulary, (rows, length), dtype=np.int32),
        "types": random.integers(0, data.num_types or 1, (rows, length), dtype=np.int32),
        "segment_ids": (np.arange(length)[None] < sizes).astype(np.int32),
    }


def _labeled(random: np.random.Generator, rows: int, data: DataSpec) -> dict[str, np.ndarray]:
    labels = random.integers(0, data.num_classes or _CLASSES, rows, dtype=np.int32)
    return {**_padded(random, rows, data), "labels": labels}


def _spans(random: np.random.Generator, rows: int, data: DataSpec) -> dict[str, np.ndarray]:
    shortest = (data.sequence_length or _LENGTH) // 2
    ends = np.sort(random.integers(0, max(shortest, 1), (2, rows), dtype=np.int32), axis=0)
    return {**_padded(random, rows, data), "starts": ends[0], "ends": ends[1]}


def _reduced_rows(data: DataSpec, model: Any) -> DataSpec:
    types = getattr(model, "num_types", None)
    return dataclasses.replace(_reduced_text(data, model), num_types=types)


def _reduced_labeled(data: DataSpec, model: Any) -> DataSpec:
    classes = getattr(model, "num_classes", None) or data.num_classes or _CLASSES
    return dataclasses.replace(_reduced_rows(data, model), num_classes=classes)


_ROWS: Mapping[str, tuple[str | None, ...]] = dict.fromkeys(
    ("tokens", "types", "segment_ids"), ("batch", "length")
)

LABELED_TEXT = BatchKind(
    "labeled_text", axes=_ROWS, unit="texts", example=_labeled, reduced=_reduced_labeled
)
"""Texts `tokens`, `types` (kinds of tokens) and `segment_ids` (1, and 0 for padding)
[batch, length], and their `labels` [batch], all int32."""

SPANS = BatchKind("spans", axes=_ROWS, unit="texts", example=_spans, reduced=_reduced_rows)
"""Texts as in `LABELED_TEXT`, with the first and last token of a span in place of a label: `starts`
and `ends` [batch] int32."""


def _pairs(random: np.random.Generator, rows: int, data: DataSpec) -> dict[str, np.ndarray]:
    inputs = _padded(random, rows, data)
    length = data.target_length or _LENGTH
    targets = _padded(random, rows, dataclasses.replace(data, sequence_length=length))
    return {
        **inputs,
        "targets": targets["tokens"],
        "target_segment_ids": targets["segment_ids"],
    }


def _reduced_pairs(data: DataSpec, model: Any) -> DataSpec:
    length = min(data.target_length or _LENGTH, _LENGTH)
    return dataclasses.replace(_reduced_text(data, model), target_length=length)


PAIRS = BatchKind(
    "pairs",
    axes=dict.fromkeys(
        ("tokens", "segment_ids", "targets", "target_segment_ids"), ("batch", "length")
    ),
    unit="tokens",
    units_per_example=lambda data: (data.sequence_length or 1) + (data.target_length or 0),
    example=_pairs,
    reduced=_reduced_pairs,
)
"""Inputs `tokens` [batch, length] and answers `targets` [batch, target_length], each with its
`segment_ids` and `target_segment_ids` (1, and 0 for padding), all int32."""


def _reduced_images(data: DataSpec, model: Any) -> DataSpec:
    height, width, channels = data.image_shape or (_PIXELS, _PIXELS, 3)
    shape = (min(height, _PIXELS), min(width, _PIXELS), channels)
    return DataSpec(num_classes=data.num_classes or _CLASSES, image_shape=shape)


def _images(random: np.random.Generator, rows: int, data: DataSpec) -> dict[str, np.ndarray]:
    assert data.image_shape is not None
    return {
        "images": random.standard_normal((rows, *data.image_shape), np.float32),
        "labels": random.integers(0, data.num_classes or _CLASSES, rows, dtype=np.int32),
    }


IMAGES = BatchKind("images", unit="images", example=_images, reduced=_reduced_images)
"""Images and their labels; see `shardlib.data.open_data`."""


def _reduced_pairs_of_images(data: DataSpec, model: Any) -> DataSpec:
    text, images = _reduced_text(data, model), _reduced_images(data, model)
    return dataclasses.replace(text, image_shape=images.image_shape)


def _pairs_of_images(
    random: np.random.Generator, rows: int, data: DataSpec
) -> dict[str, np.ndarray]:
    assert data.image_shape is not None
    images = random.standard_normal((rows, *data.image_shape), np.float32)
    return {**_padded(random, rows, data), "images": images}


IMAGE_TEXT = BatchKind(
    "image_text",
    axes=dict.fromkeys(("tokens", "segment_ids"), ("batch", "length")),
    unit="pairs",
    example=_pairs_of_images,
    reduced=_reduced_pairs_of_images,
)
"""Texts `tokens` and `segment_ids` (1, and 0 for padding) [batch, length] int32, and their `images`
[batch, height, width, channels]."""

NUM_SIZES = 6
"""Sizes of an image that condition a model with pooled texts.

Source: Podell et al. 2023, "SDXL", section 2.2.
"""
_CONTEXT_DIM = 16


def _reduced_latents(data: DataSpec, model: Any) -> DataSpec:
    shape = _reduced_images(data, model).image_shape
    assert shape is not None
    channels = getattr(model, "channels", None) or shape[2]
    return DataSpec(
        sequence_length=min(data.sequence_length or _LENGTH, _LENGTH),
        image_shape=(*shape[:2], channels),
        context_dim=getattr(model, "context_dim", None) or data.context_dim or _CONTEXT_DIM,
        pooled_dim=getattr(model, "pooled_dim", None),
    )


def _latents(random: np.random.Generator, rows: int, data: DataSpec) -> dict[str, np.ndarray]:
    assert data.image_shape is not None
    assert data.sequence_length is not None
    assert data.context_dim is not None
    texts = rows, data.sequence_length, data.context_dim
    batch = {
        "latents": random.standard_normal((rows, *data.image_shape), np.float32),
        "context": random.standard_normal(texts, np.float32),
        "weights": np.ones(rows, np.float32),
    }
    if data.pooled_dim is not None:
        batch["pooled"] = random.standard_normal((rows, data.pooled_dim), np.float32)
        batch["sizes"] = random.integers(0, 1025, (rows, NUM_SIZES), dtype=np.int32)
    return batch


LATENTS = BatchKind("latents", unit="images", example=_latents, reduced=_reduced_latents)
"""Images as `latents` [batch, height, width, channels], the embeddings of their texts `context`
[batch, length, context_dim], and `weights` [batch] float32: 1, and 0 for padding. With pooled texts
also `pooled` [batch, pooled_dim] and `sizes` [batch, 6] int32; see `UNet`."""
