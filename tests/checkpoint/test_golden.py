"""Checkpoints of every format that there has been keep loading."""

import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from make_golden import RUN, golden_state

from shardlib.checkpoint import RunCheckpoints

GOLDEN = pathlib.Path(__file__).with_name("golden")


def bits(leaf):
    is_key = hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()


@pytest.mark.parametrize("schema", [1, 2])
@pytest.mark.parametrize("devices", [1, 4])
def test_every_format_loads_on_any_mesh(schema, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",), axis_types=(AxisType.Auto,))
    expected, told = golden_state(), []
    target = {
        **expected,
        "params": jax.device_put(expected["params"], NamedSharding(mesh, PartitionSpec("x"))),
    }
    directory = GOLDEN / f"schema_{schema}"
    with RunCheckpoints(directory, notify=told.append) as checkpoints:
        assert checkpoints.steps() == [12]
        assert checkpoints.metadata(12) == RUN
        state = checkpoints.restore(12, target)
    assert jax.tree.map(bits, state) == jax.tree.map(bits, expected)
    assert state["params"]["kernel"].sharding == target["params"]["kernel"].sharding
    unverified = (
        f"checkpoint {directory}/00000012 has format 1, without fingerprints: its values are not "
        "verified"
    )
    assert told == ([unverified] if schema == 1 else [])


def test_what_each_format_says():
    checkpoints = {n: RunCheckpoints(GOLDEN / f"schema_{n}") for n in (1, 2)}
    manifests = {n: found.manifest(12) for n, found in checkpoints.items()}
    assert manifests[1].leaves == manifests[2].leaves
    assert not manifests[1].fingerprints
    assert manifests[2].fingerprints.keys() == manifests[2].leaves.keys()
    # What a fingerprint is may never change, or old checkpoints would count as damaged.
    assert manifests[2].fingerprints["opt_state/0/mu"] == "c68f7815"
    assert checkpoints[2].verify(12) == manifests[2]
