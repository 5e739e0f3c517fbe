"""Other dtypes and parts of a state: refused unless asked for, then told leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.checkpoint import RunCheckpoints
from shardlib.errors import CheckpointError

SAVED = {
    "w": np.float32([[0.1, 1e-3], [3.0, -0.0]]),
    "count": np.int64(2**40),
    "big": np.arange(8, dtype=np.int64),
    "old": np.ones(3, np.float32),
    "rng": jax.random.key(1),
}


@pytest.fixture
def saved(tmp_path):
    with RunCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(5, {**SAVED, "w": jnp.asarray(SAVED["w"])}, {}, wait=True)
    return tmp_path


def struct(shape, dtype, *spec):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Auto,))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def test_dtypes_change_when_asked(saved):
    target = SAVED | {
        "w": struct((2, 2), jnp.bfloat16, "x"),
        "big": struct((8,), jnp.float32, "x"),
        "old": np.zeros(3, np.float64),
        "count": 0.0,
    }
    told = []
    with RunCheckpoints(saved, notify=told.append) as checkpoints:
        with pytest.raises(CheckpointError, match="4 of 5 leaves differ"):
            checkpoints.restore(5, target)
        assert told == []
        state = checkpoints.restore(5, target, cast=True)
    assert [text.split(": ")[1] for text in told] == ["big", "count", "old", "w"]
    expected = np.asarray(SAVED["w"]).astype(jnp.bfloat16)
    assert np.asarray(state["w"]).tobytes() == expected.tobytes()
    for path in ("w", "big"):
        assert state[path].sharding == target[path].sharding
    np.testing.assert_array_equal(state["big"], np.arange(8, dtype=np.float32))
    assert state["old"].dtype == np.float64
    assert (state["count"], type(state["count"])) == (2.0**40, float)


def test_shapes_and_keys_never_change(saved):
    target = SAVED | {"w": np.zeros((4, 1), np.float64), "rng": np.zeros(2, np.uint32)}
    text = (
        r"(?s)rng: expected uint32\[2\], found key<fry>.*w: expected float64\[4,1\], found float32"
    )
    with (
        RunCheckpoints(saved, notify=pytest.fail) as checkpoints,
        pytest.raises(CheckpointError, match=text),
    ):
        checkpoints.restore(5, target, cast=True, partial=True)


def test_parts_are_restored_when_asked(saved):
    new = jnp.full(4, 7.0)
    target = {"w": jnp.zeros((2, 2)), "new": {"adapter": new}, "rng": jax.random.key(0)}
    told = []
    with RunCheckpoints(saved, notify=told.append) as checkpoints:
        with pytest.raises(CheckpointError, match="4 of 6 leaves differ"):
            checkpoints.restore(5, target, cast=True)
        state = checkpoints.restore(5, target, partial=True)
    assert [text.split(": ")[1] for text in told] == ["big", "count", "new/adapter", "old"]
    assert told[2].endswith("expected float32[4], missing from the checkpoint")
    np.testing.assert_array_equal(state["w"], SAVED["w"])
    assert state["new"]["adapter"] is new
    assert jax.random.key_data(state["rng"]).tolist() == jax.random.key_data(SAVED["rng"]).tolist()


def test_leaves_without_any_value_are_refused(saved):
    target = {"w": jnp.zeros((2, 2)), "a": struct((3,), jnp.int8), "b": struct((), jnp.float32)}
    text = r"(?s)missing from the checkpoint.*a: int8\[3\].*b: float32\[\].*Pass arrays for them"
    with (
        RunCheckpoints(saved, notify=pytest.fail) as checkpoints,
        pytest.raises(CheckpointError, match=text),
    ):
        checkpoints.restore(5, target, partial=True)
