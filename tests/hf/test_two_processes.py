"""Two real processes: disjoint parts of a folder, the same logits, the bits of one process."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardlib import hf
from shardlib.data.tokenizer import train_bpe
from shardlib.hf.safetensors import SINGLE, Tensors
from shardlib.registry import DataSpec
from shardlib_models.transformer import make
from shardlib_models.transformer_config import TransformerConfig

pytestmark = pytest.mark.process

CONFIG = TransformerConfig(num_layers=2, embed_dim=32, num_heads=4, mlp_dim=48, vocab_size=96)

PROGRAM = """
import json, resource, sys
import jax

folder, out, index, port = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", 2, int(index))
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
import shardlib as sl
from shardlib.hf.tensor_table import TensorTable

parts = []
read = TensorTable.read

def recorded(self, path, index, tensor):
    values = read(self, path, index, tensor)
    whole = values.shape == self.params[path].shape
    parts.append(None if whole else [path, str(index)])
    return values

TensorTable.read = recorded
with sl.use(sl.make_mesh("fsdp=4"), sl.rules.FSDP):
    loaded = sl.hf.load(folder)
    logits = loaded.logits(jnp.arange(24).reshape(2, 12))
    logits = multihost_utils.process_allgather(logits, tiled=True)
    sl.hf.save(loaded, out)
    sl.hf.save(loaded, out + ".narrow", dtype="float16")
    if index == "0":  # The disk of the first process is full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        sl.hf.save(loaded, out + ".full")
    except sl.errors.CheckpointError as error:
        fault = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
with open(f"{folder}.{index}.json", "w") as file:
    json.dump({"parts": parts, "logits": np.asarray(logits).tolist(), "fault": fault}, file)
"""
CONFIG_FILE = """
run_dir: RUN
model: {init_from: FOLDER}
data: {path: TEXT, separator: "\\n", sequence_length: 16}
train: {global_batch: 8, steps: 1, cpu_devices: 4}
eval: {every_steps: 0}
optimizer: {learning_rate: 1.0e-30, weight_decay: 0}
mesh: fsdp=2,tensor=2
"""


def run_two(folder, out):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), str(out), str(index), port],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
    # The libraries of the processes print to standard output, too.
    return [
        json.loads(folder.with_name(f"{folder.name}.{index}.json").read_text())
        for index in range(2)
    ]


def test_each_reads_its_own_part_and_one_writes(tmp_path):
    hf.save(make(CONFIG, DataSpec(), nnx.Rngs(0)), tmp_path / "in")
    first, second = run_two(tmp_path / "in", tmp_path / "out")
    parts = [{tuple(part) for part in each["parts"] if part} for each in (first, second)]
    assert parts[0]
    assert parts[0].isdisjoint(parts[1])
    expected = hf.load(tmp_path / "in").logits(jnp.arange(24).reshape(2, 12))
    for each in (first, second):
        np.testing.assert_allclose(each["logits"], expected, rtol=1e-5, atol=1e-5)
    assert "out.full cannot be written: File too large" in first["fault"]
    assert "the first process cannot write" in second["fault"]
    assert not list(tmp_path.glob("*out.full*"))
    old, new = Tensors(tmp_path / "in"), Tensors(tmp_path / "out")
    narrow = Tensors(tmp_path / "out.narrow")
    assert old.keys() == new.keys() == narrow.keys()
    for name in old:
        np.testing.assert_array_equal(old[name], new[name])
        np.testing.assert_array_equal(old[name].astype(np.float16), narrow[name])


def command(*words):
    done = subprocess.run(
        [sys.executable, "-m", "shardlib", *map(str, words)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path):
    folder, lines = tmp_path / "in", [f"the {i} quick brown foxes" for i in range(400)]
    config = dataclasses.replace(CONFIG, vocab_size=320)
    hf.save(make(config, DataSpec(), nnx.Rngs(0)), folder)
    train_bpe(lines, 300).save(folder / "tokenizer.json")
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return folder


def test_an_import_and_a_run_from_a_folder_hold_its_bits(folder, tmp_path):
    run, trained = tmp_path / "run", tmp_path / "trained"
    devices = ("mesh=fsdp=4", "train.cpu_devices=4")
    out = command("launch", "--processes", 2, "--", "import", folder, "--out", run, *devices)
    assert out.count("imported") == 1
    places = {"RUN": trained, "FOLDER": folder, "TEXT": tmp_path / "text.txt"}
    text = re.sub("|".join(places), lambda found: str(places[found[0]]), CONFIG_FILE)
    (tmp_path / "config.yaml").write_text(text)
    command("launch", "--processes", 2, "--", "train", tmp_path / "config.yaml")
    command("export", run, "--out", tmp_path / "first")
    two = ("launch", "--processes", 2, "--")
    out = command(*two, "export", trained, "--out", tmp_path / "second")
    assert out.count("exported") == 1
    for name in ("first", "second"):
        assert (tmp_path / name / SINGLE).read_bytes() == (folder / SINGLE).read_bytes()
        assert (tmp_path / name / "tokenizer.json").exists()
