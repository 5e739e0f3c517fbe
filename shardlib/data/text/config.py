"""The data config of text."""

from typing import TYPE_CHECKING, Literal

from shardlib.batch_kinds import DataSpec
from shardlib.config import configclass
from shardlib.data.text.fields import TextFields

if TYPE_CHECKING:
    import numpy as np

    from shardlib.data.loader import MapSource
    from shardlib.data.tokenizer import Tokenizer


@configclass
class TextData(TextFields):
    """Text, tokenised once and packed into rows of equal length."""

    def spec(self) -> DataSpec:
        from shardlib.data.tokenizer import BytesTokenizer

        vocab_size = BytesTokenizer.vocab_size if self.tokenizer == "bytes" else None
        return DataSpec(vocab_size=vocab_size, sequence_length=self.sequence_length)

    def padding(self) -> "dict[str, np.ndarray]":
        from shardlib.data.text.packing import empty_row

        # The shape of a row does not depend on its padding token.
        return empty_row(self.sequence_length, eot=0)

    def check_paths(self) -> None:
        from shardlib.data.text.sources import check_exist

        check_exist(self.path, self.eval_path)

    def open(self, *, global_batch: int, seed: int, split: Literal["train", "eval"]) -> "MapSource":
        from shardlib.data.text.rows import open_text

        return open_text(self, global_batch=global_batch, seed=seed, split=split)

    def find_tokenizer(self, *, read: bool = False) -> "Tokenizer | None":
        from shardlib.data.text.rows import load_tokenizer, tokenizer_at_hand

        return load_tokenizer(self) if read else tokenizer_at_hand(self)
