"""The source of questions, each with the windows of its text."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from shardlib.batch_kinds import DataSpec
from shardlib.data.config import as_paths
from shardlib.data.encoder_tasks.answers import Answers
from shardlib.data.encoder_tasks.fields import QuestionFields
from shardlib.data.encoder_tasks.rows import (
    Framed,
    Writer,
    blocks,
    framed,
    num_types,
    row_source,
    split_rows,
)
from shardlib.data.encoder_tasks.squad import SquadQuestion, read_questions
from shardlib.data.encoder_tasks.tokenizing import Texts, load_tokenizer
from shardlib.data.loader import MapSource
from shardlib.data.records import raise_faults
from shardlib.data.tokenizer import JsonTokenizer


def open_questions(
    config: QuestionFields, *, global_batch: int, seed: int, split: Literal["train", "eval"]
) -> MapSource:
    """Returns the source of questions; see `open_data`."""
    tokenizer = load_tokenizer(config, question_texts(config))
    ours = _framed(config, tokenizer, as_paths(config.path))
    evals = None
    if config.eval_path is not None:
        evals = _framed(config, tokenizer, as_paths(config.eval_path))
    side = split_rows(config, ours, evals, seed, split)
    scored = None
    if split == "eval":
        scored = Answers.of(config, side)
        if config.eval_steps is not None:
            scored.check_some(config.eval_steps * global_batch)
    spec = DataSpec(tokenizer.vocab_size, config.sequence_length, num_types=num_types(ours, evals))
    return row_source(
        config,
        side,
        spec,
        tokenizer,
        global_batch=global_batch,
        seed=seed,
        split=split,
        score=None if scored is None else scored.score,
    )


def question_texts(config: QuestionFields) -> Texts:
    """Returns how the texts are read, to train a tokenizer."""

    def read(paths: Sequence[str]) -> list[tuple[int, str]]:
        questions = read_questions(paths, unanswerable=config.unanswerable)
        return [(each.hash, text) for each in questions for text in (each.text, each.context)]

    return Texts("questions", read)


def _framed(config: QuestionFields, tokenizer: JsonTokenizer, paths: Sequence[str]) -> Framed:
    build = functools.partial(_build, config, tokenizer, paths)
    return framed(config, tokenizer, paths, ("spans", config.stride, config.unanswerable), build)


def _build(
    config: QuestionFields, tokenizer: JsonTokenizer, paths: Sequence[str], writer: Writer
) -> None:
    questions = read_questions(paths, unanswerable=config.unanswerable)
    contexts: dict[str, int] = {}
    _check_room(config, tokenizer, questions)
    for block in blocks(questions):
        encodings = tokenizer.framed(
            [(each.text, each.context) for each in block],
            max_tokens=config.sequence_length,
            stride=config.stride,
            cut="only_second",
        )
        for each, encoding in zip(block, encodings, strict=True):
            for window in (encoding, *encoding.overflowing):
                spans = context_spans(window)
                starts, ends = span_tokens(spans, each.answers[0] if each.answers else None)
                writer.row(window, each.hash, {"starts": starts, "ends": ends})
                writer.more("spans", spans)
            writer.more("windows", np.array([1 + len(encoding.overflowing)], np.int32))
    numbers = [contexts.setdefault(each.context, len(contexts)) for each in questions]
    writer.notes = {
        "contexts": list(contexts),
        "questions": [
            (each.id, number, each.answers) for each, number in zip(questions, numbers, strict=True)
        ],
    }


def _check_room(
    config: QuestionFields, tokenizer: JsonTokenizer, questions: Sequence[SquadQuestion]
) -> None:
    """Raises `DataError` with the questions that leave too little of a row to their texts."""
    room = config.sequence_length - tokenizer.num_framing_tokens(2)
    sizes = [len(each.ids) for each in tokenizer.encode_documents([q.text for q in questions])]
    fix = "Shorten the question, or set data.sequence_length to more or data.stride to less."
    faults = [
        (
            question.where,
            f"the question of {size} tokens leaves {max(room - size, 0)} tokens of "
            f"{config.sequence_length} to a window of its text; it takes more than "
            f"stride={config.stride}.\n"
            f"  {fix}",
        )
        for question, size in zip(questions, sizes, strict=True)
        if room - size <= config.stride
    ]
    raise_faults(faults, len(questions))


def context_spans(window: Any) -> np.ndarray:
    """Returns the characters of the second text that each token of a `tokenizers.Encoding` covers:
    the first, and the one after the last; -1 for other tokens. [n, 2] int32."""
    is_context = np.array([which == 1 for which in window.sequence_ids])
    spans = np.array(window.offsets, np.int32).reshape(-1, 2)
    return np.where(is_context[:, None], spans, np.int32(-1))


def span_tokens(spans: np.ndarray, answer: tuple[int, int] | None) -> tuple[int, int]:
    """Returns the first and the last token of an answer in a window, from `context_spans`. The
    answer is its first character, and the one after its last.

    They are 0, the token that stands for the whole row, for a question without an answer and for a
    window that does not hold all of the answer.

    Source: Devlin et al. 2019, "BERT", section 4.3.
    """
    (places,) = np.nonzero(spans[:, 0] >= 0)
    if answer is None or not len(places):
        return 0, 0
    starts, ends = spans[places].T
    if starts[0] > answer[0] or ends[-1] < answer[1]:
        return 0, 0
    first = int(np.searchsorted(starts, answer[0], side="right")) - 1
    last = int(np.searchsorted(ends, answer[1], side="left"))
    return int(places[first]), int(places[max(first, last)])
