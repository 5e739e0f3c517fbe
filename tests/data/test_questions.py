"""Questions: features as transformers makes them, answers over windows, the scores of SQuAD."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from shardlib.data import QuestionData, open_data
from shardlib.data.encoder_tasks import answers
from shardlib.data.encoder_tasks.answers import Answers
from shardlib.data.encoder_tasks.questions import question_texts
from shardlib.data.encoder_tasks.tokenizing import find_tokenizer
from shardlib.data.tokenizer import train_word_piece
from shardlib.errors import DataError

TEXT = "The quick Brown fox doesn't jump, (often) over lazy-dogs; über 1,234 Bäume 東京 I.e. sing"
WORDS = TEXT.split()
LENGTH, STRIDE = 40, 12


def random_questions(count, seed=0, unanswerable=0.2):
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        words = rng.choice(WORDS, rng.integers(8, 90)).tolist()
        first = int(rng.integers(0, len(words) - 4))
        texts, starts = [], []
        if rng.random() >= unanswerable:
            # Published questions have several true answers to evaluate on.
            for stop in (first + int(rng.integers(1, 5)), first + 1):
                texts.append(" ".join(words[first:stop]))
                starts.append(len(" ".join([*words[:first], ""])))
        question = " ".join(rng.choice(WORDS, rng.integers(1, 9)).tolist()) + "?"
        found.append(
            {
                "id": f"q{number}",
                "question": question,
                "context": " ".join(words),
                "answers": {"text": texts, "answer_start": starts},
            }
        )
    return found


def nested(examples):
    """The examples in the format of the published files of SQuAD v2.0."""
    paragraphs = []
    for each in examples:
        pairs = zip(each["answers"]["text"], each["answers"]["answer_start"], strict=True)
        found = [{"text": text, "answer_start": start} for text, start in pairs]
        asked = {"id": each["id"], "question": each["question"], "answers": found}
        asked["is_impossible"] = not found
        paragraphs.append({"context": each["context"], "qas": [asked]})
    return {"version": "v2.0", "data": [{"title": "all", "paragraphs": paragraphs}]}


def write(path, examples):
    path.write_text("\n".join(map(json.dumps, examples)))
    return str(path)


def rows_of(config, split="train"):
    """All rows of a pass, and the split's source."""
    source = open_data(config, global_batch=1, seed=0, split=split)
    if split == "train":
        framed = source._make_examples.args[0]
        return [framed[index] for index in range(len(framed))], source
    rows = [source.read(step, 0, 1) for step in range(source.num_steps)]
    return [{name: values[0] for name, values in row.items()} for row in rows], source


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_word_piece(WORDS * 3, 120).save(path)
    return str(path)


def data(path, tokenizer_file, **options):
    sizes = {"sequence_length": LENGTH, "stride": STRIDE, "unanswerable": True}
    return QuestionData(path=path, tokenizer=tokenizer_file, **{**sizes, **options})


def features(examples, tokenizer):
    """Windows with their targets as transformers' fast tokenizers give them."""
    batch = tokenizer(
        [each["question"] for each in examples],
        [each["context"] for each in examples],
        truncation="only_second",
        max_length=LENGTH,
        stride=STRIDE,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
        padding="max_length",
    )
    for row, number in enumerate(batch["overflow_to_sample_mapping"]):
        spans = [
            span if which == 1 else (-1, -1)
            for span, which in zip(
                batch["offset_mapping"][row], batch.sequence_ids(row), strict=True
            )
        ]
        held = [place for place, span in enumerate(spans) if span[0] >= 0]
        starts = ends = 0
        found = examples[number]["answers"]
        if found["text"]:
            first = found["answer_start"][0]
            stop = first + len(found["text"][0])
            if spans[held[0]][0] <= first and stop <= spans[held[-1]][1]:
                starts = batch.char_to_token(row, first, sequence_index=1)
                ends = batch.char_to_token(row, stop - 1, sequence_index=1)
        yield {
            "tokens": batch["input_ids"][row],
            "types": batch["token_type_ids"][row],
            "segment_ids": batch["attention_mask"][row],
            "starts": starts,
            "ends": ends,
        }


def as_tuple(row):
    names = ("tokens", "types", "segment_ids", "starts", "ends")
    return tuple(np.concatenate([np.ravel(row[name]) for name in names]).tolist())


