"""Text of tokens as they come, held back where it may still change or be a stop text."""

from collections.abc import Callable, Sequence

UNFINISHED = "�"
"""The mark that a tokenizer writes for the bytes of an incomplete character."""
_MOST_UNFINISHED = 3
"""Tokens at the end of a text that a character may lack: it has four bytes at most. Source: RFC
3629, section 3."""
_MOST_BEFORE = 5
"""Tokens before an answer that may change how its first one is written."""


class TextStream:
    """The text of an answer.

    Args:
        decode: Returns the text of tokens.
        stop: Texts that end the answer.
        before: The tokens before the answer, whose text it continues.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        before: Sequence[int] = (),
    ):
        self._decode, self._stop = decode, tuple(stop)
        self._longest = max(map(len, self._stop), default=1) - 1
        self._tokens = list(before[-_MOST_BEFORE:])
        # The text of tokens before `_start` is final. Those up to `_read` are shown, and stay as
        # context: a tokenizer may write a first token differently from a later one.
        self._start, self._read = 0, len(self._tokens)
        self.text = ""
        """All text that is known."""
        self.num_shown = 0
        """Characters that `shown` has returned."""
        self.stopped = False

    def add(self, token: int) -> bool:
        """Adds a token; returns whether a stop text is complete, which ends the answer."""
        self._tokens.append(token)
        end = len(self._tokens)
        new = self._new_text(end)
        if new.endswith(UNFINISHED):
            end -= _MOST_UNFINISHED
            if end <= self._read:
                return False
            new = self._new_text(end)
        self._start, self._read = self._read, end
        return self._extend(new)

    def _new_text(self, end: int) -> str:
        """Returns the text of the tokens before `end` that are not read."""
        before = self._decode(self._tokens[self._start : self._read])
        after = self._decode(self._tokens[self._start : end])
        if after.startswith(before):
            return after[len(before) :]
        # A byte that completes no character spoils the ones before it, if they are bytes too.
        return self._decode(self._tokens[self._read : end])

    def finish(self) -> None:
        """Adds the text of tokens that were held back, however they end."""
        if not self.stopped and self._read < len(self._tokens):
            self._extend(self._new_text(len(self._tokens)))
            self._read = len(self._tokens)
        self._longest = 0

    def _extend(self, new: str) -> bool:
        # A stop text may begin in what was known before.
        first = max(len(self.text) - self._longest, 0)
        text = self.text + new
        found = [at for stop in self._stop if (at := text.find(stop, first)) >= 0]
        # Another thread may read the text, so that it never holds a stop text.
        self.text = text[: min(found)] if found else text
        if found:
            self.stopped, self._longest = True, 0
        return self.stopped

    def shown(self) -> str:
        """Returns the text that was not returned before and that no stop text can take back."""
        end = len(self.text) - self._held_back()
        new = self.text[self.num_shown : end]
        self.num_shown = max(end, self.num_shown)
        return new

    def _held_back(self) -> int:
        """Returns the length of the longest end of the text that may begin a stop text."""
        return max(
            (
                size
                for stop in self._stop
                for size in range(1, min(self._longest, len(stop) - 1, len(self.text)) + 1)
                if self.text.endswith(stop[:size])
            ),
            default=0,
        )
