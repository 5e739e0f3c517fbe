"""Framed texts as padded rows, written once into the cache, split and ordered."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardlib.batch_kinds import DataSpec
from shardlib.data import records
from shardlib.data.cache import cached, read_array, reading
from shardlib.data.encoder_tasks.fields import FramedFields
from shardlib.data.hashing import derive_seed, digest, mix
from shardlib.data.loader import MapSource, in_order
from shardlib.data.split import held_out, is_in
from shardlib.data.tokenizer import JsonTokenizer
from shardlib.errors import DataError

# Part of the cache key; increment it when the layout or meaning of cached data changes.
_FORMAT = 1
_EVAL_SEED = 1
_BLOCK = 1000
"""Texts that are encoded at a time."""


@dataclass(frozen=True)
class Framed:
    """All rows of some paths, without padding, concatenated."""

    tokens: np.ndarray
    """`[num_tokens] uint32`, memory-mapped."""
    types: np.ndarray
    """Kind of each token, `[num_tokens] uint8`, memory-mapped: 0 for the first text of a pair."""
    offsets: np.ndarray
    """Starts of the rows, then the end of the last one: `[num_rows + 1] int64`."""
    hashes: np.ndarray
    """Hash of the text of each row, `[num_rows] uint64`. Equal texts are on one side of a split."""
    targets: Mapping[str, np.ndarray]
    """What the loss compares, by name: `[num_rows] int32`."""
    further: Mapping[str, np.ndarray]
    """Further arrays by name, memory-mapped."""
    notes: Any
    """Further plain values."""


def empty_row(sequence_length: int, targets: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns a padding row with the layout of `FramedRows`: its targets are -1."""
    names = ("tokens", "types", "segment_ids")
    arrays = {name: np.zeros(sequence_length, np.int32) for name in names}
    return arrays | {name: np.array(-1, np.int32) for name in targets}


class FramedRows:
    """Rows of framed texts in the order of their indices `chosen`, `[n] int64`.

    Row arrays (`length` = `sequence_length`):
        tokens: `[length] int32`, 0 for padding.
        types: `[length] int32`: the kind of each token.
        segment_ids: `[length] int32`: 1, and 0 for padding.
        further arrays `[] int32`: the targets.
    """

    def __init__(self, framed: Framed, chosen: np.ndarray, sequence_length: int):
        self._framed, self._chosen, self._length = framed, chosen, sequence_length

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        place = self._chosen[index]
        start, stop = self._framed.offsets[place : place + 2]
        row = empty_row(self._length, ())
        row["tokens"][: stop - start] = self._framed.tokens[start:stop]
        row["types"][: stop - start] = self._framed.types[start:stop]
        row["segment_ids"][: stop - start] = 1
        return row | {name: values[place] for name, values in self._framed.targets.items()}


class Writer:
    """Collects rows and writes them as files of a cache entry."""

    def __init__(self) -> None:
        self._tokens: list[np.ndarray] = []
        self._types: list[np.ndarray] = []
        self._further: dict[str, list[np.ndarray]] = {}
        self.hashes: list[int] = []
        self.targets: dict[str, list[int]] = {}
        self.notes: Any = None

    def row(self, encoding: Any, text_hash: int, targets: Mapping[str, int]) -> None:
        """Adds a row, of a `tokenizers.Encoding`."""
        self._tokens.append(np.array(encoding.ids, np.uint32))
        self._types.append(np.array(encoding.type_ids, np.uint8))
        self.hashes.append(text_hash)
        for name, value in targets.items():
            self.targets.setdefault(name, []).append(value)

    def more(self, name: str, values: np.ndarray) -> None:
        """Adds values to an array of `Framed.further`."""
        self._further.setdefault(name, []).append(values)

    def write(self, directory: Path) -> None:
        """Writes all files."""
        offsets = np.cumsum([0, *map(len, self._tokens)], dtype=np.int64)
        arrays = {
            "tokens": np.concatenate(self._tokens),
            "types": np.concatenate(self._types),
            "offsets": offsets,
            "hashes": np.array(self.hashes, np.uint64),
        }
        arrays |= {f"target.{k}": np.array(x, np.int32) for k, x in self.targets.items()}
        arrays |= {f"further.{k}": np.concatenate(x) for k, x in self._further.items()}
        for name, values in arrays.items():
            np.save(directory / f"{name}.npy", values)
        (directory / "notes.json").write_text(json.dumps(self.notes), encoding="utf-8")


