"""PEFT's format: the same bits both ways, its logits, and refusals."""

import json
import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import shardlib as sl
from shardlib.errors import CheckpointError, ModelError
from shardlib.finetune import load_adapter, lora, merge, save_adapter
from shardlib.finetune.peft import CONFIG, TENSORS

# peft reads a property of models that transformers will remove.
pytestmark = [
    pytest.mark.mesh,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 1}
TOKENS = np.random.default_rng(0).integers(0, 96, (4, 24), dtype=np.int32)


@pytest.fixture(autouse=True)
def highest():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder


def random_factors(model):
    """Fills the second factors, which start at 0."""
    rng = np.random.default_rng(1)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        noise = 0.1 * rng.normal(size=variable.shape)
        variable[...] = variable[...] + jnp.asarray(noise, jnp.float32)
    return model


@pytest.fixture(scope="module")
def adapter(llama, tmp_path_factory):
    """A folder of adapters of all projections, and our logits."""
    loaded = sl.hf.load(llama)
    model = lora(
        loaded.model,
        rank=4,
        alpha=6.0,
        targets=("**/attention/*", "**/mlp/*"),
        rngs=nnx.Rngs(0),
    )
    model = random_factors(model)
    folder = tmp_path_factory.mktemp("adapter") / "out"
    save_adapter(model, folder, base=str(llama))
    with jax.default_matmul_precision("highest"):
        return folder, np.asarray(model(jnp.asarray(TOKENS)))


def error(actual, expected):
    return np.abs(np.asarray(actual) - np.asarray(expected)).max() / np.abs(expected).max()


def logits_of(model):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS.astype(np.int64))).logits.numpy()


def test_peft_loads_a_saved_adapter_and_gives_its_logits(llama, adapter):
    peft = pytest.importorskip("peft")
    folder, ours = adapter
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama)
    theirs = peft.PeftModel.from_pretrained(plain, folder)
    assert error(logits_of(theirs), ours) < 1e-6
    assert error(logits_of(theirs.merge_and_unload()), ours) < 1e-6


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_of_peft_loads_and_is_saved_with_the_same_bits(llama, tmp_path, dora):
    peft = pytest.importorskip("peft")
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        use_rslora=True,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights=False,
        use_dora=dora,
    )
    torch.manual_seed(0)
    theirs = peft.get_peft_model(plain, config)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = logits_of(theirs)
    with sl.use(sl.make_mesh("fsdp=4,tensor=2"), sl.rules.STANDARD):
        model = load_adapter(sl.hf.load(llama), tmp_path / "theirs")
        assert error(model(jnp.asarray(TOKENS)), expected) < 1e-6
        assert error(merge(model)(jnp.asarray(TOKENS)), expected) < 1e-6
        save_adapter(model, tmp_path / "ours", base=str(llama))
    first, second = (load_file(tmp_path / name / TENSORS) for name in ("theirs", "ours"))
    assert first.keys() == second.keys()
    for name, values in first.items():
        np.testing.assert_array_equal(second[name], values)


def test_gpt2_has_its_inputs_first(tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    plain.save_pretrained(tmp_path / "base")
    loaded = sl.hf.load(tmp_path / "base")
    model = lora(loaded.model, rank=2, targets=("**/mlp/*",), rngs=nnx.Rngs(0))
    model = random_factors(model)
    save_adapter(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    # With the rounding of the base model, as in the oracle of GPT-2.
    assert error(logits_of(theirs), model(jnp.asarray(TOKENS))) < 1e-5
    with pytest.raises(ModelError, match=r"(?s)attention/query: PEFT has no name.*\n  Leave out"):
        save_adapter(lora(loaded.model, rngs=nnx.Rngs(0)), tmp_path / "fused")
    assert not (tmp_path / "fused").exists()


CHANGES = {
    "dora": ({"use_dora": True}, "lora_magnitude_vector is missing"),
    "dropout": ({"lora_dropout": 2}, "lora_dropout is 2"),
    "another kind": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "parts of layers": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    "a base changed by SVD": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "some tokens": ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens is \[1\]"),
    "rank": ({"r": 8}, r"lora_A.weight has shape \(4, 32\), expected \(8, 32\)"),
    "no rank": ({"r": "four"}, "r is 'four'"),
}


@pytest.mark.parametrize(("changes", "text"), CHANGES.values(), ids=CHANGES)
def test_configs_that_ask_for_more_are_refused(llama, adapter, tmp_path, changes, text):
    folder = shutil.copytree(adapter[0], tmp_path / "copy")
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=text):
        load_adapter(sl.hf.load(llama), folder)


def test_tensors_that_do_not_fit_are_refused(llama, adapter, tmp_path):
    loaded = sl.hf.load(llama)
    folder = shutil.copytree(adapter[0], tmp_path / "copy")
    tensors = load_file(folder / TENSORS)
    name = next(iter(tensors))
    save_file(
        {one: x for one, x in tensors.items() if one != name}
        | {"other.lora_A.weight": tensors[name]},
        folder / TENSORS,
    )
    with pytest.raises(
        CheckpointError,
        match=r"(?s)is missing.*other.lora_A.weight is not a factor.*Merge adapters of some",
    ):
        load_adapter(loaded, folder)
    save_file({"other.lora_A.weight": tensors[name]}, folder / TENSORS)
    with pytest.raises(CheckpointError, match=r"holds no adapter of this model"):
        load_adapter(loaded, folder)
    (folder / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config.json cannot be read"):
        load_adapter(loaded, folder)
    with pytest.raises(ModelError, match="has no adapters"):
        save_adapter(loaded.model, tmp_path / "none")
    with pytest.raises(CheckpointError, match="is not an empty folder"):
        save_adapter(loaded.model, folder)


def test_adapters_of_different_ranks_are_not_written_as_one(llama, tmp_path):
    loaded = sl.hf.load(llama)
    model = lora(loaded.model, rank=2, alpha=4.0, rngs=nnx.Rngs(0))
    model = lora(model, rank=4, alpha=4.0, targets=("**/mlp/*",), rngs=nnx.Rngs(1))
    text = r"(?s)attention/\w+: rank 2, alpha 4.*mlp/\w+: rank 4, alpha 4.*\n  Save the merged"
    with pytest.raises(ModelError, match=text):
        save_adapter(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
