"""Hugging Face folders: dtypes, training states, kept keys, and those that are refused."""

import dataclasses
import json
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib import hf
from shardlib.errors import CheckpointError, ConfigError, ModelError
from shardlib.hf.safetensors import SINGLE, Tensors, write
from shardlib.registry import DataSpec
from shardlib_models.hf.gemma import GEMMA
from shardlib_models.transformer import FAMILY, make
from shardlib_models.transformer_config import TransformerConfig

CONFIG = TransformerConfig(
    num_layers=3, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48, vocab_size=96
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """An exported Llama with weights in bfloat16."""
    model = make(CONFIG, DataSpec(), nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model)))
    folder = tmp_path_factory.mktemp("llama") / "out"
    hf.save(model, folder, architecture="LlamaForCausalLM")
    return folder


def test_dtypes(llama, tmp_path):
    loaded = hf.load(llama)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(loaded.model))} == {np.dtype(jnp.bfloat16)}
    hf.save(loaded, tmp_path / "out")
    assert (tmp_path / "out" / SINGLE).stat().st_size < 1.1 * (llama / SINGLE).stat().st_size
    wide = hf.load(llama, dtype=jnp.float32)
    kernel = wide.model.head.kernel[...]
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(kernel, loaded.model.head.kernel[...].astype(jnp.float32))


@pytest.mark.parametrize("dtype", ["bf16", jnp.int8], ids=["name", "integer"])
def test_dtypes_that_hold_no_weights_are_refused(llama, dtype):
    with pytest.raises(ModelError, match=r"dtype=.* is not a floating-point dtype\.\n  Write it"):
        hf.load(llama, dtype=dtype)


def test_a_dtype_that_no_file_holds_is_refused_before_anything_is_written(llama, tmp_path):
    loaded = hf.load(llama)
    with pytest.raises(ModelError, match=r"dtype float8_e4m3\.\n  Choose one of: .*bfloat16"):
        hf.save(loaded, tmp_path / "out", dtype="float8_e4m3")
    assert list(tmp_path.iterdir()) == []
    hf.save(loaded, tmp_path / "out", dtype="float8_e4m3fn")


def test_values_beyond_the_range_of_a_dtype_are_refused(llama, tmp_path):
    with sl.use(sl.make_mesh("fsdp=8"), sl.rules.FSDP):
        loaded = hf.load(llama, dtype=jnp.float32)
        hf.save(loaded, tmp_path / "fits", dtype="float16")
        kernel = loaded.model.head.kernel
        kernel.set_value(kernel.get_value().at[1, 2].set(-7e4))
        with pytest.raises(ModelError, match=r"head/kernel are beyond .*65504\.\n  Write"):
            hf.save(loaded, tmp_path / "out", dtype="float16")
        hf.save(loaded, tmp_path / "wide", dtype="bfloat16")
    assert {file.name for file in tmp_path.iterdir()} == {"fits", "wide"}


def test_a_training_state_is_exported(llama, tmp_path):
    with sl.use(sl.make_mesh("fsdp=8"), sl.rules.FSDP):
        loaded = hf.load(llama, dtype=jnp.float32)
        state = sl.init_state(loaded.model, optax.sgd(0.1))
        hf.save(state, tmp_path / "out")
    again = hf.load(tmp_path / "out")
    assert again.architecture.name == "LlamaForCausalLM"
    for old, new in zip(
        *(jax.tree.leaves(nnx.state(x.model)) for x in (loaded, again)), strict=True
    ):
        np.testing.assert_array_equal(old, new)


