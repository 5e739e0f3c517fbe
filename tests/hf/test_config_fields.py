"""Fields of config.json as other versions write them: the logits of transformers, or a refusal."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import hf
from shardlib.errors import ConfigError

pytestmark = pytest.mark.mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, LENGTH = 64, 20
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ABSENT = object()
SLIDING, FULL = "sliding_attention", "full_attention"
ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, ORIGINAL: 16}
LLAMA3 = YARN | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}


def ropes(local=1e3, **full):
    """The rotary fields of Gemma 3."""
    return {
        SLIDING: {"rope_type": "default", "rope_theta": local},
        FULL: {"rope_type": "default", "rope_theta": 1e6, **full},
    }


# The config of transformers, and the fields of config.json that are changed after it is written.
READ = {
    "both names of rotary fields": ("Llama", {}, {"rope_scaling": LINEAR, "rope_theta": 3e3}),
    "two places of the original length": ("Llama", {}, {"rope_parameters": LLAMA3, ORIGINAL: 48}),
    "a factor that follows from lengths": ("Llama", {}, {"rope_parameters": YARN}),
    "the first name of longrope's length": ("Llama", {}, {"rope_parameters": LONG, ORIGINAL: 16}),
    "no rotary fields": ("Mixtral", {"num_local_experts": 4}, {"rope_parameters": ABSENT}),
    "a window in every layer": ("Mistral", {"sliding_window": 5}, {}),
    "a window in some layers of Mistral": (
        "Mistral",
        {"sliding_window": 5},
        {"layer_types": [SLIDING, FULL, SLIDING, FULL]},
    ),
    "a window in no layer of Mistral": (
        "Mistral",
        {"sliding_window": 5},
        {"layer_types": [FULL] * 4},
    ),
    "null for an empty list": ("Qwen2Moe", EXPERTS, {"mlp_only_layers": None, "head_dim": ABSENT}),
    "no activation": ("Gemma2", {}, {"hidden_activation": ABSENT}),
    "false for null": ("Gemma2", {"use_bidirectional_attention": False}, {}),
    "a window in every layer of Gemma 3": (
        "Gemma3Text",
        {"sliding_window": 5, "layer_types": [SLIDING] * 4, "rope_parameters": ropes()},
        {},
    ),
    "a window in no layer of Gemma 3": (
        "Gemma3Text",
        {"layer_types": [FULL] * 4, "rope_parameters": ropes(rope_type="linear", factor=8.0)},
        {},
    ),
    "the first rotary fields of Gemma 3": (
        "Gemma3Text",
        {"sliding_window": 5, "layer_types": [SLIDING, FULL, SLIDING, FULL]},
        {
            "rope_parameters": ABSENT,
            "rope_theta": 1e5,
            "rope_local_base_freq": 1e3,
            "rope_scaling": LINEAR,
            "layer_types": ABSENT,
            "sliding_window_pattern": 2,
        },
    ),
}


def folder_of(tmp_path, name, options, changes):
    torch.manual_seed(0)
    sizes = SIZES | ({"head_dim": None} if name == "Qwen2Moe" else {})
    config = getattr(transformers, f"{name}Config")(**(sizes | options))
    if name == "Qwen2Moe":
        config.head_dim = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.3 * torch.randn(tensor.shape))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: value for k, value in fields.items() if value is not ABSENT}))
    return tmp_path


@pytest.mark.parametrize(("name", "options", "changes"), READ.values(), ids=READ)
def test_fields_are_read_as_transformers_reads_them(tmp_path, name, options, changes):
    folder = folder_of(tmp_path / "in", name, options, changes)
    tokens = np.random.default_rng(0).integers(2, VOCAB, (2, LENGTH))
    expected = logits(folder, tokens)
    with jax.default_matmul_precision("highest"):
        loaded = hf.load(folder)
        found = np.asarray(loaded.logits(jnp.asarray(tokens, jnp.int32)))
    # Sums of at most 32 products through 4 layers: measured 1e-6 to 3e-6.
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    hf.save(loaded.model, tmp_path / "out", architecture=loaded.architecture.name)
    again = logits(tmp_path / "out", tokens)
    assert np.abs(again - expected).max() < 1e-5 * np.abs(expected).max()


def logits(folder, tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


REFUSED = {
    "attention to later tokens": (
        "Gemma",
        {"use_bidirectional_attention": True},
        r"use_bidirectional_attention is True",
    ),
    "a bound that transformers ignores": (
        "Gemma3Text",
        {"attn_logit_softcapping": 2.0},
        r"attn_logit_softcapping is 2.0; supported: None",
    ),
    "layers of several kinds": (
        "Qwen3",
        {"layer_types": [SLIDING, FULL, SLIDING, FULL]},
        r"layer_types has \['sliding_attention'\]; supported: full_attention alone",
    ),
    "another pattern of layers": (
        "Gemma2",
        {"layer_types": [SLIDING, SLIDING, FULL, FULL]},
        r"supported: full_attention in the last of every n layers",
    ),
    "rotary fields of several kinds of layers": (
        "Qwen3",
        {"rope_parameters": ropes()},
        r"rope_parameters has \['sliding_attention', 'full_attention'\]; supported: one",
    ),
    "a scaling without its numbers": (
        "Llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        r"low_freq_factor is missing",
    ),
    "a size of another type": (
        "Gemma2",
        {"query_pre_attn_scalar": "256"},
        r"query_pre_attn_scalar='256': a value of another type or size",
    ),
    "rotary fields that are a list": (
        "Gemma3Text",
        {"rope_parameters": [1]},
        r"rope_parameters is \[1\]; supported: null or an object",
    ),
}


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_fields_without_a_counterpart_are_refused(tmp_path, name, changes, message):
    fields = getattr(transformers, f"{name}Config")(**SIZES).to_dict() | changes
    fields["architectures"] = [f"{name.removesuffix('Text')}ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=rf"(?s){message}.*\n  Choose a checkpoint"):
        hf.describe(tmp_path)
