"""Labelled texts: rows as transformers makes them, every storage, splits and faults."""

import json

import numpy as np
import pytest

from shardlib.data import LabeledTextData, open_data
from shardlib.data.tokenizer import train_word_piece
from shardlib.errors import DataError

TEXT = "the quick brown fox jumps over lazy dogs and birds sing in trees"
WORDS = TEXT.split()
LENGTH = 16


def random_examples(count, seed=0, longest=24):
    rng = np.random.default_rng(seed)

    def text():
        return " ".join(rng.choice(WORDS, rng.integers(1, longest)).tolist())

    names = ("bird", "dog", "fox")
    return [{"text": text(), "other": text(), "label": names[n % 3]} for n in range(count)]


def write(path, examples):
    path.write_text("\n".join(map(json.dumps, examples)))
    return str(path)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_word_piece(WORDS * 3, 400).save(path)
    return str(path)


def data(path, tokenizer_file, **options):
    return LabeledTextData(
        path=path, tokenizer=tokenizer_file, **{"sequence_length": LENGTH, **options}
    )


def all_rows(config, split="train"):
    source = open_data(config, global_batch=1, seed=0, split=split)
    examples = source._make_examples.args[0]
    return [examples[index] for index in range(len(examples))], source.spec


@pytest.mark.mesh
@pytest.mark.parametrize("fields", [("text",), ("text", "other")])
def test_rows_are_those_of_transformers(tmp_path, tokenizer_file, fields, caplog):
    transformers = pytest.importorskip("transformers")
    examples = random_examples(60)
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=tokenizer_file, pad_token="[PAD]")
    batch = oracle(
        *([each[name] for each in examples] for name in fields),
        truncation=True,
        max_length=LENGTH,
        padding="max_length",
        return_token_type_ids=True,
    )
    arrays = [batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")]
    labels = [("bird", "dog", "fox").index(each["label"]) for each in examples]
    expected = sorted(np.concatenate([*arrays, np.array(labels)[:, None]], axis=1).tolist())
    config = data(
        write(tmp_path / "a.jsonl", examples),
        tokenizer_file,
        text_fields=fields,
        too_long="truncate",
        eval_fraction=0.0,
    )
    rows, spec = all_rows(config)
    names = ("tokens", "types", "segment_ids", "labels")
    found = [np.concatenate([np.ravel(row[name]) for name in names]).tolist() for row in rows]
    assert sorted(found) == expected
    assert (spec.num_classes, spec.num_types) == (3, len(fields))
    assert "of 60 texts to train on are cut to a row of 16 tokens" in caplog.text


@pytest.mark.mesh
def test_every_storage_gives_the_same_rows(tmp_path, tokenizer_file):
    datasets = pytest.importorskip("datasets")
    import csv

    examples = random_examples(12, longest=9)
    held = datasets.Dataset.from_list(examples)
    held.save_to_disk(tmp_path / "saved")
    held.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(examples))
    for name, options in (("a.csv", {}), ("a.tsv", {"delimiter": "\t"})):
        with (tmp_path / name).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, examples[0], **options)
            writer.writeheader()
            writer.writerows(examples)
    expected, _ = all_rows(data(write(tmp_path / "a.jsonl", examples), tokenizer_file))
    for name in ("saved", "a.parquet", "a.json", "a.csv", "a.tsv"):
        found, _ = all_rows(data(str(tmp_path / name), tokenizer_file))
        for row, other in zip(found, expected, strict=True):
            for key, values in row.items():
                np.testing.assert_array_equal(values, other[key], err_msg=name)


def test_labels_of_both_sides_are_numbered_alike(tmp_path, tokenizer_file):
    examples = random_examples(30, longest=9)
    held = [each for each in random_examples(9, seed=3, longest=9) if each["label"] == "fox"]
    config = data(
        write(tmp_path / "a.jsonl", [*examples, *held]),
        tokenizer_file,
        eval_path=write(tmp_path / "b.jsonl", held),
    )
    rows, spec = all_rows(config, "eval")
    assert {int(row["labels"]) for row in rows} == {2}
    assert spec.num_classes == 3
    assert len(all_rows(config)[0]) <= 30
    named = data(config.path, tokenizer_file, classes=("fox", "cat", "dog", "bird"))
    rows, spec = all_rows(named)
    assert spec.num_classes == 4
    assert {int(row["labels"]) for row in rows} == {0, 2, 3}
    numbered = [each | {"label": n} for n, each in enumerate(examples[:11])]
    _, spec = all_rows(data(write(tmp_path / "c.jsonl", numbered), tokenizer_file))
    assert spec.num_classes == 11


FAULTS = {
    "no label": ({"labl": 1}, "no field 'label'; its fields: 'text', 'labl'. Did you mean 'labl'?"),
    "real number": ({"label": 0.5}, "the label is float, neither a number nor a name"),
    "negative": ({"label": -1}, "the label -1 is outside the classes: the numbers from 0 on"),
    "mixed": ({"label": "a"}, "the label 'a' is a name, unlike those before"),
    "no text": ({"label": 1, "text": None}, "the field 'text' holds NoneType, not text"),
}


@pytest.mark.parametrize(("example", "fault"), FAULTS.values(), ids=FAULTS)
def test_faults_name_their_place(tmp_path, tokenizer_file, example, fault):
    path = write(tmp_path / "a.jsonl", [{"text": "a", "label": 0}, {"text": "b"} | example])
    with pytest.raises(DataError) as caught:
        all_rows(data(path, tokenizer_file))
    assert f"{path}:2: {fault}" in str(caught.value)
    assert "\n  " in str(caught.value)


def test_all_faults_are_counted(tmp_path, tokenizer_file):
    examples = random_examples(20, longest=9)
    for each in examples[::2]:
        each["label"] = "brid"
    path = write(tmp_path / "a.jsonl", examples)
    with pytest.raises(DataError) as caught:
        all_rows(data(path, tokenizer_file, classes=("bird", "dog", "fox")))
    lines = str(caught.value).split("\n  ")
    assert lines[0] == "10 of 20 examples have faults:"
    assert "'brid' is outside the classes: bird, dog, fox. Did you mean 'bird'?" in lines[1]
    assert lines[6] == "and 5 more."
    assert lines[7].startswith("Correct the labels")


def test_long_texts_are_refused_with_their_number(tmp_path, tokenizer_file):
    path = write(tmp_path / "a.jsonl", random_examples(60))
    with pytest.raises(DataError, match=r"of 60 texts are longer than a row of 16 tokens; .*\n  S"):
        all_rows(data(path, tokenizer_file))
    with pytest.raises(DataError, match="row of 2 tokens holds 2 special tokens and no text"):
        all_rows(data(path, tokenizer_file, sequence_length=2))


def test_wrong_keys_are_refused_together():
    with pytest.raises(ValueError, match=r"text_fields must.*classes must.*sequence_length must"):
        LabeledTextData(text_fields=(), classes=("a", "a"), sequence_length=0)
