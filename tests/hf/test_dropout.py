"""Dropout of a config.json: a field of the model, or named in one line of the log."""

import json
import logging

import pytest

from shardlib.config import load
from shardlib.errors import ConfigError
from shardlib.hf import describe
from shardlib.hf.dropout import lacking, warn_of_lacking
from shardlib.run import RunConfig

GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 64}
GPT2 |= {"layer_norm_epsilon": 1e-5, "summary_first_dropout": 0.1}
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64}
SIZES |= {"intermediate_size": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 32}
CLIP = {"text_config": SIZES | {"attention_dropout": 0.3}, "vision_config": SIZES}
DROPPED = {"hidden_dropout_prob": 0.2, "classifier_dropout": 0.2}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
T5 |= {"dropout_rate": 0.2, "is_encoder_decoder": True}
ATTENTION = "0.2 (here 0 for weights of attention)"
CASES = {
    "none": ("LlamaForCausalLM", SIZES | {"attention_dropout": 0.0}, 0.0, {}),
    "of attention": (
        "LlamaForCausalLM",
        SIZES | {"attention_dropout": 0.2},
        0.0,
        {"attention_dropout": "0.2 (here 0)"},
    ),
    "one rate": (
        "GPT2LMHeadModel",
        GPT2 | {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1},
        0.1,
        {"attn_pdrop": "0.1 (here 0)"},
    ),
    "two rates": (
        "GPT2LMHeadModel",
        GPT2 | {"embd_pdrop": 0.0, "resid_pdrop": 0.3},
        0.3,
        {"embd_pdrop": "0.0 (here 0.3)"},
    ),
    "of a head": ("BertForSequenceClassification", SIZES | DROPPED, 0.2, {}),
    "of a part": ("CLIPModel", CLIP, None, {"text_config.attention_dropout": "0.3 (here 0)"}),
    "of T5": ("T5ForConditionalGeneration", T5, 0.2, {"dropout_rate": ATTENTION}),
}


@pytest.mark.parametrize("name", CASES)
def test_dropout_is_read_or_named(name, tmp_path, caplog):
    architecture, fields, ours, named = CASES[name]
    config = {"architectures": [architecture], **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = describe(tmp_path)
    assert getattr(found.config, "dropout", None) == ours
    assert lacking(found) == named
    with caplog.at_level(logging.WARNING, "shardlib.hf"):
        warn_of_lacking(found)
    assert len(caplog.messages) == bool(named)
    for key, value in named.items():
        assert f"{key}={value}" in caplog.text


def test_a_chosen_rate_is_not_named(tmp_path):
    fields = {"architectures": ["GPT2LMHeadModel"], **GPT2, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"resid_pdrop": 0.3}))
    assert set(lacking(describe(tmp_path), rate=0.3)) == {"embd_pdrop", "attn_pdrop"}
    assert set(lacking(describe(tmp_path), rate=0.2)) == {"attn_pdrop"}


def test_another_rate_of_a_config_is_no_contradiction(tmp_path):
    fields = {"architectures": ["GPT2LMHeadModel"], **GPT2, "resid_pdrop": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "tokenizer.json").write_text("{}")
    for words, rate in (((), 0.1), (("model.dropout=0.25",), 0.25)):
        config = load(RunConfig, None, [f"model.init_from={tmp_path}", *words])
        assert config.model.dropout == rate


def test_a_rate_of_another_type_is_named_by_the_field_that_counts(tmp_path):
    fields = {"architectures": ["GPT2LMHeadModel"], **GPT2, "embd_pdrop": 0.1, "resid_pdrop": "0.1"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"config\.json: resid_pdrop: "):
        _ = describe(tmp_path).config
