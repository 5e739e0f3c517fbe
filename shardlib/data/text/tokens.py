"""Tokens of a text source, computed once and memory-mapped from the cache."""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from shardlib.data.cache import cached, read_array, reading
from shardlib.data.hashing import content_hash, digest
from shardlib.data.text.sources import TextSource
from shardlib.data.tokenizer import Encoded, Tokenizer
from shardlib.errors import DataError

# Part of every cache key; increment it when the layout or meaning of cached data changes.
FORMAT = 1
_BATCH_CHARACTERS = 1 << 22


@dataclass(frozen=True)
class TokenArray:
    """All documents of one source, concatenated without tokens between them."""

    tokens: np.ndarray
    """`[num_tokens] uint16` (`uint32` for large vocabularies), memory-mapped."""
    num_bytes: np.ndarray | None
    """Text bytes of each token, `[num_tokens] uint32`, memory-mapped. None if the tokenizer has
    `token_num_bytes`."""
    offsets: np.ndarray
    """Document starts in `tokens`, then the end of the last one: `[num_documents + 1] int64`."""
    hashes: np.ndarray
    """Hash of the text of each document, `[num_documents] uint64`."""
    document_bytes: np.ndarray
    """Length of each document in UTF-8, `[num_documents] int64`."""
    fingerprint: str
    """A digest that is equal for equal documents in equal order under the same tokenizer."""


def open_tokens(source: TextSource, tokenizer: Tokenizer) -> TokenArray:
    """Returns the tokens of a source; they are computed if they are not in the cache.

    Raises:
        DataError: If a file of the source or the tokenizer is malformed, or the cache is damaged
            or not writable.
    """

    key = digest([FORMAT, source.key(), tokenizer.fingerprint])
    build = functools.partial(_write, source, tokenizer)
    return _read(cached("tokens", key, build, task=f"tokenising {source.path}"))


def _write(source: TextSource, tokenizer: Tokenizer, directory: Path) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    counts, hashes, sizes = [], [], []
    table = tokenizer.token_num_bytes
    with (directory / "tokens").open("wb") as tokens, (directory / "num_bytes").open("wb") as spans:
        for texts in _batches(source.documents()):
            contents = [text.encode() for text in texts]
            hashes += map(content_hash, contents)
            sizes += map(len, contents)
            for encoded, content in zip(tokenizer.encode_documents(texts), contents, strict=True):
                _append(tokens, encoded.ids, dtype)
                counts.append(len(encoded.ids))
                _append_num_bytes(spans, encoded, table, len(content))
    offsets = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))])
    np.save(directory / "offsets.npy", offsets.astype(np.int64))
    np.save(directory / "hashes.npy", np.array(hashes, np.uint64))
    np.save(directory / "document_bytes.npy", np.array(sizes, np.int64))
    meta = {
        "dtype": dtype.name,
        "has_num_bytes": table is None,
        "fingerprint": digest([tuple(hashes), tokenizer.fingerprint]),
    }
    (directory / "meta.json").write_text(json.dumps(meta))


def _append(file: IO[bytes], values: np.ndarray, dtype: np.dtype) -> None:
    file.write(values.astype(dtype).tobytes())


def _append_num_bytes(
    file: IO[bytes], encoded: Encoded, table: np.ndarray | None, expected: int
) -> None:
    if table is not None:
        if (counted := int(table[encoded.ids].sum())) != expected:
            raise DataError(
                f"the tokens of a document of {expected:,} bytes stand for {counted:,} bytes.\n"
                "  Repair the tokenizer.json: each id must map to one token."
            )
    elif encoded.num_bytes is not None:
        _append(file, encoded.num_bytes, np.dtype(np.uint32))


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read(directory: Path) -> TokenArray:
    with reading(directory):
        meta = json.loads((directory / "meta.json").read_text())
        array = TokenArray(
            tokens=_map(directory / "tokens", meta["dtype"]),
            num_bytes=_map(directory / "num_bytes", "uint32") if meta["has_num_bytes"] else None,
            offsets=read_array(directory / "offsets.npy"),
            hashes=read_array(directory / "hashes.npy"),
            document_bytes=read_array(directory / "document_bytes.npy"),
            fingerprint=meta["fingerprint"],
        )
        expected = array.offsets[-1]
        for name, values in (("tokens", array.tokens), ("num_bytes", array.num_bytes)):
            if values is not None and len(values) != expected:
                raise ValueError(f"the file {name} holds {len(values):,} of {expected:,}")
        return array


def _map(file: Path, dtype: str) -> np.ndarray:
    if not file.stat().st_size:  # An empty file cannot be mapped.
        return np.zeros(0, dtype)
    return np.memmap(file, dtype=dtype, mode="r")