@pytest.mark.mesh
def test_features_are_those_of_transformers(tmp_path, tokenizer_file):
    transformers = pytest.importorskip("transformers")
    examples = random_questions(200)
    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_file=tokenizer_file, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )
    expected = sorted(map(as_tuple, features(examples, oracle)))
    assert len(expected) > 300
    path = write(tmp_path / "flat.jsonl", examples)
    rows, source = rows_of(data(path, tokenizer_file, eval_fraction=0.0))
    assert sorted(map(as_tuple, rows)) == expected
    assert {name: x.shape[1:] for name, x in source.element_spec().items()} == {
        name: np.shape(x) for name, x in rows[0].items()
    }
    (tmp_path / "nested.json").write_text(json.dumps(nested(examples)))
    again, _ = rows_of(data(str(tmp_path / "nested.json"), tokenizer_file, eval_fraction=0.0))
    assert sorted(map(as_tuple, again)) == expected


def certain(rows, answers_of):
    """Logits that point at the targets of each row, or where `answers_of` says."""
    logits = np.zeros((len(rows), LENGTH, 2), np.float32)
    for number, row in enumerate(rows):
        starts, ends = answers_of(row)
        logits[number, starts, 0] = logits[number, ends, 1] = 5 - (starts == 0)
    return logits


def test_true_spans_score_one_and_each_question_counts_once(tmp_path, tokenizer_file):
    examples = random_questions(40)
    path = write(tmp_path / "train.jsonl", random_questions(3, seed=1))
    held = write(tmp_path / "eval.jsonl", examples)
    config = data(path, tokenizer_file, eval_path=held, max_answer_tokens=40)
    rows, source = rows_of(config, "eval")
    truth = certain(rows, lambda row: (int(row["starts"]), int(row["ends"])))
    padded = np.concatenate([truth, np.full((3, LENGTH, 2), 9.0, np.float32)])
    scores = source.score({"logits": padded})
    # An answer that no window holds whole cannot be predicted.
    with_answers = [each for each in examples if each["answers"]["text"]]
    assert len(rows) > len(examples) > len(with_answers) > 10
    assert scores["exact_match"] == scores["f1"] == 1.0
    nowhere = certain(rows, lambda row: (0, 0))
    scores = source.score({"logits": nowhere})
    assert scores["exact_match"] == pytest.approx(1 - len(with_answers) / len(examples))
    assert (scores["exact_match_answerable"], scores["exact_match_unanswerable"]) == (0.0, 1.0)
    assert source.score({"logits": truth[:0]}) == {}


def test_the_best_span_over_windows_is_the_answer():
    """Two windows of one question; the better pair begins in a place that is not the best."""
    spans = np.full((8, 2), -1, np.int32)
    spans[[2, 3, 6, 7]] = [[0, 2], [3, 5], [3, 5], [6, 8]]
    found = Answers(
        [("q", 0, [(3, 8)])],
        ["ab cd ef"],
        np.array([2]),
        spans,
        np.array([[0, 4], [4, 8]]),
        unanswerable=True,
        no_answer_threshold=0.0,
        max_answer_tokens=2,
    )
    logits = np.zeros((2, 4, 2), np.float32)
    logits[0, 3, 0], logits[0, 2, 1] = 9.0, 9.0  # It would end before it begins.
    logits[1, 2, 0], logits[1, 3, 1] = 6.0, 6.0
    assert found.predicted(logits) == ["cd ef"]
    assert found.score({"logits": logits})["exact_match"] == 1.0
    logits[:, 0] = 5.9
    assert found.predicted(logits) == ["cd ef"]
    logits[0, 0] = 6.1  # Only one of the windows says that there is no answer.
    assert found.predicted(logits) == ["cd ef"]
    logits[1, 0] = 6.1
    assert found.predicted(logits) == [""]
    # Sums of 12.2 for no answer and of 12 for the best one.
    wary = dataclasses.replace(found, no_answer_threshold=0.25)
    assert wary.predicted(logits) == ["cd ef"]
    logits[:, 0] = 6.2
    assert wary.predicted(logits) == [""]


