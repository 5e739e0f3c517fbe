"""Two real processes load disjoint parts of a folder, compute the same logits, and save it."""

import json
import os
import socket
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardlib import hf
from shardlib.hf.safetensors import Tensors
from shardlib.registry import DataSpec
from shardlib_models.transformer import make
from shardlib_models.transformer_config import TransformerConfig

pytestmark = pytest.mark.process

CONFIG = TransformerConfig(num_layers=2, embed_dim=32, num_heads=4, mlp_dim=48, vocab_size=96)

PROGRAM = """
import json, sys
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
with open(f"{folder}.{index}.json", "w") as file:
    json.dump({"parts": parts, "logits": np.asarray(logits).tolist()}, file)
"""


def run_two(folder, out):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
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
    old, new = Tensors(tmp_path / "in"), Tensors(tmp_path / "out")
    assert old.keys() == new.keys()
    for name in old:
        np.testing.assert_array_equal(old[name], new[name])
