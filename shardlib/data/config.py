"""Data configs: sources, splitting into examples, and held-out data."""

from typing import Literal

from shardlib.config import configclass
from shardlib.errors import DataError

DEFAULT_VOCAB_SIZE = 1024
# 256 byte values and the end-of-text token.
SMALLEST_VOCAB_SIZE = 257


@configclass
class TextData:
    """Text, tokenised once and packed into rows of equal length."""

    kind: Literal["text"] = "text"
    """Text for training a language model."""
    path: str | tuple[str, ...] = "builtin:python"
    """Location of the text: a file (`.jsonl` and `.jsonl.gz`: one JSON object per line; others:
    plain UTF-8 text, also as `.gz`), a directory (its `.txt`, `.md` and `.jsonl` files, recursively
    and without hidden files), a glob (`corpus/**/*.py`), or `builtin:python`, the source files of
    Python's standard library. Several paths make a mixture."""
    weights: tuple[float, ...] | None = None
    """Share of the rows from each path, accurate to 1%. Unset: proportional to its rows."""
    text_field: str = "text"
    """The field of a JSONL object that holds the text."""
    separator: str | None = None
    """Text between two documents of one plain-text file. Unset: each file is one document."""
    sequence_length: int = 256
    """Tokens in one row."""
    tokenizer: str = "bpe"
    """`bpe` (byte-level BPE, trained on a 2 MB sample of the training text), `bytes`, or the path
    of a `tokenizer.json`."""
    vocab_size: int = DEFAULT_VOCAB_SIZE
    """Entries of a `bpe` tokenizer. It has fewer if the text has too few frequent pairs."""
    end_of_text: str | None = None
    """The token of a `tokenizer.json` between documents. Unset: `<|endoftext|>` or another usual
    name in its vocabulary."""
    eval_fraction: float = 0.01
    """Share of the bytes of each path held out from training, in whole documents chosen by a hash
    of their content. Unused if `eval_path` is set."""
    eval_path: str | tuple[str, ...] | None = None
    """Location of the held-out text. Documents of `path` that equal one of its documents are
    excluded from training."""
    eval_steps: int | None = None
    """Maximum batches in one evaluation, drawn from all held-out text. Unset: all of it."""

    def __post_init__(self) -> None:
        faults = _path_faults(self.path, self.eval_path) + _eval_faults(self)
        faults += self._weight_faults()
        if self.sequence_length < 1:
            faults.append(f"sequence_length must be at least 1, not {self.sequence_length}")
        if self.tokenizer == "bpe" and self.vocab_size < SMALLEST_VOCAB_SIZE:
            faults.append(
                f"vocab_size must be at least {SMALLEST_VOCAB_SIZE} (256 byte values and the "
                f"end-of-text token), not {self.vocab_size}"
            )
        if self.tokenizer != "bpe" and self.vocab_size != DEFAULT_VOCAB_SIZE:
            faults.append(
                f"vocab_size is for tokenizer 'bpe'; tokenizer {self.tokenizer!r} has its own"
            )
        if self.tokenizer in ("bpe", "bytes") and self.end_of_text is not None:
            faults.append(f"end_of_text is for a tokenizer.json, not for {self.tokenizer!r}")
        if self.separator == "":
            faults.append("separator must not be empty")
        if faults:
            raise ValueError("; ".join(faults))

    def _weight_faults(self) -> list[str]:
        if self.weights is None:
            return []
        count = len(as_paths(self.path))
        if len(self.weights) != count:
            return [f"weights has {len(self.weights)} entries but path has {count}"]
        if not all(0 < weight < float("inf") for weight in self.weights):
            return [f"weights must all be positive numbers, not {self.weights}"]
        return []


@configclass
class ImageData:
    """Images and their labels for training a classifier."""

    kind: Literal["images"] = "images"
    """Images with one label each."""
    path: str = "builtin:digits"
    """A directory with one subdirectory of images per class, or `builtin:digits`, the 1,797 images
    of 8x8 pixels that come with scikit-learn."""
    image_size: int | None = None
    """Height and width in pixels. Unset: 8 for the digits, 224 for a directory."""
    channels: Literal[1, 3] | None = None
    """1 for grey, 3 for RGB. Unset: 1 for the digits, 3 for a directory."""
    augment: Literal["none", "shift", "resized_crop"] = "none"
    """Geometric augmentation of training images: `none`, `shift` (padding by an eighth on each
    side, then a random crop) or `resized_crop` (a random crop of 8% to 100% of the area, then a
    resize)."""
    flip: bool = False
    """Whether training images are flipped left to right with probability one half."""
    center_crop: float = 1.0
    """Side of the center crop as a fraction of the shorter side, used without a random crop."""
    mean: tuple[float, ...] = (0.5,)
    """Subtracted from pixels in [0, 1]: one number, or one per channel."""
    std: tuple[float, ...] = (0.5,)
    """Divisor of the result: one number, or one per channel."""
    eval_fraction: float = 0.1
    """Share of the images held out from training. Unused if `eval_path` is set."""
    eval_path: str | None = None
    """A directory of held-out images of the same classes."""
    eval_steps: int | None = None
    """Maximum batches in one evaluation, drawn from all classes. Unset: all held-out images."""
    threads: int = 8
    """Number of images decoded in parallel."""

    def __post_init__(self) -> None:
        faults = _path_faults(self.path, self.eval_path) + _eval_faults(self)
        if self.image_size is not None and self.image_size < 1:
            faults.append(f"image_size must be at least 1, not {self.image_size}")
        if not 0 < self.center_crop <= 1:
            faults.append(f"center_crop must lie in (0, 1], not {self.center_crop}")
        if self.threads < 1:
            faults.append(f"threads must be at least 1, not {self.threads}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, 3):
                faults.append(f"{name} must hold 1 or 3 numbers, not {len(values)}")
        if not all(value > 0 for value in self.std):
            faults.append(f"std must be positive, not {self.std}")
        if faults:
            raise ValueError("; ".join(faults))


def as_paths(path: str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns one or several paths as a tuple."""
    return (path,) if isinstance(path, str) else path


def _path_faults(path: str | tuple[str, ...], eval_path: str | tuple[str, ...] | None) -> list[str]:
    named = [("path", path)] + ([] if eval_path is None else [("eval_path", eval_path)])
    return [
        f"{name} must name at least one place"
        for name, value in named
        if not value or not all(as_paths(value))
    ]


def _eval_faults(config: TextData | ImageData) -> list[str]:
    faults = []
    if not 0 <= config.eval_fraction < 1:
        faults.append(f"eval_fraction must lie in [0, 1), not {config.eval_fraction}")
    if config.eval_steps is not None and config.eval_steps < 1:
        faults.append(f"eval_steps must be at least 1, not {config.eval_steps}")
    return faults


def check_held_out(config: TextData | ImageData) -> None:
    """Raises `DataError` for a config without held-out data."""
    if config.eval_path is None and config.eval_fraction == 0:
        what = "held-out text" if isinstance(config, TextData) else "held-out images"
        raise DataError(
            f"the data has no {what}: data.eval_fraction is 0 and data.eval_path is not set.\n"
            "  Set one of them, or do not evaluate."
        )
