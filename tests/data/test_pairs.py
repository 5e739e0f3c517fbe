"""Inputs and answers: spans that are left out of text, prompts with completions, and refusals."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib import run
from shardlib.config import load
from shardlib.data import PairData, SpanData, StreamPosition, open_data
from shardlib.data.text.spans import SpanSizes, corrupted, fitting
from shardlib.data.tokenizer import read_tokenizer
from shardlib.errors import ConfigError, DataError

EOT = 256


def test_rows_have_the_published_sizes():
    """Raffel et al. 2020, section 3.3.4 and its code: 512 inputs hold 568 tokens of text."""
    sizes = fitting(512, 0.15, 3.0)
    assert (sizes.text, sizes.inputs, sizes.targets) == (568, 512, 114)


@given(
    length=st.integers(2, 200),
    density=st.floats(0.01, 0.99),
    mean=st.floats(1.0, 20.0),
    seed=st.integers(0, 9),
)
def test_inputs_and_targets_together_are_the_text(length, density, mean, seed):
    sizes = SpanSizes.of(length, density, mean)
    text, ids = np.arange(length, dtype=np.int32), np.arange(sizes.spans, dtype=np.int32) + 1000
    inputs, targets = corrupted(text, sizes, ids, 2000, np.random.default_rng(seed))
    assert (len(inputs), len(targets)) == (sizes.inputs, sizes.targets)
    assert inputs[-1] == targets[-1] == 2000
    spans = np.split(targets[:-1], np.flatnonzero(targets[:-1] >= 1000)[1:])
    filled = [spans[token - 1000][1:] if token >= 1000 else [token] for token in inputs[:-1]]
    np.testing.assert_array_equal(np.concatenate(filled), text)
    assert all(len(span) > 1 for span in spans)
    hidden = inputs[:-1] >= 1000
    assert not (hidden[:-1] & hidden[1:]).any(), "kept spans are not empty"


def test_spans_are_uniform():
    """Each place of the text but the first and the last is left out with the same probability."""
    sizes = SpanSizes.of(20, 0.3, 2.0)
    ids, random = np.arange(3, dtype=np.int32) + 100, np.random.default_rng(0)
    draws = 4000
    left_out = np.zeros(20)
    for _ in range(draws):
        _, targets = corrupted(np.arange(20, dtype=np.int32), sizes, ids, 200, random)
        left_out[targets[targets < 100]] += 1
    assert left_out[0] == 0
    assert left_out[-1] == draws
    assert left_out.sum() == draws * sizes.noise


@pytest.fixture
def spans(corpus):
    return SpanData(path=str(corpus), tokenizer="bytes", sequence_length=48, eval_fraction=0.2)


def test_rows_depend_on_seed_and_place_alone(spans):
    source = open_data(spans, global_batch=4, seed=3, split="train")
    whole = source.read(2, 0, 4)
    again = open_data(spans, global_batch=2, seed=3, split="train")
    moved = again.at(StreamPosition(0, 8)).read(0, 0, 2)
    for name, rows in whole.items():
        np.testing.assert_array_equal(rows[:2], moved[name])
    other = open_data(spans, global_batch=4, seed=4, split="train").read(2, 0, 4)
    assert (whole["tokens"] != other["tokens"]).any()


def test_each_pass_leaves_out_other_spans_but_evaluation_the_same(spans):
    source = open_data(spans, global_batch=1, seed=0, split="train")
    rows = [source.read(step, 0, 1) for step in range(1200)]
    tokens = {row["tokens"].tobytes() for row in rows}
    # The corpus has about 230 rows.
    assert len(tokens) > 1100
    evals = [open_data(spans, global_batch=1, seed=seed, split="eval") for seed in (0, 1)]
    for step in range(evals[0].num_steps):
        first, second = (source.read(step, 0, 1) for source in evals)
        np.testing.assert_array_equal(first["tokens"], second["tokens"])
    # The end of the last row of text has no tokens.
    sizes = [evals[0].read(step, 0, 1)["segment_ids"].sum() for step in range(evals[0].num_steps)]
    assert min(sizes) < 48 == max(sizes)


def test_a_prompt_names_the_spans_to_fill_in(spans):
    tokenizer = spans.find_tokenizer()
    count = spans.spec().vocab_size - 257
    assert spans.spec() == open_data(spans, global_batch=1, seed=0, split="train").spec
    tokens = spans.prompt_tokens("a<extra_id_0>b<extra_id_1>", tokenizer)
    assert tokens == [97, 257, 98, 258, EOT]
    assert spans.sampled_text([*tokens[:-1], 900], tokenizer) == "a<extra_id_0>b<extra_id_1>"
    with pytest.raises(DataError, match=rf"span <extra_id_{count}>.*\n  Number the spans from 0"):
        spans.prompt_tokens(f"a<extra_id_{count}>", tokenizer)


def test_the_sentinels_of_a_tokenizer_are_used(tmp_path, corpus):
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    alphabet = {name: n for n, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = ["</s>", "<extra_id_2>", "<extra_id_1>", "<extra_id_0>"]
    library.add_special_tokens([AddedToken(name, special=True) for name in names])
    file = str(tmp_path / "tokenizer.json")
    library.save(file)
    data = SpanData(path=str(corpus), tokenizer=file, sequence_length=48, eval_fraction=0.2)
    source = open_data(data, global_batch=1, seed=0, split="train")
    targets = source.read(0, 0, 1)["targets"][0]
    assert targets[targets > EOT].tolist() == [259, 258, 257][: (targets > EOT).sum()]
    assert source.spec.vocab_size == read_tokenizer(file).vocab_size == 260
    long = SpanData(path=str(corpus), tokenizer=file, sequence_length=96, eval_fraction=0.2)
    with pytest.raises(DataError, match=r"sequence_length=96.* the tokenizer has 3 tokens"):
        open_data(long, global_batch=1, seed=0, split="train")


def pairs(tmp_path, **options):
    lines = [{"prompt": f"{n} + 1", "completion": str(n + 1)} for n in (*range(40), 123_456)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = {"sequence_length": 12, "target_length": 8, "eval_fraction": 0.1} | options
    return PairData(path=str(tmp_path / "sums.jsonl"), **options)


def test_a_prompt_and_its_completion_have_a_row_each(tmp_path):
    data = pairs(tmp_path)
    source = open_data(data, global_batch=16, seed=0, split="train")
    assert source.spec == data.spec()
    batch = source.read(0, 0, 16)
    for row in range(16):
        texts = []
        for name, ids in (("tokens", "segment_ids"), ("targets", "target_segment_ids")):
            size = batch[ids][row].sum()
            assert (batch[ids][row] == (np.arange(len(batch[ids][row])) < size)).all()
            tokens = batch[name][row]
            assert tokens[size - 1] == EOT
            assert not tokens[size:].any()
            texts.append(bytes(tokens[: size - 1].tolist()).decode())
        assert int(texts[0].removesuffix(" + 1")) + 1 == int(texts[1])
    prompt = data.prompt_tokens("1 + 1", source.tokenizer)
    assert prompt == [*b"1 + 1", EOT]


def test_pairs_that_are_too_long_are_refused_or_cut(tmp_path, caplog):
    with pytest.raises(DataError) as error:
        open_data(pairs(tmp_path, sequence_length=8, target_length=4), **OPTIONS)
    path = "data.path"
    assert str(error.value) == (
        f"{path}: 1 of 41 examples have a prompt longer than 8 tokens; the longest has 11.\n"
        f"{path}: 1 of 41 examples have a completion longer than 4 tokens; the longest has 7.\n"
        "  Set data.sequence_length=11 and data.target_length=7, or data.too_long=truncate to "
        "cut them."
    )
    cut = pairs(tmp_path, sequence_length=8, target_length=4, too_long="truncate")
    for split in ("train", "eval"):
        open_data(cut, **OPTIONS | {"split": split})
    assert "are cut to 8 tokens of the prompt and 4 of the completion" in caplog.text


OPTIONS = {"global_batch": 4, "seed": 0, "split": "train"}


def test_wrong_keys_are_named_together(tmp_path):
    path = tmp_path / "t5.yaml"
    path.write_text(
        "data: {kind: span_corruption, sequence_length: 2, noise_density: 1, mean_span_length: 0}\n"
        "model: {name: t5}\n"
    )
    with pytest.raises(ConfigError) as error:
        load(run.RunConfig, path)
    for fault in ("sequence_length must be at least 3", "noise_density", "mean_span_length"):
        assert fault in str(error.value)


def test_a_model_of_pairs_does_not_take_text(tmp_path):
    path = tmp_path / "t5.yaml"
    path.write_text(f"run_dir: {tmp_path / 'run'}\nmodel: {{name: t5}}\ntrain: {{steps: 1}}\n")
    with pytest.raises(ConfigError, match=r"takes pairs, but .*'text'.\n  Set data.kind=pairs"):
        run.explain(load(run.RunConfig, path))
