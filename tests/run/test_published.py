"""Configs that name a published size or a folder of weights; nothing is loaded here."""

import json

import jsonschema
import pytest

from shardlib import hf
from shardlib.config import json_schema, load, to_yaml
from shardlib.errors import CheckpointError, ConfigError
from shardlib.plan import plan
from shardlib.run import RunConfig
from shardlib_models.hf.llama import MIXTRAL
from shardlib_models.moe import MoEConfig
from shardlib_models.transformer_config import TransformerConfig, llama3_8b

CONFIG = TransformerConfig(
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    vocab_size=320,
    max_positions=64,
    moe=MoEConfig(num_experts=4),
)


@pytest.fixture
def folder(tmp_path):
    """A folder with config.json alone."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MIXTRAL.write(CONFIG)))
    return folder


def written(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "overrides", "changes"),
    [
        ("model: llama3-8b", [], {}),
        ("model: LLaMA3_8B", ["model.remat=full"], {"remat": "full"}),
        ("model: gpt2", ["model=llama3-8b", "model.num_layers=2"], {"num_layers": 2}),
        ("model: {size: llama3-8b, remat: dots}", [], {"remat": "dots"}),
        ("model: {name: transformer, size: gpt2}", ["model.size=llama3-8b"], {}),
    ],
    ids=["text", "override of a key", "override of all", "key", "override of the size"],
)
def test_a_size_gives_the_keys_that_are_left_out(tmp_path, text, overrides, changes):
    config = load(RunConfig, written(tmp_path, text), overrides)
    assert config.model == llama3_8b(**changes)
    again = load(RunConfig, written(tmp_path, to_yaml(config)))
    assert again == config


def test_a_size_with_experts_keeps_keys_beside_them(tmp_path):
    path = written(tmp_path, "model: {size: mixtral-8x7b, moe: {dispatch: capacity}}")
    moe = load(RunConfig, path).model.moe
    assert (moe.num_experts, moe.dispatch) == (8, "capacity")


def test_the_schema_takes_sizes():
    schema = json_schema(RunConfig)
    for model in ("llama3-8b", {"size": "gpt2", "remat": "full"}):
        jsonschema.validate({"model": model}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": {"sise": "gpt2"}}, schema)


def test_the_planner_takes_sizes():
    plans = plan("Qwen2.5_0.5B", on="8xh100", global_batch=64, length=2048)
    assert plans.best is not None


def test_a_folder_gives_the_model_and_the_tokenizer(tmp_path, folder):
    text = f"model: {{init_from: {folder}, remat: full, dropout: 0.1, moe: {{dispatch: capacity}}}}"
    with pytest.raises(ConfigError, match=r"has no tokenizer.json.*\n *Add data.tokenizer=PATH"):
        load(RunConfig, written(tmp_path, text))
    (folder / "tokenizer.json").write_text("{}")
    config = load(RunConfig, tmp_path / "config.yaml")
    model = config.model
    assert (model.num_layers, model.remat, model.dropout) == (2, "full", 0.1)
    assert (model.moe.num_experts, model.moe.dispatch) == (4, "capacity")
    assert config.data.tokenizer == str(folder / "tokenizer.json")
    given = load(RunConfig, tmp_path / "config.yaml", ["data.tokenizer=bytes"])
    assert given.data.tokenizer == "bytes"
    # The config of a run has all keys: the folder may have gone.
    path = written(tmp_path, to_yaml(config))
    (folder / "config.json").unlink()
    assert load(RunConfig, path) == config
    # Nor is a name on the hub asked for again.
    written(tmp_path, to_yaml(config).replace(f"init_from: {folder}", "init_from: an-org/a-model"))
    assert load(RunConfig, path).model.init_from == "an-org/a-model"


WRONG = {
    "an unknown size": (
        "model: lama3-8b",
        r"yaml:1: model: no published size is called 'lama3-8b'\. Did you mean 'llama3-8b'\?",
    ),
    "a size of no family": (
        "model: {name: resnet, size: gpt2}",
        r"no published size is called 'gpt2'\. Known: none",
    ),
    "a misspelt family": ("model: resnt", r"'resnt'\. Did you mean 'resnet'\?"),
    "a family": ("model: resnet", r"'resnet'\. Write model.name=resnet\."),
    "two sources": ("model: {size: gpt2, init_from: FOLDER}", r"size and init_from .* give one"),
    "keys that contradict": (
        "model: {init_from: FOLDER, num_layers: 3, norm: layer, moe: {num_experts: 8}}",
        r"(?s)contradict .*tiny/config.json: .*norm is 'layer', there 'rms'.*num_layers is 3, "
        r"there 2|num_layers is 3, there 2.*num_experts is 8, there 4.*norm is 'layer'",
    ),
    "another family": ("model: {init_from: FOLDER, name: resnet}", r"holds a 'transformer'"),
    "a key with a fault": ("model: {init_from: FOLDER, dropout: much}", r"dropout: expected"),
    "an absent folder": (
        "model: {init_from: FOLDER/absent}",
        r"absent/config.json does not exist\.\n *Give a folder",
    ),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_wrong_models_are_refused(tmp_path, folder, text, message):
    path = written(tmp_path, text.replace("FOLDER", str(folder)))
    with pytest.raises(ConfigError, match=message):
        load(RunConfig, path)


def test_a_name_on_the_hub_that_cannot_be_downloaded(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    expected = r"there is no folder an-org/a-model, and no model .*\n +Correct the path"
    with pytest.raises(CheckpointError, match=expected):
        hf.load("an-org/a-model")
    with pytest.raises(ConfigError, match=expected):
        load(RunConfig, written(tmp_path, "model: {init_from: an-org/a-model}"))
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"the package huggingface_hub is not installed"):
        hf.load("an-org/a-model")
