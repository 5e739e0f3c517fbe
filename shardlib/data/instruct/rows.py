"""The source of a config for fine-tuning: encoded examples, split and packed rows."""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from shardlib.data import records
from shardlib.data.cache import cached, read_array, reading
from shardlib.data.config import as_paths
from shardlib.data.hashing import content_hash, derive_seed, digest, mix
from shardlib.data.instruct.encode import encoder, load_tokenizer
from shardlib.data.instruct.fields import ExampleFields, PairFields
from shardlib.data.instruct.packing import Encodings, ExampleRows
from shardlib.data.instruct.pairs import PairRows, pair_sizes
from shardlib.data.loader import MapSource, in_order
from shardlib.data.split import held_out, is_in
from shardlib.data.tokenizer import Tokenizer
from shardlib.errors import DataError

_LOG = logging.getLogger(__name__)
# Part of the cache key; increment it when the layout or meaning of cached data changes.
_FORMAT = 1
_EVAL_SEED = 1


def open_examples(
    config: ExampleFields, *, global_batch: int, seed: int, split: Literal["train", "eval"]
) -> MapSource:
    """Returns the source of a config; see `open_data`."""
    tokenizer = load_tokenizer(config)
    ours = _encodings(config, tokenizer, as_paths(config.path), "data.path")
    sizes = np.diff(ours.offsets)
    evals = ours
    if config.eval_path is not None:
        evals = _encodings(config, tokenizer, as_paths(config.eval_path), "data.eval_path")
        held = np.unique(evals.hashes)
    else:
        held = held_out(ours.hashes, sizes, config.eval_fraction)
    if split == "train":
        chosen = np.flatnonzero(~is_in(ours.hashes, held))
        rows = _rows(config, ours, chosen, derive_seed(seed, "examples"), "train on")
    else:
        config.check_held_out()
        chosen = np.flatnonzero(is_in(evals.hashes, held))
        rows = _rows(config, evals, chosen, _EVAL_SEED, "evaluate on")
    return MapSource(
        in_order(rows, seed, split),
        spec=dataclasses.replace(config.spec(), vocab_size=tokenizer.vocab_size),
        global_batch=global_batch,
        padding=config.padding(),
        num_examples=None if split == "train" else len(rows),
        max_steps=None if split == "train" else config.eval_steps,
        fingerprint=digest((tuple(ours.hashes.tolist()), tuple(held.tolist()), config.too_long)),
        tokenizer=tokenizer,
    )


def _rows(
    config: ExampleFields, encodings: Encodings, chosen: np.ndarray, seed: int, purpose: str
) -> ExampleRows | PairRows:
    """Returns the rows of the chosen examples, shuffled by the seed."""
    if isinstance(config, PairFields):
        return _pair_rows(config, encodings, chosen, seed, purpose)
    length = config.sequence_length
    cut = np.diff(encodings.offsets)[chosen] > length + 1
    if cut.any():
        starts = encodings.offsets[chosen]
        learned = np.array(
            [encodings.mask[start + 1 : start + length + 1].any() for start in starts[cut]]
        )
        _LOG.warning(
            "%d of %d examples to %s are cut to a row of %d tokens; %d of them are left out, since "
            "their first %d tokens hold nothing to learn",
            *(cut.sum(), len(chosen), purpose, length, (~learned).sum(), length),
        )
        chosen = np.delete(chosen, np.flatnonzero(cut)[~learned])
    return ExampleRows(encodings, _shuffled(encodings, chosen, seed, purpose), length)


def _pair_rows(
    config: PairFields, encodings: Encodings, chosen: np.ndarray, seed: int, purpose: str
) -> PairRows:
    lengths = config.sequence_length, config.target_length
    inputs, answers = (sizes[chosen] for sizes in pair_sizes(encodings))
    if cut := int(((inputs > lengths[0]) | (answers > lengths[1])).sum()):
        _LOG.warning(
            "%d of %d examples to %s are cut to %d tokens of the prompt and %d of the completion",
            *(cut, len(chosen), purpose, *lengths),
        )
    return PairRows(encodings, _shuffled(encodings, chosen, seed, purpose), *lengths)


