"""The sequences of an engine, and the work of its steps on them."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from shardlib.engine.adjustment import Adjustment
from shardlib.engine.guesses import NGrams
from shardlib.engine.requests import Sampling


@dataclasses.dataclass(eq=False)
class SequenceState:
    """A prompt and its answer so far."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    adjustment: Adjustment | None = None
    """Added to its logits. It needs all tokens before."""
    stops: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    priority: int = 0
    """Lower ones are served first."""
    root: bytes = b""
    """What decides keys and values besides the tokens."""
    number: int = 0
    """The order of arrival."""
    out: list[int] = dataclasses.field(default_factory=list)
    """The tokens of the answer that are known."""
    in_flight: int = 0
    """Tokens of the answer that steps compute now, without those that need a right guess."""
    ngrams: NGrams = dataclasses.field(default_factory=NGrams)
    """The n-grams of the known tokens that were read so far; empty without a slot."""
    computed: int = 0
    """Positions whose keys and values are in the cache once all planned steps have run."""
    read_until: int = 0
    """Known tokens that are read from the host; later ones come from the step before."""
    pages: list[int] = dataclasses.field(default_factory=list)
    group: int = 0
    """The group of devices that its pages lie on, while it has a slot."""
    slot: int | None = None
    num_cached: int | None = None
    """Positions that were found in the cache at first."""
    num_preempted: int = 0
    ended: bool = False
    keys: list[bytes] = dataclasses.field(default_factory=list)
    """The keys of its full pages of known tokens."""
    num_offered: int = 0
    """Pages that were offered to other sequences."""
    is_stale: bool = False
    """Whether its pages are never offered, as other weights have computed some of them."""
    num_encoded: int = 0
    """Tokens at the start of the prompt that an encoder reads, all at once."""

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.number

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.out)

    @property
    def asked(self) -> tuple[int, ...]:
        """The prompt as it was given, without the token that a decoder starts from."""
        return self.prompt[: self.num_encoded] if self.num_encoded else self.prompt

    @property
    def is_encoded_only(self) -> bool:
        """Whether its embedding is all that is computed."""
        return self.num_encoded == len(self.prompt)

    @property
    def num_drawn(self) -> int:
        """Tokens of the answer that are known or computed now."""
        return len(self.out) + self.in_flight

    def tokens(self, start: int, end: int) -> list[int]:
        """Returns known tokens from one position to another."""
        split = len(self.prompt)
        return [
            *self.prompt[start:end],
            *self.out[max(start - split, 0) : max(end - split, 0)],
        ]


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """One token of a sequence, drawn by the step before it, at a position."""

    sequence: SequenceState
    slot: int
    position: int
    pages: tuple[int, ...]
    guessed: ClassVar[tuple[int, ...]] = ()
    """A row has no guesses; a `Lane` may have some."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """Known tokens of a sequence from one position on, and guesses of the next tokens."""

    sequence: SequenceState
    slot: int
    start: int
    tokens: tuple[int, ...]
    draws: bool
    """Whether a token follows the last one."""
    pages: tuple[int, ...]
    guessed: tuple[int, ...] = ()
    """The last of its tokens, if they are guessed: a token is drawn after the known one before
    them, and after each that is the token drawn before it."""

    @property
    def scores(self) -> bool:
        """Whether its tokens are of a prompt whose log probabilities are wanted."""
        is_prompt = self.start < len(self.sequence.prompt)
        return self.sequence.sampling.prompt_logprobs and is_prompt


@dataclasses.dataclass(frozen=True)
class EncodedText:
    """A text that an encoder reads, before the rows and lanes of its step."""

    sequence: SequenceState
    pages: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.sequence.prompt[: self.sequence.num_encoded]


class GroupStep(NamedTuple):
    """The work of one group of devices in a step."""

    decodes: tuple[DecodeRow, ...]
    lanes: tuple[Lane, ...]
    texts: tuple[EncodedText, ...] = ()
    """Texts of one shape, the same in all groups."""


class EngineStep(NamedTuple):
    """The work of one step."""

    groups: tuple[GroupStep, ...]

    @property
    def encodes(self) -> bool:
        """Whether any text is encoded."""
        return any(group.texts for group in self.groups)

    @property
    def draws(self) -> bool:
        """Whether there are rows or lanes."""
        return any(group.decodes or group.lanes for group in self.groups)

    @property
    def scores(self) -> bool:
        """Whether any lane wants the log probabilities of its tokens."""
        return any(lane.scores for group in self.groups for lane in group.lanes)

    def drawing(
        self, num_slots: int, draws_a_lane: int
    ) -> Iterator[tuple[tuple[int, int], DecodeRow | Lane]]:
        """Yields the work that draws tokens, each with its group and the row there of its first
        token: slots first, then lanes."""
        for number, group in enumerate(self.groups):
            for row in group.decodes:
                yield (number, row.slot), row
            for lane_number, lane in enumerate(group.lanes):
                if lane.draws:
                    yield (number, num_slots + lane_number * draws_a_lane), lane
