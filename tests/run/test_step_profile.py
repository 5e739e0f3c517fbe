"""Profiles of some steps of a run."""

import jax
import pytest

from shardlib import run
from shardlib.log.events import read_events
from shardlib.log.step_profile import ProfileConfig, StepProfiler

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


@pytest.mark.mesh
def test_a_run_that_ends_before_its_profile_says_so(lab, tmp_path, capsys):
    run_dir = tmp_path / "run"
    run.train(lab.config(run_dir, "train.steps=3", "train.profile.steps=1", *QUIET))
    assert recorded(run_dir) == []
    assert "no step is profiled: the profile would have begun at step 11" in capsys.readouterr().out


def test_processes_stop_for_the_same_steps_after_a_rewind(tmp_path):
    def stops(*, writes):
        profiler = StepProfiler(ProfileConfig(skip=2, steps=3), tmp_path, 0, writes=writes)
        due = []
        for step in (1, 2, 3, 4, 1, 2, 3, 4, 5, 6):  # A rewind in the middle of the profile.
            if step == 1:
                profiler.end()
            due.append(profiler.is_due(step))
            if due[-1]:
                profiler.end(step)
                profiler.start(step)
        return due

    assert stops(writes=True) == stops(writes=False)
    assert sum(stops(writes=False)) == 1
