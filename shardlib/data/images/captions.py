"""Images and captions: glyphs with their Unicode names, or a folder with a table of captions."""

import dataclasses
import functools
import logging
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardlib.batch_kinds import DataSpec
from shardlib.data import records
from shardlib.data.corpus import BUILTIN
from shardlib.data.hashing import content_hash, digest
from shardlib.data.images.augment import Transform
from shardlib.data.images.fields import CaptionFields
from shardlib.data.images.folders import EvalExamples, ImageSet, TrainExamples, decode, held_apart
from shardlib.data.loader import Examples, MapSource
from shardlib.data.missing import missing
from shardlib.data.tokenizer import (
    BytesTokenizer,
    JsonTokenizer,
    Tokenizer,
    read_tokenizer,
    tokenizer_file,
)
from shardlib.errors import DataError, did_you_mean, require

_LOG = logging.getLogger(__name__)
GLYPHS = "builtin:glyphs"
_TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_EXTRA = "images"
_GLYPH_SIZE = 32
_PART = 4096
"""Captions that are encoded at once."""


@dataclasses.dataclass(frozen=True)
class Captioned:
    """Images whose labels are the numbers of their captions."""

    images: ImageSet
    captions: tuple[str, ...]


class PairExamples:
    """Examples of images with the tokens of their captions in place of labels."""

    def __init__(self, examples: Examples, tokens: np.ndarray, segment_ids: np.ndarray):
        self._examples, self._tokens, self._segments = examples, tokens, segment_ids

    def __getitem__(self, position: int) -> dict[str, np.ndarray]:
        row = self._examples[position]
        number = int(row["labels"])
        pair = {"tokens": self._tokens[number], "segment_ids": self._segments[number]}
        return {"images": row["images"], **pair}


def open_captions(
    config: CaptionFields, *, global_batch: int, seed: int, split: Literal["train", "eval"]
) -> MapSource:
    """Returns the source of a config; see `open_data`."""
    require("PIL", _EXTRA, "data.kind captioned_images")
    size, _, channels = shape = caption_shape(config)
    transform, tokenizer = Transform(config, size, channels), find_tokenizer(config)
    parts = _sets(config)
    chosen = parts[split == "eval"]
    if split == "train":
        images = functools.partial(TrainExamples, chosen.images, transform, seed)
    else:
        config.check_held_out()
        images = functools.partial(EvalExamples, chosen.images, transform)
    rows = _encoded(chosen.captions, tokenizer, config.sequence_length)
    return MapSource(
        lambda: PairExamples(images(), *rows),
        spec=DataSpec(
            tokenizer.vocab_size,
            config.sequence_length,
            image_shape=shape,
            end_token=tokenizer.eot,
        ),
        global_batch=global_batch,
        padding=no_pair(config),
        num_examples=None if split == "train" else len(chosen.images.labels),
        max_steps=None if split == "train" else config.eval_steps,
        fingerprint=digest(
            (part.captions, part.images.hashes.tobytes(), part.images.labels.tobytes())
            for part in parts
        ),
        tokenizer=tokenizer,
        threads=config.threads,
    )


def no_pair(config: CaptionFields) -> dict[str, np.ndarray]:
    """Returns a padding example."""
    texts = np.zeros(config.sequence_length, np.int32)
    images = np.zeros(caption_shape(config), np.float32)
    return {"images": images, "tokens": texts, "segment_ids": texts}


def caption_shape(config: CaptionFields) -> tuple[int, int, int]:
    """Returns the height, width and channels of the images of a config without reading them."""
    size, channels = (_GLYPH_SIZE, 1) if config.path == GLYPHS else (224, 3)
    size = config.image_size or size
    return size, size, config.channels or channels


def find_tokenizer(config: CaptionFields) -> Tokenizer:
    """Returns the tokenizer of a config.

    Raises:
        DataError: If its file is missing or malformed.
    """
    if config.tokenizer == "bytes":
        return BytesTokenizer()
    return read_tokenizer(tokenizer_file(config.tokenizer))


