"""Profiles of some steps of a run."""

import jax
import pytest

from shardlib import run
from shardlib.log.events import read_events

QUIET = ("eval.every_steps=0", "train.sample_length=0", "checkpoint.enabled=false")


def profiled_steps(run_dir):
    """The numbers of the steps in a profile, the only one."""
    (path,) = (run_dir / "profile").rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(path))
    events = (event for plane in profile.planes for line in plane.lines for event in line.events)
    return [dict(event.stats)["step_num"] for event in events if event.name == "train"]


def recorded(run_dir):
    return [e["facts"]["steps"] for e in read_events(run_dir) if e["kind"] == "profiled"]


@pytest.mark.mesh
def test_the_steps_that_are_asked_for(lab, tmp_path, losses, finished):
    run_dir = tmp_path / "run"
    words = ("train.steps=8", "train.profile.skip=2", "train.profile.steps=3", *QUIET)
    run.train(lab.config(run_dir, *words))
    assert recorded(run_dir) == [[3, 5]]
    assert profiled_steps(run_dir) == [3, 4, 5]
    assert losses(run_dir) == losses(finished.run_dir)[:8]


@pytest.mark.mesh
def test_a_stop_within_a_profile_writes_it(lab, tmp_path):
    run_dir = tmp_path / "run"
    config = lab.config(run_dir, "train.steps=30", "train.profile.steps=20", *QUIET)
    run.train(config, after_step=lambda step: "enough" if step == 12 else None)
    assert recorded(run_dir) == [[11, 12]]
    assert profiled_steps(run_dir) == [11, 12]
