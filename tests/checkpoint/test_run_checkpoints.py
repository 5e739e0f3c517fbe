"""One process: bit-equal round trips across meshes, what is kept, and what is refused."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.checkpoint import CheckpointConfig, RunCheckpoints, SavedCheckpoints
from shardlib.errors import CheckpointError


class Statistics(typing.NamedTuple):
    mean: jax.Array
    count: np.int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: jax.Array
    params: dict
    statistics: Statistics
    opt_state: typing.Any
    rng: jax.Array
    definition: str = dataclasses.field(default="static", metadata={"static": True})


def make_mesh(*sizes):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def shard(tree, mesh):
    """Places every array with its dims over the mesh axes that divide them."""

    def place(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        axes = [
            axis if size % mesh.shape[axis] == 0 else None
            for axis, size in zip(("fsdp", "data"), leaf.shape, strict=False)
        ]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*axes)))

    return jax.tree.map(place, tree)


def abstract(tree):
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        tree,
    )


def make_state(transform=None, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "embed": {"table": jax.random.normal(keys[0], (16, 8)).astype(jnp.bfloat16)},
        "layers": [
            {"kernel": jax.random.normal(keys[1], (8, 24)), "bias": jnp.full(24, -0.0)},
            {"kernel": jax.random.normal(keys[2], (24, 8)), "bias": jnp.full(8, jnp.nan)},
        ],
    }
    transform = transform or optax.adamw(1e-3)
    opt_state = transform.init(params)
    gradients = jax.tree.map(lambda p: jnp.cos(p), params)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # of optax
        _, opt_state = transform.update(gradients, opt_state, params)
    return State(
        step=jnp.int32(7),
        params=params,
        statistics=Statistics(jnp.arange(8.0), np.int32(3)),
        opt_state=opt_state,
        rng=jax.random.split(jax.random.key(seed, impl="rbg"), 8),
    )


def bits(leaf):
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a.shape if hasattr(a, "shape") else ()).tolist() == list(np.shape(b))
        assert getattr(a, "dtype", type(a)) == getattr(b, "dtype", type(b))
        assert bits(a) == bits(b)


def mixed(params):
    labels = {"embed": {"table": "slow"}, "layers": [{"kernel": "fast", "bias": "none"}] * 2}
    del params
    return labels


TRANSFORMS = {
    "adamw": optax.adamw(1e-3),
    # Factors dims of at least 8 and holds placeholders of shape (1,) for the others.
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "multi": optax.multi_transform(
        {
            "slow": optax.sgd(0.1, momentum=0.9),
            "fast": optax.adam(1e-2),
            "none": optax.set_to_zero(),
        },
        mixed,
    ),
}


@pytest.mark.mesh
@pytest.mark.parametrize("name", TRANSFORMS)
def test_bit_equal_on_every_mesh(name, tmp_path):
    state = shard(make_state(TRANSFORMS[name]), make_mesh(2, 4))
    with RunCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(7, state, {"mesh": "data=2,fsdp=4"})
        every = ((2, 4), (1, 1), (4, 1), (8, 1), (1, 3))
        for sizes in every if name == "adamw" else every[-1:]:
            target = abstract(shard(state, make_mesh(*sizes)))
            restored = checkpoints.restore(7, target)
            assert_same_bits(restored, state)
            for leaf, wanted in zip(
                jax.tree.leaves(restored), jax.tree.leaves(target), strict=True
            ):
                if hasattr(wanted, "sharding"):
                    assert leaf.sharding == wanted.sharding


def test_leaves_of_every_kind(tmp_path):
    state = {
        "int": 5,
        "float": 0.1,
        "flag": True,
        "numpy": np.arange(6, dtype=np.int64).reshape(2, 3),
        "scalar": np.float32(2.5),
        "no_elements": jnp.zeros((0, 3), jnp.bfloat16),
        "none": None,
        "empty": optax.EmptyState(),
        "key": jax.random.key(3),
        "float8": jnp.linspace(-1, 1, 5).astype(jnp.float8_e4m3fn),
        "int4": jnp.arange(-4, 4, dtype=jnp.int4),
    }
    with RunCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state, {})
        restored = checkpoints.restore(0, state)
        assert_same_bits(restored, state)
        kinds = [type(restored[key]) for key in ("int", "float", "flag", "numpy", "scalar")]
        assert kinds == [int, float, bool, np.ndarray, np.float32]
        assert restored["key"].dtype == state["key"].dtype

        numbers = {key: state[key] for key in ("int", "float", "numpy")}
        host = checkpoints.restore(0, jax.eval_shape(lambda: state) | numbers)
        assert isinstance(host["float8"], np.ndarray)
        assert bits(host["float8"]) == bits(state["float8"])


@pytest.mark.mesh
def test_state_may_be_donated_and_changed_during_a_save(tmp_path):
    mesh = make_mesh(2, 4)
    state = shard({"w": jnp.arange(2.0**20).reshape(1024, 1024), "b": jnp.zeros(64)}, mesh)
    mutable = np.zeros(4)
    update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    expected = {}
    with RunCheckpoints(tmp_path, CheckpointConfig(keep=10)) as checkpoints:
        for step in range(6):
            expected[step] = jax.tree.map(lambda x: np.array(x), state)
            checkpoints.save(step, {"jax": state, "numpy": mutable}, {})
            for _ in range(3):
                state = update(state)
            mutable += 1
        checkpoints.wait()
        for step, arrays in expected.items():
            restored = checkpoints.restore(step, {"jax": abstract(state), "numpy": mutable})
            assert_same_bits(restored["jax"], arrays)
            assert restored["numpy"].tolist() == [float(step)] * 4


def test_a_shard_larger_than_the_read_bound(tmp_path, monkeypatch):
    from shardlib.checkpoint import arrays

    monkeypatch.setattr(arrays, "READ_BYTES", 1000)
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 2048)
    state = shard({"w": jnp.arange(4096.0).reshape(64, 64)}, make_mesh(2, 4))
    with RunCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        columns = NamedSharding(make_mesh(8, 1), PartitionSpec(None, "data"))
        target = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=columns)}
        assert_same_bits(checkpoints.restore(1, target), state)


def test_another_model_is_refused_before_arrays_are_read(tmp_path):
    saved = {"a": jnp.ones((2, 3)), "b": jnp.ones(4), "c": jnp.ones(5), "key": jax.random.key(0)}
    target = {
        "a": jnp.ones((3, 2)),
        "b": jnp.ones(4, jnp.bfloat16),
        "d": jnp.ones(6),
        "key": jax.random.key(0, impl="rbg"),
    }
    with RunCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved, {}, wait=True)
        for file in (tmp_path / "00000001" / "state").rglob("*"):
            if file.is_file():
                file.unlink()
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(1, target)
    first, *differ, _ = str(caught.value).splitlines()
    assert first.endswith("5 of 5 leaves differ:")
    assert differ[0] == "  a: expected float32[3,2], found float32[2,3]"
    assert [line.split(":")[0].strip() for line in differ] == ["a", "b", "c", "d", "key"]


def test_a_step_is_read_without_its_classes(tmp_path):
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 2)
    state = {"layers": [jnp.arange(3), {"w": jnp.ones((2, 2), jnp.bfloat16)}], "keys": keys}
    with RunCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {}, wait=True)
    saved = SavedCheckpoints(tmp_path)
    on_host = saved.restore(1, saved.target(1))
    assert isinstance(on_host["layers"]["0"], np.ndarray)
    np.testing.assert_array_equal(on_host["layers"]["0"], [0, 1, 2])
    assert on_host["layers"]["1"]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(jax.random.key_data(on_host["keys"]), jax.random.key_data(keys))
    replicated = NamedSharding(
        jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec()
    )
    placed = saved.restore(1, saved.target(1, replicated))
    assert placed["layers"]["1"]["w"].sharding == replicated


def test_the_step_may_be_an_array(tmp_path):
    with RunCheckpoints(tmp_path) as checkpoints:
        for step in (np.int64(1), jnp.int32(2)):
            checkpoints.save(step, {"w": jnp.ones(1)}, {}, wait=True)
        assert checkpoints.steps() == [1, 2]


def test_what_cannot_be_saved(tmp_path):
    with RunCheckpoints(tmp_path) as checkpoints:
        for metadata in ({"x": jnp.ones(1)}, {"x": float("nan")}):
            with pytest.raises(CheckpointError, match=r"^the metadata of step 1 is not JSON: "):
                checkpoints.save(1, {"w": jnp.ones(1)}, metadata)
        with pytest.raises(CheckpointError, match=r"^keys of the tree cannot be stored"):
            checkpoints.save(1, {"a.b": jnp.ones(1)}, {})
        with pytest.raises(CheckpointError, match=r"^leaves of the tree cannot be stored"):
            checkpoints.save(1, {"a": "text"}, {})
        with pytest.raises(CheckpointError, match=r"^the state of step 1 holds no array"):
            checkpoints.save(1, {}, {})
        assert os.listdir(tmp_path) == []
        checkpoints.save(1, {"w": jnp.ones(1)}, {}, wait=True)
        with pytest.raises(
            CheckpointError, match=r"(?s)step 1 is already saved in.*Save each step once"
        ):
            checkpoints.save(1, {"w": jnp.ones(1)}, {})


def test_a_failed_save_is_raised_once_and_gives_its_space_back(tmp_path, capfd):
    state = {"w": jnp.ones((64, 64))}
    checkpoints = RunCheckpoints(tmp_path, CheckpointConfig(keep=3))
    checkpoints.save(1, state, {}, wait=True)
    # What the rename of step 2 will meet.
    checkpoints.save(2, state, {})
    (tmp_path / "00000002").mkdir()
    (tmp_path / "00000002" / "in the way").write_text("")
    with pytest.raises(CheckpointError, match=r"step 2 could not .*\n  Free space .*: 1"):
        checkpoints.wait()
    checkpoints.wait()
    checkpoints.save(3, state, {})
    checkpoints.close()
    assert checkpoints.steps() == [1, 3]
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000002", "00000003"]
    assert capfd.readouterr() == ("", "")


def test_the_error_of_the_run_is_not_hidden_by_one_of_its_last_save(tmp_path):
    def run():
        with RunCheckpoints(tmp_path) as checkpoints:
            checkpoints.save(2, {"w": jnp.ones((64, 64))}, {})
            (tmp_path / "00000002").mkdir()
            (tmp_path / "00000002" / "in the way").write_text("")
            raise RuntimeError("diverged")

    with pytest.raises(RuntimeError, match="diverged") as caught:
        run()
    assert caught.value.__notes__[0].startswith("the checkpoint of step 2 could not be written")


@pytest.mark.mesh
def test_import_is_light_and_exit_completes_the_save(tmp_path):
    script = """
import sys
import shardlib.checkpoint as c
assert not {"orbax", "tensorstore", "flax"} & set(sys.modules), sys.modules
import jax.numpy as jnp
checkpoints = c.RunCheckpoints(sys.argv[1])
checkpoints.save(1, {"w": jnp.ones((1024, 1024))}, {})
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "")
    # Some Pythons start no threads at that point; then the loss is told.
    if pathlib.Path(tmp_path / "00000001").exists():
        assert ended.stderr == ""
    else:
        assert "the checkpoint of step 1 could not be written" in ended.stderr
