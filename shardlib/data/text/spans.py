"""Span corruption: text with short spans left out, and the spans to fill in.

Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", sections 3.1.4 and 3.3.4.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from shardlib.data.hashing import derive_seed, digest
from shardlib.data.loader import MapSource
from shardlib.data.text.fields import SpanFields
from shardlib.data.text.rows import open_text
from shardlib.data.tokenizer import Tokenizer
from shardlib.errors import DataError
from shardlib.registry import DataSpec

SENTINEL = "<extra_id_{}>"
"""Names of the tokens that stand for spans in published tokenizers."""
_NAMED = re.compile(r"<extra_id_(\d+)>")
_EVAL_SEED = 1


@dataclasses.dataclass(frozen=True)
class SpanSizes:
    """The numbers of tokens of a row."""

    text: int
    """Tokens of text before corruption."""
    noise: int
    """Tokens that are left out."""
    spans: int
    """Spans that they form."""

    @classmethod
    def of(cls, text: int, density: float, mean_length: float) -> "SpanSizes":
        """Returns the sizes for some tokens of text, at least 2."""
        noise = min(max(round(text * density), 1), text - 1)
        spans = min(max(round(noise / mean_length), 1), text - noise)
        return cls(text, noise, spans)

    @property
    def inputs(self) -> int:
        """Tokens of the corrupted text: a sentinel for each span, and the end of text."""
        return self.text - self.noise + self.spans + 1

    @property
    def targets(self) -> int:
        """Tokens of the spans, each after its sentinel, and the end of text."""
        return self.noise + self.spans + 1


@functools.cache
def fitting(inputs: int, density: float, mean_length: float) -> SpanSizes:
    """Returns the sizes of the longest text whose corrupted form has at most `inputs` tokens, at
    least 3."""
    text = 2
    while (longer := SpanSizes.of(text + 1, density, mean_length)).inputs <= inputs:
        text = longer.text
    return SpanSizes.of(text, density, mean_length)


def sizes_of(config: SpanFields) -> SpanSizes:
    """Returns the sizes of the rows of a config."""
    return fitting(config.sequence_length, config.noise_density, config.mean_span_length)


def sentinels(config: SpanFields, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the ids of the spans of a row, [spans] int32: sentinels of the tokenizer, or the
    first ids beyond its vocabulary if it has none.

    Raises:
        DataError: If the tokenizer has fewer than a row has spans.
    """
    count = sizes_of(config).spans
    known = tokenizer.added_tokens
    if SENTINEL.format(0) not in known:
        return np.arange(count, dtype=np.int32) + np.int32(tokenizer.vocab_size)
    missing = [n for n in range(count) if SENTINEL.format(n) not in known]
    if missing:
        raise DataError(
            f"a row of data.sequence_length={config.sequence_length} tokens has {count} spans, but "
            f"the tokenizer has {missing[0]} tokens {SENTINEL.format('N')}.\n"
            "  Set a smaller data.sequence_length, or a greater data.mean_span_length."
        )
    return np.array([known[SENTINEL.format(n)] for n in range(count)], np.int32)


