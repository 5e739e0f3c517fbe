"""What is refused: with one error that says what to do, and before anything is written."""

import os

import jax
import jax.numpy as jnp
import pytest

import shardlib as sl
from shardlib import cli, run
from shardlib.errors import ConfigError, RuleError


@pytest.fixture
def refused(lab, tmp_path, capfd):
    """Runs `shardlib train` on what must be refused; returns its exit code and its error."""

    def shardlib_train(*overrides):
        words = ["train", str(lab.config_file), f"run_dir={tmp_path / 'a' / 'run'}", *overrides]
        with pytest.raises(SystemExit) as exited:
            cli.main(words)
        out, err = capfd.readouterr()
        assert out == ""
        assert not (tmp_path / "a").exists()
        return exited.value.code, err

    return shardlib_train


USAGE = 2  # The request is wrong.
FAILURE = 1


@pytest.mark.parametrize(
    ("overrides", "error", "parts"),
    [
        (("optimizer.lr=1",), "ConfigError", ("optimizer.lr=1: ", "Did you mean 'learning_rate'?")),
        (("mesh=fspd=3",), "MeshError", ("needs 3 devices but 8", "Did you mean 'fsdp'?")),
        (("mesh=fsdp8",), "ConfigError", ("mesh 'fsdp8' cannot be read", "Did you mean 'fsdp=8'")),
        (
            ("mesh=data=3,fsdp=2",),
            "MeshError",
            ("needs 6 devices but 8 are available", "-1 (data=-1,fsdp=2 gives 4x2)"),
        ),
        (
            ("rules.params.embed=fdsp",),
            "RuleError",
            (
                "names a mesh axis that does not exist. Did you mean 'fsdp'?",
                "Name an axis of the mesh (fsdp), or",
            ),
        ),
        (
            ("mesh=fsdp=4,tensor=2", "model.vocab_size=257"),
            "RuleError",
            ("head/kernel: logical axis 'vocab'", "token_embedding/embedding: ", "Change the dim"),
        ),
        (
            ("train.global_batch=12", "train.microbatches=3", "eval.global_batch=9"),
            "MeshError",
            ("train.global_batch=12 in 3 microbatches of 4", "multiple of 24", "eval.global_batch"),
        ),
        (
            ("mesh=context=8", "data.sequence_length=12"),
            "MeshError",
            ("data.sequence_length=12 cannot be split evenly", "Choose a multiple of 8"),
        ),
        (("model.max_positions=8",), "ConfigError", ("longer than max_positions=8", "shorten")),
        (("model.vocab_size=200",), "ConfigError", ("vocab_size=200; raise vocab_size",)),
        (("model={name: resnet}",), "ConfigError", ("takes images", "Set data.kind=images")),
    ],
)
def test_what_does_not_fit_is_a_wrong_request(refused, overrides, error, parts):
    code, err = refused(*overrides)
    assert (code, err.partition(":")[0]) == (USAGE, error)
    assert all(part in err for part in parts), err


def test_unknown_names_in_rules(refused):
    code, err = refused("rules.params.embd=fsdp", "rules.paths={'**/kernels': [embed, mlp]}")
    assert code == USAGE
    assert "RuleError: rules.params.embd: no parameter has the logical axis 'embd'. Did you" in err
    assert "rules.paths: '**/kernels' matches no parameter. Did you mean '**/kernel'?\n" in err


def test_a_pattern_behind_one_that_takes_all_is_named(refused):
    axes = "[layers, embed, kv_heads, head_dim]"
    patterns = f"'**/key/kernel': {axes}, '**/attention/key/kernel': {axes}"
    code, err = refused(f"rules.paths={{{patterns}}}")
    assert code == USAGE
    assert "'**/attention/key/kernel' matches only what earlier patterns match.\n  Move it" in err
    # One that overrides metadata is in use.
    _, err = refused("rules.params.embd=fsdp", f"rules.paths={{'**/attention/key/kernel': {axes}}}")
    assert "rules.paths" not in err


def test_missing_or_empty_data(refused, tmp_path):
    code, err = refused(f"data.path={tmp_path}/corpus")
    assert code == FAILURE
    assert f"DataError: data.path: there is nothing at '{tmp_path}/corpus'.\n  Correct" in err
    (tmp_path / "empty.txt").write_text("")
    code, err = refused(f"data.path={tmp_path}/empty.txt")
    assert code == FAILURE
    assert "holds no text (1 files, all empty).\n  Give a path that holds text.\n" in err


def test_faults_of_several_kinds_come_at_once(refused, tmp_path):
    changes = ("mesh=fsdp=3", "model.max_positions=8", "optimizer.warmup_steps=20")
    assert refused(*changes, f"data.path={tmp_path}/corpus") == (
        USAGE,
        "ConfigError: the run has 4 faults:\n"
        "  mesh fsdp=3 needs 3 devices but 8 are available.\n"
        "    Set one axis to -1 (fsdp=-1 gives 8) or run on 3 devices.\n"
        "  model: sequences of 16 tokens are longer than max_positions=8; "
        "shorten data.sequence_length or raise model.max_positions.\n"
        "  optimizer.warmup_steps is 20 but the run has 20 steps.\n"
        "    Set optimizer.warmup_steps below 20, or train for more steps.\n"
        f"  data.path: there is nothing at '{tmp_path}/corpus'.\n"
        f"    Correct the path; it is relative to '{os.getcwd()}'.\n",
    )


def test_a_directory_that_is_a_file(lab, tmp_path):
    (tmp_path / "run").write_text("")
    for run_dir in (tmp_path / "run", tmp_path / "run" / "below"):
        with pytest.raises(ConfigError, match=r"cannot be made: .*/run is a file.\n  Set run_dir"):
            run.train(lab.config(run_dir))


def test_no_write_permission(lab, tmp_path):
    config = lab.config(tmp_path / "locked" / "run")
    (tmp_path / "locked").mkdir(mode=0o555)
    is_root = os.geteuid() == 0
    if is_root:  # Root may write anywhere: become somebody else for a while.
        os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match=r"written: Permission denied.\n  Set run_dir to a"):
            run.train(config)
    finally:
        if is_root:
            os.seteuid(0)
    assert os.listdir(tmp_path / "locked") == []


def test_too_few_names_for_a_rank():
    fault = r"logical axes \('embed',\) name 1 dim, but the shape \(8, 16\) has 2.\n  Give one"
    with sl.use(sl.make_mesh("fsdp=8"), sl.rules.STANDARD), pytest.raises(RuleError, match=fault):
        jax.eval_shape(lambda x: sl.constrain(x, "embed"), jnp.zeros((8, 16)))


def test_an_empty_directory_and_a_step_beyond_the_counter(refused):
    assert refused("run_dir=", "train.steps=1e12") == (
        USAGE,
        "ConfigError: the configuration has 2 faults:\n"
        "  command line: train.steps=1e12: steps must be below 2**31, the limit of the counter, "
        "not 1000000000000\n"
        "  command line: run_dir=: run_dir must name a directory\n",
    )
