"""`shardlib check`: what it proves, what it refuses, and how it exits."""

import dataclasses
import json

import pytest

import shardlib as sl
from shardlib.cli.arguments import load_config
from shardlib.errors import MeshError
from shardlib.run.reports.proving import reduced, small_mesh
from shardlib.sharding.constrain import active
from shardlib_models.transformer import FAMILY

CONFIG = """
model: {name: transformer, num_layers: 16, embed_dim: 512, num_heads: 8, mlp_dim: 1024}
data: {path: builtin:python, sequence_length: 4096}
train: {global_batch: 256, steps: 1000}
mesh: data=64,fsdp=8,tensor=4
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return str(file)


def test_a_mesh_keeps_its_axes():
    assert small_mesh("data=64,fsdp=8,tensor=4") == "data=2,fsdp=2,tensor=2"
    assert small_mesh("fsdp=-1") == "fsdp=8"
    assert small_mesh("data=2,tensor=2") == "data=2,tensor=2"
    with pytest.raises(MeshError, match=r"data=9.*\n  Name a smaller mesh"):
        small_mesh("data=9")


def test_a_config_is_halved_as_far_as_its_mesh_allows(config):
    small = reduced(load_config(config, []), "data=2,fsdp=2,tensor=2")
    model = small.model
    assert (model.num_layers, model.embed_dim, model.num_heads, model.mlp_dim) == (2, 32, 2, 32)
    assert (small.precision, small.train.global_batch, small.mesh) == (
        "f32",
        8,
        "data=2,fsdp=2,tensor=2",
    )


def test_sizes_stay_divisible(config):
    words = ["model.vocab_size=128256", "model.num_heads=24", "model.head_dim=64"]
    words += ["model.num_kv_heads=4", "model.mlp_dim=11008"]
    model = reduced(load_config(config, words), "data=2,tensor=4").model
    assert (model.num_layers, model.vocab_size, model.num_heads) == (2, 4008, 12)
    assert model.mlp_dim == 344
    # A size that the mesh does not divide is an error of the run, also when it is halved.
    words = ["model.vocab_size=50260"]
    assert reduced(load_config(config, words), "tensor=8").model.vocab_size == 12565


@pytest.mark.mesh
def test_a_right_config_exits_0(shardlib, config):
    code, out, err = shardlib("check", config, "--mesh", "fsdp=4,tensor=2", "--json")
    assert code == 0, err
    (facts,) = json.loads(out)
    assert facts["mesh"] == {"fsdp": 4, "tensor": 2}
    assert facts["right"]
    assert facts["compared"] > 50


@pytest.mark.mesh
def test_a_wrong_loss_exits_1(shardlib, config, monkeypatch):
    """A loss that depends on the mesh: it is divided by the devices along an axis."""

    def divided(*arguments, **options):
        mean, metrics = FAMILY.loss(*arguments, **options)
        return sl.Mean(mean.total / active().sizes.get("fsdp", 1), mean.weight), metrics

    wrong = dataclasses.replace(FAMILY, loss=divided)
    monkeypatch.setattr("shardlib_models.transformer.FAMILY", wrong)
    code, out, err = shardlib(
        "check", config, "--mesh", "fsdp=4,tensor=2", "--mesh", "data=2,tensor=2"
    )
    assert code == 1, err
    assert "the loss of step 1" in out
    code, out, _ = shardlib("check", config, "--mesh", "data=2,fsdp=2", "--json")
    assert code == 1
    (facts,) = json.loads(out)
    assert not facts["right"]
    assert any(row["quantity"] == "the loss of step 1" for row in facts["differ"])


def test_wrong_requests_exit_2(shardlib, config):
    code, out, err = shardlib("check", config, "--mesh", "data=two")
    assert (code, out) == (2, "")
    assert "data=two" in err
    code, _, err = shardlib("check", config, "train.local_sgd.inner_steps=2")
    assert code == 2
    assert "train.local_sgd=null" in err
