"""Two places for checkpoints: each step in one of them, the newest of both restored."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.checkpoint import (
    CheckpointConfig,
    LocalTier,
    RunCheckpoints,
    TieredCheckpoints,
    open_checkpoints,
)
from shardlib.checkpoint.tiers import _check_one_host
from shardlib.errors import CheckpointError


def state_of(step):
    return {"w": jnp.full(4, float(step))}


def open_both(directory, **options):
    local = LocalTier(directory=str(directory / "near"), every_steps=2, keep=2)
    config = CheckpointConfig(every_steps=10, keep=2, local=local)
    return open_checkpoints(directory / "far", config, **options)


def train(checkpoints, steps):
    for step in steps:
        if checkpoints.is_due(step):
            checkpoints.save(step, state_of(step), {"step": step})


def test_one_place_unless_asked_for_two(tmp_path):
    assert type(open_checkpoints(tmp_path, CheckpointConfig())) is RunCheckpoints
    assert type(open_both(tmp_path)) is TieredCheckpoints


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
    assert [text.split(": ")[0] for text in told] == [
        "step 24 does not validate, trying the one before it",
        f"step 24 is now {_aside(tmp_path / 'near', 24)}",
        "step 22 does not validate, trying the one before it",
        f"step 22 is now {_aside(tmp_path / 'near', 22)}",
    ]


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


def test_several_hosts_are_refused():
    assert _check_one_host(["a 1", "a 1"]) == ""
    with pytest.raises(CheckpointError) as caught:
        _check_one_host(["node2 17", "node1 4", "node2 17"])
    assert str(caught.value) == (
        "checkpoint.local is for one host, but the processes are on 2: node1, node2.\n"
        "  Leave checkpoint.local out: every process must see the directory."
    )
