"""`train.constrain`, `train.allow_wrong_numbers` and `train.compiler_options` reach both steps of a
run."""

import jax
import pytest

from shardlib.data import batch_spec
from shardlib.errors import ConfigError
from shardlib.run.config import check_resumable
from shardlib.run.setup import make_scope, open_source, setup
from shardlib.run.trace_programs import traced


def programs(config):
    source = open_source(config, "train")
    parts = setup(config, source.spec, make_scope(config, jax.devices()))
    batch = batch_spec(config.data, config.train.global_batch)
    return traced(parts, batch, batch, None)


@pytest.mark.mesh
def test_both_steps_are_given_them(lab):
    words = ("mesh=fsdp=8", "train.constrain=user", "train.allow_wrong_numbers=[SL205, SL206]")
    words += ("train.compiler_options={xla_cpu_enable_fast_math: false}",)
    found = programs(lab.config("unused", *words))
    for step in (found.train, found.evaluate):
        assert step.constrain == "user"
        assert step.check.allowed == ("SL205", "SL206")
        assert step.compiler_options == {"xla_cpu_enable_fast_math": False}


def test_groups_that_train_apart_are_given_them(lab):
    words = ("mesh=data=8", "train.local_sgd.inner_steps=2", "train.constrain=user")
    assert programs(lab.config("unused", *words)).train.inner.constrain == "user"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.allow_wrong_numbers=[SL999]", "allow_wrong_numbers names 'SL999'"),
        ("train.constrain=xla", "'xla'"),
    ],
)
def test_what_is_not_there_is_refused(lab, override, named):
    with pytest.raises(ConfigError) as refused:
        lab.config("unused", override)
    assert named in str(refused.value)


def test_a_resumed_run_may_change_them(lab):
    saved = lab.config("unused")
    check_resumable(saved, lab.config("unused", "train.constrain=user"))
    check_resumable(saved, lab.config("unused", "train.allow_wrong_numbers=[SL205]"))
    check_resumable(saved, lab.config("unused", "train.compiler_options.xla_any=null"))
