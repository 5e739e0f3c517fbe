"""Data configs: what a run asks of its data, and the checks that several kinds share.

`shardlib.run.config` names the kinds.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardlib.batch_kinds import DataSpec
from shardlib.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    from shardlib.data.loader import MapSource
    from shardlib.data.tokenizer import Tokenizer


class DataConfig(abc.ABC):
    """A data source of a config. A configclass inherits it and has the field `kind: str`.

    A run of `data.kind: mypackage.mine:MyData` imports the class and fills its fields.
    """

    kind: str
    gives: ClassVar[str] = "examples"
    """Name of the kind of batch, as in `shardlib.registry.BatchKind`."""
    decides: ClassVar[tuple[str, ...]] = ()
    """Fields of the data spec that may be unknown before the data is read. Each is a number, 1 or
    more."""

    def spec(self) -> DataSpec:
        """Returns the data spec that the config alone determines; unknown fields are None.

        Raises:
            DataError: If the config contradicts itself.
        """
        return DataSpec()

    def vocabulary(self, tokenizer: "Tokenizer") -> int:
        """Returns the `vocab_size` of the data spec with a tokenizer."""
        return tokenizer.vocab_size

    def with_tokenizer(self, spec: DataSpec, tokenizer: "Tokenizer") -> DataSpec:
        """Returns a data spec with the fields that a tokenizer decides."""
        return dataclasses.replace(spec, vocab_size=self.vocabulary(tokenizer))

    def prompt_tokens(self, prompt: str, tokenizer: "Tokenizer") -> list[int]:
        """Returns the tokens of a prompt, arranged as in the data: here after an end of text.

        Raises:
            DataError: If the prompt names what the data do not have.
        """
        return [tokenizer.eot, *tokenizer.encode(prompt)]

    def sampled_text(self, tokens: Sequence[int], tokenizer: "Tokenizer") -> str:
        """Returns the text of tokens that a model wrote."""
        # A model may pad its vocabulary beyond the tokenizer's, so that a mesh divides it.
        return tokenizer.decode(t for t in tokens if t < tokenizer.vocab_size)

    @abc.abstractmethod
    def padding(self) -> "Mapping[str, np.ndarray]":
        """Returns one example that the loss ignores: it fills up the last batch of an evaluation,
        and gives the shape and dtype of each array. Nothing is read.

        Raises:
            DataError: If the config contradicts itself.
        """

    @abc.abstractmethod
    def open(self, *, global_batch: int, seed: int, split: Literal["train", "eval"]) -> "MapSource":
        """Returns the batches: an endless stream to train on, or one pass over held-out data.

        Args:
            global_batch: Rows in a batch, over all processes.
            seed: Sets the order of training.
            split: `train` or `eval`. A run with eval.every_steps=0 opens no `eval`.

        Raises:
            DataError: If the data is missing, empty, malformed or too small, or nothing is held
                out.
        """

    def check_paths(self) -> None:
        """Raises `DataError` with every path that does not exist; reads no data.

        A run whose config has other faults calls it, to report all faults at once.
        """
        return None

    def check_held_out(self) -> None:
        """Raises `DataError` for a config without held-out data, such as `eval_fraction: 0`."""
        path, fraction = getattr(self, "eval_path", None), getattr(self, "eval_fraction", None)
        if path is None and fraction == 0:
            raise DataError(
                f"the data has no held-out {self.gives}: data.eval_fraction is 0 and "
                "data.eval_path is not set.\n  Set one of them, or do not evaluate."
            )

    def class_names(self) -> tuple[str, ...]:
        """Returns the names of the classes by number, () if they are not known or not there; reads
        no examples."""
        return ()

    def find_tokenizer(self, *, read: bool = False) -> "Tokenizer | None":
        """Returns the tokenizer of text, and None for other data.

        Args:
            read: Whether the data may be read to find it.

        Raises:
            DataError: If what is read is missing or malformed.
        """
        return None


def as_paths(path: str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns one or several paths as a tuple."""
    return (path,) if isinstance(path, str) else path


def path_faults(path: str | tuple[str, ...], eval_path: str | tuple[str, ...] | None) -> list[str]:
    named = [("path", path)] + ([] if eval_path is None else [("eval_path", eval_path)])
    return [
        f"{name} must name at least one place"
        for name, value in named
        if not value or not all(as_paths(value))
    ]


def eval_faults(config: Any) -> list[str]:
    faults = []
    if not 0 <= config.eval_fraction < 1:
        faults.append(f"eval_fraction must lie in [0, 1), not {config.eval_fraction}")
    if config.eval_steps is not None and config.eval_steps < 1:
        faults.append(f"eval_steps must be at least 1, not {config.eval_steps}")
    return faults
