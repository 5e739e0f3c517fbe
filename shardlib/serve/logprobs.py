"""Log probabilities of tokens, as the OpenAI API shows them.

Source: the OpenAI API reference, "Completions" and "Chat".
"""

import math
from collections.abc import Sequence
from typing import Any

from shardlib.engine import Token
from shardlib.engine.texts import UNFINISHED, TextStream
from shardlib.serve.bodies import Asked, Speaker

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


def chat_logprobs(tokens: Sequence[Token], speaker: Speaker) -> dict[str, Any]:
    """Returns the log probabilities of tokens of a message."""
    return {"content": [_of_chat(token, speaker) for token in tokens]}


def _of_chat(token: Token, speaker: Speaker) -> dict[str, Any]:
    def entry(number: int, logprob: float) -> dict[str, Any]:
        text = speaker.decode([number])
        # A token that is a part of a character decodes to a mark, whose bytes are not its own.
        known = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": _shown(logprob), "bytes": known}

    top = [entry(*pair) for pair in token.top]
    return entry(token.id, token.logprob) | {"top_logprobs": top}


class CompletionText:
    """The text of a choice of a completion as it comes, and the log probabilities of its tokens.

    Args:
        asked: The body.
        index: The number of the choice.
        ids: The tokens of its prompt.
        speaker: The model.
    """

    def __init__(self, asked: Asked, index: int, ids: Sequence[int], speaker: Speaker):
        self._asked, self._ids, self._speaker = asked, ids, speaker
        self._prompt = asked.prompts[index // len(asked.samplings)]
        self._begun = False
        self._before = 0  # Characters of the choice before the answer.

    def add(
        self, text: str, tokens: Sequence[Token], scored_prompt: Sequence[Token]
    ) -> tuple[str, dict[str, Any] | None]:
        """Returns new text of the choice, and the log probabilities of its tokens if they are
        wanted, for a piece of the answer. `scored_prompt` are the tokens of the prompt but the
        first."""
        if self._asked.drops_answer:
            text, tokens = "", ()
        is_first, self._begun = not self._begun, True
        offsets: list[int] = []
        if self._asked.echo and is_first:
            prompt = self._prompt if isinstance(self._prompt, str) else self._decode(self._ids)
            self._before, text = len(prompt), prompt + text
            if self._asked.wants_logprobs:
                offsets = self._prompt_offsets(len(prompt))
        if not self._asked.wants_logprobs:
            return text, None
        offsets += [self._before + token.text_offset for token in tokens]
        if self._asked.echo and is_first:
            tokens = (Token(self._ids[0], math.nan), *scored_prompt, *tokens)
        return text, self._logprobs(tokens, offsets)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._speaker.decode(ids)

    def _prompt_offsets(self, size: int) -> list[int]:
        """Returns where the tokens of the prompt begin in its text of `size` characters. Tokens
        that stand before a text, as `<s>` does, are not in it."""
        stream, found = TextStream(self._decode), []
        for token in self._ids:
            found.append(len(stream.text))
            stream.add(token)
        stream.finish()
        outside = len(stream.text) - size
        return [min(max(begin - outside, 0), size) for begin in found]

    def _logprobs(self, tokens: Sequence[Token], offsets: Sequence[int]) -> dict[str, Any]:
        return {
            "tokens": [self._decode([token.id]) for token in tokens],
            "token_logprobs": [_shown(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": list(offsets),
        }

    def _top(self, token: Token) -> dict[str, float | None] | None:
        """Returns the likeliest tokens and this one; of several with one text, the likeliest. None
        for a token that has no log probability."""
        if math.isnan(token.logprob):
            return None
        found: dict[str, float | None] = {}
        for number, logprob in (*token.top, (token.id, token.logprob)):
            found.setdefault(self._decode([number]), _shown(logprob))
        return found


def _shown(logprob: float) -> float | None:
    """Returns a log probability as JSON can write it."""
    return None if math.isnan(logprob) else max(logprob, _LEAST_LOGPROB)
