"""Checkpoints in MXFP4: the bits of transformers on every mesh, and an export without packing."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import shardlib as sl
from shardlib import hf
from shardlib.errors import CheckpointError

pytestmark = pytest.mark.mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")

EMBED, MLP, EXPERTS = 64, 96, 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One model, packed and as transformers unpacks it."""
    config = transformers.GptOssConfig(
        vocab_size=96,
        hidden_size=EMBED,
        intermediate_size=MLP,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        sliding_window=5,
    )
    plain = tmp_path_factory.mktemp("mxfp4") / "plain"
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(plain)
    tensors, rng = load_file(plain / "model.safetensors"), np.random.default_rng(0)
    packed = dict(tensors)
    for name in tensors:
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        del packed[name]
        experts, inputs, outputs = tensors[name].shape
        shape = (experts, outputs, inputs // 32)
        blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
        # Powers of two about 2**-4, and now and then about the least that bfloat16 holds.
        scales = np.where(rng.random(shape) < 0.05, rng.integers(0, 12, shape), 123)
        scales = scales.astype(np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        theirs = mxfp4.convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales)
        )
        bits = theirs.contiguous().view(torch.int16).numpy()
        tensors[name] = bits.view(jnp.bfloat16)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    folder = plain.with_name("packed")
    folder.mkdir()
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((plain / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(described))
    return folder, plain


def arrays(loaded):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(loaded.model))]


# Shards of 8 numbers, of whole groups, of whole experts, and of some outputs.
@pytest.mark.parametrize("mesh", ["data=1", "fsdp=8", "fsdp=2,tensor=4", "expert=4,tensor=2"])
def test_the_bits_are_those_of_transformers(folders, mesh):
    packed, plain = folders
    devices = jax.devices()[: 1 if mesh == "data=1" else 8]
    with sl.use(sl.make_mesh(mesh, devices=devices), sl.rules.STANDARD):
        found, expected = arrays(hf.load(packed)), arrays(hf.load(plain))
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x.view(np.uint16), y.view(np.uint16))


def test_an_export_is_not_packed(folders, tmp_path):
    packed, plain = folders
    hf.save(hf.load(packed), tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    found, expected = (load_file(f / "model.safetensors") for f in (tmp_path / "out", plain))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].view(np.uint16), tensor.view(np.uint16))


def test_other_packings_are_refused(folders, edited):
    copy = edited(folders[0], {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(CheckpointError, match=r"quant_method='gptq'; supported: 'mxfp4'"):
        hf.load(copy)


def test_a_scale_for_each_block(folders, edited):
    copy = edited(folders[0], {})
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:, 1:]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} is missing(.|\n)*{name}_blocks is not a"):
        hf.load(copy)
