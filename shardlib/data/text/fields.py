"""The keys of text data."""

from typing import ClassVar, Literal

from shardlib.config import configclass
from shardlib.data.config import DataConfig, as_paths, eval_faults, path_faults

DEFAULT_VOCAB_SIZE = 1024
# 256 byte values and the end-of-text token.
SMALLEST_VOCAB_SIZE = 257


@configclass
class TextFields(DataConfig):
    """The fields of all data of text, which the reading of text takes."""

    gives: ClassVar[str] = "text"
    decides: ClassVar[tuple[str, ...]] = ("vocab_size",)

    kind: str = ""
    """Kind of the data."""
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
    of a `tokenizer.json` or of the folder that holds it."""
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
        faults = path_faults(self.path, self.eval_path) + eval_faults(self)
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
class SpanFields(TextFields):
    """The fields of `SpanData`."""

    gives: ClassVar[str] = "pairs"

    kind: Literal["span_corruption"] = "span_corruption"
    """Text with spans left out, for an encoder, and the spans to fill in, for a decoder.
    `sequence_length` counts the tokens of the encoder, a sentinel for each span among them."""
    noise_density: float = 0.15
    """Share of the tokens that sentinels replace, in (0, 1)."""
    mean_span_length: float = 3.0
    """Mean number of tokens of a span, 1 or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        faults = []
        if self.sequence_length < 3:
            faults.append(f"sequence_length must be at least 3, not {self.sequence_length}")
        if not 0 < self.noise_density < 1:
            faults.append(f"noise_density must lie in (0, 1), not {self.noise_density}")
        if not 1 <= self.mean_span_length < float("inf"):
            faults.append(f"mean_span_length must be at least 1, not {self.mean_span_length}")
        if faults:
            raise ValueError("; ".join(faults))
