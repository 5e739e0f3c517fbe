"""Biases, penalties and grammars, as numbers that are added to the logits of an answer."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from shardlib.engine.grammars import Matcher
from shardlib.engine.requests import Sampling
from shardlib.errors import ModelError


class Adjustment:
    """The numbers that are added to the logits of one answer.

    Raises:
        ModelError: If the model lacks tokens of the bias.
    """

    def __init__(self, sampling: Sampling, vocab_size: int, matcher: Matcher | None):
        self._sampling, self._matcher = sampling, matcher
        self._bias = np.zeros(vocab_size, np.float32)
        wrong = [token for token in sampling.logit_bias if not 0 <= token < vocab_size]
        if wrong:
            raise ModelError(
                f"logit_bias has the tokens {', '.join(map(str, wrong[:4]))}, but the model has "
                f"only 0 to {vocab_size - 1}.\n  Give ids of tokens of the model."
            )
        for token, value in sampling.logit_bias.items():
            self._bias[token] = value

    def row(self, answer: Sequence[int]) -> Float32[np.ndarray, " vocab"]:
        """Returns what is added to the logits of the token that follows an answer.

        Raises:
            ModelError: If its grammar cannot go on.
        """
        row = self._bias.copy()
        presence, frequency = self._sampling.presence_penalty, self._sampling.frequency_penalty
        if answer and (presence or frequency):
            tokens, counts = np.unique(np.asarray(answer), return_counts=True)
            row[tokens] -= presence + frequency * counts
        if self._matcher is not None:
            row[~self._matcher.allowed(answer)] = -np.inf
        return row
