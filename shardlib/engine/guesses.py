"""Guesses of the tokens that come next, from what followed the same tokens before.

Saxena, "Prompt Lookup Decoding" (2023): answers often repeat passages of their prompts, and a model
checks several tokens in about the time of one.
"""

from collections.abc import Iterable

_SIZES = (3, 2)
"""Tokens that must be equal, the better sign first."""


class NGrams:
    """Where the last tokens of a text stood before."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        """The position after the last occurrence of an n-gram that has one."""

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the end of the text."""
        for token in tokens:
            for size in _SIZES:
                if size <= len(self._tokens):
                    self._next[self._last(size)] = len(self._tokens)
            self._tokens.append(token)

    def guess(self, most: int) -> tuple[int, ...]:
        """Returns `most` tokens that may come next; none if the text has no such passage. A passage
        that reaches the end of the text goes on as it repeats itself."""
        end = len(self._tokens)
        starts = (self._next.get(self._last(n)) for n in _SIZES if n <= end)
        start = next((start for start in starts if start is not None), None)
        if start is None:
            return ()
        return tuple(self._tokens[start + at % (end - start)] for at in range(most))

    def _last(self, count: int) -> tuple[int, ...]:
        return tuple(self._tokens[-count:])
