"""Models that were loaded from a folder, and their logits."""

import contextlib
import dataclasses
import functools
import inspect
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from shardlib.errors import CheckpointError, ModelError
from shardlib.hf.architecture import Architecture
from shardlib.hf.description import end_tokens
from shardlib.hf.pooling import TextPooling, text_pooling
from shardlib.registry import ModelFamily
from shardlib.sharding.constrain import Scope, use


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """A model that was loaded from a Hugging Face folder."""

    model: nnx.Module
    """The module in evaluation mode, its parameters on their devices."""
    config: Any
    """The config of its family."""
    family: ModelFamily
    architecture: Architecture
    source: Mapping[str, Any]
    """The contents of its config.json."""
    folder: Path
    """The folder that it was loaded from."""
    scope: Scope | None
    """The mesh and the rules that it was loaded under."""

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer (of the package `tokenizers`), without the truncation and padding of its
        file; None if the folder has no tokenizer.json.

        Raises:
            CheckpointError: If tokenizer.json is malformed.
        """
        path = self.folder / "tokenizer.json"
        if not path.exists():
            return None
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # The package raises the base class.
            raise CheckpointError(
                f"{path} cannot be read: {error}.\n  Download it again."
            ) from None
        # Files for embeddings may cut texts, and fill them up, without a word.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @functools.cached_property
    def pooling(self) -> TextPooling:
        """What the folder says about embeddings; see `text_pooling`."""
        return text_pooling(self.folder)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer, by generation_config.json or config.json."""
        return end_tokens(self.folder, self.source)

    def logits(self, inputs: ArrayLike, **arrays: ArrayLike) -> Float[Array, "batch ..."]:
        """Returns the float32 logits of a batch: [batch, length, vocab] of a language model.

        The program is compiled once for each shape. Rows are added where the mesh cuts a batch into
        more parts than it has rows, and their logits are left out.

        Args:
            inputs: Token ids [batch, length] int32, or images or latents [batch, height, width,
                channels].
            arrays: Further arrays [batch, ...] that the model takes by name, such as `segment_ids`.

        Raises:
            ModelError: If the inputs are of another kind or rank, too long for the model, or token
                ids that it does not have; or further arrays have other rows, are missing, or are
                none that the model takes.
        """
        of = _INPUTS[self.architecture.inputs]
        try:
            inputs = jnp.asarray(inputs)
        except (TypeError, ValueError, OverflowError):
            kind = f"{type(inputs).__name__} {reprlib.repr(inputs)}"
            raise ModelError(
                f"the {of.name} are {kind}, expected {of.expected}.\n  {of.fix}"
            ) from None
        if inputs.ndim != of.rank or not jnp.issubdtype(inputs.dtype, of.dtype):
            raise ModelError(
                f"the {of.name} are {inputs.dtype}{list(inputs.shape)}, expected {of.expected}.\n"
                f"  {of.fix}"
            )
        if self.architecture.inputs == "tokens":
            self._refuse_foreign(inputs)
        num_rows = inputs.shape[0]
        self._refuse_arrays(num_rows, arrays)
        with _scoped(self.scope):
            parts = self.scope.parts("batch", self.scope.mesh.size) if self.scope else 1
            added = -num_rows % parts
            padded = jax.tree.map(
                lambda x: jnp.pad(x, ((0, added), *[(0, 0)] * (jnp.ndim(x) - 1))), (inputs, arrays)
            )
            return self._forward(nnx.state(self.model), *padded)[:num_rows]

    def _refuse_arrays(self, num_rows: int, arrays: Mapping[str, ArrayLike]) -> None:
        # Padding would fill up the missing rows.
        shapes = {name: list(jnp.shape(array)) for name, array in arrays.items()}
        wrong = [f"{name} {shape}" for name, shape in shapes.items() if shape[:1] != [num_rows]]
        if wrong:
            raise ModelError(
                f"the inputs have {num_rows} rows, but other arrays have others: "
                f"{', '.join(wrong)}.\n  Give as many rows of each."
            )
        call = inspect.signature(type(self.model).__call__)
        try:
            call.bind(self.model, None, **arrays)
        except TypeError as error:
            names = ", ".join(list(call.parameters)[1:])
            raise ModelError(
                f"a {type(self.model).__name__} takes {names}: {error}.\n"
                "  Give the arrays that it takes, by these names."
            ) from None

    def _refuse_foreign(self, tokens: jax.Array) -> None:
        # A lookup beyond the table would return another row without a word.
        size = getattr(self.config, "vocab_size", None)
        is_known = not isinstance(tokens, Tracer) and tokens.is_fully_addressable
        if size is None or not is_known or not tokens.size:
            return
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= size:
            raise ModelError(
                f"token ids from {least} to {most} are not within the {size} of the model.\n"
                "  Encode the text with the tokenizer of the checkpoint."
            )

    @functools.cached_property
    def _forward(self) -> Any:
        graphdef = nnx.graphdef(self.model)

        def forward(state: nnx.State, inputs: jax.Array, arrays: dict[str, Any]) -> jax.Array:
            model: Any = nnx.merge(graphdef, state)
            with _scoped(self.scope):
                return model(inputs, **arrays).astype(jnp.float32)

        return jax.jit(forward)


class _Inputs(NamedTuple):
    name: str
    rank: int
    dtype: Any
    expected: str
    fix: str


_INPUTS = {
    "tokens": _Inputs(
        "token ids",
        2,
        jnp.integer,
        "integers [batch, length]",
        "Give one row of ids for each text, as in jnp.array([tokenizer.encode(text).ids]).",
    ),
    "images": _Inputs(
        "images",
        4,
        jnp.floating,
        "floating-point numbers [batch, height, width, channels]",
        "Scale the pixels as the preprocessor_config.json says, channels last.",
    ),
    "latents": _Inputs(
        "latents",
        4,
        jnp.floating,
        "floating-point numbers [batch, height, width, channels]",
        "Scale what the autoencoder gives by its scaling_factor, channels last.",
    ),
}


def _scoped(scope: Scope | None) -> Any:
    return contextlib.nullcontext() if scope is None else use(scope.mesh, scope.rules)
