"""A language model with its tokenizer: log-probabilities of tokens, and continuations."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlib.data import Tokenizer
from shardlib.errors import ModelError
from shardlib.registry import ModelFamily
from shardlib.sharding.constrain import Scope, use

_SHORTEST = 32
"""Length of the shortest compiled rows; others are powers of two times this."""

Tokens = Sequence[int]


class Scores(NamedTuple):
    """The scores of the tokens of a row, except the first."""

    logprobs: np.ndarray
    """[n - 1] float32: log-probability of each token after those before it."""
    is_greedy: np.ndarray
    """[n - 1] bool: whether it is the likeliest token."""


@dataclasses.dataclass(frozen=True, eq=False)
class TextModel:
    """A causal language model on its devices.

    Rows are padded to a power of two, and computed `batch` at a time, so that few programs are
    compiled. Each process of a group computes all results.
    """

    model: nnx.Module
    family: ModelFamily
    tokenizer: Tokenizer
    scope: Scope | None
    max_length: int
    """Most tokens of a row."""
    prefix: int
    """The token before the first one of a text."""
    batch: int = 32
    """Rows of a compiled program; rounded up to what the mesh divides."""

    def __post_init__(self) -> None:
        generate = self.family.generate
        if generate is None or "lengths" not in inspect.signature(generate).parameters:
            name = type(self.model).__name__
            raise ModelError(
                f"{name} is not a language model that continues texts.\n"
                "  Evaluate a decoder, such as a run of model.name=transformer."
            )

    def scores(self, rows: Sequence[Tokens]) -> list[Scores]:
        """Returns the scores of rows of 2 to `max_length + 1` tokens; the last is not read.

        Raises:
            ModelError: If a row is too short or too long.
        """
        self._check([len(row) - 1 for row in rows])
        found: list[Scores | None] = [None] * len(rows)
        for length, indices in self._batches([len(row) - 1 for row in rows]):
            tokens, targets = (np.zeros((self._rows, length), np.int32) for _ in range(2))
            for at, index in enumerate(indices):
                row = np.asarray(rows[index], np.int32)
                tokens[at, : len(row) - 1], targets[at, : len(row) - 1] = row[:-1], row[1:]
            logprobs, is_greedy = jax.device_get(self._scored(self._state, tokens, targets))
            for at, index in enumerate(indices):
                n = len(rows[index]) - 1
                found[index] = Scores(logprobs[at, :n], is_greedy[at, :n])
        return found  # type: ignore[return-value]

    def continued(
        self, rows: Sequence[Tokens], length: int, *, temperature: float = 0.0, seed: int = 0
    ) -> list[list[int]]:
        """Returns `length` further tokens of each row of 1 token or more.

        Args:
            rows: Prompts as tokens.
            length: Tokens to add.
            temperature: 0 takes the likeliest token; otherwise it divides the logits, and tokens
                are drawn.
            seed: Seed of the sampling.

        Raises:
            ModelError: If a row is empty, or too long with what is added.
        """
        self._check([len(row) for row in rows], added=length)
        found: list[list[int]] = [[] for _ in rows]
        for number, (width, indices) in enumerate(self._batches([len(row) for row in rows])):
            width = min(width, self.max_length - length)
            tokens, lengths = np.zeros((self._rows, width), np.int32), [width] * self._rows
            for at, index in enumerate(indices):
                tokens[at, : len(rows[index])] = rows[index]
                lengths[at] = len(rows[index])
            key = jax.random.fold_in(jax.random.key(seed), number)
            options = np.asarray(lengths, np.int32), np.float32(temperature), key
            # Rows of a batch have more than half its width, but for the shortest ones.
            first = width // 2 + 1 if min(lengths) > width // 2 else 1
            out = jax.device_get(self._continued(self._state, tokens, *options, length, first))
            for at, index in enumerate(indices):
                n = len(rows[index])
                found[index] = out[at, n : n + length].tolist()
        return found

    def _check(self, lengths: Sequence[int], added: int = 0) -> None:
        wrong = [n for n in lengths if not 1 <= n <= self.max_length - added]
        if wrong:
            raise ModelError(
                f"{len(wrong)} of {len(lengths)} rows have {min(wrong)} to {max(wrong)} tokens, "
                f"but the model takes 1 to {self.max_length - added}.\n"
                "  Leave empty rows out, and cut long ones."
            )

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Yields the padded length of each batch and the indices of its rows."""
        by_length: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            by_length.setdefault(self._padded(length), []).append(index)
        for length, indices in sorted(by_length.items()):
            for start in range(0, len(indices), self._rows):
                yield length, indices[start : start + self._rows]

    def _padded(self, length: int) -> int:
        padded = _SHORTEST
        while padded < length:
            padded *= 2
        return max(min(padded, self.max_length), length)

    @functools.cached_property
    def _rows(self) -> int:
        parts = 1 if self.scope is None else self.scope.parts("batch", self.scope.mesh.size)
        return -(-self.batch // parts) * parts

    @functools.cached_property
    def _state(self) -> nnx.State:
        return nnx.state(self.model)

    def _in_scope(self) -> contextlib.AbstractContextManager[Any]:
        if self.scope is None:
            return contextlib.nullcontext()
        return use(self.scope.mesh, self.scope.rules)

    @functools.cached_property
    def _scored(self) -> Any:
        graphdef = nnx.graphdef(self.model)

        def scored(state: nnx.State, tokens: jax.Array, targets: jax.Array) -> Any:
            model: Any = nnx.merge(graphdef, state)
            model.eval()
            with self._in_scope():
                logits = model(tokens).astype(jnp.float32)
            # Sums and maxima leave logits divided over their classes; an index would gather them.
            classes = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
            is_target = classes == targets[..., None]
            chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
            logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)
            likelier = (logits > chosen[..., None]) | (
                (logits == chosen[..., None]) & (classes < targets[..., None])
            )
            return self._whole((logprobs, ~jnp.any(likelier, axis=-1)))

        return jax.jit(scored)

    @functools.cached_property
    def _continued(self) -> Any:
        graphdef, generate = nnx.graphdef(self.model), self.family.generate
        assert generate is not None, "checked in __post_init__"

        def continued(
            state: nnx.State,
            tokens: jax.Array,
            lengths: jax.Array,
            temperature: jax.Array,
            key: jax.Array,
            length: int,
            first: int,
        ) -> jax.Array:
            model: Any = nnx.merge(graphdef, state)
            options = {"temperature": temperature, "rng": key, "lengths": lengths, "first": first}
            with self._in_scope():
                return self._whole(generate(model, tokens, length=length, **options))

        return jax.jit(continued, static_argnums=(5, 6))

    def _whole(self, arrays: Any) -> Any:
        """Returns arrays that every process holds whole."""
        if self.scope is None:
            return arrays
        replicated = jax.sharding.NamedSharding(self.scope.mesh, jax.sharding.PartitionSpec())
        return jax.lax.with_sharding_constraint(arrays, replicated)
