"""The data configs of labelled texts and of questions."""

from typing import TYPE_CHECKING, Literal

from shardlib.batch_kinds import DataSpec
from shardlib.config import configclass
from shardlib.data.encoder_tasks.fields import FramedFields, LabeledTextFields, QuestionFields

if TYPE_CHECKING:
    import numpy as np

    from shardlib.data.loader import MapSource
    from shardlib.data.tokenizer import Tokenizer


class _Framed(FramedFields):
    def spec(self) -> DataSpec:
        return DataSpec(sequence_length=self.sequence_length)

    def check_paths(self) -> None:
        from shardlib.data.text.sources import check_exist

        check_exist(self.path, self.eval_path)

    def prompt_tokens(self, prompt: str, tokenizer: "Tokenizer") -> list[int]:
        """Returns the tokens of a text with the special tokens around it."""
        from shardlib.data.tokenizer import JsonTokenizer

        assert isinstance(tokenizer, JsonTokenizer), "others put no special tokens around a text"
        return tokenizer.framed([prompt])[0].ids


@configclass
class LabeledTextData(LabeledTextFields, _Framed):
    """Texts, or pairs of texts, with labels for training a classifier."""

    def spec(self) -> DataSpec:
        num_classes = len(self.class_names()) or None
        return DataSpec(sequence_length=self.sequence_length, num_classes=num_classes)

    def class_names(self) -> tuple[str, ...]:
        from shardlib.data.builtin_examples import PACKAGES

        return self.classes or (PACKAGES if self.path == "builtin:packages" else ())

    def padding(self) -> "dict[str, np.ndarray]":
        from shardlib.data.encoder_tasks.rows import empty_row

        return empty_row(self.sequence_length, ("labels",))

    def open(self, *, global_batch: int, seed: int, split: Literal["train", "eval"]) -> "MapSource":
        from shardlib.data.encoder_tasks.labels import open_labeled

        return open_labeled(self, global_batch=global_batch, seed=seed, split=split)

    def find_tokenizer(self, *, read: bool = False) -> "Tokenizer | None":
        from shardlib.data.encoder_tasks.labels import labeled_texts
        from shardlib.data.encoder_tasks.tokenizing import find_tokenizer

        return find_tokenizer(self, labeled_texts(self) if read else None)


@configclass
class QuestionData(QuestionFields, _Framed):
    """Questions and texts for training a model that finds the spans of answers."""

    def padding(self) -> "dict[str, np.ndarray]":
        from shardlib.data.encoder_tasks.rows import empty_row

        return empty_row(self.sequence_length, ("starts", "ends"))

    def open(self, *, global_batch: int, seed: int, split: Literal["train", "eval"]) -> "MapSource":
        from shardlib.data.encoder_tasks.questions import open_questions

        return open_questions(self, global_batch=global_batch, seed=seed, split=split)

    def find_tokenizer(self, *, read: bool = False) -> "Tokenizer | None":
        from shardlib.data.encoder_tasks.questions import question_texts
        from shardlib.data.encoder_tasks.tokenizing import find_tokenizer

        return find_tokenizer(self, question_texts(self) if read else None)
