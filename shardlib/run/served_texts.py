"""The texts that a served model reads and writes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx

from shardlib.data.instruct.encode import Learned, chat_encoder
from shardlib.data.instruct.template import ChatTemplate, Span
from shardlib.errors import DataError
from shardlib.evaluation import TextModel


@dataclasses.dataclass(frozen=True)
class ServedTexts:
    """How a model reads and writes texts: framed as it was trained. It holds no parameters, so that
    those that the engine does not serve are freed."""

    text_model: TextModel

    @classmethod
    def of(cls, text_model: TextModel) -> "ServedTexts":
        return cls(dataclasses.replace(text_model, model=nnx.Module()))

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text with what stands around it."""
        return self.text_model.tokens(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens; those that pad the vocabulary have none."""
        return self.text_model.decoded(ids)

    def to_json(self) -> str:
        """Returns the text of the tokenizer's file."""
        return self.text_model.tokenizer.to_json()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Returns the tokens of messages, up to the answer, which may call `tools`.

        Raises:
            DataError: If there is no chat template, or it refuses the messages.
        """
        text = self.template.text(messages, tools, add_generation_prompt=True)
        return self._chat_tokens(text, [])[0].tolist()

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            DataError: If the model has no chat template.
        """
        if self.text_model.template is None:
            raise DataError("the model has no chat template.\n  Use /v1/completions.")
        return self.text_model.template()

    @functools.cached_property
    def _chat_tokens(self) -> Callable[[str, Sequence[Span]], Learned]:
        return chat_encoder(self.text_model.tokenizer)
