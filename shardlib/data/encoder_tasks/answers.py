"""Answers from the logits of their first and last tokens, and the scores of SQuAD."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardlib.data.encoder_tasks.fields import QuestionFields
from shardlib.data.encoder_tasks.rows import Split
from shardlib.errors import DataError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Answers:
    """The questions of a pass and where their windows are."""

    questions: list[Any]
    """Id, number of the context, and spans of the answers of each question, in the order of a
    pass."""
    contexts: list[str]
    ends: np.ndarray
    """The row of a pass after the last window of each question, `[n] int64`."""
    spans: np.ndarray
    """Characters that each token covers, as `context_spans` returns them, of all rows."""
    places: np.ndarray
    """Where each row of a pass lies in `spans`: its start and stop, `[num_rows, 2] int64`."""
    unanswerable: bool
    no_answer_threshold: float
    max_answer_tokens: int

    @classmethod
    def of(cls, config: QuestionFields, side: Split) -> "Answers":
        """Returns the questions of one side of a split."""
        framed = side.framed
        windows = framed.further["windows"]
        # The windows of a question are neighbours in the files and in a pass.
        question = np.repeat(np.arange(len(windows)), windows)[side.chosen]
        (lasts,) = np.nonzero(np.diff(question, append=-1))
        return cls(
            [framed.notes["questions"][each] for each in question[lasts]],
            framed.notes["contexts"],
            lasts + 1,
            framed.further["spans"],
            np.stack([framed.offsets[side.chosen], framed.offsets[side.chosen + 1]], axis=1),
            config.unanswerable,
            config.no_answer_threshold,
            config.max_answer_tokens,
        )

    def check_some(self, rows: int) -> None:
        """Raises `DataError` if so many rows hold no whole question."""
        if self.ends[0] > rows:
            raise DataError(
                f"data.eval_steps leaves {rows} rows to an evaluation, fewer than the "
                f"{self.ends[0]} windows of its first question.\n  Set it to more, or to null."
            )

    def predicted(self, logits: np.ndarray) -> list[str]:
        """Returns the answer to each question whose windows are all there, "" for none. Logits are
        of the first and the last token, [n, length, 2], of the first n rows of a pass.

        It is the span of the largest sum of logits over the windows of the question. If questions
        may have no answer, it is empty where the first token of every window has a larger sum, by
        more than `no_answer_threshold`.

        Source: Devlin et al. 2019, "BERT", sections 4.2 and 4.3.
        """
        found, begin = [], 0
        for (_, context, _), end in zip(self.questions, self.ends, strict=True):
            if end > len(logits):
                break
            rows = range(begin, int(end))
            score, first, stop = max(
                (self._best(row, logits[row]) for row in rows), key=lambda best: best[0]
            )
            nothing = min(logits[row, 0].sum() for row in rows)
            is_none = self.unanswerable and nothing - score > self.no_answer_threshold
            found.append("" if is_none else self.contexts[context][first:stop])
            begin = int(end)
        return found

    def _best(self, row: int, logits: np.ndarray) -> tuple[float, int, int]:
        """Returns the largest sum of logits of a span of a window, and the span's characters."""
        spans = self.spans[slice(*self.places[row])]
        (inside,) = np.nonzero(spans[:, 0] >= 0)
        if not len(inside):
            return -np.inf, 0, 0
        firsts, lasts = logits[inside].astype(np.float32).T
        sums = np.full((min(self.max_answer_tokens, len(inside)), len(inside)), -np.inf, np.float32)
        for more in range(len(sums)):
            sums[more, : len(inside) - more] = firsts[: len(inside) - more] + lasts[more:]
        more, first = np.unravel_index(int(sums.argmax()), sums.shape)
        characters = spans[inside]
        return float(sums[more, first]), characters[first, 0], characters[first + more, 1]

    def score(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the mean `exact_match` and `f1` of the questions, in [0, 1], from
        `logits` [n, length, 2] of the first n rows of a pass.

        If questions may have no answer, `exact_match_answerable` and `f1_answerable` are means over
        the questions with an answer, and `exact_match_unanswerable` is the share of the others with
        an empty prediction.
        """
        predictions = self.predicted(rows["logits"])
        if not predictions:  # An evaluation that was stopped.
            return {}
        scores, has_answer = [], []
        for prediction, (_, context, spans) in zip(predictions, self.questions, strict=False):
            truths = [self.contexts[context][first:stop] for first, stop in spans]
            scores.append((exact_match(prediction, truths), f1(prediction, truths)))
            has_answer.append(bool(spans))
        exact, overlap = np.array(scores, np.float64).T
        found = {"exact_match": float(exact.mean()), "f1": float(overlap.mean())}
        which = np.array(has_answer)
        if self.unanswerable and which.any():
            found["exact_match_answerable"] = float(exact[which].mean())
            found["f1_answerable"] = float(overlap[which].mean())
        if self.unanswerable and not which.all():
            found["exact_match_unanswerable"] = float(exact[~which].mean())
        return found


def normalized(text: str) -> str:
    """Returns an answer in lower case, without punctuation, articles and repeated spaces.

    Source: the evaluation of SQuAD (Rajpurkar et al. 2016, section 6.1).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(prediction: str, truths: Sequence[str]) -> float:
    """Returns 1 if a prediction equals one of the true answers, normalised, else 0."""
    return max(float(normalized(prediction) == truth) for truth in _truths(truths))


def f1(prediction: str, truths: Sequence[str]) -> float:
    """Returns the largest F1 of a prediction's words and a true answer's words.

    Where either has no words, it is whether both have none.

    Source: the evaluation of SQuAD v2.0 (Rajpurkar et al. 2018).
    """
    ours = normalized(prediction).split()

    def overlap(theirs: list[str]) -> float:
        if not ours or not theirs:
            return float(ours == theirs)
        return 2 * sum((Counter(ours) & Counter(theirs)).values()) / (len(ours) + len(theirs))

    return max(overlap(truth.split()) for truth in _truths(truths))


def _truths(truths: Sequence[str]) -> list[str]:
    """Returns the normalised true answers; without one, no words are true."""
    return [words for words in map(normalized, truths) if words] or [""]
