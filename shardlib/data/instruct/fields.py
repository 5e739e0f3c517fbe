"""The keys of data for fine-tuning."""

from typing import ClassVar, Literal

from shardlib.config import configclass
from shardlib.data.config import DataConfig, eval_faults, path_faults


@configclass
class ExampleFields(DataConfig):
    """The fields that chats and instructions share."""

    gives: ClassVar[str] = "text"
    decides: ClassVar[tuple[str, ...]] = ("vocab_size",)

    kind: str = ""
    """Kind of the data."""
    path: str | tuple[str, ...] = "builtin:docstrings"
    """Location of the examples: a `.jsonl`, `.jsonl.gz`, `.json`, `.csv`, `.tsv` or `.parquet`
    file, a pattern such as `data/train-*.parquet`, a folder that `save_to_disk` of Hugging Face
    `datasets` wrote, `builtin:docstrings` (functions of Python's standard library and the first
    sentences of their docstrings) or `builtin:topics` (questions about Python's help texts, with
    the fields of SQuAD). Several paths are joined."""
    sequence_length: int = 256
    """Tokens in one row, which holds whole examples."""
    too_long: Literal["refuse", "truncate"] = "refuse"
    """What happens to examples longer than a row: `refuse` stops with their number; `truncate` cuts
    their ends off and logs their number."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a `tokenizer.json` or of the folder that holds it."""
    end_of_text: str | None = None
    """The token of a `tokenizer.json` that ends a text. Unset: `eos_token` of the
    `tokenizer_config.json` in its folder, or a usual name in its vocabulary."""
    eval_fraction: float = 0.01
    """Share of the tokens held out from training, in whole examples chosen by a hash of their
    content. Unused if `eval_path` is set."""
    eval_path: str | tuple[str, ...] | None = None
    """Location of the held-out examples. Examples of `path` that equal one of them are excluded
    from training."""
    eval_steps: int | None = None
    """Maximum batches in one evaluation. Unset: all held-out examples."""

    def __post_init__(self) -> None:
        faults = path_faults(self.path, self.eval_path) + eval_faults(self)
        if self.sequence_length < 1:
            faults.append(f"sequence_length must be at least 1, not {self.sequence_length}")
        if self.tokenizer == "bytes" and self.end_of_text is not None:
            faults.append("end_of_text is for a tokenizer.json, not for 'bytes'")
        if faults:
            raise ValueError("; ".join(faults))


@configclass
class PromptFields(ExampleFields):
    """The fields of all data of prompts and completions."""

    prompt_fields: tuple[str, ...] = ("prompt",)
    """The fields of an example that make the prompt, joined by line ends."""
    completion_field: str = "completion"
    """The field that holds the completion: a text, or answers as SQuAD writes them, of which the
    first counts."""


@configclass
class InstructionFields(PromptFields):
    """The fields of `InstructionData`."""

    kind: Literal["instructions"] = "instructions"
    """Prompts and completions; the loss is on the completions."""


@configclass
class PairFields(PromptFields):
    """The fields of `PairData`."""

    gives: ClassVar[str] = "pairs"

    kind: Literal["pairs"] = "pairs"
    """Prompts for an encoder and completions for a decoder, one of each in a row.
    `sequence_length` counts the tokens of the prompt with its end-of-text token."""
    target_length: int = 64
    """Tokens of the longest completion, with its end-of-text token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_length < 1:
            raise ValueError(f"target_length must be at least 1, not {self.target_length}")


@configclass
class ChatFields(ExampleFields):
    """The fields of `ChatData`."""

    kind: Literal["chat"] = "chat"
    """Chats, rendered by a chat template; the loss is on the assistant's tokens."""
    messages_field: str = "messages"
    """The field of an example that holds its messages, each with `role` and `content`."""
    template: str | None = None
    """A chat template in Jinja's language. Unset: that of the tokenizer's folder."""
