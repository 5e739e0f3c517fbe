"""Which directories count as checkpoints, which are kept, and what a killed process has left."""

import json
import os
import shutil

import jax.numpy as jnp
import pytest

from shardlib.checkpoint import (
    CheckpointConfig,
    KeepBest,
    LocalTier,
    RunCheckpoints,
)
from shardlib.checkpoint.directory import kept
from shardlib.errors import CheckpointError

STATE = {"w": jnp.ones(4)}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CheckpointConfig(keep=2), {50, 60}),
        (CheckpointConfig(keep=1, keep_every_steps=20), {20, 40, 60}),
        (CheckpointConfig(keep=1, keep_best=KeepBest(metric="loss")), {30, 60}),
        (CheckpointConfig(keep=1, keep_best=KeepBest(metric="loss", count=2)), {30, 50, 60}),
        (CheckpointConfig(keep=1, keep_best=KeepBest(metric="loss", mode="max")), {10, 60}),
        (CheckpointConfig(keep=1, keep_best=KeepBest(metric="accuracy")), {60}),
        (
            CheckpointConfig(keep=1, keep_every_steps=25, keep_best=KeepBest(metric="loss")),
            {30, 50, 60},
        ),
    ],
)
def test_what_any_policy_keeps_stays(config, expected):
    losses = {10: 5.0, 20: 4.0, 30: 2.0, 40: 2.5, 50: 2.5}
    metrics = {step: {"loss": loss} for step, loss in losses.items()} | {60: {}}
    assert kept(metrics, config) == expected


def test_an_unhealthy_save_leaves_the_last_healthy_one(tmp_path):
    with RunCheckpoints(tmp_path, CheckpointConfig(keep=1)) as checkpoints:
        left = []
        for step, run in enumerate(({}, {"healthy": True}, {"healthy": False}, {"healthy": False})):
            checkpoints.save(step, STATE, run, wait=True)
            left.append(checkpoints.steps())
        assert left == [[0], [1], [1, 2], [1, 3]]
        checkpoints.save(4, STATE, {"healthy": True}, wait=True)
        assert checkpoints.steps() == [4]


def test_the_best_and_every_nth_survive_a_restart(tmp_path):
    told = []
    config = CheckpointConfig(keep=1, keep_every_steps=4, keep_best=KeepBest(metric="loss"))
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: 4.0, 6: 5.0}
    for step, loss in losses.items():
        with RunCheckpoints(tmp_path, config, notify=told.append) as checkpoints:
            checkpoints.save(step, STATE, {}, metrics={"loss": loss, "z": 0})
    assert checkpoints.steps() == [2, 4, 6]
    assert checkpoints.manifest(2).metrics == {"loss": 1.0, "z": 0.0}
    assert checkpoints.manifest(4).metrics == {"z": 0.0}
    assert told == [
        "step 4 is saved without the metric 'loss' (given: z): it cannot be kept as the best"
    ]


def test_foreign_entries_are_never_listed_and_told_of_once(tmp_path):
    told = []
    elsewhere = tmp_path / "elsewhere"
    directory = tmp_path / "checkpoints"
    with RunCheckpoints(directory, CheckpointConfig(keep=1), notify=told.append) as checkpoints:
        checkpoints.save(5, STATE, {}, wait=True)
        shutil.copytree(directory / "00000005", elsewhere)
        (directory / "00000098").mkdir()
        (directory / "00000099" / "state").mkdir(parents=True)
        (directory / "100").mkdir()
        (directory / "00000101").write_text("a file")
        (directory / "notes").mkdir()
        (directory / "00000102").symlink_to(elsewhere)
        shutil.copytree(elsewhere, directory / "00000103")
        shutil.copytree(elsewhere, directory / "00000104")
        (directory / "00000104" / "manifest.json").unlink()
        (directory / "00000104" / "manifest.json").symlink_to(elsewhere / "manifest.json")
        for _ in range(2):
            assert checkpoints.latest() == 5
            assert checkpoints.steps() == [5]
        checkpoints.save(6, STATE, {}, wait=True)
        assert checkpoints.steps() == [6]
    steps = {f"{step:08d}" for step in (6, 98, 99, 101, 102, 103, 104)}
    assert set(os.listdir(directory)) == steps | {"100", "notes"}
    skipped = {text.split(" is skipped: ")[0]: text for text in told}
    assert len(told) == len(skipped) == 8
    for name, why in {
        "00000098": "not a checkpoint",
        "00000101": "a file",
        "00000102": "a symbolic link",
        "00000099": "No such file or directory",
        "00000103": "it belongs to step 5",
        "00000104": "is a symbolic link",
    }.items():
        assert why in skipped[f"{directory}/{name}"]


