"""One of the processes that `test_checkpoint_processes.py` starts: DIRECTORY INDEX PORT."""

import contextlib
import os
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.checkpoint import CheckpointConfig, LocalTier, RunCheckpoints, open_checkpoints
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

    with pytest.raises(CheckpointError, match=r"one process only.*\n  local: .*\n  Place them on"):
        checkpoints.save(3, {"w": moved["w"], "local": jnp.ones(3)}, {})
    refuse_different_steps(checkpoints, moved)
    checkpoints.save(4, moved, {})
    checkpoints.settle()
    return moved


def refuse_different_steps(checkpoints, state):
    """One process is a step ahead; and so that another of two places is its own."""
    local = LocalTier(directory=str(checkpoints.directory / "near"), every_steps=2)
    config = CheckpointConfig(every_steps=3, local=local)
    tiers = open_checkpoints(checkpoints.directory / "far", config)
    for store in (checkpoints, tiers):
        with pytest.raises(CheckpointError, match=r"(?s)step 8: 1 of 2.*step 9: 1 of.*Call save"):
            store.save(8 + jax.process_index(), state, {})
    with pytest.raises(CheckpointError, match=r"process 1: step 2.*\n  Ask for the same step"):
        checkpoints.restore(1 + jax.process_index(), make_target())


@contextlib.contextmanager
def limited(resource_name, value, *, on_process):
    """A limit of the operating system on one of the processes."""
    kind = getattr(resource, resource_name)
    former = resource.getrlimit(kind)
    if jax.process_index() == on_process:
        resource.setrlimit(kind, (value, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, former)


def fail_on_one_process(checkpoints, state, told):
    """What fails on one process fails on both, at once, and the next try works."""
    for step, process in ((5, 1), (6, 0)):
        with limited("RLIMIT_FSIZE", 50, on_process=process):
            checkpoints.save(step, state, {})
            checkpoints.settle()
        (text,) = told
        first = text.splitlines()[0]
        where = f"could not be written to {checkpoints.directory}: process {process}: "
        assert first.startswith(f"the checkpoint of step {step} {where}"), text
        assert "File too large" in first, text
        told.clear()
    checkpoints.save(5, state, {}, wait=True)

    target = make_target()
    opened = len(os.listdir("/proc/self/fd"))
    for process in (0, 1):
        with limited("RLIMIT_NOFILE", opened, on_process=process):
            # Before anything is logged from here: there is no file left for it.
            try:
                checkpoints.restore(5, target)
            except CheckpointError as error:
                text = str(error)
            else:
                text = ""
        assert "oo many open files" in text or "cannot be read" in text, text
    checkpoints.restore(5, target)
    assert told == []


def fall_back_together(checkpoints, told):
    """One damaged file, seen by the first process: both restore the step before it."""
    if jax.process_index() == 0:
        (checkpoints.directory / "00000005" / "state" / "_METADATA").unlink()
    assert checkpoints.latest() == 5
    manifest, state = checkpoints.restore_newest(make_target())
    assert manifest.step == 4
    table = np.arange(128.0).reshape(16, 8) + 1
    for shard in state["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, table[shard.index])
    assert told[0].startswith("step 5 does not validate, trying the one before it: "), told
    assert "state/_METADATA: missing" in told[0], told
    assert checkpoints.latest() == 4
    checkpoints.drop_after(4)


if __name__ == "__main__":
    start(int(sys.argv[2]), sys.argv[3])
    notices = []
    config = CheckpointConfig(keep=9)
    with RunCheckpoints(sys.argv[1], config, notify=notices.append) as run_checkpoints:
        last = restore_save_and_refuse(run_checkpoints)
        assert notices == []
        fail_on_one_process(run_checkpoints, last, notices)
        fall_back_together(run_checkpoints, notices)
    jax.distributed.shutdown()
    print("done")
