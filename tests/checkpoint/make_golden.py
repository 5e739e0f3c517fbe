"""Writes a golden checkpoint of the present format: python tests/checkpoint/make_golden.py OUT.

What it wrote for each format lies in `golden/schema_N` and is never written again: a checkpoint of
every format must keep loading.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.checkpoint import RunCheckpoints

RUN = {"config": {"seed": 3}, "mesh": "fsdp=2", "data": {"samples_seen": 96}}


def golden_state():
    """The state of step 12: dtypes and kinds of leaves that a training state has."""
    table = np.arange(32, dtype=np.float32).reshape(4, 8) / 7
    return {
        "params": {
            "kernel": jnp.asarray(table).astype(jnp.bfloat16),
            "bias": jnp.asarray(np.float32([0.0, -0.0, np.nan, np.inf])),
        },
        "opt_state": [{"mu": jnp.asarray(table), "count": jnp.int32(12)}],
        "rng": jax.random.key(5),
        "step": 12,
    }


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    mesh = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
    state = golden_state()
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    for holder, name in ((state["params"], "kernel"), (state["opt_state"][0], "mu")):
        holder[name] = jax.device_put(holder[name], split)
    with RunCheckpoints(sys.argv[1]) as checkpoints:
        checkpoints.save(12, state, RUN, wait=True)