# The formulas of the published script, evaluated by hand: exact match, words in common, and the
# words of prediction and truth.
SCORES = {
    "the same": ("Denver Broncos", ["The Denver Broncos"], 1, 1),
    "other order": ("the Broncos of Denver!", ["Denver Broncos"], 0, 2 * 2 / (3 + 2)),
    "punctuation": ("A  gold-plated,  year", ["gold", "goldplated year"], 1, 1),
    "articles alone": ("an", ["the"], 1, 1),
    "nothing for articles": ("", ["the"], 1, 1),
    "nothing": ("", [], 1, 1),
    "something for nothing": ("anything", [], 0, 0),
    "nothing for something": ("", ["Denver"], 0, 0),
    "the best of two": (
        "Levi's Stadium in the San Francisco Bay Area",
        ["Levi Stadium", "Levi's Stadium"],
        0,
        2 * 2 / (7 + 2),
    ),
    "repeated": ("word word other", ["word word word"], 0, 2 * 2 / (3 + 3)),
}


@pytest.mark.parametrize(("prediction", "truths", "exact", "overlap"), SCORES.values(), ids=SCORES)
def test_scores_are_those_of_squad(prediction, truths, exact, overlap):
    assert answers.exact_match(prediction, truths) == exact
    assert answers.f1(prediction, truths) == pytest.approx(overlap, rel=1e-12)


@pytest.mark.parametrize("name", ["fault", "room", "plain"])
def test_faults_are_named_together(tmp_path, tokenizer_file, name):
    good = random_questions(8, unanswerable=0.0)
    options, split = {"unanswerable": False}, "train"
    if name == "fault":
        good[1]["answers"]["answer_start"][0] += 1
        good[2] = {"question": "a", "contxt": "b", "answers": {}}
        good[3]["answers"] = {"text": [], "answer_start": []}
        good[4]["answers"] = "the fox"
        good[5]["answers"]["text"][0] = " "
        good[6]["question"] = None
        good[7]["answers"]["answer_start"][0] = 10**6
        expected = [
            "7 of 8 examples have faults:",
            "bad.jsonl:2: the answer",
            "bad.jsonl:3: no field 'context'; its fields: 'question', 'contxt', 'answers'. Did you",
            "bad.jsonl:4: the question has no answer",
            "bad.jsonl:5: the field 'answers' is not in the format of SQuAD",
            "bad.jsonl:6: an answer is blank",
            "and 2 more.",
            "Set data.unanswerable=true, or remove such questions.",
            "Correct answer_start",
        ]
    elif name == "room":
        good[0]["question"] = "fox " * 30
        expected = [
            "bad.jsonl:1: the question of",
            "tokens of 40 to a window of its text; it takes more than stride=12.",
            "data.stride",
        ]
    else:
        plain = tmp_path / "plain.json"
        content = json.loads(pathlib.Path(tokenizer_file).read_text()) | {"post_processor": None}
        plain.write_text(json.dumps(content))
        tokenizer_file = str(plain)
        expected = ["puts no special tokens around a text", "Give the tokenizer of an encoder"]
    path = write(tmp_path / "bad.jsonl", good)
    with pytest.raises(DataError) as caught:
        open_data(data(path, tokenizer_file, **options), global_batch=2, seed=0, split=split)
    for part in expected:
        assert part in str(caught.value), str(caught.value)


def test_too_few_batches_for_one_question_are_refused(tmp_path, tokenizer_file):
    path = write(tmp_path / "a.jsonl", random_questions(6, unanswerable=0.0))
    long = [each | {"context": each["context"] * 4} for each in random_questions(4, seed=5)]
    config = data(path, tokenizer_file, eval_path=write(tmp_path / "b.jsonl", long), eval_steps=1)
    with pytest.raises(DataError, match=r"eval_steps leaves 1 rows.*\n  Set it to more"):
        open_data(config, global_batch=1, seed=0, split="eval")


def test_a_tokenizer_of_the_training_texts(tmp_path):
    path = write(tmp_path / "a.jsonl", random_questions(50))
    config = QuestionData(path=path, unanswerable=True, vocab_size=90, eval_fraction=0.3)
    assert config.find_tokenizer() is None
    tokenizer = config.find_tokenizer(read=True)
    assert tokenizer is not None
    assert tokenizer.fingerprint == find_tokenizer(config, question_texts(config)).fingerprint
    (pair,) = tokenizer.framed([("fox", "the Fox")])
    assert pair.tokens[0] == "[CLS]"
    assert pair.type_ids == [0] * pair.tokens.index("[SEP]") + [0] + [1] * (
        len(pair.tokens) - pair.tokens.index("[SEP]") - 1
    )
    assert open_data(config, global_batch=2, seed=0, split="train").spec.num_types == 2
