"""The model and tokenizer that the engine serves, as protocols."""

from typing import Any, Protocol

from flax import nnx

from shardlib.registry import ModelFamily
from shardlib.sharding.constrain import Scope


class TextTokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str) -> Any:
        """Returns token ids, or an object that has them as `ids`."""

    def decode(self, ids: list[int]) -> str:
        """Returns the text of tokens."""
        ...


class Servable(Protocol):
    """A model to serve, such as the result of `hf.load`.

    It may also have `texts`, a `TextTokenizer` that the engine takes in place of the tokenizer, and
    an encoder `pooling`, a `shardlib.hf.pooling.TextPooling`.
    """

    @property
    def model(self) -> nnx.Module: ...
    @property
    def config(self) -> Any: ...
    @property
    def family(self) -> ModelFamily: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def end_tokens(self) -> tuple[int, ...]: ...
    @property
    def scope(self) -> Scope | None: ...
