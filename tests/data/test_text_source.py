"""Text from files to batches: the same global batch, whoever reads which part of it, and when."""

import gzip
import json
import re

import jax
import numpy as np
import pytest

from shardlib.data import TextData, load_tokenizer, open_data
from shardlib.data.corpus import builtin_files
from shardlib.data.text.sources import open_sources
from shardlib.registry import DataSpec

BATCH = 8


def config(path, **options):
    defaults = {"sequence_length": 32, "tokenizer": "bytes", "eval_fraction": 0.1}
    return TextData(path=path, **(defaults | options))


def open_split(config, split="train", *, seed=0, global_batch=BATCH):
    return open_data(config, global_batch=global_batch, seed=seed, split=split)


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def documents_of(source, steps):
    """The texts between end-of-text tokens in some steps of training or a pass of evaluation."""
    stream = []
    for step in range(steps):
        batch = source.read(step, 0, source.global_batch)
        for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
            stream.append(source.tokenizer.decode(tokens[segments > 0]))
    return stream


def test_element_spec_is_the_shape_of_a_batch(corpus):
    source = open_split(config(str(corpus)))
    assert source.spec == DataSpec(vocab_size=257, sequence_length=32)
    assert source.num_steps is None
    batch = source.read(0, 0, BATCH)
    assert source.element_spec() == {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in batch.items()
    }
    assert {name: value.shape for name, value in batch.items()} == {
        "tokens": (8, 32),
        "targets": (8, 32),
        "segment_ids": (8, 32),
        "positions": (8, 32),
        "num_bytes": (8,),
    }
    assert {value.dtype for value in batch.values()} == {np.dtype(np.int32)}


def test_seed_sets_the_order_of_training_and_not_of_evaluation(corpus):
    settings = config(str(corpus))
    first, second = (open_split(settings, seed=seed).read(0, 0, BATCH) for seed in (0, 1))
    assert not np.array_equal(first["tokens"], second["tokens"])
    evaluations = [open_split(settings, "eval", seed=seed) for seed in (0, 1)]
    assert_equal(*(source.read(0, 0, BATCH) for source in evaluations))


def test_each_pass_holds_every_row_once_in_a_new_order(corpus):
    source = open_split(config(str(corpus), eval_fraction=0.0), global_batch=1)
    total = sum(len(file.read_bytes()) + 1 for file in corpus.iterdir())
    rows = -(-total // 32)
    passes = []
    for start in (0, rows):
        batches = [source.read(step, 0, 1) for step in range(start, start + rows)]
        passes.append([batch["tokens"].tobytes() for batch in batches])
        assert sum(int(batch["num_bytes"][0]) for batch in batches) == total - 40
        assert sum((batch["segment_ids"] > 0).sum() for batch in batches) == total
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1])


def test_held_out_documents_are_not_trained_on(corpus):
    # Rows as long as the text, so that whole documents are seen.
    settings = config(str(corpus), sequence_length=4000, eval_fraction=0.2)
    train = documents_of(open_split(settings, global_batch=4), 1)
    evaluation = open_split(settings, "eval", global_batch=1)
    held = documents_of(evaluation, evaluation.num_steps)
    names = [set(re.findall(r"document (\d+)\n", "".join(texts))) for texts in (train, held)]
    assert names[0].isdisjoint(names[1])
    assert names[0] | names[1] == {str(number) for number in range(40)}
    assert 4 <= len(names[1]) <= 8


def test_a_copy_of_a_held_out_document_is_held_out_in_every_source(corpus, tmp_path):
    copies = tmp_path / "copies"
    copies.mkdir()
    for file in corpus.glob("0*.txt"):
        (copies / file.name).write_bytes(file.read_bytes())
    settings = config(
        (str(corpus), str(copies)), weights=(1, 1), sequence_length=1000, eval_fraction=0.3
    )
    train = "".join(documents_of(open_split(settings), 4))
    evaluation = open_split(settings, "eval")
    held = "".join(documents_of(evaluation, evaluation.num_steps))
    names = [set(re.findall(r"document (\d+)\n", text)) for text in (train, held)]
    assert names[0].isdisjoint(names[1])
    assert names[0] | names[1] == {str(number) for number in range(40)}


def test_eval_path_is_held_out_and_left_out_of_training(corpus):
    settings = config(str(corpus), eval_path=str(corpus / "3*.txt"), sequence_length=4000)
    train = "".join(documents_of(open_split(settings, global_batch=4), 1))
    evaluation = open_split(settings, "eval")
    held = "".join(documents_of(evaluation, evaluation.num_steps))
    trained, tested = (set(re.findall(r"document (\d+)\n", text)) for text in (train, held))
    assert tested == {str(number) for number in range(30, 40)}
    assert trained == {str(number) for number in range(30)}


