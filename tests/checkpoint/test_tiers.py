"""Two places for checkpoints: each step in one of them, the newest of both restored."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.checkpoint import (
    CheckpointConfig,
    LocalTier,
    RunCheckpoints,
    open_checkpoints,
    open_saved,
)
from shardlib.checkpoint.run_checkpoints import _check_one_host
from shardlib.errors import CheckpointError, ConfigError


def state_of(step):
    return {"w": jnp.full(4, float(step))}


def config_of(directory):
    local = LocalTier(directory=str(directory / "near"), every_steps=2, keep=2)
    return CheckpointConfig(every_steps=10, keep=2, local=local)


def open_both(directory, **options):
    return open_checkpoints(directory / "far", config_of(directory), **options)


def train(checkpoints, steps):
    for step in steps:
        if checkpoints.is_due(step):
            checkpoints.save(step, state_of(step), {"step": step})


def test_each_step_is_in_the_place_that_asks_for_it(tmp_path):
    with open_both(tmp_path) as checkpoints:
        checkpoints.check_writable()
        train(checkpoints, range(1, 26))
        checkpoints.save(25, state_of(25), {}, wait=True)  # The last one: nothing asks for it.
        assert checkpoints.steps() == [20, 22, 24, 25]
        assert checkpoints.latest() == 25
        assert checkpoints.metadata(24) == {"step": 24}
        np.testing.assert_array_equal(checkpoints.restore(22, state_of(0))["w"], [22.0] * 4)
    assert sorted(os.listdir(tmp_path / "near")) == ["00000022", "00000024"]
    assert sorted(os.listdir(tmp_path / "far")) == ["00000020", "00000025"]


@pytest.mark.parametrize("near", ["far", "far/near", "."])
def test_places_within_each_other_are_refused(near, tmp_path):
    local = LocalTier(directory=str(tmp_path / near), every_steps=2)
    with pytest.raises(ConfigError, match=r"(?s)overlaps with the run's.*Name a directory"):
        open_checkpoints(tmp_path / "far", CheckpointConfig(every_steps=10, local=local))


def test_the_newest_of_both_that_validates_is_restored(tmp_path):
    told = []
    with open_both(tmp_path) as checkpoints:
        train(checkpoints, range(1, 25))
    for expected, damaged in ((24, "near/00000024"), (22, "near/00000022"), (20, None)):
        with open_both(tmp_path, notify=told.append) as checkpoints:
            manifest, state = checkpoints.restore_newest(state_of(0))
        assert manifest.step == expected
        np.testing.assert_array_equal(state["w"], [float(expected)] * 4)
        if damaged:
            (tmp_path / damaged / "state" / "_METADATA").unlink()
    assert [text for text in told if "does not validate" in text][1].startswith("step 22 ")
    assert [told[2], told[5]] == [f"step {step} is restored in its place" for step in (22, 20)]
    assert told[1] == f"step 24 is now {_aside(tmp_path / 'near', 24)}"


def _aside(directory, step):
    (found,) = (directory / ".damaged").glob(f"{step:08d}-*")
    return found


def test_a_lost_local_disk_costs_the_steps_on_it(tmp_path):
    with open_both(tmp_path) as checkpoints:
        train(checkpoints, range(1, 25))
        checkpoints.wait()
        assert checkpoints.latest() == 24
    os.rename(tmp_path / "near", tmp_path / "lost")
    with open_both(tmp_path) as checkpoints:
        manifest, _ = checkpoints.restore_newest(state_of(0))
        assert manifest.step == 20
        train(checkpoints, range(21, 25))
        checkpoints.wait()
        assert checkpoints.steps() == [10, 20, 22, 24]
        checkpoints.drop_after(20)
        assert checkpoints.steps() == [10, 20]


def test_a_local_place_belongs_to_one_run(tmp_path):
    def save(step, run):
        RunCheckpoints(tmp_path / "near").save(step, state_of(step), run, wait=True)

    save(2, {})
    for owner in (None, "a"):  # One without an id may be anyone's.
        with open_both(tmp_path, owner=owner):
            pass
    save(4, {"id": "a"})
    save(6, {"id": "a"})
    with open_both(tmp_path, owner="a") as checkpoints:
        assert checkpoints.latest() == 6
    told = []
    for owner in (None, "b"):
        with pytest.raises(CheckpointError, match=r"(?s)/near holds checkpoints of.*Name another"):
            open_both(tmp_path, owner=owner)
        saved = open_saved(tmp_path, config_of(tmp_path), notify=told.append, owner=owner)
        assert list(saved.tiers) == ["run"]
    assert told == 2 * [
        f"checkpoint.local.directory holds checkpoints of another run, skipped: {tmp_path}/near"
    ]


def test_who_only_reads_sees_both_places(tmp_path):
    with open_both(tmp_path) as checkpoints:
        train(checkpoints, range(1, 25))
    saved = open_saved(tmp_path / "far", config_of(tmp_path), notify=pytest.fail)
    assert {tier: place.steps() for tier, place in saved.tiers.items()} == {
        "run": [10, 20],
        "local": [22, 24],
    }
    assert (saved.latest(), saved.steps()) == (24, [10, 20, 22, 24])
    for step in (20, 24):
        assert saved.metadata(step) == {"step": step}
        saved.check(step, state_of(0))
        assert list(saved.stored(step, state_of(0))[1]) == ["w"]
        np.testing.assert_array_equal(saved.restore(step, state_of(0))["w"], [float(step)] * 4)
    (tmp_path / "near" / "00000022" / "manifest.json").unlink()
    saved = open_saved(tmp_path / "far", config_of(tmp_path), notify=lambda text: None)
    with pytest.raises(CheckpointError, match=r"near/00000022 cannot be read as a checkpoint"):
        saved.manifest(22)
    os.rename(tmp_path / "near", tmp_path / "lost")
    told = []
    saved = open_saved(tmp_path / "far", config_of(tmp_path), notify=told.append)
    assert saved.latest() == 20
    assert told == [f"checkpoint.local.directory does not exist, skipped: {tmp_path}/near"]


def test_several_hosts_are_refused():
    assert _check_one_host(["a 1", "a 1"]) == ""
    with pytest.raises(
        CheckpointError, match=r"(?s)checkpoint\.local is for one.*Leave checkpoint\.local"
    ):
        _check_one_host(["node2 17", "node1 4", "node2 17"])
