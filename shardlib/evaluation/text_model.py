"""A language model with its tokenizer: log-probabilities of tokens, and continuations."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlib.data import Tokenizer
from shardlib.data.instruct.template import ChatTemplate
from shardlib.data.tokenizer import JsonTokenizer
from shardlib.errors import ModelError
from shardlib.registry import ModelFamily
from shardlib.sharding.constrain import Scope, use

_SHORTEST = 32
"""Length of the shortest compiled rows; others are powers of two times this."""
_MOST_LOGITS = 2**29
"""Logits of a batch for each device that holds rows of their own: 2 GiB, and as much to reduce
them. Longer rows are computed fewer at a time."""

_OTHERS = 0, 3, 15
"""Further last tokens of a row that one program scores: few sizes, so that few are compiled."""
_FIRST_CHUNK = 64
"""Tokens that are written before it is asked which rows have ended; twice as many each time."""

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
    framing: Literal["prefix", "file"] = "prefix"
    """What stands around a text: `prefix` before it, or what the tokenizer's file says."""
    ends: frozenset[int] = frozenset()
    """Tokens that end what the model writes, besides the tokenizer's end of a text."""
    template: Callable[[], ChatTemplate] | None = None
    """Reads the chat template; None without one."""
    architecture: str | None = None
    """The name that its folder of Hugging Face gives its architecture."""
    batch: int = 32
    """Most rows of a compiled program; rounded up to what the mesh divides."""

    def __post_init__(self) -> None:
        generate = self.family.generate
        if generate is None or "lengths" not in inspect.signature(generate).parameters:
            name = type(self.model).__name__
            raise ModelError(
                f"{name} is not a language model that continues texts.\n"
                "  Evaluate a decoder, such as a run of model.name=transformer."
            )

    def tokens(self, text: str) -> list[int]:
        """Returns the tokens of a text with what stands around it."""
        if self.framing == "prefix":
            return [self.prefix, *self.tokenizer.encode(text)]
        if isinstance(self.tokenizer, JsonTokenizer):
            return self.tokenizer.framed([text])[0].ids
        return self.tokenizer.encode(text)

    def has_ended(self, tokens: Tokens, stops: Sequence[str] = ()) -> bool:
        """Whether `written` leaves out a part of the tokens that the model wrote, because they end
        a text or hold a stop string."""
        if not self._ends(stops).isdisjoint(tokens):
            return True
        text = self._text(tokens)
        return any(stop in text for stop in stops if stop)

    def written(self, tokens: Tokens, stops: Sequence[str] = ()) -> str:
        """Returns the text of tokens that the model wrote, up to the first that ends it or to the
        first stop string. Special tokens are left out."""
        ends = self._ends(stops)
        text = self._text(itertools.takewhile(lambda token: token not in ends, tokens))
        for stop in filter(None, stops):
            text = text.split(stop)[0]
        return text

    def _ends(self, stops: Sequence[str]) -> set[int]:
        special = getattr(self.tokenizer, "special_tokens", {})
        return {self.tokenizer.eot, *self.ends, *(special[one] for one in stops if one in special)}

    def _text(self, tokens: Iterable[int]) -> str:
        # A model may pad its vocabulary beyond the tokenizer's.
        known = self.tokenizer.vocab_size
        left_out = set(getattr(self.tokenizer, "special_tokens", {}).values())
        return self.tokenizer.decode(t for t in tokens if t < known and t not in left_out)

    def scores(self, rows: Sequence[Tokens]) -> list[Scores]:
        """Returns the scores of rows of 2 to `max_length + 1` tokens; the last is not read.

        Rows that differ in the last token alone are read once.

        Raises:
            ModelError: If a row is too short or too long.
        """
        self._check([len(row) - 1 for row in rows])
        groups = _differing_in_last(rows)
        lengths = [len(rows[group[0]]) - 1 for group in groups]
        found: list[Scores | None] = [None] * len(rows)
        for length, batch, numbers in self._batches(lengths, positions_with_logits=None):
            tokens, targets, ids = (np.zeros((batch, length), np.int32) for _ in range(3))
            read = [groups[number] for number in numbers]
            most = max(len(group) for group in read) - 1
            others = np.zeros((batch, next(n for n in _OTHERS if n >= most)), np.int32)
            for at, (first, *rest) in enumerate(read):
                row = np.asarray(rows[first], np.int32)
                n = len(row) - 1
                tokens[at, :n], targets[at, :n], ids[at, :n] = row[:-1], row[1:], 1
                others[at, : len(rest)] = [rows[index][-1] for index in rest]
            scored = jax.device_get(self._scored(self._state, tokens, targets, ids, others))
            for at, group in enumerate(read):
                for index, scores in zip(
                    group, _of_group(scored, at, lengths[numbers[at]]), strict=False
                ):
                    found[index] = scores
        return found  # type: ignore[return-value]

    def continued(
        self,
        rows: Sequence[Tokens],
        length: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        ended: Callable[[int, Tokens], bool] | None = None,
    ) -> list[list[int]]:
        """Returns `length` further tokens of each row of 1 token or more.

        Args:
            rows: Prompts as tokens.
            length: Tokens to add.
            temperature: 0 takes the likeliest token; otherwise it divides the logits, and tokens
                are drawn.
            seed: Seed of the sampling.
            ended: `ended(index, tokens)`: whether a row needs no more than the tokens that were
                added to it so far. It then gets fewer than `length`.

        Raises:
            ModelError: If a row is empty, or too long with what is added.
        """
        self._check([len(row) for row in rows], added=length)
        grown, going = [list(row) for row in rows], list(range(len(rows)))
        chunk, added, batches = length if ended is None else _FIRST_CHUNK, 0, itertools.count()
        while going and added < length:
            count = min(chunk, length - added)
            parts = [grown[index] for index in going]
            for index, new in zip(
                going, self._added(parts, count, temperature, seed, batches), strict=True
            ):
                grown[index] += new
            added, chunk = added + count, 2 * chunk
            going = [i for i in going if ended is None or not ended(i, grown[i][len(rows[i]) :])]
        return [row[len(given) :] for row, given in zip(grown, rows, strict=True)]

    def _added(
        self,
        rows: Sequence[Tokens],
        length: int,
        temperature: float,
        seed: int,
        numbers: Iterator[int],
    ) -> list[list[int]]:
        """Returns `length` further tokens of each row; see `continued`. Each batch takes one of the
        `numbers`, from which its sampling follows."""
        found: list[list[int]] = [[] for _ in rows]
        for width, batch, indices in self._batches(
            [len(row) for row in rows], positions_with_logits=1
        ):
            width = min(width, self.max_length - length)
            tokens, lengths = np.zeros((batch, width), np.int32), [width] * batch
            for at, index in enumerate(indices):
                tokens[at, : len(rows[index])] = rows[index]
                lengths[at] = len(rows[index])
            key = jax.random.fold_in(jax.random.key(seed), next(numbers))
            options = np.asarray(lengths, np.int32), np.float32(temperature), key
            # The shortest row decides how much is read at once, in quarters of the width, so that
            # few programs are compiled.
            quarter = max(width // 4, 1)
            first = max(min(lengths) // quarter * quarter, 1)
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

    def _batches(
        self, lengths: Sequence[int], positions_with_logits: int | None
    ) -> Iterator[tuple[int, int, list[int]]]:
        """Yields the padded length and number of rows of each batch, and the indices of its rows.

        `positions_with_logits` of a row have logits at once; all if it is None.
        """
        by_length: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            by_length.setdefault(self._padded(length), []).append(index)
        parts = 1 if self.scope is None else self.scope.parts("batch", self.scope.mesh.size)
        for length, indices in sorted(by_length.items()):
            logits = (positions_with_logits or length) * self.tokenizer.vocab_size
            held = max(min(-(-self.batch // parts), _MOST_LOGITS // logits), 1) * parts
            for start in range(0, len(indices), held):
                yield length, held, indices[start : start + held]

    def _padded(self, length: int) -> int:
        padded = _SHORTEST
        while padded < length:
            padded *= 2
        return min(padded, self.max_length)

    @functools.cached_property
    def _state(self) -> nnx.State:
        return nnx.state(self.model)

    def _in_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the rules without a cut along length: texts have any length."""
        if self.scope is None:
            return contextlib.nullcontext()
        uncut = {"length": None, "residual_length": None}
        return use(self.scope.mesh, self.scope.rules.override(activations=uncut))

    @functools.cached_property
    def _scored(self) -> Any:
        graphdef = nnx.graphdef(self.model)

        def scored(
            state: nnx.State,
            tokens: jax.Array,
            targets: jax.Array,
            segment_ids: jax.Array,
            others: jax.Array,
        ) -> Any:
            model: Any = nnx.merge(graphdef, state)
            model.eval()
            with self._in_scope():
                logits = model(tokens, segment_ids=segment_ids).astype(jnp.float32)
            # A sum, too, leaves the classes divided.
            last = jnp.sum(segment_ids, axis=1, keepdims=True) - 1
            is_last = (jnp.arange(tokens.shape[1])[None] == last)[..., None]
            ends = jnp.sum(jnp.where(is_last, logits, 0.0), axis=1, keepdims=True)
            scores = _scores_of(logits, targets)
            of_others = [_scores_of(ends, others[:, n, None]) for n in range(others.shape[1])]
            return self._whole((scores, of_others))

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


def _differing_in_last(rows: Sequence[Tokens]) -> list[list[int]]:
    """Returns the indices of rows in groups that differ in the last token alone."""
    by_start: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        by_start.setdefault(tuple(row[:-1]), []).append(index)
    most = _OTHERS[-1] + 1
    return [
        group[start : start + most]
        for group in by_start.values()
        for start in range(0, len(group), most)
    ]


def _of_group(scored: Any, at: int, n: int) -> Iterator[Scores]:
    """Yields the scores of a row of n scored tokens, and with each of its further last tokens."""
    (logprobs, is_greedy), of_others = scored
    first = Scores(logprobs[at, :n], is_greedy[at, :n])
    yield first
    for others in of_others:
        yield Scores(
            *(np.append(x[:-1], other[at]) for x, other in zip(first, others, strict=True))
        )


def _scores_of(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probabilities of `targets` [batch, length] by `logits` [batch, length,
    vocab], and whether each is the likeliest."""
    # Sums and maxima leave logits divided over their classes; an index would gather them.
    classes = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    is_target = classes == targets[..., None]
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    logprobs = chosen - jax.nn.logsumexp(logits, axis=-1)
    likelier = (logits > chosen[..., None]) | (
        (logits == chosen[..., None]) & (classes < targets[..., None])
    )
    is_greedy = jnp.isfinite(logprobs) & ~jnp.any(likelier, axis=-1)
    return logprobs, is_greedy
