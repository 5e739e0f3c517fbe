"""What is refused: with one error that says what to do, and before anything is written."""

import os

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

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
        (("mesh=fsdp8",), "ConfigError", ("mesh 'fsdp8' cannot be read", "Did you mean 'fsdp=8'")),
        (
            ("mesh=data=3,fsdp=2",),
            "MeshError",
            ("needs 6 devices but 8 are available", "-1 (data=-1,fsdp=2 gives 4x2)"),
        ),
        (
            ("rules.params.embed=fdsp",),
            "RuleError",
            ("names a mesh axis that does not exist. Did you mean 'fsdp'?", "Mesh axes: fsdp;"),
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


def test_unknown_logical_axis_in_a_rule(refused):
    assert refused("rules.params.embd=fsdp", "rules.paths={'**/kernels': [embed, mlp]}") == (
        USAGE,
        "RuleError: rules.params.embd: no parameter has the logical axis 'embd'. "
        "Did you mean 'embed'?\n"
        "  The model has: embed, head_dim, heads, kv_heads, layers, mlp, norm, vocab.\n"
        "rules.paths: '**/kernels' matches no parameter. Did you mean '**/kernel'?\n"
        "  Correct it or remove it.\n",
    )


def test_a_pattern_behind_one_that_takes_all_is_named(refused):
    axes = "[layers, embed, kv_heads, head_dim]"
    patterns = f"'**/key/kernel': {axes}, '**/attention/key/kernel': {axes}"
    assert refused(f"rules.paths={{{patterns}}}") == (
        USAGE,
        "RuleError: rules.paths: '**/attention/key/kernel' matches only what earlier patterns "
        "match.\n  Move it first, or remove it.\n",
    )


def test_faults_of_mesh_and_rules_come_with_those_of_other_keys(refused):
    code, err = refused("mesh=fsdp8", "rules=zero3", "train.steps=abc", "seed=-1")
    assert code == USAGE
    assert err.startswith(
        "ConfigError: the configuration has 4 faults:\n"
        "  command line: train.steps=abc: expected an integer, got 'abc'.\n"
        "  command line: seed=-1: seed must lie in [0, 2**32), not -1\n"
        "  command line: mesh=fsdp8: mesh 'fsdp8' cannot be read"
    )
    assert "\n  command line: rules=zero3: " in err


def test_an_empty_directory_and_a_step_beyond_the_counter(refused):
    assert refused("run_dir=", "train.steps=1e12") == (
        USAGE,
        "ConfigError: the configuration has 2 faults:\n"
        "  command line: train.steps=1e12: steps must be below 2**31, the limit of the counter, "
        "not 1000000000000\n"
        "  command line: run_dir=: run_dir must name a directory\n",
    )


def test_a_missing_path_of_the_data_comes_with_faults_of_other_keys(refused, tmp_path):
    assert refused("train.stepz=3", f"data.path={tmp_path}/corpus") == (
        USAGE,
        "ConfigError: the configuration has 2 faults:\n"
        "  command line: train.stepz=3: unknown key. Did you mean 'steps'?\n"
        f"  command line: data.path={tmp_path}/corpus: there is nothing at '{tmp_path}/corpus'.\n"
        f"      Correct the path; it is relative to '{os.getcwd()}'.\n",
    )


def test_a_pattern_that_overrides_metadata_is_in_use(refused):
    axes = "[layers, embed, kv_heads, head_dim]"
    code, err = refused(
        "rules.params.embd=fsdp", f"rules.paths={{'**/attention/key/kernel': {axes}}}"
    )
    assert code == USAGE
    assert "rules.params.embd: no parameter" in err
    assert "rules.paths" not in err


def test_missing_or_empty_data(refused, tmp_path):
    assert refused(f"data.path={tmp_path}/corpus") == (
        FAILURE,
        f"DataError: data.path: there is nothing at '{tmp_path}/corpus'.\n"
        f"  Correct the path; it is relative to '{os.getcwd()}'.\n",
    )
    (tmp_path / "empty.txt").write_text("")
    assert refused(f"data.path={tmp_path}/empty.txt") == (
        FAILURE,
        f"DataError: data.path: '{tmp_path}/empty.txt' holds no text (1 files, all empty).\n"
        "  Give a path that holds text.\n",
    )


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
        with pytest.raises(ConfigError) as refused:
            run.train(lab.config(run_dir))
        assert str(refused.value) == (
            f"run_dir {run_dir} cannot be made: {tmp_path}/run is a file.\n"
            "  Set run_dir to a directory."
        )


def test_no_write_permission(lab, tmp_path):
    config = lab.config(tmp_path / "locked" / "run")
    (tmp_path / "locked").mkdir(mode=0o555)
    is_root = os.geteuid() == 0
    if is_root:  # Root may write anywhere: become somebody else for a while.
        os.seteuid(65534)
    try:
        with pytest.raises(ConfigError) as refused:
            run.train(config)
    finally:
        if is_root:
            os.seteuid(0)
    assert str(refused.value) == (
        f"run_dir {config.run_dir} cannot be written: Permission denied.\n"
        "  Set run_dir to a directory that this user may write."
    )
    assert os.listdir(tmp_path / "locked") == []


class TooFewNames(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.zeros((8, 16)), out_sharding=("embed",), eager_sharding=False)


def test_too_few_names_for_a_rank():
    mesh = sl.make_mesh("fsdp=8")
    fault = "logical axes ('embed',) name 1 dim, but the shape (8, 16) has 2.\n"
    fix = "  Give one name, or None, for each dim."
    rule = ' Or add a path rule: rules.override(paths={"...": (None, None)}).'
    with sl.use(mesh, sl.rules.STANDARD):
        with pytest.raises(RuleError) as refused:
            sl.abstract_state(lambda rngs: TooFewNames(rngs), optax.sgd(0.1))
        assert str(refused.value) == f"kernel: {fault}{fix}{rule}"
        with pytest.raises(RuleError) as refused:
            jax.eval_shape(lambda x: sl.constrain(x, "embed"), jnp.zeros((8, 16)))
        assert str(refused.value) == f"{fault}{fix}"