def test_a_run_does_not_pass_over_a_checkpoint_that_is_a_link(tmp_path):
    directory = tmp_path / "checkpoints"
    with RunCheckpoints(directory, notify=lambda text: None) as checkpoints:
        for step in (5, 6):
            checkpoints.save(step, STATE, {}, wait=True)
        (directory / "00000006").rename(tmp_path / "moved")
        (directory / "00000006").symlink_to(tmp_path / "moved")
        (directory / "latest").symlink_to(directory / "00000005")
        for use in (lambda: checkpoints.restore_newest(STATE), lambda: checkpoints.verify(6)):
            with pytest.raises(
                CheckpointError, match=r"(?s)/00000006 is a symbolic link.*Replace it with its"
            ):
                use()
        assert checkpoints.links() == [6]
        (directory / "00000006").unlink()
        manifest, _ = checkpoints.restore_newest(STATE)
        assert manifest.step == 5


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_manifest_that_nobody_writes_to_is_damaged(tmp_path):
    told = []
    with RunCheckpoints(tmp_path, notify=told.append) as checkpoints:
        for step in (5, 6):
            checkpoints.save(step, STATE, {}, wait=True)
        manifest = tmp_path / "00000006" / "manifest.json"
        manifest.unlink()
        os.mkfifo(manifest)
        assert checkpoints.steps() == [5]
        assert "it is not a regular file" in told[0]
        found, _ = checkpoints.restore_newest(STATE)
    assert found.step == 5


def leave_behind(directory):
    (directory / "00000003.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (directory / ".trash" / "00000001-x").mkdir(parents=True)
    (directory / ".probe-1234").write_text("shardlib")


def test_leftovers_go_when_a_run_starts_and_stay_when_someone_reads(tmp_path):
    with RunCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, STATE, {})
    leave_behind(tmp_path)
    (tmp_path / "00000003.orbax-checkpoint-tmp.bak").mkdir()
    with RunCheckpoints(tmp_path, notify=lambda text: None) as checkpoints:
        checkpoints.restore(1, STATE)
        assert len(os.listdir(tmp_path)) == 5
        assert checkpoints.restore_newest(STATE) is not None
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000003.orbax-checkpoint-tmp.bak"]


def test_going_back_drops_the_later_steps(tmp_path):
    with RunCheckpoints(tmp_path, CheckpointConfig(keep=9)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, STATE, {})
        (tmp_path / "00000004" / "state").mkdir(parents=True)
        checkpoints.wait()
        assert checkpoints.last_saved == 3
        checkpoints.drop_after(1)
        assert checkpoints.last_saved is None
        assert checkpoints.steps() == [1]
        checkpoints.save(2, STATE, {}, wait=True)
        assert checkpoints.steps() == [1, 2]
        checkpoints.drop_after(2)
        assert checkpoints.last_saved == 2
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000002"]


def test_what_is_set_aside_does_not_pile_up(tmp_path):
    with RunCheckpoints(tmp_path, notify=lambda text: None) as checkpoints:
        checkpoints.save(1, STATE, {}, wait=True)
        for step in (2, 3, 4):
            checkpoints.save(step, STATE, {}, wait=True)
            (tmp_path / f"{step:08d}" / "manifest.json").unlink()
            manifest, _ = checkpoints.restore_newest(STATE)
            assert manifest.step == 1
    names = sorted(os.listdir(tmp_path / ".damaged"))
    assert [name[:8] for name in names] == ["00000003", "00000004"]


def test_what_accept_raises_is_passed_on_and_nothing_is_set_aside(tmp_path):
    class WrongConfigError(Exception):
        pass

    def accept(manifest):
        if manifest.run["seed"] == 2:
            raise WrongConfigError

    with RunCheckpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, STATE, {"seed": step}, wait=True)
        with pytest.raises(WrongConfigError):
            checkpoints.restore_newest(STATE, accept=accept)
        found = checkpoints.restore_newest(STATE, accept=lambda manifest: manifest.run["seed"] < 2)
        assert found is not None
        assert found[0].step == 1
        assert checkpoints.restore_newest(STATE, accept=lambda manifest: False) is None
        with pytest.raises(CheckpointError, match="is of another model or optimizer"):
            checkpoints.restore_newest({"v": jnp.ones(4)})
        assert checkpoints.steps() == [1, 2]


def test_a_later_format_is_not_damage(tmp_path):
    with RunCheckpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, STATE, {}, wait=True)
        path = tmp_path / "00000002" / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 3}))
        with pytest.raises(CheckpointError, match=r"has format 3; .*\n  Use the shardlib"):
            checkpoints.restore_newest(STATE)
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000002"]


def test_a_directory_that_cannot_be_written(tmp_path):
    # A path below a file is refused to root as well.
    (tmp_path / "file").write_text("")
    place = f"{tmp_path}/file/checkpoints"
    told = []
    checkpoints = RunCheckpoints(place, notify=told.append)
    with pytest.raises(
        CheckpointError, match=r"(?s)checkpoints cannot be written.*Name a directory that"
    ):
        checkpoints.check_writable()
    with pytest.raises(
        CheckpointError, match=r"(?s)checkpoints cannot be listed.*Name a directory that"
    ):
        checkpoints.steps()
    text = f"step 1 could not be written to {place}: NotADirectoryError"
    checkpoints.save(1, STATE, {})
    assert text in told[0]
    with pytest.raises(CheckpointError, match=rf"{text}[^\n]*\n  Free space or restore access"):
        checkpoints.save(1, STATE, {}, wait=True)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        *((CheckpointConfig, {name: 0}) for name in ("every_steps", "keep", "max_failures")),
        (CheckpointConfig, {"keep_every_steps": 0}),
        (KeepBest, {"count": 0, "metric": "loss"}),
        *((LocalTier, {name: 0, "directory": "x"}) for name in ("every_steps", "keep")),
    ],
)
def test_config_faults(config, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be at least 1, not 0"):
        config(**options)
    with pytest.raises(ValueError, match="local checkpoints must be more frequent"):
        CheckpointConfig(every_steps=10, local=LocalTier(directory="x", every_steps=10))
