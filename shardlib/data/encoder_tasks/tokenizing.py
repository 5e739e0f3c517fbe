"""The tokenizer of framed texts: one of a file, or WordPiece trained on the texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardlib.data import records
from shardlib.data.cache import cached
from shardlib.data.config import as_paths
from shardlib.data.encoder_tasks.fields import TRAINED, FramedFields
from shardlib.data.encoder_tasks.rows import held_texts
from shardlib.data.hashing import digest
from shardlib.data.split import is_in
from shardlib.data.tokenizer import (
    JsonTokenizer,
    read_tokenizer,
    tokenizer_file,
    train_word_piece,
)
from shardlib.errors import DataError

_FILE = "tokenizer.json"
# Part of the cache key; increment it when the training changes.
_FORMAT = 2


@dataclass(frozen=True)
class Texts:
    """How the texts of a data set are read, to train a tokenizer."""

    way: object
    """Options that change them, a plain value."""
    read: Callable[[Sequence[str]], list[tuple[int, str]]]
    """`read(paths)`: the hash of each example, which decides whether it is held out, and its
    text."""


def find_tokenizer(config: FramedFields, texts: Texts | None) -> JsonTokenizer | None:
    """Returns the tokenizer of a config, or None if it must be trained and there are no texts."""
    if config.tokenizer == TRAINED and texts is None:
        return None
    return load_tokenizer(config, texts or Texts(None, lambda paths: []))


def load_tokenizer(config: FramedFields, texts: Texts) -> JsonTokenizer:
    """Returns the tokenizer of a config; one of its own is trained if it is not in the cache.

    Raises:
        DataError: If its file is missing or malformed, it does not put special tokens around a
            text, or the texts have faults.
    """
    if config.tokenizer == TRAINED:
        return _trained(config, texts)
    file = tokenizer_file(config.tokenizer)
    tokenizer = read_tokenizer(file)
    if not isinstance(tokenizer, JsonTokenizer) or tokenizer.num_framing_tokens(1) < 2:
        raise DataError(
            f"data.tokenizer: {str(file)!r} puts no special tokens around a text, as [CLS] and "
            f"[SEP] of BERT.\n  Give the tokenizer of an encoder, or leave {TRAINED!r}."
        )
    return tokenizer


def check_room(config: FramedFields, tokenizer: JsonTokenizer, texts: int) -> None:
    """Raises `DataError` if a row holds no more than the special tokens."""
    if config.sequence_length <= (added := tokenizer.num_framing_tokens(texts)):
        raise DataError(
            f"a row of {config.sequence_length} tokens holds {added} special tokens and no text.\n"
            "  Set data.sequence_length to a larger number."
        )


def _trained(config: FramedFields, texts: Texts) -> JsonTokenizer:
    paths, eval_paths = as_paths(config.path), as_paths(config.eval_path or ())

    def build(directory: Path) -> None:
        ours = texts.read(paths)
        hashes = np.array([each for each, _ in ours], np.uint64)
        if eval_paths:
            held = np.array([each for each, _ in texts.read(eval_paths)], np.uint64)
        else:
            held = held_texts(hashes, config.eval_fraction)
        left = ~is_in(hashes, held)
        chosen = dict.fromkeys(text for (_, text), use in zip(ours, left, strict=True) if use)
        train_word_piece(chosen, config.vocab_size).save(directory / _FILE)

    split = [records.key(path) for path in eval_paths] or config.eval_fraction
    keys = [records.key(path) for path in paths]
    key = digest(("framed", _FORMAT, keys, split, texts.way, config.vocab_size))
    task = f"training a tokenizer of {config.vocab_size:,} entries"
    tokenizer = read_tokenizer(cached("tokenizers", key, build, task=task) / _FILE)
    assert isinstance(tokenizer, JsonTokenizer)
    return tokenizer