def _encoded(
    captions: Sequence[str], tokenizer: Tokenizer, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of captions and their segment ids, int32 [captions, length]. The token
    that ends a text follows each caption, and others precede it if the tokenizer's file says so, as
    CLIP's does."""
    tokens, segments = (np.zeros((len(captions), length), np.int32) for _ in range(2))
    if isinstance(tokenizer, JsonTokenizer) and tokenizer.num_framing_tokens(1):
        encode = tokenizer.framed
    else:
        encode = tokenizer.encode_documents
    # An encoding takes far more memory than its tokens.
    parts = (captions[at : at + _PART] for at in range(0, len(captions), _PART))
    cut = 0
    for number, encoded in enumerate(one for part in parts for one in encode(part)):
        ids = list(encoded.ids)
        if ids[-1:] == [tokenizer.eot]:
            ids.pop()
        cut += len(ids) > length - 1
        ids = [*ids[: length - 1], tokenizer.eot]
        tokens[number, : len(ids)], segments[number, : len(ids)] = ids, 1
    if cut:
        _LOG.warning("%d of %d captions are cut to %d tokens", cut, len(captions), length - 1)
    return tokens, segments


def _sets(config: CaptionFields) -> tuple[Captioned, Captioned]:
    """Returns the pairs to train on and the held-out pairs."""
    pairs = _open(config, config.path)
    if config.eval_path is not None:
        return pairs, _open(config, config.eval_path)
    train, evaluation = held_apart(pairs.images, config)
    return Captioned(train, pairs.captions), Captioned(evaluation, pairs.captions)


def _open(config: CaptionFields, path: str) -> Captioned:
    if path == GLYPHS:
        return _glyphs()
    if path.startswith(BUILTIN):
        raise DataError(
            f"no embedded set of captioned images is called {path!r}."
            f"{did_you_mean(path, [GLYPHS])}\n  Choose {GLYPHS}, or give a folder."
        )
    place = Path(path).expanduser()
    if not place.is_dir():
        raise missing(path) if not place.exists() else DataError(f"{path!r} is a file.\n{_FIX}")
    tables = [name for name in _TABLES if (place / name).is_file()]
    if not tables:
        raise DataError(f"{path!r} has no table of captions.\n{_FIX}")
    if len(tables) > 1:
        raise DataError(
            f"{path!r} has {len(tables)} tables of captions: {', '.join(tables)}.\n"
            "  Remove all but one."
        )
    table = place / tables[0]

    def read(where: str, example: dict[str, Any]) -> tuple[str, str]:
        fix = "Name the field in data.caption_field; file_name is relative to the folder."
        name, caption = (records.text(example, n, fix) for n in ("file_name", config.caption_field))
        if not (place / name).is_file():
            raise DataError(f"the file {name!r} does not exist.\n  Add it, or remove the row.")
        return name, caption

    found = records.read_all(records.examples(str(table)), read)
    if not found:
        raise DataError(f"{table} is empty.\n{_FIX}")
    names, captions = zip(*found, strict=True)
    return _captioned(names, captions, lambda index: decode(place / names[index]))


_FIX = (
    f"  Give a folder with images and {', '.join(_TABLES)}: the fields file_name and text, as in "
    "imageHugging Face folder datasets."
)


def _captioned(keys: Sequence[str], captions: Sequence[str], load: Any) -> Captioned:
    hashes = np.array([content_hash(key.encode()) for key in keys], np.uint64)
    labels = np.arange(len(keys), dtype=np.int32)
    return Captioned(ImageSet((), labels, hashes, load), tuple(captions))


def _glyphs() -> Captioned:
    """Returns the named glyphs of the font DejaVu Sans, which comes with matplotlib."""
    matplotlib = require("matplotlib", _EXTRA, f"data.path {GLYPHS}")
    fonts = require("matplotlib.ft2font", _EXTRA, f"data.path {GLYPHS}")
    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    codes = sorted(fonts.FT2Font(str(file)).get_charmap())
    # Of controls, spaces and marks there is nothing to see by themselves.
    seen = [char for char in map(chr, codes) if unicodedata.category(char)[0] in "LNPS"]
    chars = [char for char in seen if unicodedata.name(char, "")]
    names = [unicodedata.name(char).lower() for char in chars]
    draw = functools.partial(_drawn, str(file))
    return _captioned(chars, names, lambda index: draw(chars[index]))


@functools.lru_cache(1)
def _font(file: str) -> Any:
    from PIL import ImageFont

    return ImageFont.truetype(file, 3 * _GLYPH_SIZE // 4)


def _drawn(file: str, char: str) -> Any:
    """Returns a glyph in white on black, [32, 32] grey levels."""
    from PIL import Image, ImageDraw

    image = Image.new("L", (_GLYPH_SIZE, _GLYPH_SIZE))
    middle = (_GLYPH_SIZE / 2, _GLYPH_SIZE / 2)
    ImageDraw.Draw(image).text(middle, char, fill=255, font=_font(file), anchor="mm")
    return image
