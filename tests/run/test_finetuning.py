"""A run is exported, fine-tuned on another text by adapters, and exported again."""

import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardlib import finetune, hf, run
from shardlib.config import load
from shardlib.errors import ConfigError, ModelError
from shardlib.paths import named_leaves
from shardlib.run import RunConfig
from shardlib.run.reports.proving import prove

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

FIRST = "\n".join(f"the {i} quick brown foxes jump over {i * i} lazy dogs" for i in range(400))
SECOND = "\n".join(f"pack my box with {i * 7} dozen liquor jugs, {i}" for i in range(400))
DATA = ("data.separator='\n'", "data.sequence_length=32", "train.global_batch=8")
QUIET = ("eval.every_steps=0", "checkpoint.every_steps=20", "optimizer.schedule=constant")
QUIET += ("train.sample_length=0",)
LORA = ("finetune.rank=8", "finetune.targets=['**/attention/*','**/mlp/*']")
TOKENS = np.random.default_rng(0).integers(0, 200, (4, 16), dtype=np.int32)


def trained(tmp_path, name, text, *words):
    path = tmp_path / f"{name}.txt"
    path.write_text(text)
    config = load(
        RunConfig, None, [f"run_dir={tmp_path / name}", f"data.path={path}", *DATA, *QUIET, *words]
    )
    return run.train(config), config


def losses(tmp_path, name):
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def logits(model):
    model.eval()
    return np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(TOKENS)))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Hugging Face folder with a model that was trained on the first text."""
    tmp_path = tmp_path_factory.mktemp("base")
    sizes = (
        "model.vocab_size=264",
        "model.num_layers=2",
        "model.embed_dim=32",
        "model.num_heads=4",
        "model.mlp_dim=64",
    )
    words = (*sizes, "data.tokenizer=bytes", "train.steps=40", "optimizer.learning_rate=1e-2")
    trained(tmp_path, "run", FIRST, "mesh=fsdp=8", *words)
    run.export(str(tmp_path / "run"), str(tmp_path / "out"))
    return tmp_path / "out"


def test_adapters_learn_what_the_base_does_not_know(base, tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    words = [f"model.init_from={base}", "data.tokenizer=bytes", *LORA]
    words += ["train.log_every=1", "optimizer.learning_rate=1e-2", "mesh=fsdp=4,tensor=2"]
    trained(tmp_path, "tuned", SECOND, "train.steps=20", *words)
    result, _ = trained(tmp_path, "tuned", SECOND, "train.steps=40", *words)  # resumed
    found = losses(tmp_path, "tuned")
    assert found[40] < 0.6 * found[1]

    state = result.state
    assert all(path.endswith(("lora_a", "lora_b")) for path in named_leaves(state.params))
    kernel = hf.load(base).model.layers.mlp.up.kernel[...]
    np.testing.assert_array_equal(
        state.model_state["layers"]["mlp"]["up"]["base"]["kernel"], kernel
    )

    run.export(str(tmp_path / "tuned"), str(tmp_path / "merged"))
    run.export(str(tmp_path / "tuned"), str(tmp_path / "adapter"), adapter=True)
    assert json.loads((tmp_path / "adapter" / finetune.peft.CONFIG).read_text())["r"] == 8
    with jax.default_matmul_precision("highest"):
        ours = logits(state.model)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    for model in (merged, peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")):
        with torch.no_grad():
            theirs = model.eval()(torch.from_numpy(TOKENS.astype(np.int64))).logits.numpy()
        assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    ("kind", "also"), [("int8", ["finetune.dora=true", "finetune.dropout=0.05"]), ("nf4", [])]
)
def test_adapters_learn_on_a_base_in_few_bits(base, tmp_path, kind, also):
    words = [f"model.init_from={base}", "data.tokenizer=bytes", *LORA, f"finetune.quantize={kind}"]
    words += also
    words += ["train.log_every=1", "optimizer.learning_rate=1e-2", "mesh=fsdp=8"]
    few = ("train.steps=2", "checkpoint.enabled=false", "precision=bf16_params")
    half = trained(tmp_path, "half", SECOND, *few, *words)[0]
    held = half.state.model_state["layers"]["mlp"]["up"]["base"]["kernel"]
    assert held["scales"].dtype == jnp.bfloat16
    result, _ = trained(tmp_path, "tuned", SECOND, "train.steps=30", *words)
    found = losses(tmp_path, "tuned")
    assert found[30] < 0.7 * found[1]
    values = result.state.model_state["layers"]["mlp"]["up"]["base"]["kernel"]["values"]
    assert values.dtype == {"int8": jnp.int8, "nf4": jnp.uint8}[kind]
    run.export(str(tmp_path / "tuned"), str(tmp_path / "merged"))
    merged = np.asarray(hf.load(tmp_path / "merged").logits(jnp.asarray(TOKENS)))
    whole = logits(result.state.model)
    assert np.abs(merged - whole).max() < 1e-5 * np.abs(whole).max()


def test_groups_sum_the_gradients_of_adapters_once(base, tmp_path):
    words = [f"model.init_from={base}", "data.tokenizer=bytes", *LORA, "mesh=data=4,fsdp=2"]
    words += ["train.log_every=1", "train.steps=4", "checkpoint.enabled=false"]
    trained(tmp_path, "each", SECOND, *words)
    trained(tmp_path, "once", SECOND, *words, "train.reduction.dtype=f32")
    each, once = losses(tmp_path, "each"), losses(tmp_path, "once")
    np.testing.assert_allclose([*once.values()], [*each.values()], rtol=1e-5)


def test_check_proves_the_trained_adapters():
    words = ("data.path=builtin:python", "data.tokenizer=bytes", *DATA, *LORA)
    config = load(RunConfig, None, [*words, "model.num_layers=2", "mesh=fsdp=4,tensor=2"])
    comparison = prove(config).comparison
    assert not comparison.deviations
    state = comparison.compiled.args_info[0][0]
    assert all("/lora_" in path for path in named_leaves(state.params))


def test_wrong_keys_are_refused(base, tmp_path):
    words = (f"model.init_from={base}", "data.tokenizer=bytes", "train.steps=1")
    with pytest.raises(ConfigError, match=r"(?s)rank must be at least 1, not 0.*'int4'|int4"):
        trained(tmp_path, "a", SECOND, *words, "finetune.rank=0", "finetune.quantize=int4")
    with pytest.raises(ModelError, match=r"'\*\*/mpl/\*' matches no projection"):
        trained(tmp_path, "b", SECOND, *words, "finetune.targets=['**/mpl/*']")
    assert not (tmp_path / "b").exists()
    trained(tmp_path, "c", SECOND, *words, "mesh=fsdp=8")
    with pytest.raises(ModelError, match="has no adapters"):
        run.export(str(tmp_path / "c"), str(tmp_path / "out"), adapter=True)