def _shuffled(encodings: Encodings, chosen: np.ndarray, seed: int, purpose: str) -> np.ndarray:
    if not len(chosen):
        raise DataError(
            f"no example is left to {purpose}.\n"
            "  Give more examples, another data.eval_fraction, or a longer data.sequence_length."
        )
    return chosen[np.argsort(mix(encodings.hashes[chosen], seed), kind="stable")]


def _encodings(
    config: ExampleFields, tokenizer: Tokenizer, paths: Sequence[str], name: str
) -> Encodings:
    way, _ = encoder(config, tokenizer)
    keys = [records.key(path) for path in paths]
    build = functools.partial(_write, config, tokenizer, paths)
    key = digest((_FORMAT, keys, way, tokenizer.fingerprint))
    directory = cached("examples", key, build, task=f"encoding {', '.join(paths)}")
    with reading(directory):
        encodings = Encodings(
            np.load(directory / "tokens.npy", mmap_mode="r", allow_pickle=False),
            np.load(directory / "mask.npy", mmap_mode="r", allow_pickle=False),
            read_array(directory / "offsets.npy"),
            read_array(directory / "hashes.npy"),
        )
    if config.too_long == "refuse":
        _check_fit(config, encodings, name)
    return encodings


def _check_fit(config: ExampleFields, encodings: Encodings, name: str) -> None:
    if isinstance(config, PairFields):
        _check_pairs_fit(config, encodings, name)
        return
    sizes = np.diff(encodings.offsets)
    long = int((sizes > config.sequence_length + 1).sum())
    if long:
        raise DataError(
            f"{name}: {long:,} of {len(sizes):,} examples are longer than a row of "
            f"{config.sequence_length:,} tokens; the longest needs {sizes.max() - 1:,}.\n"
            "  Set data.sequence_length to that, or data.too_long=truncate to cut them."
        )


def _check_pairs_fit(config: PairFields, encodings: Encodings, name: str) -> None:
    lengths = {"sequence_length": "prompt", "target_length": "completion"}
    faults, fixes = [], []
    for (key, part), sizes in zip(lengths.items(), pair_sizes(encodings), strict=True):
        limit, longest = getattr(config, key), sizes.max()
        if longest > limit:
            faults.append(
                f"{name}: {(sizes > limit).sum():,} of {len(sizes):,} examples have a {part} "
                f"longer than {limit:,} tokens; the longest has {longest:,}."
            )
            fixes.append(f"data.{key}={longest}")
    if faults:
        fix = f"  Set {' and '.join(fixes)}, or data.too_long=truncate to cut them."
        raise DataError("\n".join([*faults, fix]))


def _write(
    config: ExampleFields, tokenizer: Tokenizer, paths: Sequence[str], directory: Path
) -> None:
    _, encode = encoder(config, tokenizer)
    tokens, masks, hashes = [], [], []
    for path in paths:
        for where, example in records.examples(path):
            try:
                ids, mask = encode(example)
            except DataError as fault:
                raise DataError(f"{where}: {fault}") from None
            if not mask[1:].any():
                raise DataError(
                    f"{where}: the example has no token to learn.\n"
                    "  Give it an assistant's message or a completion, or remove it."
                )
            tokens.append(ids.astype(np.uint32))
            masks.append(mask)
            hashes.append(content_hash(ids.astype(np.uint32).tobytes() + mask.tobytes()))
    if not tokens:
        raise DataError(f"{', '.join(paths)} holds no example.\n  Give a path that holds some.")
    np.save(directory / "tokens.npy", np.concatenate(tokens))
    np.save(directory / "mask.npy", np.concatenate(masks))
    np.save(directory / "offsets.npy", np.cumsum([0, *map(len, tokens)], dtype=np.int64))
    np.save(directory / "hashes.npy", np.array(hashes, np.uint64))
