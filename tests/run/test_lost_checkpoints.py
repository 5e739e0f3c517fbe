"""A run whose checkpoints are out of sight is not begun anew over what it has written."""

import os
import shutil

import pytest

from shardlib import run
from shardlib.errors import CheckpointError
from shardlib.log.events import Events, read_events, saved_step

QUIET = ("eval.every_steps=0", "train.sample_length=0")


class LostError(Exception):
    """What ends a run without a last save, as a kill does."""


def lost_at(last):
    def after_step(step):
        if step == last:
            raise LostError

    return after_step


def contents(run_dir):
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.mesh
def test_events_record_what_is_saved(finished):
    saved = [event["step"] for event in read_events(finished.run_dir) if event["kind"] == "saved"]
    # The first may be complete only when the last is on its way.
    assert saved in ([20], [10, 20])
    assert saved_step(finished.run_dir) == 20


@pytest.mark.mesh
@pytest.mark.parametrize("words", [(), ("train.steps=30",), ("checkpoint.enabled=false",)])
@pytest.mark.parametrize("is_there", [True, False], ids=["empty", "missing"])
def test_a_run_without_its_checkpoints_is_refused(finished, lab, tmp_path, is_there, words):
    run_dir = finished.copy(tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints")
    if is_there:
        (run_dir / "checkpoints").mkdir()
    before = contents(run_dir)
    with pytest.raises(CheckpointError) as refused:
        run.train(lab.config(run_dir, *QUIET, *words))
    assert contents(run_dir) == before
    what, fix = str(refused.value).split("\n")
    assert what.startswith(f"{run_dir}/checkpoints ")
    assert f"{run_dir}/events.jsonl records that step 20 was saved" in what
    assert fix.startswith("  Mount the disk that holds the checkpoints")


@pytest.mark.mesh
def test_a_run_that_was_lost_before_it_saved_starts_again(finished, lab, tmp_path, losses):
    run_dir = tmp_path / "run"
    config = lab.config(run_dir, *QUIET, "train.steps=12")
    with pytest.raises(LostError):
        run.train(config, after_step=lost_at(7))
    assert saved_step(run_dir) is None
    assert os.listdir(run_dir / "checkpoints") == []
    assert run.train(config).step == 12
    assert losses(run_dir) == losses(finished.run_dir)[:12]


@pytest.mark.mesh
def test_what_was_saved_on_a_local_disk_alone_may_go_with_its_machine(
    finished, lab, tmp_path, losses
):
    run_dir, local = tmp_path / "run", tmp_path / "local"
    words = (f"checkpoint.local.directory={local}", "checkpoint.local.every_steps=2")
    config = lab.config(run_dir, *QUIET, *words, "train.steps=12")
    with pytest.raises(LostError):
        run.train(config, after_step=lost_at(7))
    assert saved_step(run_dir) is None
    assert os.listdir(local) != []
    shutil.rmtree(local)
    assert run.train(config).step == 12
    assert losses(run_dir) == losses(finished.run_dir)[:12]


@pytest.mark.parametrize(
    ("happened", "step"),
    [
        ([], None),
        ([("start", 0), ("end", 20)], None),
        ([("start", 0), ("saved", 10), ("saved", 20), ("start", 20)], 20),
        ([("saved", 10), ("saved", 20), ("rewind", 10)], 10),
        # All of its checkpoints were removed then.
        ([("saved", 10), ("rewind", 0)], None),
        ([("saved", 10), ("rewind", 0), ("saved", 5)], 5),
    ],
    ids=["no events", "not saved", "saved twice", "went back", "to the start", "and saved again"],
)
def test_the_newest_step_that_events_record_as_saved(tmp_path, happened, step):
    events = Events()
    events.open(tmp_path, pytest.fail)
    for kind, at in happened:
        events.add(kind, step=at)
    events.close()
    broken = b'not JSON\n[1]\n{"kind": "saved"}\n{"kind": "saved", "step": "x"}\n{"kind": "sa'
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(broken)
    assert saved_step(tmp_path) == step