def prompt_tokens(config: SpanFields, prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens of a prompt with spans to fill in, written as `<extra_id_0>` and so on.

    Raises:
        DataError: If it names more spans than a row of the data has.
    """
    ids, tokens = sentinels(config, tokenizer), []
    for place, part in enumerate(_NAMED.split(prompt)):
        if place % 2 == 0:
            tokens += tokenizer.encode(part)
        elif int(part) < len(ids):
            tokens.append(int(ids[int(part)]))
        else:
            raise DataError(
                f"the prompt has the span {SENTINEL.format(part)}, but a row of the data has "
                f"{len(ids)} spans.\n  Number the spans from 0 to {len(ids) - 1}."
            )
    return [*tokens, tokenizer.eot]


def sampled_text(config: SpanFields, tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Returns the text of tokens, in which spans are written as in `prompt_tokens`."""
    names = {int(id): SENTINEL.format(n) for n, id in enumerate(sentinels(config, tokenizer))}
    # Others beyond the vocabulary of the tokenizer pad that of the model.
    known = (token for token in tokens if token in names or token < tokenizer.vocab_size)
    runs = itertools.groupby(known, key=names.get)
    return "".join(
        tokenizer.decode(run) if name is None else name * len(list(run)) for name, run in runs
    )


def empty_row(config: SpanFields) -> dict[str, np.ndarray]:
    """Returns a row of padding."""
    targets = sizes_of(config).targets
    return {
        "tokens": np.zeros(config.sequence_length, np.int32),
        "segment_ids": np.zeros(config.sequence_length, np.int32),
        "targets": np.zeros(targets, np.int32),
        "target_segment_ids": np.zeros(targets, np.int32),
    }


def open_spans(
    config: SpanFields, *, global_batch: int, seed: int, split: Literal["train", "eval"]
) -> MapSource:
    """Returns the source of a config; see `open_data`.

    Each pass over the text leaves out other spans. Evaluation always leaves out the same.
    """
    sizes = sizes_of(config)
    whole = dataclasses.replace(config, sequence_length=sizes.text)
    source = open_text(whole, global_batch=global_batch, seed=seed, split=split)
    assert source.tokenizer is not None
    ids, eot = sentinels(config, source.tokenizer), source.tokenizer.eot
    drawn = derive_seed(seed if split == "train" else _EVAL_SEED, "spans")

    def corrupt(index: int, row: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return _corrupted(config, row, ids, eot, np.random.default_rng((drawn, index)))

    options = (config.sequence_length, config.noise_density, config.mean_span_length)
    return source.mapped(
        corrupt,
        spec=DataSpec(
            vocab_size=config.vocabulary(source.tokenizer),
            sequence_length=config.sequence_length,
            target_length=sizes.targets,
        ),
        padding=empty_row(config),
        fingerprint=digest((source.fingerprint, *options)),
    )


def _corrupted(
    config: SpanFields,
    row: Mapping[str, Any],
    ids: np.ndarray,
    eot: int,
    random: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Returns a row of `SpanData` from a row of text."""
    out, text = empty_row(config), row["tokens"][row["segment_ids"] > 0]
    if len(text) < 2:
        return out
    sizes = SpanSizes.of(len(text), config.noise_density, config.mean_span_length)
    inputs, targets = corrupted(text, sizes, ids[: sizes.spans], eot, random)
    for name, ids_name, tokens in (
        ("tokens", "segment_ids", inputs),
        ("targets", "target_segment_ids", targets),
    ):
        out[name][: len(tokens)] = tokens
        out[ids_name][: len(tokens)] = 1
    return out


def corrupted(
    text: np.ndarray, sizes: SpanSizes, ids: np.ndarray, eot: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns text, `[sizes.text] int32`, with spans replaced by sentinels, `[sizes.spans] int32`,
    and the spans after their sentinels. Both end with the token `eot`.

    Kept and left-out spans alternate, a kept one first. All ways to cut the tokens of either kind
    into spans are equally likely.

    Returns:
        `[sizes.inputs] int32` and `[sizes.targets] int32`.
    """
    kept = _cut(sizes.text - sizes.noise, sizes.spans, random)
    left_out = _cut(sizes.noise, sizes.spans, random)
    pieces = np.split(text, np.cumsum(np.stack([kept, left_out], 1).ravel())[:-1])
    end = np.array([eot], np.int32)
    inputs = [part for span, id in zip(pieces[::2], ids, strict=True) for part in (span, [id])]
    targets = [part for span, id in zip(pieces[1::2], ids, strict=True) for part in ([id], span)]
    return tuple(np.concatenate([*parts, end]).astype(np.int32) for parts in (inputs, targets))  # type: ignore[return-value]


def _cut(count: int, parts: int, random: np.random.Generator) -> np.ndarray:
    """Returns the lengths, at least 1, of `parts` parts of `count` things: [parts] int64."""
    places = 1 + np.sort(random.permutation(count - 1)[: parts - 1])
    return np.diff(places, prepend=0, append=count)