def blocks(items: Sequence[Any]) -> Any:
    """Yields the items in lists of a thousand, since encodings take much memory."""
    for start in range(0, len(items), _BLOCK):
        yield items[start : start + _BLOCK]


def framed(
    config: FramedFields,
    tokenizer: JsonTokenizer,
    paths: Sequence[str],
    way: object,
    build: Callable[[Writer], None],
) -> Framed:
    """Returns the rows of some paths, which `build` makes if they are not in the cache.

    Raises:
        DataError: If a path is missing, or holds nothing.
    """
    keys = [records.key(path) for path in paths]
    key = digest((_FORMAT, keys, way, config.sequence_length, tokenizer.fingerprint))

    def write(directory: Path) -> None:
        writer = Writer()
        build(writer)
        if not writer.hashes:
            raise DataError(f"{', '.join(paths)} holds no example.\n  Give a path that holds some.")
        writer.write(directory)

    directory = cached("framed", key, write, task=f"encoding {', '.join(paths)}")
    with reading(directory):
        return Framed(
            _mapped(directory / "tokens.npy"),
            _mapped(directory / "types.npy"),
            read_array(directory / "offsets.npy"),
            read_array(directory / "hashes.npy"),
            {_name(file): read_array(file) for file in sorted(directory.glob("target.*.npy"))},
            {_name(file): _mapped(file) for file in sorted(directory.glob("further.*.npy"))},
            json.loads((directory / "notes.json").read_text(encoding="utf-8")),
        )


def _mapped(file: Path) -> np.ndarray:
    return np.load(file, mmap_mode="r", allow_pickle=False)


def _name(file: Path) -> str:
    return file.name.split(".")[1]


def held_texts(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Returns the sorted hashes of the texts to hold out, a share of the distinct texts."""
    distinct = np.unique(hashes)
    return held_out(distinct, np.ones(len(distinct), np.int64), fraction)


@dataclass(frozen=True)
class Split:
    """The rows of one side of the split, in order."""

    framed: Framed
    chosen: np.ndarray
    """Indices of the rows in order, `[n] int64`. Rows of one text stay together."""
    fingerprint: str


def split_rows(
    config: FramedFields, ours: Framed, evals: Framed | None, seed: int, split: str
) -> Split:
    """Returns the rows to train on, shuffled by the seed, or the held-out rows.

    Raises:
        DataError: If no row is left, or nothing is held out.
    """
    if evals is None:
        held = held_texts(ours.hashes, config.eval_fraction)
    else:
        held = np.unique(evals.hashes)
    side, order_seed, purpose = ours, derive_seed(seed, "texts"), "train on"
    if split == "train":
        chosen = np.flatnonzero(~is_in(ours.hashes, held))
    else:
        config.check_held_out()
        side, order_seed, purpose = evals or ours, _EVAL_SEED, "evaluate on"
        chosen = np.flatnonzero(is_in(side.hashes, held))
    if not len(chosen):
        raise DataError(
            f"no example is left to {purpose}.\n"
            "  Give more examples, or another data.eval_fraction."
        )
    order = np.argsort(mix(side.hashes[chosen], order_seed), kind="stable")
    marks = [
        (part.hashes.tobytes(), *(x.tobytes() for x in part.targets.values()))
        for part in (ours, evals)
        if part is not None
    ]
    return Split(side, chosen[order], digest((marks, held.tobytes(), config.sequence_length)))


def row_source(
    config: FramedFields,
    side: Split,
    spec: DataSpec,
    tokenizer: JsonTokenizer,
    *,
    global_batch: int,
    seed: int,
    split: Literal["train", "eval"],
    score: Callable[[Mapping[str, np.ndarray]], dict[str, float]] | None = None,
) -> MapSource:
    """Returns the source of one side of the split; see `open_data`."""
    rows = FramedRows(side.framed, side.chosen, config.sequence_length)
    is_train = split == "train"
    return MapSource(
        in_order(rows, seed, split),
        spec=spec,
        global_batch=global_batch,
        padding=empty_row(config.sequence_length, tuple(side.framed.targets)),
        num_examples=None if is_train else len(rows),
        max_steps=None if is_train else config.eval_steps,
        fingerprint=side.fingerprint,
        tokenizer=tokenizer,
        score=score,
    )


def num_types(*parts: Framed | None) -> int:
    """Returns the number of kinds of tokens in some rows."""
    return 1 + max(int(part.types.max()) for part in parts if part is not None)
