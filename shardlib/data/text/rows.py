"""The text source of a config: tokenizer, split and packed rows."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from shardlib.data.cache import cached
from shardlib.data.config import as_paths
from shardlib.data.hashing import content_hash, derive_seed, digest, mix, shuffled
from shardlib.data.loader import Examples, MapSource
from shardlib.data.split import held_out, is_in, union
from shardlib.data.text.fields import TextFields
from shardlib.data.text.packing import Concatenation, PackedRows
from shardlib.data.text.sources import TextSource, open_sources
from shardlib.data.text.tokens import FORMAT, TokenArray, open_tokens
from shardlib.data.tokenizer import (
    BytesTokenizer,
    Tokenizer,
    find_tokenizer_file,
    read_tokenizer,
    tokenizer_file,
    train_bpe,
)
from shardlib.errors import DataError
from shardlib.registry import DataSpec

# Training text of the BPE tokenizer; a larger sample hardly changes 1,024 entries.
SAMPLE_BYTES = 2_000_000
# These orders must not change between runs, so that losses of different seeds are comparable.
_SAMPLE_SEED, _EVAL_SEED = 0, 1
_TOKENIZER_FILE = "tokenizer.json"


def load_tokenizer(config: TextFields) -> Tokenizer:
    """Returns the tokenizer of a config; a `bpe` tokenizer is trained if it is not in the cache.

    A `bpe` tokenizer depends on the text. To use a trained model without that text, save the
    tokenizer with the model (`Tokenizer.save`) and read it with `read_tokenizer`.

    Raises:
        DataError: If the text or the file of the tokenizer is missing or malformed.
    """
    if config.tokenizer in ("bpe", "bytes"):
        return _tokenizer(config, *_sources(config))
    return _tokenizer(config, [], [])


def tokenizer_at_hand(config: TextFields) -> Tokenizer | None:
    """Returns the tokenizer of a config if it can be loaded without reading text, else None.

    Raises:
        DataError: If the file of the tokenizer is malformed.
    """
    if config.tokenizer != "bytes" and find_tokenizer_file(config.tokenizer) is None:
        return None
    return _tokenizer(config, [], [])


def open_text(
    config: TextFields, *, global_batch: int, seed: int, split: Literal["train", "eval"]
) -> MapSource:
    """Returns the text source of a config; see `open_data`."""
    sources, eval_sources = _sources(config)
    tokenizer = _tokenizer(config, sources, eval_sources)
    arrays = [_open_nonempty(source, tokenizer, "data.path") for source in sources]
    eval_arrays = [_open_nonempty(source, tokenizer, "data.eval_path") for source in eval_sources]
    held = _held_out(config, arrays, eval_arrays)
    if split == "train":
        parts = _train_parts(config, arrays, held, tokenizer, seed)
        num_examples, max_steps = None, None
        make_examples = functools.partial(_endless_mixture, parts, config.weights, seed)
    else:
        config.check_held_out()
        parts = _eval_parts(config, eval_arrays or arrays, held, tokenizer)
        num_examples, max_steps = sum(map(len, parts)), config.eval_steps
        order = shuffled(num_examples, _EVAL_SEED)
        make_examples = functools.partial(Concatenation, parts, order)
    return MapSource(
        make_examples,
        spec=DataSpec(vocab_size=tokenizer.vocab_size, sequence_length=config.sequence_length),
        global_batch=global_batch,
        padding=parts[0].padding(),
        num_examples=num_examples,
        max_steps=max_steps,
        fingerprint=digest(array.fingerprint for array in (*arrays, *eval_arrays)),
        tokenizer=tokenizer,
    )


def _train_parts(
    config: TextFields,
    arrays: Sequence[TokenArray],
    held: np.ndarray,
    tokenizer: Tokenizer,
    seed: int,
) -> list[PackedRows]:
    """Returns the rows of each path without held-out documents, shuffled by the seed."""
    parts = []
    for index, array in enumerate(arrays):
        documents = np.flatnonzero(~is_in(array.hashes, held))
        scores = mix(array.hashes[documents], derive_seed(seed, "documents", index))
        order = np.argsort(scores, kind="stable")
        parts.append(PackedRows(array, documents[order], config.sequence_length, tokenizer))
    _check_enough(config, parts)
    return parts


def _eval_parts(
    config: TextFields, arrays: Sequence[TokenArray], held: np.ndarray, tokenizer: Tokenizer
) -> list[PackedRows]:
    """Returns the rows of the held-out documents of each path that has some."""
    chosen = [(array, np.flatnonzero(is_in(array.hashes, held))) for array in arrays]
    return [
        PackedRows(array, documents, config.sequence_length, tokenizer)
        for array, documents in chosen
        if len(documents)
    ]


def _endless_mixture(
    parts: Sequence[PackedRows], weights: tuple[float, ...] | None, seed: int
) -> Examples:
    import grain

    endless = [
        grain.MapDataset.source(part).shuffle(seed=derive_seed(seed, "rows", index)).repeat()
        for index, part in enumerate(parts)
    ]
    if len(endless) == 1:
        return endless[0]
    return grain.MapDataset.mix(endless, weights=weights or [len(part) for part in parts])


def _sources(config: TextFields) -> tuple[list[TextSource], list[TextSource]]:
    sources = open_sources(config, config.path, "data.path")
    if config.eval_path is None:
        return sources, []
    return sources, open_sources(config, config.eval_path, "data.eval_path")


def _tokenizer(
    config: TextFields, sources: Sequence[TextSource], eval_sources: Sequence[TextSource]
) -> Tokenizer:
    if config.tokenizer == "bytes":
        return BytesTokenizer()
    if config.tokenizer != "bpe":
        return read_tokenizer(tokenizer_file(config.tokenizer), config.end_of_text)

    def build(directory: Path) -> None:
        texts = _sample(config, sources, eval_sources)
        train_bpe(texts, config.vocab_size).save(directory / _TOKENIZER_FILE)

    split = [source.key() for source in eval_sources] or config.eval_fraction
    keys = [source.key() for source in sources]
    key = digest([FORMAT, keys, config.weights, split, config.vocab_size, SAMPLE_BYTES])
    task = f"training a tokenizer of {config.vocab_size:,} entries"
    return read_tokenizer(cached("tokenizers", key, build, task=task) / _TOKENIZER_FILE)


def _sample(
    config: TextFields, sources: Sequence[TextSource], eval_sources: Sequence[TextSource]
) -> Iterator[str]:
    """Yields training documents of `SAMPLE_BYTES` in total, from each source by its weight."""
    indices = [_index(source) for source in sources]
    evals = [_index(source)[0] for source in eval_sources]
    held = union(evals or [held_out(*index, config.eval_fraction) for index in indices])
    weights = config.weights or [float(sizes.sum()) for _, sizes in indices]
    for source, (hashes, sizes), weight in zip(sources, indices, weights, strict=True):
        share = int(SAMPLE_BYTES * weight / max(sum(weights), 1))
        allowed = _allowed_bytes(hashes, np.where(is_in(hashes, held), 0, sizes), share)
        for text, limit in zip(source.documents(), allowed, strict=True):
            if limit:
                yield text.encode()[:limit].decode(errors="ignore")


def _allowed_bytes(hashes: np.ndarray, sizes: np.ndarray, total: int) -> np.ndarray:
    """Returns the bytes to take from each document, in hash order, for a sum of `total`."""
    order = np.argsort(mix(hashes, _SAMPLE_SEED), kind="stable")
    before = np.cumsum(sizes[order]) - sizes[order]
    allowed = np.zeros(len(sizes), np.int64)
    allowed[order] = np.clip(total - before, 0, sizes[order])
    return allowed


def _index(source: TextSource) -> tuple[np.ndarray, np.ndarray]:
    """Reads a source and returns the hash and the size in bytes of each document."""
    pairs = [
        (content_hash(content), len(content)) for content in map(str.encode, source.documents())
    ]
    hashes = np.array([pair[0] for pair in pairs], np.uint64)
    return hashes, np.array([pair[1] for pair in pairs], np.int64)


def _held_out(
    config: TextFields, arrays: Sequence[TokenArray], eval_arrays: Sequence[TokenArray]
) -> np.ndarray:
    if eval_arrays:
        return union([array.hashes for array in eval_arrays])
    parts = [held_out(array.hashes, array.document_bytes, config.eval_fraction) for array in arrays]
    held = union(parts)
    if config.eval_fraction and not len(held):
        raise DataError(
            f"data.path holds a single document, so none can be held out for evaluation: "
            f"{', '.join(as_paths(config.path))}.\n"
            f"  Set data.separator to the text between its documents, data.eval_path to other "
            f"text, or data.eval_fraction=0."
        )
    return held


def _open_nonempty(source: TextSource, tokenizer: Tokenizer, key: str) -> TokenArray:
    array = open_tokens(source, tokenizer)
    if not len(array.hashes):
        raise DataError(
            f"{key}: {source.path!r} holds no text ({len(source.files)} files, all empty).\n"
            f"  Give a path that holds text."
        )
    return array


def _check_enough(config: TextFields, parts: Sequence[PackedRows]) -> None:
    faults = [
        f"data.path: {path!r} has {part.num_targets:,} tokens to train on, fewer than one row of "
        f"{config.sequence_length:,}.\n"
        f"  Give more text, or set data.sequence_length to {part.num_targets} or less."
        if part.num_targets
        else f"data.path: all documents of {path!r} are held out, and none is left to train on.\n"
        f"  Give more text, or text that is not in data.eval_path."
        for path, part in zip(as_paths(config.path), parts, strict=True)
        if part.num_targets < config.sequence_length
    ]
    if faults:
        raise DataError("\n".join(faults))
