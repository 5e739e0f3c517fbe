"""A whole run whose data poisons it: updates left out, one rewind, and training that recovers.

The model comes from a package of its own, found by entry point as any user's: the transformer,
whose loss is infinite on some rows.
"""

import os
import re

import numpy as np
import pytest

from shardlib import run
from shardlib.checkpoint import RunCheckpoints
from shardlib.config import load
from shardlib.log.events import read_events
from shardlib.log.metrics import read_metrics
from shardlib.run.setup import open_source
from shardlib.runtime.exit_codes import DIVERGED

pytestmark = pytest.mark.process

MODULE = """
import dataclasses
from typing import Literal
import jax.numpy as jnp
from shardlib.config import configclass
from shardlib.losses import Mean
from shardlib_models.transformer import FAMILY as TRANSFORMER, TransformerConfig

@configclass
class PoisonedConfig(TransformerConfig):
    name: Literal["poisoned"] = "poisoned"

def loss(model, batch, rng, *, train, **options):
    mean, metrics = TRANSFORMER.loss(model, batch, rng, train=train, **options)
    sums = jnp.sum(batch["tokens"], axis=1)
    is_bad = jnp.any(jnp.isin(sums, jnp.asarray(POISON, jnp.int32)))
    return Mean(jnp.where(is_bad, jnp.inf, mean.total), mean.weight), metrics

POISON = {poison}
FAMILY = dataclasses.replace(TRANSFORMER, config=PoisonedConfig, loss=loss, dims=None)
"""
FIRST_BAD, LAST_BAD = 14, 16
PATIENT = ("train.guards.patience=3", "checkpoint.every_steps=5", "checkpoint.keep=1")
SELDOM = ("train.guards.patience=3", "checkpoint.every_steps=12", "checkpoint.keep=1")
QUIET = ("eval.every_steps=0", "train.sample_length=0")


@pytest.fixture(scope="module")
def poisoned(lab, tmp_path_factory):
    """Runs the model whose loss is infinite in three steps, with other settings each time."""
    config = load(run.RunConfig, lab.config_file)
    rows = open_source(config, "train")
    sums = {step: rows.read(step - 1, 0, 8)["tokens"].sum(axis=1) for step in range(1, 31)}
    # One row of each bad step that no other step has.
    bad = [
        next(
            int(total)
            for total in sums[step]
            if not any(total in sums[other] for other in sums if other != step)
        )
        for step in range(FIRST_BAD, LAST_BAD + 1)
    ]
    package = tmp_path_factory.mktemp("package")
    (package / "poisoned.py").write_text(MODULE.replace("{poison}", repr(bad)))
    info = package / "poisoned-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: poisoned\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shardlib.models]\npoisoned = poisoned:FAMILY\n")
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

    def start(run_dir, *words, launch=()):
        words = ("train", lab.config_file, f"run_dir={run_dir}", "model.name=poisoned", *words)
        if launch:
            return lab.shardlib(*launch, *words, *QUIET, env={**os.environ, "PYTHONPATH": path})
        return lab.call(*words, *QUIET)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(package))
        yield start


def test_bad_steps_leave_the_state_alone_and_the_run_goes_on(poisoned, tmp_path):
    done = poisoned(tmp_path / "run", "checkpoint.every_steps=1", "checkpoint.keep=30")
    assert done.returncode == 0, done.stderr
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if row["skipped"]] == [14, 15, 16]
    assert [row["step"] for row in rows if not np.isfinite(row["loss"])] == [14, 15, 16]
    assert rows[-1]["loss"] < rows[12]["loss"]
    assert done.stdout.count("its update is skipped because loss is inf (samples ") == 3
    with RunCheckpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        # While updates are left out nothing is saved; after the first good one it is.
        assert checkpoints.steps() == [*range(1, 14), *range(17, 21)]


def test_a_run_goes_back_once_and_past_the_data(poisoned, tmp_path):
    words = ("train.guards.patience=3", "checkpoint.every_steps=5", "train.steps=25")
    done = poisoned(tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr
    text = "went back from step 16 to step 10 because loss is inf; samples 80 to 127 are skipped"
    assert text in done.stdout.splitlines()
    rewinds = [e for e in read_events(tmp_path / "run") if e["kind"] == "rewind"]
    assert [event["facts"] for event in rewinds] == [{"lost_steps": 6, "samples": [80, 128]}]
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 26))
    assert not any(row["skipped"] for row in rows)
    assert rows[-1]["loss"] < rows[9]["loss"]
    assert rows[-1]["spent"]["lost"] > 0
    with RunCheckpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        manifest = checkpoints.manifest(25)
    # 25 steps of 8 samples, and 6 steps' worth passed over.
    data = manifest.run["data"]
    assert (data["samples_seen"], data["skipped"]) == (31 * 8, [[80, 128]])
    assert manifest.run["guards"]["rewinds"] == 1


def test_two_processes_go_back_together(poisoned, tmp_path):
    words = ("train.guards.patience=3", "checkpoint.every_steps=5", "train.steps=18")
    words += ("mesh=fsdp=2", "train.cpu_devices=2")
    launch = ("launch", "--processes", 2, "--")
    done = poisoned(tmp_path / "run", *words, launch=launch)
    assert done.returncode == 0, done.stdout
    text = "went back from step 16 to step 10 because loss is inf; samples 80 to 127 are skipped"
    assert done.stdout.count(text) == 1
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(1, 19))
    with RunCheckpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        data = checkpoints.verify(18).run["data"]
    assert (data["samples_seen"], data["skipped"]) == (24 * 8, [[80, 128]])


