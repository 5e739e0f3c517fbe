"""One of the processes that `test_checkpoint_processes.py` starts: DIRECTORY INDEX PORT."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.checkpoint import RunCheckpoints
from shardlib.errors import CheckpointError


def start(index, port):
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.distributed.initialize(f"localhost:{port}", 2, index, heartbeat_timeout_seconds=20)


def make_target():
    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def struct(shape, dtype, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return {
        "w": struct((16, 8), jnp.float32, "fsdp", "data"),
        "b": struct((8,), jnp.bfloat16),
        "keys": struct((4,), jax.random.key(0).dtype, "data"),
    }


def restore_save_and_refuse(checkpoints):
    assert checkpoints.latest() == 1
    state = checkpoints.restore(1, make_target() | {"step": np.int32(0)})
    table = np.arange(128.0).reshape(16, 8)
    for shard in state["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, table[shard.index])
    assert state.pop("step") == 1

    add = jax.jit(lambda s: {**s, "w": s["w"] + 1, "b": s["b"] + 1}, donate_argnums=0)
    # A scalar and a key of this process alone, as `jnp.int32(2)` makes them.
    local = {"step": jnp.int32(2), "rng": jax.random.key(5)}
    checkpoints.save(2, {**state, **local}, {"samples_seen": 16})
    moved = add(state)
    jax.block_until_ready(moved)
    checkpoints.wait()
    assert checkpoints.latest() == 2

    with pytest.raises(CheckpointError) as caught:
        checkpoints.save(3, {"w": moved["w"], "local": jnp.ones(3)}, {})
    assert str(caught.value) == (
        "arrays live on one process only, so that it is not clear which one to save:\n"
        "  local: float32[3]\n"
        "  Place them on the mesh: jax.device_put(array, NamedSharding(mesh, P()))."
    )
    checkpoints.save(4, moved, {})


if __name__ == "__main__":
    start(int(sys.argv[2]), sys.argv[3])
    with RunCheckpoints(sys.argv[1]) as run_checkpoints:
        restore_save_and_refuse(run_checkpoints)
    jax.distributed.shutdown()
    print("done")
