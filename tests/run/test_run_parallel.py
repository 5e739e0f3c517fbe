"""Runs over stages, unequal groups and groups that train apart, from a config alone."""

import contextlib
import io

import numpy as np
import pytest

from shardlib import run
from shardlib.config import to_dict
from shardlib.errors import ConfigError, MeshError, RuleError

SHORT = ("train.steps=4", "optimizer.warmup_steps=1", "train.sample_length=0", "model.dropout=0")
NO_EVAL = ("eval.every_steps=0",)
SAMPLES = ("train.sample_length=6", "train.sample_temperature=0")
# Sums in another order differ by float32 rounding, which four steps of training carry on.
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def plain(lab, tmp_path_factory, losses_of):
    """The losses, the evaluation and the sample of the run on one kind of mesh."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = run.train(lab.config(run_dir, *SHORT, *SAMPLES, "checkpoint.enabled=false"))
    return losses_of(run_dir), result.evaluation, sample_in(out.getvalue())


def sample_in(out):
    """What stands in the box of the last sample, line by line."""
    box = out.rpartition("─ sample at step")[2].partition("╰")[0]
    lines = [line.strip("│ ") for line in box.splitlines()[1:]]
    assert lines[0].startswith("the ")
    return lines


@pytest.fixture(scope="module")
def losses_of():
    import json

    def read(run_dir):
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    return read


@pytest.mark.mesh
@pytest.mark.rest("soak", keep=3)
@pytest.mark.parametrize(
    "overrides",
    [
        ("mesh=stage=2,fsdp=2,tensor=2", "train.microbatches=2"),
        ("mesh=data=2,tensor=4", "train.reduction.group_microbatches=[3,1]"),
        ("mesh=context=2,fsdp=4", "model.context=ring"),
        ("mesh=data=2,fsdp=4", "train.reduction.dtype=f32"),
        ("mesh=fsdp=4,tensor=2", "rules=sequence", "train.offload_optimizer=true"),
    ],
    ids=lambda overrides: ",".join(overrides[1:]),
)
def test_every_way_to_run_is_the_same(overrides, lab, tmp_path, plain, losses_of, capsys):
    run_dir = tmp_path / "run"
    overrides = (*SHORT, *SAMPLES, "checkpoint.enabled=false", *overrides)
    result = run.train(lab.config(run_dir, *overrides))
    np.testing.assert_allclose(losses_of(run_dir), plain[0], rtol=RELATIVE)
    assert result.evaluation["loss"] == pytest.approx(plain[1]["loss"], rel=RELATIVE)
    assert sample_in(capsys.readouterr().out) == plain[2]


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    "overrides",
    [
        ("mesh=expert=4,fsdp=2", "train.offload_optimizer=true"),
        ("mesh=expert=2,context=2,tensor=2", "model.moe.exchange_chunks=3"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_run_with_experts_samples(overrides, lab, tmp_path, capsys):
    run_dir = tmp_path / "run"
    options = (*SHORT, *SAMPLES, *NO_EVAL, "train.steps=2", "optimizer.ema_decay=0.5")
    run.train(lab.config(run_dir, *options, "model.moe.num_experts=4", *overrides))
    found = sample_in(capsys.readouterr().out)
    text = run.generate(str(run_dir), prompt="the ", length=6, temperature=0, mesh="data=8")
    assert text.strip()
    assert found == [line.rstrip() for line in f"the {text}".rstrip().splitlines()]


@pytest.mark.mesh
def test_groups_that_train_apart_resume_where_they_were(lab, tmp_path, losses_of):
    options = ("mesh=data=2,fsdp=4", "train.local_sgd.inner_steps=3", *SHORT, *NO_EVAL)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run.train(lab.config(whole, *options, "train.steps=8"))
    run.train(lab.config(parts, *options))
    # The number of groups is recorded: it does not follow the mesh.
    result = run.train(lab.config(parts, *options, "train.steps=8", "mesh=data=1,fsdp=4,tensor=2"))
    assert result.step == 8
    np.testing.assert_allclose(losses_of(parts), losses_of(whole), rtol=RELATIVE)
    saved = lab.load(parts / "config.yaml")
    assert saved.train.local_sgd.groups == 2


@pytest.mark.mesh
def test_microbatches_auto_are_decided_once(lab, tmp_path, rows, capsys):
    options = ("mesh=stage=2,data=4", "train.microbatches=auto", *SHORT, *NO_EVAL)
    run.train(lab.config(tmp_path / "run", *options))
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "2 microbatches: the devices do not say how much memory they have" in said
    assert "1f1b, 2 microbatches over 2 stages: 33% idle" in said
    assert [row["pipeline_bubble"] for row in rows(tmp_path / "run")] == [pytest.approx(1 / 3)] * 4
    assert to_dict(lab.load(tmp_path / "run" / "config.yaml"))["train"]["microbatches"] == 2
    run.train(lab.config(tmp_path / "run", *options, "train.steps=6"))
    assert "2: as the run began" in capsys.readouterr().out


GROUPS = "train.reduction.group_microbatches"


@pytest.mark.parametrize(
    ("error", "overrides", "part"),
    [
        (ConfigError, ("mesh=stage=4,data=2", "train.microbatches=2"), "do not fill 4 stages"),
        (
            ConfigError,
            ("mesh=stage=4,data=2", "train.microbatches=4"),
            "4 stages need 4 layers, and the model has 2",
        ),
        (RuleError, ("mesh=fsdp=4,tensor=2", "rules=fsdp"), "no rule names the mesh axis 'tensor'"),
        (RuleError, ("mesh=auto", "rules=data"), "no rule names the mesh axis 'fsdp'"),
        (RuleError, ("mesh=data=2,tnesor=4",), "Did you mean 'tensor'?"),
        (
            ConfigError,
            ("mesh=data=8", f"{GROUPS}=[1,2]"),
            "names 2 groups, but the mesh has data=8",
        ),
        (MeshError, ("mesh=data=2,fsdp=4", "train.local_sgd.groups=3"), "Use a multiple of 2"),
        (
            MeshError,
            ("mesh=data=2,fsdp=4", f"{GROUPS}=[3,2]", "train.global_batch=16"),
            "Choose a multiple of 5",
        ),
        (MeshError, ("mesh=data=2,fsdp=4", "train.local_sgd.groups=4"), "Choose a multiple of 16"),
        (
            MeshError,
            ("mesh=data=2,tensor=4", f"{GROUPS}=[2,1]", "train.global_batch=3"),
            "eval.global_batch=null, train.global_batch=3 cannot be split evenly",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_data_is_read(lab, tmp_path, error, overrides, part):
    with pytest.raises(error) as caught:
        run.train(lab.config(tmp_path / "run", *SHORT, *overrides))
    assert part in str(caught.value)
    assert "\n  " in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_options_that_exclude_each_other(lab, tmp_path):
    apart, groups = "train.local_sgd.inner_steps=2", "train.reduction.group_seconds=[1,2]"
    for options, fault in (
        ((apart, "train.reduction.dtype=bf16"), "but reduction is set: leave one of them out"),
        (("train.microbatches=auto", apart), "not support local_sgd or groups .*: give a num"),
        (
            ("train.microbatches=auto", groups),
            "not support local_sgd or groups .*: give a num",
        ),
    ):
        with pytest.raises(ConfigError, match=fault):
            lab.config(tmp_path / "run", *options)


@pytest.mark.soak
def test_equal_groups_may_have_stages(lab, tmp_path):
    options = ("mesh=stage=2,data=2,tensor=2", "train.reduction.group_microbatches=[2,2]", *SHORT)
    result = run.train(lab.config(tmp_path / "run", *options, *NO_EVAL))
    assert result.step == int(result.state.step) == 4


def test_groups_apart_over_stages_where_the_compiler_cannot_nest_them(lab, tmp_path, monkeypatch):
    monkeypatch.setattr("shardlib.run.checks.NESTS_IN_MESH_ORDER_ONLY", True)
    options = ("mesh=stage=2,data=4", "train.microbatches=2", "train.local_sgd.inner_steps=2")
    with pytest.raises(ConfigError, match=r"over stage: the compiler of jax .*\n  Use a mesh"):
        run.train(lab.config(tmp_path / "run", *options, *SHORT))


@pytest.mark.mesh
def test_groups_apart_split_rows_that_no_rule_does(lab, tmp_path):
    options = ("mesh=data=2,fsdp=4", "rules.activations.batch=fsdp", *SHORT, *NO_EVAL)
    result = run.train(lab.config(tmp_path / "run", *options, "train.local_sgd.inner_steps=2"))
    assert result.step == int(result.state.step) == 4