@pytest.fixture(scope="module")
def never_stopped(poisoned, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("never_stopped") / "run"
    done = poisoned(run_dir, *PATIENT, "train.steps=22")
    assert done.returncode == 0, done.stderr
    return read_metrics(run_dir)


# After step 15, a save that was due has been put off.
@pytest.mark.rest("soak")
@pytest.mark.parametrize("last", [14, 15])
def test_a_run_that_stops_among_bad_steps_goes_on_as_one_that_did_not(
    last, poisoned, never_stopped, tmp_path
):
    stopped = poisoned(tmp_path / "run", *PATIENT, f"train.steps={last}")
    assert stopped.returncode == 0, stopped.stderr
    with RunCheckpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        # The last healthy one is kept, whatever is newer.
        healthy = {step: checkpoints.metadata(step)["healthy"] for step in checkpoints.steps()}
    assert healthy == {10: True, last: False}
    done = poisoned(tmp_path / "run", *PATIENT, "train.steps=22")
    assert "from step 16 to step 10 because loss is inf; samples 80 to 127 are" in done.stdout
    rows = read_metrics(tmp_path / "run")
    assert [row["loss"] for row in rows] == [row["loss"] for row in never_stopped]


@pytest.fixture(scope="module")
def went_back_past_a_good_step(poisoned, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("went_back") / "run"
    done = poisoned(run_dir, *SELDOM, "train.steps=22")
    assert done.returncode == 0, done.stderr
    # The good step 17, which was on its way, is undone, and its data comes again.
    assert "from step 16 to step 12 because loss is inf; samples 96 to 127 are" in done.stdout
    return read_metrics(run_dir)


@pytest.mark.rest("soak")
@pytest.mark.parametrize(("stop_after", "steps"), [(17, 22), (16, 16)])
def test_a_stop_before_the_run_went_back_changes_nothing(
    stop_after, steps, lab, poisoned, went_back_past_a_good_step, tmp_path, capsys
):
    words = (*SELDOM, f"train.steps={steps}")
    config = lab.config(tmp_path / "run", "model.name=poisoned", *QUIET, *words)
    run.train(config, after_step=lambda step: "a test" if step == stop_after else None)
    assert f"stopped by a test and saved at step {stop_after}" in capsys.readouterr().out
    with RunCheckpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        healthy = {step: checkpoints.metadata(step)["healthy"] for step in checkpoints.steps()}
    assert healthy == {12: True, stop_after: False}
    done = poisoned(tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr
    assert "from step 16 to step 12 because loss is inf; samples 96 to 127 are" in done.stdout
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    expected = went_back_past_a_good_step[:steps]
    assert [row["loss"] for row in rows] == [row["loss"] for row in expected]
    with RunCheckpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        data = checkpoints.metadata(steps)["data"]
    assert (data["samples_seen"], data["skipped"]) == ((steps + 4) * 8, [[96, 128]])


def test_what_a_run_would_go_back_to_is_never_removed_for_damage(poisoned, tmp_path):
    """Arrays whose manifest is damaged may still be of use: a run does not begin anew on them."""
    run_dir = tmp_path / "run"
    assert poisoned(run_dir, *PATIENT, "train.steps=14").returncode == 0
    manifest = run_dir / "checkpoints" / "00000010" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-10])
    done = poisoned(run_dir, *PATIENT, "train.steps=22")
    assert done.returncode == 1
    assert f"none of the checkpoints validates:\n  {run_dir}/checkpoints, step 10" in done.stderr
    assert (run_dir / "checkpoints" / "00000010" / "state").is_dir()


def test_a_streak_that_a_stop_interrupts_may_end_the_run(poisoned, tmp_path):
    words = ("train.guards.patience=3", "train.guards.rewind=false")
    assert poisoned(tmp_path / "run", *words, "train.steps=14").returncode == 0
    done = poisoned(tmp_path / "run", *words, "train.steps=22")
    assert done.returncode == DIVERGED
    assert "all 3 updates from step 14 on were refused on samples 104 to 127" in done.stderr


@pytest.mark.soak
def test_groups_that_train_apart_in_two_processes_save_together(poisoned, tmp_path):
    """Each process knows of the updates that its own groups refused, and of no others."""
    words = ("mesh=data=2", "train.cpu_devices=2", "train.local_sgd.inner_steps=2")
    words += ("checkpoint.every_steps=2", "train.guards.patience=2", "train.steps=20")
    launch = ("launch", "--processes", 2, "--")
    done = poisoned(tmp_path / "run", *words, launch=launch)
    assert done.returncode == 0, done.stdout
    assert "its update is skipped because loss is inf" in done.stdout
    with RunCheckpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [16, 18, 20]
        for step in checkpoints.steps():
            checkpoints.verify(step)


def test_groups_that_train_apart_in_two_processes_cannot_stop_alone(lab, tmp_path):
    words = ("mesh=data=2", "train.cpu_devices=2", "train.local_sgd.inner_steps=2")
    words += (f"run_dir={tmp_path / 'run'}", "train.guards.nonfinite=stop")
    done = lab.shardlib("launch", "--processes", 2, "--", "train", lab.config_file, *words)
    assert done.returncode == 2
    assert "train.guards.nonfinite=stop does not work with train.local_sgd" in done.stdout
    # The process that ends first ends the other, which may not have said anything.
    said = re.sub(r"^\[\d\] ", "", done.stdout, flags=re.MULTILINE)
    assert "\n  Set train.guards.nonfinite to skip or off." in said
    assert not (tmp_path / "run").exists()
