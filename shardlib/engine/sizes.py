"""The sizes of an engine: rows of its steps, and pages of its cache."""

import dataclasses
import math

from shardlib.errors import ModelError
from shardlib.functional.quantized import Bits

_DEFAULT_CONTEXT = 4096
"""Positions of a sequence where the model has any number, or more."""
_SMALL = 2
"""Lanes of the smaller program that reads prompts."""
_LEAST_ROWS = 64
"""Rows from which XLA for CPU multiplies a row by a matrix in one way: of 240 random shapes, more
than half differ at 32 or 48 rows, and none from 56 on. The means of a norm need 4096 numbers."""


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
    num_guesses: int = 0

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
    num_guesses: int = 0,
) -> EngineSizes:
    """Returns the sizes of an engine, from arguments as `Engine` takes them. Groups of devices
    share the slots and the pages. `max_length` is None for any number of positions.

    Raises:
        ModelError: If sizes do not fit.
    """
    few = {} if pages is None else {"pages": pages}
    check_sizes(slots=slots, page_size=page_size, chunk=chunk, lane=lane, **few)
    if not 0 <= num_guesses < lane:
        raise ModelError(
            f"speculate={num_guesses}: a lane has {lane} tokens, of which the first is known.\n"
            f"  Give from 0 to {lane - 1}."
        )
    slots = -(-slots // groups)
    pages = None if pages is None else pages // groups
    context = _context(context, max_length, None if pages is None else pages * page_size)
    lanes, least_rows = chunk // lane, _LEAST_ROWS if deterministic else 0
    fewest = math.ceil(max(least_rows - slots, 0) / lane)
    return EngineSizes(
        groups=groups,
        slots=slots,
        context=context,
        page_size=page_size,
        num_pages=1 + (slots * math.ceil(context / page_size) if pages is None else pages),
        lane=lane,
        lane_counts=tuple(sorted({max(fewest, n) for n in (0, min(_SMALL, lanes), lanes)})),
        least_drawn=least_rows,
        cache=cache,
        num_guesses=num_guesses,
    )


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
    if wrong := [f"{name}={size} is less than 1" for name, size in sizes.items() if size < 1]:
        raise ModelError(f"{', '.join(wrong)}.\n  Give 1 or more.")
    chunk, lane = sizes["chunk"], sizes["lane"]
    if chunk % lane:
        below = chunk // lane * lane
        near = f"{below} or {below + lane}" if below else f"{lane}"
        raise ModelError(f"chunk={chunk} is not a multiple of lane={lane}.\n  Give {near}.")
