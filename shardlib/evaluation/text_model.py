"""A language model with its tokenizer: log-probabilities of tokens, and continuations."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlib.data import Tokenizer
from shardlib.data.config import DataConfig
from shardlib.data.instruct.template import ChatTemplate
from shardlib.data.tokenizer import JsonTokenizer
from shardlib.engine import Engine, Request, Sampling
from shardlib.errors import ModelError
from shardlib.hf.pooling import TextPooling
from shardlib.registry import ModelFamily
from shardlib.sharding.constrain import Scope, use

_SHORTEST = 32
"""Length of the shortest compiled rows; others are powers of two times this."""
_MOST_LOGITS = 2**29
"""Logits of a batch for each device that holds rows of their own: 2 GiB, and as much to reduce
them. Longer rows are computed fewer at a time."""

_OTHERS = 0, 3, 15
"""Further last tokens of a row that one program scores: few sizes, so that few are compiled."""
_FIRST_CHECK = 8
"""Tokens that are written before it is asked whether a row has ended; twice as many each time."""

Tokens = Sequence[int]


class Scores(NamedTuple):
    """The scores of the tokens of a row, except the first."""

    logprobs: np.ndarray
    """[n - 1] float32: log-probability of each token after those before it."""
    is_greedy: np.ndarray
    """[n - 1] bool: whether it is the likeliest token."""


@dataclasses.dataclass(eq=False)
class TextModel:
    """A language model on its devices, causal unless it is only served.

    An engine continues rows. Rows to score are padded to a power of two, and computed `batch` at a
    time, so that few programs are compiled. Each process of a group computes all results.
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
    data: DataConfig | None = None
    """Data that says how prompts and answers are written, in place of `framing`; None for models
    that continue texts."""
    ends: frozenset[int] = frozenset()
    """Tokens that end what the model writes, besides the tokenizer's end of a text."""
    template: Callable[[], ChatTemplate] | None = None
    """Reads the chat template; None without one."""
    pooling: TextPooling | None = None
    """What its folder says about embeddings."""
    architecture: str | None = None
    """The name that its folder of Hugging Face gives its architecture."""
    batch: int = 32
    """Most rows of a compiled program, and slots of the engine; rounded up to what the mesh
    divides."""
    _engine: Engine | None = dataclasses.field(default=None, init=False, repr=False)
    """The engine that continues rows, with the longest context that was needed so far."""

    def check_continues(self) -> None:
        """Raises `ModelError` for a model that does not continue texts."""
        if self.family.decoding is None or self.family.encoding is not None:
            name = type(self.model).__name__
            raise ModelError(
                f"{name} is not a language model that continues texts.\n"
                "  Evaluate a decoder, such as a run of model.name=transformer."
            )

    def tokens(self, text: str) -> list[int]:
        """Returns the tokens of a text with what stands around it."""
        if self.data is not None:
            return self.data.prompt_tokens(text, self.tokenizer)
        if self.framing == "prefix":
            return [self.prefix, *self.tokenizer.encode(text)]
        if isinstance(self.tokenizer, JsonTokenizer):
            return self.tokenizer.framed([text])[0].ids
        return self.tokenizer.encode(text)

    def decoded(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens, special ones included; those that pad the vocabulary have
        none."""
        if self.data is not None:
            return self.data.sampled_text(list(tokens), self.tokenizer)
        return self.tokenizer.decode(t for t in tokens if t < self.tokenizer.vocab_size)

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

        Rows that differ in the last token alone are read once. The engine of `continued` releases
        its cache, which leaves room for logits.

        Raises:
            ModelError: If a row is too short or too long.
        """
        self._check([len(row) - 1 for row in rows])
        if self._engine is not None:
            self._engine.release()
        groups = _differing_in_last(rows)
        lengths = [len(rows[group[0]]) - 1 for group in groups]
        found: list[Scores | None] = [None] * len(rows)
        for length, batch, numbers in self._batches(lengths):
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
            seed: Seed of the sampling; that of a row is larger by its index.
            ended: `ended(index, tokens)`: whether a row needs no more than the tokens that were
                added to it so far. It then gets fewer than `length`.

        Raises:
            ModelError: If a row is empty, or too long with what is added.
        """
        self._check([len(row) for row in rows], added=length)
        engine = self._engine_for(max(map(len, rows), default=1) + length)
        options = {"max_tokens": length, "temperature": temperature, "ignore_end": True}
        requests: list[Request] = []
        try:
            for index, row in enumerate(rows):
                sampling = Sampling(seed=(seed + index) % 2**32, **options)
                requests.append(engine.submit(row, sampling))
            check_at = {} if ended is None else dict.fromkeys(range(len(rows)), _FIRST_CHECK)
            while engine.step():
                for index in [n for n, at in check_at.items() if len(requests[n].tokens) >= at]:
                    tokens = [token.id for token in requests[index].tokens]
                    check_at[index] = 2 * len(tokens)
                    if ended is not None and ended(index, tokens):
                        engine.cancel(requests[index])
                        del check_at[index]
        finally:
            for request in requests:
                engine.cancel(request)
        return [request.answer().ids for request in requests]

    def _engine_for(self, tokens: int) -> Engine:
        """Returns an engine for rows of some tokens with what is added to them."""
        if self._engine is None or self._engine.context < tokens:
            self._engine = None  # Or two caches would have to fit.
            decoder = _Decoder(self.model, self.family, self.scope)
            self._engine = Engine(decoder, slots=self.batch, context=self._padded(tokens))
        return self._engine

    def _check(self, lengths: Sequence[int], added: int = 0) -> None:
        self.check_continues()
        wrong = [n for n in lengths if not 1 <= n <= self.max_length - added]
        if wrong:
            raise ModelError(
                f"{len(wrong)} of {len(lengths)} rows have {min(wrong)} to {max(wrong)} tokens, "
                f"but the model takes 1 to {self.max_length - added}.\n"
                "  Leave empty rows out, and cut long ones."
            )

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
        """Yields the padded length and number of rows of each batch, and the indices of its
        rows."""
        by_length: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            by_length.setdefault(self._padded(length), []).append(index)
        parts = 1 if self.scope is None else self.scope.parts("batch", self.scope.mesh.size)
        for length, indices in sorted(by_length.items()):
            logits = length * self.tokenizer.vocab_size
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

    def _whole(self, arrays: Any) -> Any:
        """Returns arrays that every process holds whole."""
        if self.scope is None:
            return arrays
        replicated = jax.sharding.NamedSharding(self.scope.mesh, jax.sharding.PartitionSpec())
        return jax.lax.with_sharding_constraint(arrays, replicated)


@dataclasses.dataclass(frozen=True)
class _Decoder:
    """A model that an engine continues by token ids alone."""

    model: nnx.Module
    family: ModelFamily
    scope: Scope | None
    tokenizer: None = None
    end_tokens: tuple[int, ...] = ()

    @property
    def config(self) -> Any:
        return self.model.config  # type: ignore[attr-defined]


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
