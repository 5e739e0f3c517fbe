"""`open_model` and `load_run` on folders and runs of encoders, with a decoder or without one."""

import json
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
from flax import nnx

import shardlib as sl
from shardlib import run
from shardlib.config import from_dict
from shardlib.data.tokenizer import train_word_piece
from shardlib.errors import ModelError
from shardlib.registry import DataSpec
from shardlib.serve import answer_batch
from shardlib.serve.open_model import open_model
from shardlib_models.bert import BertConfig
from shardlib_models.bert_losses import MASKED
from shardlib_models.t5 import FAMILY
from shardlib_models.t5_config import T5Config

WORDS = ["one small text", "another text of words", "small words"]
SMALL: dict[str, Any] = {"embed_dim": 64, "num_layers": 1, "num_heads": 4}


def saved(folder, family, config):
    """Saves a new model with a tokenizer that puts [CLS] and [SEP] around texts."""
    sl.hf.save(family.make(config, DataSpec(), nnx.Rngs(0)), folder)
    train_word_piece(WORDS, 200).save(folder / "tokenizer.json")
    parts = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    (folder / "modules.json").write_text(json.dumps(parts))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    return folder


@pytest.mark.mesh
def test_a_folder_of_bert_embeds_texts(tmp_path):
    config = BertConfig(**SMALL, vocab_size=256, max_positions=64, head="none")
    folder = saved(tmp_path / "bert", MASKED, config)
    engine, speaker = open_model(str(folder))
    assert (engine.context, speaker.names) == (24, ("bert",))
    found = sl.Engine(sl.hf.load(folder)).embed(WORDS)
    np.testing.assert_allclose(engine.embed(WORDS), found, atol=1e-5)
    with pytest.raises(ModelError, match="writes no text"):
        engine.generate(WORDS)


@pytest.mark.mesh
def test_a_folder_of_t5_answers_texts(tmp_path):
    folder = saved(tmp_path / "t5", FAMILY, T5Config(**SMALL, vocab_size=256, init_factor=2.0))
    # What it says about embeddings is not for T5, and may be wrong.
    (folder / "modules.json").write_text("3")
    engine, speaker = open_model(str(folder), slots=2)
    assert (engine.context, speaker.names) == (1024, ("t5",))
    loaded = sl.hf.load(folder)
    answers = sl.Engine(loaded, slots=2).generate(WORDS, max_tokens=8)
    assert [one.ids for one in engine.generate(WORDS, max_tokens=8)] == [x.ids for x in answers]
    assert list(answers[0].prompt) == loaded.tokenizer.encode(WORDS[0]).ids


def trained(folder, model, data):
    (folder / "text.txt").write_text("\n".join(f"line {n} of a text" for n in range(400)))
    config = {
        "run_dir": str(folder / "run"),
        "model": {**SMALL, **model},
        "data": {
            "path": str(folder / "text.txt"),
            "tokenizer": "bytes",
            "eval_fraction": 0,
            **data,
        },
        "train": {"steps": 2, "global_batch": 8, "sample_length": 0},
        "eval": {"every_steps": 0},
    }
    run.train(from_dict(run.RunConfig, config, source="the test"))
    return config["run_dir"]


@pytest.mark.mesh
def test_a_run_of_spans_writes_them_by_name(tmp_path):
    data = {"kind": "span_corruption", "sequence_length": 32}
    run_dir = trained(tmp_path, {"name": "t5"}, data)
    engine, speaker = open_model(run_dir, slots=2)
    own = sl.Engine(sl.load_run(run_dir), slots=2)
    prompt = "line <extra_id_0> of"
    for one in (engine, own):
        assert one.encode(prompt) == (*b"line ", 257, *b" of", 256)
        (answer,) = one.generate(prompt, max_tokens=12, logit_bias={257: 100})
        assert answer.text == "<extra_id_0>" * 12
    assert own.generate(prompt, max_tokens=12) == engine.generate(prompt, max_tokens=12)
    (answer,) = engine.generate(prompt, max_tokens=12)
    text = run.generate(run_dir, prompt, length=12, temperature=0.0)
    assert answer.text == text
    rows = [
        {"custom_id": x, "url": "/v1/completions", "body": {"prompt": x, "max_tokens": 2}}
        for x in (prompt, "line <extra_id_99>")
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = answer_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", engine, speaker)
    assert (card.answered, card.refused) == (2, 1)
    lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    responses = {one["custom_id"]: one["response"] for one in lines}
    assert responses[prompt]["status_code"] == 200
    refused = responses["line <extra_id_99>"]
    assert refused["status_code"] == 400
    assert "the prompt has the span <extra_id_99>" in refused["body"]["error"]["message"]


@pytest.mark.mesh
def test_a_run_of_an_encoder_embeds_texts_as_it_is_served(tmp_path):
    model = {"name": "bert", "max_positions": 64}
    run_dir = trained(tmp_path, model, {"kind": "text", "sequence_length": 32})
    engine, _ = open_model(run_dir)
    own = sl.Engine(sl.load_run(run_dir))
    assert own.encode("one") == engine.encode("one") == (256, *b"one")
    np.testing.assert_array_equal(own.embed(WORDS), engine.embed(WORDS))
