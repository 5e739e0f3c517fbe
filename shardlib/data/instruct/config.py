"""The data configs of chats and instructions."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from shardlib.batch_kinds import DataSpec
from shardlib.config import configclass
from shardlib.data.instruct.fields import (
    ChatFields,
    ExampleFields,
    InstructionFields,
    PairFields,
)

if TYPE_CHECKING:
    import numpy as np

    from shardlib.data.instruct.template import ChatTemplate
    from shardlib.data.loader import MapSource
    from shardlib.data.tokenizer import Tokenizer


class _Examples(ExampleFields):
    def spec(self) -> DataSpec:
        from shardlib.data.tokenizer import BytesTokenizer

        vocab_size = BytesTokenizer.vocab_size if self.tokenizer == "bytes" else None
        return DataSpec(vocab_size, self.sequence_length, loss_mask=True)

    def padding(self) -> "dict[str, np.ndarray]":
        from shardlib.data.instruct.packing import empty_row

        return empty_row(self.sequence_length)

    def check_paths(self) -> None:
        from shardlib.data.text.sources import check_exist

        check_exist(self.path, self.eval_path)

    def open(self, *, global_batch: int, seed: int, split: Literal["train", "eval"]) -> "MapSource":
        from shardlib.data.instruct.rows import open_examples

        return open_examples(self, global_batch=global_batch, seed=seed, split=split)

    def find_tokenizer(self, *, read: bool = False) -> "Tokenizer | None":
        from shardlib.data.instruct.encode import load_tokenizer

        return load_tokenizer(self)


@configclass
class InstructionData(InstructionFields, _Examples):
    """Prompts and completions, packed into rows; the loss is on the completions."""


@configclass
class PairData(PairFields, _Examples):
    """Prompts and completions in rows of their own, for encoders with a decoder."""

    def spec(self) -> DataSpec:
        return dataclasses.replace(
            super().spec(), loss_mask=False, target_length=self.target_length
        )

    def prompt_tokens(self, prompt: str, tokenizer: "Tokenizer") -> list[int]:
        return [*tokenizer.encode(prompt), tokenizer.eot]

    def padding(self) -> "dict[str, np.ndarray]":
        from shardlib.data.instruct.pairs import empty_row

        return empty_row(self.sequence_length, self.target_length)


@configclass
class ChatData(ChatFields, _Examples):
    """Rendered chats, packed into rows; the loss is on the assistant's tokens."""

    def prompt_tokens(self, prompt: str, tokenizer: "Tokenizer") -> list[int]:
        """Returns the tokens of a chat whose user says the prompt, up to the answer."""
        from shardlib.data.instruct.encode import prompt_of_chat

        return prompt_of_chat(
            self._chat_template(), tokenizer, [{"role": "user", "content": prompt}]
        )

    def sampled_text(self, tokens: Sequence[int], tokenizer: "Tokenizer") -> str:
        """Returns the text of an answer, up to what the template puts at its end."""
        text, end = super().sampled_text(tokens, tokenizer), self._chat_template().answer_end
        return text.split(end)[0] if end else text

    def _chat_template(self) -> "ChatTemplate":
        from shardlib.data.instruct.encode import tokenizer_folder
        from shardlib.data.instruct.template import find_template

        return find_template(tokenizer_folder(self), self.template)
