"""Questions in the format of SQuAD: its nested files, and the flat examples of `datasets`.

Source: Rajpurkar et al. 2016, "SQuAD: 100,000+ Questions for Machine Comprehension of Text";
Rajpurkar et al. 2018, "Know What You Don't Know: Unanswerable Questions for SQuAD" (v2.0).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardlib.data import records
from shardlib.data.hashing import content_hash
from shardlib.errors import DataError

_NAMES = "Name the fields as SQuAD does: question, context, answers."
_ANSWERS = (
    'Write answers as {"text": ["..."], "answer_start": [0]}, or as a list of {"text": "...", '
    '"answer_start": 0}.'
)
_SHOWN_CHARACTERS = 40


class SquadQuestion(NamedTuple):
    """A question about a text."""

    where: str
    """Its place in the files."""
    id: str
    text: str
    context: str
    answers: tuple[tuple[int, int], ...]
    """The first character of each answer in the context, and the one after its last."""

    @property
    def hash(self) -> int:
        """Hash of the context: questions about one text are on one side of a split."""
        return content_hash(self.context.encode())


def read_questions(paths: Sequence[str], *, unanswerable: bool) -> list[SquadQuestion]:
    """Returns the questions of some paths in order. With `unanswerable`, a question may have no
    answer.

    Raises:
        DataError: If examples lack fields or answers, or an answer is not where it should be. The
            message names the first few and their number.
    """

    def read(where: str, example: Mapping[str, Any]) -> SquadQuestion:
        text = records.text(example, "question", _NAMES)
        context = records.text(example, "context", _NAMES)
        spans = tuple(_spans(context, records.field(example, "answers", _NAMES)))
        if not spans and not unanswerable:
            raise DataError(
                "the question has no answer.\n"
                "  Set data.unanswerable=true, or remove such questions."
            )
        # As transformers' example script does: spaces at the front are of no use.
        return SquadQuestion(where, str(example.get("id", where)), text.lstrip(), context, spans)

    examples = (each for path in paths for each in records.examples(path))
    return records.read_all((one for each in examples for one in _flat(*each)), read)


def _flat(where: str, example: dict[str, Any]) -> Iterator[records.Placed]:
    """Yields the questions of an article of SQuAD, or the example itself."""
    if "paragraphs" not in example:
        yield where, example
        return
    for number, paragraph in enumerate(example["paragraphs"]):
        place = f"{where}: paragraph {number}"
        if "qas" not in paragraph:
            yield place, paragraph
        for question in paragraph.get("qas", ()):
            shared = {key: value for key, value in paragraph.items() if key == "context"}
            yield f"{place}: question {question.get('id')!r}", {**question, **shared}


def _spans(context: str, answers: Any) -> Iterator[tuple[int, int]]:
    """Yields the characters of each answer, without spaces around it."""
    try:
        if isinstance(answers, Mapping):
            pairs = list(zip(answers["text"], answers["answer_start"], strict=True))
        else:
            pairs = [(answer["text"], answer["answer_start"]) for answer in answers]
    except (TypeError, KeyError, ValueError):
        pairs = [(None, None)]
    for text, start in pairs:
        if not isinstance(text, str) or not isinstance(start, int):
            raise DataError(f"the field 'answers' is not in the format of SQuAD.\n  {_ANSWERS}")
        if not text.strip():
            raise DataError("an answer is blank.\n  Correct or remove the question.")
        held = context[max(start, 0) : max(start, 0) + len(text)]
        if start < 0 or held != text:
            raise DataError(
                f"the answer {_short(text)} is not at character {start} of the context, which has "
                f"{_short(held)} there.\n  Correct answer_start, which counts characters from 0."
            )
        first = start + len(text) - len(text.lstrip())
        yield first, first + len(text.strip())


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")
