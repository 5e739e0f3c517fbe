"""torch's `.bin` files: equal to the safetensors of the same model, or refused."""

import collections
import json
import os
import pickle
import shutil
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardlib import hf
from shardlib.errors import CheckpointError
from shardlib.hf.safetensors import SINGLE as SAFE
from shardlib.hf.torch_files import INDEX, SINGLE
from shardlib.registry import DataSpec
from shardlib_models.transformer import make
from shardlib_models.transformer_config import TransformerConfig

pytestmark = pytest.mark.mesh
torch = pytest.importorskip("torch")
CONFIG = TransformerConfig(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=24, vocab_size=40)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = make(CONFIG, DataSpec(), nnx.Rngs(0))
    folder = tmp_path_factory.mktemp("llama") / "out"
    hf.save(model, folder, architecture="LlamaForCausalLM")
    return folder


def state_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / SAFE)


def as_bin(folder, out, state):
    """A copy of a folder with a `.bin` file in place of the safetensors."""
    shutil.copytree(folder, out)
    (out / SAFE).unlink()
    torch.save(state, out / SINGLE)
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_those_of_safetensors(llama, tmp_path, dtype):
    state = {name: t.to(getattr(torch, dtype)) for name, t in state_of(llama).items()}
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(4)
    folder = as_bin(llama, tmp_path / "bin", collections.OrderedDict(state))
    with pytest.raises(
        CheckpointError, match=r"(?s)pytorch_model.bin may hold .*or allow .bin files"
    ):
        hf.load(folder)
    loaded, expected = hf.load(folder, allow_bin=True), hf.load(llama, dtype=getattr(jnp, dtype))
    pairs = zip(*(jax.tree.leaves(nnx.state(x.model)) for x in (loaded, expected)), strict=True)
    for one, other in pairs:
        assert one.dtype == dtype
        np.testing.assert_array_equal(one, other)


def test_several_files(llama, tmp_path):
    state = state_of(llama)
    folder = as_bin(llama, tmp_path / "bin", {})
    (folder / SINGLE).unlink()
    names = sorted(state)
    files = {"a.bin": names[:5], "b.bin": names[5:]}
    for file, held in files.items():
        torch.save({name: torch.nn.Parameter(state[name]) for name in held}, folder / file)
    where = {name: file for file, held in files.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    loaded = hf.load(folder, allow_bin=True).model.head.kernel[...]
    np.testing.assert_array_equal(loaded, hf.load(llama).model.head.kernel[...])


class _Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def rewritten(path, change):
    """Writes an archive anew, its entries changed by `change(name, content)`."""
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in held.items():
            if (new := change(name, content)) is not None:
                archive.writestr(name, new)


def of_pickle(data):
    return lambda path: rewritten(
        path, lambda name, content: data if name.endswith("data.pkl") else content
    )


WRONG = {
    "code": (of_pickle(pickle.dumps(_Runs(), 2)), r"it names (posix|nt).mkdir"),
    "a class of torch": (
        lambda path: torch.save({"a": torch.nn.Linear(1, 1)}, path),
        r"it names torch.nn.modules.linear.Linear|it names builtins",
    ),
    "a cut pickle": (of_pickle(b"\x80\x02}"), r"its description cannot be read"),
    "no tensors": (of_pickle(pickle.dumps([1], 2)), r"does not hold tensors by name"),
    "a number": (of_pickle(pickle.dumps({"a": 1}, 2)), r"'a' is not a tensor"),
    "no archive": (lambda path: path.write_bytes(b"PK" + bytes(64)), r"not an archive of torch"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-300]), r"not an archive"),
    "a missing storage": (
        lambda path: rewritten(
            path, lambda name, content: None if name.endswith("data/0") else content
        ),
        r"storage 0 of \d+ bytes is not in the file",
    ),
    "a short storage": (
        lambda path: rewritten(
            path, lambda name, content: content[:-4] if name.endswith("data/0") else content
        ),
        r"storage 0 of \d+ bytes is not in the file",
    ),
    "a view": (
        lambda path: torch.save({"a": torch.zeros(4, 6).T}, path),
        r"a is a view with strides \(1, 6\), not contiguous",
    ),
    "another byte order": (
        lambda path: rewritten(
            path, lambda name, content: b"big" if name.endswith("byteorder") else content
        ),
        r"little-endian",
    ),
}


@pytest.mark.parametrize(("damage", "message"), WRONG.values(), ids=WRONG)
def test_wrong_files_are_refused(llama, tmp_path, monkeypatch, damage, message):
    monkeypatch.chdir(tmp_path)
    folder = as_bin(llama, tmp_path / "bin", state_of(llama))
    damage(folder / SINGLE)
    with pytest.raises(CheckpointError, match=rf"(?s)pytorch_model.bin: .*({message}).*Download"):
        hf.load(folder, allow_bin=True)
    assert not (tmp_path / "ran").exists()


def test_a_tensor_that_leaves_its_storage_is_refused(llama, tmp_path):
    folder = as_bin(llama, tmp_path / "bin", {"a": torch.zeros(3, 100)})

    def enlarged(name, content):
        return content.replace(b"K\x03Kd", b"K\x09Kd") if name.endswith("data.pkl") else content

    rewritten(folder / SINGLE, enlarged)
    with pytest.raises(CheckpointError, match=r"a of shape \(9, 100\) is larger than its storage"):
        hf.load(folder, allow_bin=True)
