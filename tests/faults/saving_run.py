"""A run that does nothing but save: DIRECTORY [INDEX COUNT PORT]; killed by `test_kill_saves`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.checkpoint import CheckpointConfig, RunCheckpoints

SHAPE = (64, 512)


def state_of(step, place):
    """The state after so many steps: exact in float32."""
    return {
        "w": place(np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE) + step, "fsdp"),
        "half": place(np.full(16, step, jnp.bfloat16)),
        "step": np.int64(step),
    }


def placement(devices):
    mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))

    def place(array, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return place


def assert_is(state, step, place):
    for path, expected in state_of(step, place).items():
        if isinstance(expected, jax.Array):
            for shard, wanted in zip(
                state[path].addressable_shards, expected.addressable_shards, strict=True
            ):
                assert np.asarray(shard.data).tobytes() == np.asarray(wanted.data).tobytes()
        else:
            assert state[path] == expected


def main(directory, index=0, count=1, port=0):
    jax.config.update("jax_num_cpu_devices", 2)
    if int(count) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    place = placement(jax.devices())
    update = jax.jit(lambda state: {**state, "w": state["w"] + 1, "half": state["half"] + 1})
    config = CheckpointConfig(keep=2, keep_every_steps=50)
    with RunCheckpoints(directory, config, notify=print) as checkpoints:
        print("restoring", flush=True)
        found = checkpoints.restore_newest(state_of(0, place))
        step, state = (found[0].step, found[1]) if found else (0, state_of(0, place))
        assert_is(state, step, place)
        print(f"restored {step}", flush=True)
        while True:
            numpy = state.pop("step")
            state = jax.block_until_ready(update(state)) | {"step": numpy + 1}
            step += 1
            checkpoints.save(step, state, {"samples_seen": 8 * step})
            print(f"saving {step}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
