"""What is refused: with one error that says what to do, and before anything is written."""

import os
import sys

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


USAGE = 2  # What was asked for is wrong.
FAILURE = 1


def test_unknown_key_and_wrong_type(refused):
    assert refused("train.stepz=3", "train.global_batch=many") == (
        USAGE,
        "ConfigError: the configuration has 2 faults:\n"
        "  command line: train.global_batch=many: expected an integer, got 'many'.\n"
        "  command line: train.stepz=3: unknown key. Did you mean 'steps'?\n",
    )


def test_mesh_that_does_not_multiply_out(refused):
    assert refused("mesh=data=3,fsdp=2") == (
        USAGE,
        "MeshError: mesh data=3,fsdp=2 needs 6 devices but 8 are available.\n"
        "  Set one axis to -1 (data=-1,fsdp=2 gives 4x2) or run on 6 devices.\n",
    )


def test_malformed_mesh(refused):
    code, err = refused("mesh=fsdp8")
    assert code == USAGE
    assert err.startswith("ConfigError: command line: mesh=fsdp8: mesh 'fsdp8' cannot be read:\n")
    assert "Did you mean 'fsdp=8'?" in err


def test_unknown_logical_axis_in_a_rule(refused):
    assert refused("rules.params.embd=fsdp", "rules.paths={'**/kernels': [embed, mlp]}") == (
        USAGE,
        "RuleError: rules.params.embd: no parameter has the logical axis 'embd'. "
        "Did you mean 'embed'?\n"
        "  Those of this model: embed, head_dim, heads, kv_heads, layers, mlp, norm, vocab.\n"
        "rules.paths: '**/kernels' matches no parameter, or an earlier pattern takes them all.\n"
        "  Remove it or correct it.\n",
    )


def test_a_pattern_that_overrides_metadata_is_in_use(refused):
    axes = "[layers, embed, kv_heads, head_dim]"
    code, err = refused(
        "rules.params.embd=fsdp", f"rules.paths={{'**/attention/key/kernel': {axes}}}"
    )
    assert code == USAGE
    assert "rules.params.embd: no parameter" in err
    assert "rules.paths" not in err


def test_misspelt_mesh_axis_in_a_rule(refused):
    assert refused("rules.params.embed=fdsp") == (
        USAGE,
        "RuleError: the rule 'embed' -> 'fdsp' (params) names a mesh axis that does not exist. "
        "Did you mean 'fsdp'?\n"
        "  Mesh axes: fsdp; standard: stage, data, fsdp, expert, context, tensor.\n",
    )


def test_indivisible_dim(refused):
    code, err = refused("mesh=fsdp=4,tensor=2", "model.vocab_size=257")
    assert (code, err) == (
        USAGE,
        "RuleError: head/kernel: logical axis 'vocab' (dim 1 of ('embed', 'vocab'), shape "
        "(32, 257)) cannot be sharded: tensor=2 does not divide 257.\n"
        "token_embedding/embedding: logical axis 'vocab' (dim 0 of ('vocab', 'embed'), shape "
        "(257, 32)) cannot be sharded: tensor=2 does not divide 257.\n"
        "  Change the dim or the mesh (fsdp=4,tensor=2), or allow replication: "
        "params={'vocab': ['tensor', None]}.\n",
    )


def test_batch_that_the_mesh_does_not_divide(refused):
    assert refused("train.global_batch=12", "train.microbatches=3", "eval.global_batch=9") == (
        USAGE,
        "MeshError: train.global_batch=12 in 3 microbatches of 4 cannot be shared out: "
        "data+fsdp+expert=8 does not divide 4.\n"
        "  Choose a multiple of 24, or another mesh.\n"
        "eval.global_batch=9 cannot be shared out: data+fsdp+expert=8 does not divide 9.\n"
        "  Choose a multiple of 8, or another mesh.\n",
    )
    assert refused("mesh=context=8", "data.sequence_length=12") == (
        USAGE,
        "MeshError: data.sequence_length=12 cannot be shared out: context=8 does not divide 12.\n"
        "  Choose a multiple of 8, or another mesh.\n",
    )


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


def test_sequence_longer_than_the_positions_of_the_model(refused):
    assert refused("model.max_positions=8") == (
        USAGE,
        "ConfigError: model: sequences of 16 tokens are longer than max_positions=8; "
        "shorten data.sequence_length or raise model.max_positions.\n",
    )


def test_more_tokens_than_the_model_has(refused):
    assert refused("model.vocab_size=200") == (
        USAGE,
        "ConfigError: model: the data have 257 tokens, but vocab_size=200; "
        "raise vocab_size or leave it out.\n",
    )


def test_a_model_for_other_data(refused):
    assert refused("model={name: resnet}") == (
        USAGE,
        "ConfigError: model 'resnet' takes images, but data.kind is 'text'.\n"
        "  Set data.kind=images, or choose another model.\n",
    )


def test_faults_of_several_kinds_come_at_once(refused, tmp_path):
    missing = f"data.path={tmp_path}/corpus"  # Found once the rest is right.
    changes = ("mesh=fsdp=3", "model.max_positions=8", "optimizer.warmup_steps=20", missing)
    assert refused(*changes) == (
        USAGE,
        "ConfigError: the run has 3 faults:\n"
        "  mesh fsdp=3 needs 3 devices but 8 are available.\n"
        "    Set one axis to -1 (fsdp=-1 gives 8) or run on 3 devices.\n"
        "  model: sequences of 16 tokens are longer than max_positions=8; "
        "shorten data.sequence_length or raise model.max_positions.\n"
        "  optimizer.warmup_steps is 20 but the run has 20 steps.\n"
        "    Set optimizer.warmup_steps below 20, or train for more steps.\n",
    )


def test_missing_extra(refused, monkeypatch):
    # None is how Python itself marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert refused("train.tensorboard=true") == (
        FAILURE,
        "MissingExtraError: train.tensorboard=true needs 'tensorboardX', which is not installed: "
        "pip install 'shardlib[tensorboard]'\n",
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
    fault = "logical axes ('embed',) name 1 dims, but the shape (8, 16) has 2.\n"
    fix = "  Give one name, or None, for each dim."
    with sl.use(mesh, sl.rules.STANDARD):
        with pytest.raises(RuleError) as refused:
            sl.abstract_state(lambda rngs: TooFewNames(rngs), optax.sgd(0.1))
        assert str(refused.value) == f"kernel: {fault}{fix}"
        with pytest.raises(RuleError) as refused:
            jax.eval_shape(lambda x: sl.constrain(x, "embed"), jnp.zeros((8, 16)))
        assert str(refused.value) == f"{fault}{fix}"
