"""The keys of labelled texts and of questions."""

from typing import ClassVar, Literal

from shardlib.config import configclass
from shardlib.data.config import DataConfig, eval_faults, path_faults

TRAINED = "wordpiece"
DEFAULT_VOCAB_SIZE = 4096


@configclass
class FramedFields(DataConfig):
    """The fields that labelled texts and questions share."""

    decides: ClassVar[tuple[str, ...]] = ("vocab_size",)

    kind: str = ""
    """Kind of the data."""
    path: str | tuple[str, ...] = ""
    """Location of the examples."""
    sequence_length: int = 128
    """Tokens in one row, special tokens included."""
    tokenizer: str = TRAINED
    """`wordpiece` (as BERT's, lower case, trained on the training texts), or the path of a
    `tokenizer.json`, of a `vocab.txt` of BERT, or of the folder that holds one. It must put special
    tokens around a text."""
    vocab_size: int = DEFAULT_VOCAB_SIZE
    """Entries of a `wordpiece` tokenizer."""
    eval_fraction: float = 0.1
    """Share of the examples held out from training, in whole texts chosen by a hash of their
    content. Unused if `eval_path` is set."""
    eval_path: str | tuple[str, ...] | None = None
    """Location of the held-out examples. Examples of `path` with the text of one of them are
    excluded from training."""
    eval_steps: int | None = None
    """Maximum batches in one evaluation. Unset: all held-out examples."""

    def __post_init__(self) -> None:
        faults = path_faults(self.path, self.eval_path) + eval_faults(self) + self._faults()
        if self.sequence_length < 1:
            faults.append(f"sequence_length must be at least 1, not {self.sequence_length}")
        if self.vocab_size < 1:
            faults.append(f"vocab_size must be at least 1, not {self.vocab_size}")
        if self.tokenizer != TRAINED and self.vocab_size != DEFAULT_VOCAB_SIZE:
            faults.append(
                f"vocab_size is for tokenizer {TRAINED!r}; {self.tokenizer!r} has its own"
            )
        if faults:
            raise ValueError("; ".join(faults))

    def _faults(self) -> list[str]:
        return []


@configclass
class LabeledTextFields(FramedFields):
    """The fields of `LabeledTextData`."""

    gives: ClassVar[str] = "labeled_text"
    decides: ClassVar[tuple[str, ...]] = ("vocab_size", "num_classes")

    kind: Literal["labeled_text"] = "labeled_text"
    """Texts, or pairs of texts, with one label each."""
    path: str | tuple[str, ...] = "builtin:packages"
    """Location of the examples: a `.jsonl`, `.jsonl.gz`, `.json`, `.csv`, `.tsv` or `.parquet`
    file, a folder that `save_to_disk` of Hugging Face `datasets` wrote, or `builtin:packages`
    (docstrings of functions of Python's standard library, labelled by their package). Several paths
    are joined."""
    text_fields: tuple[str, ...] = ("text",)
    """The field of an example that holds its text, or the two fields of a pair."""
    label_field: str = "label"
    """The field that holds the label: a number from 0 on, or a name."""
    classes: tuple[str, ...] | None = None
    """Names of the classes in the order of their numbers. Unset: the labels of `path`, names in
    alphabetical order."""
    too_long: Literal["refuse", "truncate"] = "refuse"
    """What happens to texts longer than a row: `refuse` stops with their number; `truncate` cuts
    their ends off (in a pair, that of the longer text) and logs their number."""

    def _faults(self) -> list[str]:
        faults = []
        if len(self.text_fields) not in (1, 2) or not all(self.text_fields):
            faults.append(f"text_fields must name one field or two, not {list(self.text_fields)}")
        if self.classes is not None and len(set(self.classes)) < max(len(self.classes), 1):
            faults.append(f"classes must be different names, not {list(self.classes)}")
        return faults


@configclass
class QuestionFields(FramedFields):
    """The fields of `QuestionData`."""

    gives: ClassVar[str] = "spans"

    kind: Literal["questions"] = "questions"
    """Questions about texts, each answered by a span of its text, in the format of SQuAD."""
    path: str | tuple[str, ...] = "builtin:questions"
    """Location of the examples: a file of SQuAD v1.1 or v2.0 (`.json`); a `.jsonl`, `.jsonl.gz` or
    `.parquet` file, or a folder that `save_to_disk` of Hugging Face `datasets` wrote, of examples
    with `question`, `context` and `answers`; or `builtin:questions` (about functions of Python's
    standard library). Several paths are joined."""
    sequence_length: int = 384
    """Tokens in one row: a question with a window of its text."""
    stride: int = 128
    """Tokens that two windows of a text share."""
    unanswerable: bool = False
    """Whether questions may have no answer, as in SQuAD v2.0. The model then points at the first
    token of a row."""
    no_answer_threshold: float = 0.0
    """With `unanswerable`, an evaluation predicts no answer if its sum of logits exceeds that of
    the best answer by more than this."""
    max_answer_tokens: int = 30
    """Longest answer that an evaluation predicts."""

    def _faults(self) -> list[str]:
        faults = []
        if not 0 <= self.stride < self.sequence_length:
            faults.append(
                f"stride must lie in [0, {self.sequence_length}), the length of a row, "
                f"not {self.stride}"
            )
        if self.no_answer_threshold and not self.unanswerable:
            faults.append("no_answer_threshold is for questions with unanswerable=true")
        if self.max_answer_tokens < 1:
            faults.append(f"max_answer_tokens must be at least 1, not {self.max_answer_tokens}")
        return faults