def test_last_batch_of_evaluation_is_padded(corpus):
    settings = config(str(corpus), eval_path=str(corpus / "00.txt"))
    length = len((corpus / "00.txt").read_bytes()) + 1
    source = open_split(settings, "eval", global_batch=64)
    assert source.num_steps == 1
    batch = source.read(0, 0, 64)
    rows = -(-length // 32)
    valid = batch["segment_ids"] > 0
    assert valid.sum() == length
    assert valid.any(axis=1).tolist() == [True] * rows + [False] * (64 - rows)
    assert batch["num_bytes"].sum() == length - 1
    with pytest.raises(ValueError, match=re.escape("no step 1 in a pass of 1 steps")):
        source.read(1, 0, 64)
    with pytest.raises(ValueError, match=re.escape("no rows [0, 65) in a batch of 64")):
        source.read(0, 0, 65)


def test_weights_are_the_shares_of_rows(tmp_path):
    for name, size in (("a", 40_000), ("b", 5_000), ("c", 1_000)):
        (tmp_path / f"{name}.txt").write_text(name * size)
    paths = tuple(str(tmp_path / f"{name}.txt") for name in "abc")

    def shares(weights):
        settings = config(paths, weights=weights, eval_fraction=0.0)
        rows = open_split(settings, global_batch=2000).read(0, 0, 2000)["tokens"][:, 1]
        return [float(np.mean(rows == ord(name))) for name in "abc"]

    # Grain keeps weights to within 1%; the first row of each source starts with the same text.
    assert shares((0.2, 0.5, 0.3)) == pytest.approx([0.2, 0.5, 0.3], abs=0.01)
    assert shares(None) == pytest.approx([40 / 46, 5 / 46, 1 / 46], abs=0.01)


def test_documents_of_each_kind_of_file(tmp_path):
    lines = [json.dumps({"id": 1, "body": "första"}), "", json.dumps({"body": "andra\r\n"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"body": "zipped"}))
    (tmp_path / "c.txt").write_bytes(b"one\r\n---\r\ntwo---")
    (tmp_path / "d.rst").write_text("not by directory")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "e.md").write_text("deep")
    (tmp_path / "sub" / ".hidden.txt").write_text("hidden")
    (tmp_path / "z.txt").write_text("")

    def documents(path, **options):
        [source] = open_sources(config(path, text_field="body", **options), path, "data.path")
        return list(source.documents())

    deep = ["första", "andra\r\n", "zipped", "one\r\n---\r\ntwo---", "deep"]
    assert documents(str(tmp_path)) == deep
    assert documents(str(tmp_path / "c.txt"), separator="---") == ["one\r\n", "\r\ntwo"]
    assert documents(str(tmp_path / "*.rst")) == ["not by directory"]
    assert documents(str(tmp_path / "**" / "*.md")) == ["deep"]


def test_a_separator_is_found_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("shardlib.data.text.sources._CHUNK_CHARACTERS", 3)
    (tmp_path / "a.txt").write_text("first<|end|>second<|end|><|end|>third")
    path = str(tmp_path / "a.txt")
    [source] = open_sources(config(path, separator="<|end|>"), path, "data.path")
    assert list(source.documents()) == ["first", "second", "third"]


def test_embedded_corpus_is_the_standard_library_without_tests():
    files = builtin_files("builtin:python")
    names = {file.name for file in files}
    assert {"argparse.py", "ast.py", "__future__.py"} <= names
    assert not any({"test", "tests", "site-packages"} & set(file.parts) for file in files)
    assert 5e6 < sum(file.stat().st_size for file in files) < 50e6
    assert files == builtin_files("builtin:python")


def test_a_tokenizer_file_gives_the_same_batches(corpus, tmp_path):
    trained = config(str(corpus), tokenizer="bpe", vocab_size=300)
    load_tokenizer(trained).save(tmp_path / "mine.json")
    given = config(str(corpus), tokenizer=str(tmp_path / "mine.json"))
    assert load_tokenizer(given).vocab_size == 300
    first, second = (open_split(settings) for settings in (trained, given))
    assert first.fingerprint == second.fingerprint
    assert_equal(first.read(3, 0, BATCH), second.read(3, 0, BATCH))


def test_fingerprint_follows_content_and_not_place(corpus, tmp_path):
    first = open_split(config(str(corpus))).fingerprint
    corpus.rename(tmp_path / "moved")
    assert open_split(config(str(tmp_path / "moved"))).fingerprint == first
    (tmp_path / "moved" / "05.txt").write_text("something else")
    assert open_split(config(str(tmp_path / "moved"))).fingerprint != first
