"""The sizes of an engine: rows of its steps, and pages of its cache."""

import dataclasses
import math
from numbers import Integral
from typing import NamedTuple

from shardlib.errors import ModelError
from shardlib.functional.quantized import Bits
from shardlib.nn.attention import PageBackend

_DEFAULT_CONTEXT = 4096
"""Positions of a sequence where the model has any number, or more."""
_ENCODER_CONTEXT = 1024
"""The same of a model with an encoder and a decoder: texts and answers of 512 tokens each. Source:
Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", section 3.1.2."""
_SMALL = 2
"""Lanes of the smaller program that reads prompts at most: half of the lanes of the other."""
_LEAST_ROWS = 64
"""Rows from which XLA for CPU multiplies a row by a matrix in one way: of 240 random shapes, more
than half differ at 32 or 48 rows, and none from 56 on."""

_EXACT_TOKENS = 256
"""Tokens of a program that encodes texts, if bits must not depend on `chunk`: some products of
matrices differ between programs of 256 and of 512 tokens."""


class EncoderShape(NamedTuple):
    """The shape of a program that encodes texts, for each group."""

    rows: int
    length: int


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """The sizes that the compiled steps have.

    Attributes:
        groups: Groups of devices, each with sequences of its own. Other sizes are of a group.
        slots: Rows that decode.
        context: Positions of a sequence.
        page_size: Positions of a page.
        num_pages: Pages of the cache, with one that nothing reads.
        lane: Tokens of a lane.
        lane_counts: Numbers of lanes that a program may have, ascending.
        least_drawn: Rows that draw a token at least, read or not.
        cache: Whether keys and values have 8 bits, or the dtype of the model.
        num_guesses: Tokens of a lane at most that are guessed.
        encoder_shapes: The shapes of programs that encode texts, shortest first; a text has the
            first that is long enough.
    """

    groups: int
    slots: int
    context: int
    page_size: int
    num_pages: int
    lane: int
    lane_counts: tuple[int, ...]
    least_drawn: int
    cache: Bits | None = None
    attention: PageBackend = "auto"
    num_guesses: int = 0
    encoder_shapes: tuple[EncoderShape, ...] = ()

    @property
    def deterministic(self) -> bool:
        """Whether the bits of a row do not depend on the other rows."""
        return self.least_drawn > 0

    @property
    def draws_a_lane(self) -> int:
        """Tokens that a lane draws at most."""
        return self.num_guesses + 1

    @property
    def pages_a_row(self) -> int:
        """Pages of a sequence at most."""
        return math.ceil(self.context / self.page_size)


def engine_sizes(
    *,
    slots: int,
    context: int | None,
    pages: int | None,
    page_size: int,
    chunk: int,
    lane: int,
    max_length: int | None,
    deterministic: bool,
    groups: int = 1,
    cache: Bits | None = None,
    attention: PageBackend = "auto",
    num_guesses: int = 0,
    encodes: bool = False,
    writes: bool = True,
) -> EngineSizes:
    """Returns the sizes of an engine, from arguments as `Engine` takes them. Groups of devices
    share the slots and the pages. `max_length` is None for any number of positions. `encodes` is
    for a model with an encoder, and `writes` for one with a decoder; without it, a slot has a page
    with nothing in it.

    Raises:
        ModelError: If sizes do not fit.
    """
    given = {"pages": pages, "context": context}
    known = {name: size for name, size in given.items() if size is not None}
    check_sizes(slots=slots, page_size=page_size, chunk=chunk, lane=lane, **known)
    if not isinstance(num_guesses, Integral) or not 0 <= num_guesses < lane:
        raise ModelError(
            f"speculate={num_guesses!r}: a lane has {lane} tokens, of which the first is known.\n"
            f"  Give an integer from 0 to {lane - 1}."
        )
    slots = -(-slots // groups)
    pages = None if pages is None else pages // groups
    if context is None and max_length is None and encodes:
        context = _ENCODER_CONTEXT if pages is None else min(_ENCODER_CONTEXT, pages * page_size)
    context = _context(context, max_length, None if pages is None else pages * page_size)
    if not writes:
        page_size = context + 1
    lanes, least_rows = chunk // lane, _LEAST_ROWS if deterministic else 0
    fewest = math.ceil(max(least_rows - slots, 0) / lane)
    counts = {max(fewest, n) for n in (0, min(_SMALL, math.ceil(lanes / 2)), lanes)}
    return EngineSizes(
        groups=groups,
        slots=slots,
        context=context,
        page_size=page_size,
        num_pages=1 + (slots * math.ceil(context / page_size) if pages is None else pages),
        lane=lane,
        lane_counts=tuple(sorted(counts)) if writes else (),
        least_drawn=least_rows,
        cache=cache,
        attention=attention,
        num_guesses=num_guesses,
        encoder_shapes=encoder_shapes(context, _EXACT_TOKENS if deterministic else chunk)
        if encodes
        else (),
    )


def encoder_shapes(longest: int, chunk: int) -> tuple[EncoderShape, ...]:
    """Returns the shapes of programs that encode texts of up to `longest` tokens: lengths double,
    and each has about `chunk` tokens, or one row.

    A text is always encoded in its own shape, in any company, so that its bits stay the same.
    """
    lengths = [min(_LEAST_ROWS, longest)]
    while lengths[-1] < longest:
        lengths.append(min(2 * lengths[-1], longest))
    return tuple(EncoderShape(max(chunk, _LEAST_ROWS) // n or 1, n) for n in lengths)


def _context(asked: int | None, model: int | None, positions: int | None) -> int:
    """Returns the most tokens of a sequence: `asked`, or what the positions of the model and of the
    pages allow, where None is any number."""
    have = min((n for n in (model, positions) if n is not None), default=None)
    context = min(have or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT) if asked is None else asked
    if positions is not None and context > positions:
        raise ModelError(
            f"context={context}, but the pages hold {positions} tokens.\n"
            "  Give more pages, or a shorter context."
        )
    if context < 2 or (have is not None and context > have):
        most = "any number" if have is None else f"at most {have}"
        raise ModelError(
            f"context={context}, but the model has {most} positions.\n"
            f"  Give {'2 tokens or more' if have is None else f'from 2 to {have} tokens'}."
        )
    return context


def check_sizes(**sizes: int) -> None:
    """Raises `ModelError` for sizes below 1, and for a chunk that lanes do not divide."""
    if wrong := [f"{name}={n!r}" for name, n in sizes.items() if not isinstance(n, Integral)]:
        raise ModelError(f"{', '.join(wrong)} is not an integer.\n  Give integers.")
    if wrong := [f"{name}={size} is less than 1" for name, size in sizes.items() if size < 1]:
        raise ModelError(f"{', '.join(wrong)}.\n  Give 1 or more.")
    chunk, lane = sizes["chunk"], sizes["lane"]
    if chunk % lane:
        below = chunk // lane * lane
        near = f"{below} or {below + lane}" if below else f"{lane}"
        raise ModelError(f"chunk={chunk} is not a multiple of lane={lane}.\n  Give {near}.")
