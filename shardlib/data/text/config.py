"""The data configs of text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from shardlib.batch_kinds import DataSpec
from shardlib.config import configclass
from shardlib.data.text.fields import SpanFields, TextFields

if TYPE_CHECKING:
    import numpy as np

    from shardlib.data.loader import MapSource
    from shardlib.data.tokenizer import Tokenizer


class _Text(TextFields):
    def check_paths(self) -> None:
        from shardlib.data.text.sources import check_exist

        check_exist(self.path, self.eval_path)

    def find_tokenizer(self, *, read: bool = False) -> "Tokenizer | None":
        from shardlib.data.text.rows import load_tokenizer, tokenizer_at_hand

        return load_tokenizer(self) if read else tokenizer_at_hand(self)


@configclass
class TextData(_Text):
    """Text, tokenised once and packed into rows of equal length."""

    kind: Literal["text"] = "text"
    """Text for training a language model."""

    def spec(self) -> DataSpec:
        from shardlib.data.tokenizer import BytesTokenizer

        vocab_size = BytesTokenizer.vocab_size if self.tokenizer == "bytes" else None
        return DataSpec(vocab_size=vocab_size, sequence_length=self.sequence_length)

    def padding(self) -> "dict[str, np.ndarray]":
        from shardlib.data.text.packing import empty_row

        # The shape of a row does not depend on its padding token.
        return empty_row(self.sequence_length, eot=0)

    def open(self, *, global_batch: int, seed: int, split: Literal["train", "eval"]) -> "MapSource":
        from shardlib.data.text.rows import open_text

        return open_text(self, global_batch=global_batch, seed=seed, split=split)


@configclass
class SpanData(SpanFields, _Text):
    """Text with spans left out and the spans to fill in, for encoders with a decoder.

    Each span is replaced by a sentinel, a token of its own; the targets are the spans, each after
    its sentinel. The sentinels are the tokens `<extra_id_0>`, `<extra_id_1>`, ... of the tokenizer,
    or the ids after its vocabulary.

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified
    Text-to-Text Transformer", section 3.1.4.
    """

    def spec(self) -> DataSpec:
        from shardlib.data.text.spans import sizes_of
        from shardlib.data.tokenizer import BytesTokenizer

        known = self.tokenizer == "bytes"
        vocab_size = self.vocabulary(BytesTokenizer()) if known else None
        targets = sizes_of(self).targets
        return DataSpec(vocab_size, self.sequence_length, target_length=targets)

    def vocabulary(self, tokenizer: "Tokenizer") -> int:
        from shardlib.data.text.spans import sentinels

        return max(tokenizer.vocab_size, int(sentinels(self, tokenizer).max()) + 1)

    def prompt_tokens(self, prompt: str, tokenizer: "Tokenizer") -> list[int]:
        from shardlib.data.text.spans import prompt_tokens

        return prompt_tokens(self, prompt, tokenizer)

    def sampled_text(self, tokens: Sequence[int], tokenizer: "Tokenizer") -> str:
        from shardlib.data.text.spans import sampled_text

        return sampled_text(self, tokens, tokenizer)

    def padding(self) -> "dict[str, np.ndarray]":
        from shardlib.data.text.spans import empty_row

        return empty_row(self)

    def open(self, *, global_batch: int, seed: int, split: Literal["train", "eval"]) -> "MapSource":
        from shardlib.data.text.spans import open_spans

        return open_spans(self, global_batch=global_batch, seed=seed, split=split)