def test_unknown_keys_of_the_config_are_kept(llama, tmp_path, edited):
    copy = edited(llama, {"pad_token_id": 5, "mine": [1]})
    for name in ("generation_config.json", "preprocessor_config.json"):
        (copy / name).write_text("{}")
    hf.save(hf.load(copy), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["pad_token_id"] == 5
    assert config["mine"] == [1]
    assert config["torch_dtype"] == "bfloat16"
    assert (tmp_path / "out" / "generation_config.json").exists()
    assert (tmp_path / "out" / "preprocessor_config.json").exists()


WRONG = {
    "unknown architecture": (
        {"architectures": ["LlamaForCausalML"]},
        ModelError,
        r"'LlamaForCausalML'.*Did you mean 'LlamaForCausalLM'\?\n  Add",
    ),
    "text and images": (
        {"architectures": ["Gemma3ForConditionalGeneration"]},
        ModelError,
        r"'Gemma3ForConditionalGeneration'.* Of Gemma3, Gemma3ForCausalLM is read\.\n  Add",
    ),
    "no architecture": ({"architectures": None}, CheckpointError, r"architectures=None.*\n  Write"),
    "unsupported values": (
        {"attention_bias": True, "hidden_act": "mish", "rope_parameters": {"rope_type": "dynamic"}},
        ConfigError,
        r"(?s)hidden_act is 'mish'.*attention_bias is True.*rope_type is 'dynamic'.*\n  Choose",
    ),
    "a scaling that is no object": (
        {"rope_scaling": "yarn"},
        ConfigError,
        r"rope_scaling is 'yarn'; supported: null or an object.",
    ),
    "a part of each head": (
        {"partial_rotary_factor": 0.5},
        ConfigError,
        r"partial_rotary_factor is 0.5; supported: 1.0.",
    ),
    "wrong types": (
        {"hidden_size": "wide", "vocab_size": [1]},
        ConfigError,
        r"(?s)config.json: hidden_size: expected an integer, got 'wide'.*json: vocab_size: ",
    ),
    "fewer layers": (
        {"num_hidden_layers": 2},
        CheckpointError,
        r"(?s)model.layers.2.mlp.up_proj.weight is not a tensor of the model.*\n  Correct",
    ),
    "more layers and another width": (
        {"num_hidden_layers": 4, "intermediate_size": 40},
        CheckpointError,
        r"(?s)layers.0.mlp.up_proj.weight has shape \(48, 32\), expected \(40, 32\)"
        r".*layers.3.mlp.up_proj.weight is missing",
    ),
}


@pytest.mark.parametrize(("changes", "kind", "text"), WRONG.values(), ids=WRONG)
def test_folders_that_do_not_fit_are_refused(llama, edited, changes, kind, text):
    with pytest.raises(kind, match=text):
        hf.load(edited(llama, changes))


def test_a_missing_field_and_a_missing_folder(llama, tmp_path, edited):
    with pytest.raises(ConfigError, match=r"(?s)hidden_size is missing.*vocab_size is missing"):
        hf.load(edited(llama, {}, remove=("hidden_size", "vocab_size")))
    with pytest.raises(CheckpointError, match=r"config.json does not exist.*\n  Give a folder"):
        hf.load(tmp_path / "absent")


def test_an_export_goes_into_a_folder_that_stays_in_place(llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    loaded = hf.load(llama)
    hf.save(loaded, "link")
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {SINGLE, "config.json"}
    with pytest.raises(CheckpointError, match=r"cannot be written: Not a directory.*\n  Free"):
        hf.save(loaded, tmp_path / "empty" / SINGLE / "out")
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"not an empty folder"):
        hf.save(loaded, ".")


@pytest.mark.parametrize("is_there", [True, False], ids=["empty folder", "no folder"])
def test_a_full_disk_leaves_nothing(llama, tmp_path, is_there):
    loaded, out = hf.load(llama), tmp_path / "out"
    if is_there:
        (out / ".partial").mkdir(parents=True)  # from a process that was killed
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written: File too large.*\n  Free"):
            hf.save(loaded, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.rglob("*")] == ["out"] * is_there
    hf.save(loaded, out)
    assert {path.name for path in out.iterdir()} == {SINGLE, "config.json"}


def test_a_folder_of_links_is_loaded_and_saved_as_files(llama, tmp_path):
    """The cache of the hub holds links to files that are named by their contents."""
    linked = tmp_path / "snapshots" / "main"
    linked.mkdir(parents=True)
    for number, path in enumerate(llama.iterdir()):
        (tmp_path / str(number)).write_bytes(path.read_bytes())
        (linked / path.name).symlink_to(tmp_path / str(number))
    (tmp_path / "text").write_text("{}")
    (linked / "generation_config.json").symlink_to(tmp_path / "text")
    (linked / "vocab.json").symlink_to(tmp_path / "absent")
    hf.save(hf.load(linked), tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / SINGLE).read_bytes() == (llama / SINGLE).read_bytes()
    assert (tmp_path / "out" / "generation_config.json").read_text() == "{}"


def test_layers_of_several_dtypes_are_refused(llama, tmp_path):
    held = Tensors(llama)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = {one: x.astype(np.float16) if one == name else x for one, x in held.items()}
    write(tmp_path, {one: (x.shape, x.dtype) for one, x in tensors.items()}, tensors.items())
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf"{name} is of dtype float16, expected bfloat16"):
        hf.load(tmp_path)


