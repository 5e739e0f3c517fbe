"""The source of labelled texts."""

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from shardlib.batch_kinds import DataSpec
from shardlib.data import records
from shardlib.data.config import as_paths
from shardlib.data.encoder_tasks.fields import LabeledTextFields
from shardlib.data.encoder_tasks.rows import (
    Framed,
    Writer,
    blocks,
    framed,
    num_types,
    row_source,
    split_rows,
)
from shardlib.data.encoder_tasks.tokenizing import Texts, check_room, load_tokenizer
from shardlib.data.hashing import content_hash
from shardlib.data.loader import MapSource
from shardlib.data.tokenizer import JsonTokenizer
from shardlib.errors import DataError, did_you_mean

_LOG = logging.getLogger(__name__)

Classes = tuple[str, ...] | int | None
"""Names of the classes, their number if they have no names, or None if they are unknown."""


class _Labeled(NamedTuple):
    texts: tuple[str, ...]
    label: str | int

    @property
    def hash(self) -> int:
        return content_hash("\0".join(self.texts).encode())


def open_labeled(
    config: LabeledTextFields, *, global_batch: int, seed: int, split: Literal["train", "eval"]
) -> MapSource:
    """Returns the source of labelled texts; see `open_data`."""
    tokenizer = load_tokenizer(config, labeled_texts(config))
    check_room(config, tokenizer, len(config.text_fields))
    ours = _framed(config, tokenizer, as_paths(config.path), config.classes)
    classes = ours.notes if isinstance(ours.notes, int) else tuple(ours.notes)
    evals = None
    if config.eval_path is not None:
        evals = _framed(config, tokenizer, as_paths(config.eval_path), classes)
    for part, key in ((ours, "data.path"), (evals, "data.eval_path")):
        if part is not None and config.too_long == "refuse":
            _check_lengths(config, part, key)
    side = split_rows(config, ours, evals, seed, split)
    sizes = side.framed.further["sizes"][side.chosen]
    if cut := int((sizes > config.sequence_length).sum()):
        _LOG.warning(
            "%d of %d texts to %s are cut to a row of %d tokens",
            *(cut, len(sizes), "train on" if split == "train" else "evaluate on"),
            config.sequence_length,
        )
    spec = DataSpec(
        tokenizer.vocab_size,
        config.sequence_length,
        classes if isinstance(classes, int) else len(classes),
        num_types=num_types(ours, evals),
    )
    return row_source(
        config, side, spec, tokenizer, global_batch=global_batch, seed=seed, split=split
    )


def labeled_texts(config: LabeledTextFields) -> Texts:
    """Returns how the texts are read, to train a tokenizer."""

    def read(paths: Sequence[str]) -> list[tuple[int, str]]:
        return [(each.hash, text) for each in _read(config, paths, None) for text in each.texts]

    return Texts((config.text_fields, config.label_field), read)


def _read(config: LabeledTextFields, paths: Sequence[str], classes: Classes) -> list[_Labeled]:
    labels = _Labels(config, classes)

    def read(where: str, example: Mapping[str, Any]) -> _Labeled:
        fix = "Set data.text_fields to the fields of text."
        texts = tuple(records.text(example, name, fix) for name in config.text_fields)
        return _Labeled(texts, labels.read(example))

    return records.read_all((each for path in paths for each in records.examples(path)), read)


class _Labels:
    """Reads labels: numbers, or names, in the classes if these are known."""

    def __init__(self, config: LabeledTextFields, classes: Classes):
        self._field, self._classes = config.label_field, classes
        self._kind = int if isinstance(classes, int) else None

    def read(self, example: Mapping[str, Any]) -> str | int:
        fix = "Set data.label_field to the field of labels."
        value = records.field(example, self._field, fix)
        if not isinstance(value, str | int):
            raise DataError(
                f"the label is {type(value).__name__}, neither a number nor a name.\n  {fix}"
            )
        if isinstance(self._classes, tuple):
            return self._number(value, self._classes)
        # The first label decides for all.
        self._kind = self._kind or (str if isinstance(value, str) else int)
        if not isinstance(value, self._kind):
            raise DataError(
                f"the label {value!r} is a {'name' if isinstance(value, str) else 'number'}, "
                "unlike those before.\n  Write all labels as numbers or all as names."
            )
        if isinstance(value, int) and not 0 <= value < (self._classes or np.inf):
            raise _outside(value, self._classes)
        return value

    def _number(self, value: str | int, classes: tuple[str, ...]) -> int:
        if isinstance(value, str) and value in classes:
            return classes.index(value)
        if isinstance(value, str) or not 0 <= value < len(classes):
            raise _outside(value, classes)
        return int(value)


def _outside(value: str | int, classes: Classes) -> DataError:
    known = "the numbers from 0 on" if classes is None else f"the numbers below {classes}"
    hint = ""
    if isinstance(classes, tuple):
        known, hint = ", ".join(classes), did_you_mean(str(value), classes)
    return DataError(
        f"the label {value!r} is outside the classes: {known}.{hint}\n"
        "  Correct the labels, remove examples without one, or set data.classes to all classes."
    )


def _framed(
    config: LabeledTextFields, tokenizer: JsonTokenizer, paths: Sequence[str], classes: Classes
) -> Framed:
    build = functools.partial(_build, config, tokenizer, paths, classes)
    way = ("labels", config.text_fields, config.label_field, classes)
    return framed(config, tokenizer, paths, way, build)


def _build(
    config: LabeledTextFields,
    tokenizer: JsonTokenizer,
    paths: Sequence[str],
    classes: Classes,
    writer: Writer,
) -> None:
    examples = _read(config, paths, classes)
    labels = [each.label for each in examples]
    if classes is None and labels and isinstance(labels[0], str):
        # Names that are numbers, as CSV has them, keep their order.
        classes = tuple(sorted(set(map(str, labels)), key=_as_number))
        numbers = {name: number for number, name in enumerate(classes)}
        labels = [numbers[name] for name in map(str, labels)]
    writer.notes = classes if classes is not None else max(map(int, labels), default=0) + 1
    for block in blocks(list(zip(examples, labels, strict=True))):
        texts = [each.texts if len(each.texts) == 2 else each.texts[0] for each, _ in block]
        sizes = np.array([len(one.ids) for one in tokenizer.framed(texts)], np.int32)
        cut = tokenizer.framed(texts, max_tokens=config.sequence_length)
        for encoding, (each, label) in zip(cut, block, strict=True):
            writer.row(encoding, each.hash, {"labels": int(label)})
        writer.more("sizes", sizes)


def _as_number(name: str) -> tuple[float, str]:
    return (float(name) if name.isdecimal() else np.inf), name


def _check_lengths(config: LabeledTextFields, part: Framed, key: str) -> None:
    sizes = part.further["sizes"]
    if long := int((sizes > config.sequence_length).sum()):
        raise DataError(
            f"{key}: {long:,} of {len(sizes):,} texts are longer than a row of "
            f"{config.sequence_length:,} tokens; the longest needs {sizes.max():,}.\n"
            "  Set data.sequence_length to that, or data.too_long=truncate to cut them."
        )
