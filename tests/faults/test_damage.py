"""Every file of a checkpoint, damaged in every way: it is told, or the state is the one saved."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.checkpoint import CheckpointConfig, RunCheckpoints, restoring
from shardlib.errors import CheckpointError

FLIPS = 8


def make_state(step):
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",), axis_types=(AxisType.Auto,))

    def place(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    table = jnp.cos(jnp.arange(6000.0) + step).reshape(60, 100)
    return {
        "params": {
            "kernel": place(table, "fsdp"),
            "bias": place(jnp.full(40, jnp.nan, jnp.bfloat16)),
            "zeros": place(jnp.zeros((64, 64)), "fsdp"),
        },
        "rng": place(jax.random.key(step)),
        "step": step,
    }


def bits(state):
    leaves = [
        jax.random.key_data(leaf) if leaf is state["rng"] else leaf
        for leaf in jax.tree.leaves(state)
    ]
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def flip(path, position, bit):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def damages(size):
    """Yields ways to damage a file of so many bytes, each a function of its path."""
    for number in range(FLIPS):
        position = min(size - 1, number * size // (FLIPS - 1))
        yield lambda path, at=position, bit=3 * number % 8: flip(path, at, bit)
    yield lambda path: os.truncate(path, size // 2)
    yield lambda path: path.unlink()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with the checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("saved")
    with RunCheckpoints(directory, CheckpointConfig(keep=5)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), {"config": {"seed": step}}, wait=True)
    return directory


def files_of(directory):
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


@pytest.mark.process
@pytest.mark.parametrize("by", ["checksums", "fingerprints"])
def test_every_file_flipped_truncated_deleted(by, saved, tmp_path, monkeypatch):
    if by == "fingerprints":
        # As of files too large to be read twice: what protects them is in the restore itself.
        monkeypatch.setattr(restoring, "SMALL_FILE_BYTES", 0)
    expected = bits(make_state(2))
    outcomes = {"told": 0, "harmless": 0}
    for name in files_of(saved / "00000002"):
        content = (saved / "00000002" / name).read_bytes()
        for damage in damages(len(content)):
            shutil.copytree(saved / "00000002", tmp_path / "00000002")
            damage(tmp_path / "00000002" / name)
            outcomes[outcome(tmp_path, name, expected)] += 1
            shutil.rmtree(tmp_path / "00000002")
    assert outcomes["told"] > 4 * FLIPS
    if by == "checksums":
        assert outcomes["harmless"] == 0


def outcome(directory, name, expected):
    target = make_state(0)
    try:
        with RunCheckpoints(directory) as checkpoints:
            state = checkpoints.restore(2, target)
    except CheckpointError as error:
        text = str(error)
    else:
        assert bits(state) == expected, name
        return "harmless"
    leaves = ("params/kernel", "params/bias", "params/zeros", "rng", "step")
    assert str(name) in text or any(f"  {leaf}: " in text for leaf in leaves), text
    return "told"


def test_changed_values_are_named_by_leaf(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(restoring, "SMALL_FILE_BYTES", 0)
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    rows = np.asarray(make_state(2)["params"]["kernel"])[:30].tobytes()
    for file in (tmp_path / "00000002" / "state" / "ocdbt.process_0" / "d").iterdir():
        place = file.read_bytes().find(rows)
        if place >= 0:
            flip(file, place + 5, 0)
    with (
        RunCheckpoints(tmp_path) as checkpoints,
        pytest.raises(
            CheckpointError,
            match=r"(?s)/00000002 is damaged: 1 of 5.*params/kernel.*Restore another step",
        ),
    ):
        checkpoints.restore(2, make_state(0))


@pytest.mark.parametrize("kind", ["array", "metadata", "manifest", "deleted"])
def test_the_step_before_is_restored(kind, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    damaged = tmp_path / "00000002"
    arrays = sorted((damaged / "state" / "ocdbt.process_0" / "d").iterdir(), key=os.path.getsize)
    if kind == "array":
        flip(arrays[-1], arrays[-1].stat().st_size // 2, 0)
    elif kind == "metadata":
        flip(damaged / "state" / "_METADATA", 20, 1)
    elif kind == "manifest":
        flip(damaged / "manifest.json", 40, 2)
    else:
        arrays[0].unlink()
    told = []
    with RunCheckpoints(tmp_path, notify=told.append) as checkpoints:
        found = checkpoints.restore_newest(make_state(0))
        assert found is not None
        manifest, state = found
        assert manifest.step == 1
        assert bits(state) == bits(make_state(1))
        assert checkpoints.steps() == [1]
        # Its step can be saved again.
        checkpoints.save(2, make_state(2), {}, wait=True)
        assert checkpoints.steps() == [1, 2]
    (aside,) = (tmp_path / ".damaged").iterdir()
    assert told[0].startswith("step 2 does not validate, trying the one before it: ")
    assert str(damaged) in told[0]
    assert told[1] == f"step 2 is now {aside}"
    assert told[2:] == ["step 1 is restored in its place"]


def test_without_one_that_validates_nothing_is_touched(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    for step in ("00000001", "00000002"):
        (tmp_path / step / "state" / "manifest.ocdbt").unlink()
    told = []
    for _ in range(2):
        with (
            RunCheckpoints(tmp_path, notify=told.append) as checkpoints,
            pytest.raises(
                CheckpointError,
                match=r"(?s)none of the checkpoints.*step 2.*step 1.*They are left as they",
            ),
        ):
            checkpoints.restore_newest(make_state(0))
    assert told[0].endswith("\n  state/manifest.ocdbt: missing")
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000002"]