def test_like_faults_are_one_line(llama, edited):
    with pytest.raises(CheckpointError) as refused:
        hf.load(edited(llama, {"num_hidden_layers": 1, "head_dim": 4}))
    lines = str(refused.value).splitlines()
    unknown = "model.layers.1.input_layernorm.weight is not a tensor of the model."
    assert f"  {unknown} The same holds for 1 of other numbers." in lines
    assert len(lines) == 1 + 9 + 4 + 1


@pytest.mark.parametrize("token", [-1, 96])
def test_token_ids_beyond_the_vocabulary_are_refused(llama, token):
    with pytest.raises(ModelError, match=r"are not within the 96 of the model\.\n  Encode"):
        hf.load(llama).logits(jnp.array([[0, token]]))


def test_a_malformed_tokenizer_is_refused(llama, edited):
    copy = edited(llama, {})
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read: .*\n  Download"):
        hf.load(copy).tokenizer  # noqa: B018


def test_exports_that_are_refused_leave_nothing(llama, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    loaded = hf.load(llama)
    with pytest.raises(CheckpointError, match=r"not an empty folder.*\n  Choose"):
        hf.save(loaded, tmp_path / "full")
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel cannot express [^.]*norm is 'rms'"):
        hf.save(loaded, tmp_path / "out", architecture="GPT2LMHeadModel")
    with pytest.raises(ModelError, match=r"Linear belongs to no model family .*\n  Save it"):
        hf.save(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_a_model_that_no_architecture_has_is_told_why(tmp_path):
    config = dataclasses.replace(CONFIG, positions="learned", max_positions=32, activation="relu")
    model = make(config, DataSpec(), nnx.Rngs(0))
    with pytest.raises(ModelError) as refused:
        hf.save(model, tmp_path / "out")
    text = str(refused.value)
    assert "LlamaForCausalLM: positions is 'learned', not 'rotary'." in text
    assert "OPTForCausalLM: norm is 'rms', not 'layer'." in text
    assert text.count("\n") == len(FAMILY.architectures) + 1


def test_the_first_gemmas_name_the_exact_gelu_and_mean_the_other():
    theirs = GEMMA.write(
        dataclasses.replace(CONFIG, norm_offset=1.0, embed_scale="sqrt", activation="gelu_tanh")
    )
    assert theirs["hidden_act"] == "gelu_pytorch_tanh"
    assert GEMMA.read({**theirs, "hidden_act": "gelu"})["activation"] == "gelu_tanh"
    with pytest.raises(ConfigError, match=r"hidden_act is 'relu'; supported: gelu_pytorch_tanh"):
        GEMMA.read({**theirs, "hidden_act": "relu"})


@pytest.mark.parametrize(
    "tokens",
    [jnp.zeros(4, jnp.int32), jnp.zeros((1, 4)), "a text", [[1, 2], [3]]],
    ids=["rank", "dtype", "text", "ragged"],
)
def test_token_ids_of_another_kind_are_refused(llama, tokens):
    with pytest.raises(ModelError, match=r"expected integers \[batch, length\]\.\n  Give one row"):
        hf.load(llama).logits(tokens)
