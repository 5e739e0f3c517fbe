"""Two real processes restore what one saved, save, and one process restores that."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.checkpoint import RunCheckpoints

pytestmark = pytest.mark.process


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def run_two_processes(directory):
    script = pathlib.Path(__file__).with_name("two_processes.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(script), str(directory), str(index), port],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
        assert out.endswith("done\n")
        assert "shardlib" not in err
        assert "orbax" not in err


def test_one_process_to_two_and_back(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))

    def place(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    state = {
        "w": place(jnp.arange(128.0).reshape(16, 8), "fsdp"),
        "b": place(jnp.linspace(-3, 3, 8).astype(jnp.bfloat16)),
        "keys": jax.random.split(jax.random.key(7), 4),
        "step": np.int32(1),
    }
    with RunCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {}, wait=True)
        run_two_processes(tmp_path)
        assert checkpoints.steps() == [1, 2, 4]
        assert checkpoints.metadata(2) == {"samples_seen": 16}
        assert checkpoints.manifest(2).processes == 2

        # Saved before the update that the donation made way for.
        second = checkpoints.restore(2, {**state, "step": jnp.int32(0), "rng": jax.random.key(0)})
        assert int(second["step"]) == 2
        np.testing.assert_array_equal(second["w"], state["w"])
        for key, expected in (("keys", state["keys"]), ("rng", jax.random.key(5))):
            np.testing.assert_array_equal(
                jax.random.key_data(second[key]), jax.random.key_data(expected)
            )
        del state["step"]
        fourth = checkpoints.restore(4, state)
        np.testing.assert_array_equal(fourth["w"], state["w"] + 1)
        np.testing.assert_array_equal(fourth["b"], state["b"] + 1)
    names = [".damaged", "00000001", "00000002", "00000004"]
    assert sorted(os.listdir(tmp_path)) == names
