"""Found rules are written as text, and read back without loss."""

import dataclasses
import json

import flax.linen as linen
import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unannotated_lm import LM, loss, shapes

import shardlib as sl
from shardlib.config import to_dict
from shardlib.errors import ConfigError, RuleError
from shardlib.rules import ActivationNames, AxisRules, RulesConfig, from_yaml, to_yaml

ADAM = optax.adamw(1e-3)


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(2):
            x = jax.nn.relu(linen.Conv(256, (3, 3))(x))
        return linen.Dense(16)(x.mean((1, 2)))


class Recurrent(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(16)(linen.RNN(linen.LSTMCell(256))(x)[:, -1])


def squared(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def found(module, *shape):
    x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (shape[0], 16)))
    options = {
        "loss": squared,
        "batch": {"x": x, "y": y},
        "inputs": (x,),
        "optimizer": ADAM,
        "precision": "f32",
    }
    return sl.find_rules(module, on="8xh100", mesh="fsdp=4,tensor=2", **options).rules


MODELS = {
    "convolutions": lambda: found(Net(), 8, 16, 16, 64),
    "lstm": lambda: found(Recurrent(), 8, 12, 64),
    "transformer": lambda: (
        sl.find_rules(
            lambda rngs: LM(rngs, dim=1024, heads=16),
            loss=loss,
            batch=shapes(16, 512),
            optimizer=ADAM,
            on="8xh100",
            mesh="fsdp=4,tensor=2",
        ).rules
    ),
}


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("model", MODELS)
def test_found_rules_are_read_back(model):
    rules = MODELS[model]()
    assert rules.names is not None
    assert from_yaml(to_yaml(rules)) == rules
    assert from_yaml(json.dumps(to_dict(RulesConfig.of(rules)))) == rules


NAMES = st.text(min_size=1, max_size=6)
AXES = st.lists(st.none() | NAMES, max_size=3).map(tuple)
CUT = st.lists(st.sampled_from(("data", "fsdp", "tensor")), max_size=2, unique=True).map(tuple)
TABLE = st.dictionaries(NAMES, st.lists(CUT, min_size=1, max_size=3), max_size=4)


@given(
    params=TABLE,
    activations=TABLE,
    paths=st.dictionaries(NAMES, AXES, max_size=4),
    inputs=st.dictionaries(st.text(max_size=6), AXES, max_size=3),
    variants=st.lists(AXES, max_size=3),
)
@settings(max_examples=30, deadline=None)
def test_any_table_is_read_back(params, activations, paths, inputs, variants):
    names = ActivationNames(tuple(inputs.items()), tuple(variants))
    rules = AxisRules(params, activations, paths=paths, names=names)
    assert from_yaml(to_yaml(rules)) == rules


def test_a_pattern_of_two_rules_means_the_first():
    rules = AxisRules({"a": "fsdp", "b": None}, {}, paths={"w": ("a",)})
    text = to_yaml(rules.override(paths={"w": ("b",)}))
    assert from_yaml(text).paths == (("w", ("b",)),)


def test_stages_of_zero_are_read_back():
    rules = AxisRules({"embed": None, "mlp": "tensor"}, {"batch": "fsdp"}, paths={"w": ("embed",)})
    cut = rules.override(embed="fsdp")
    for zero in ({"opt_state": cut}, {"gradients": cut, "opt_state": cut}):
        stage = dataclasses.replace(rules, **zero)
        assert from_yaml(to_yaml(stage)) == stage


def test_rules_that_only_presets_have_are_refused():
    for rules in (sl.rules.STANDARD, sl.rules.ZERO1):
        with pytest.raises(RuleError, match=r"no table of their own\.\n  Name the preset"):
            to_yaml(rules)


def test_wrong_text_names_the_key():
    with pytest.raises(ConfigError, match=r"names\.inputs: missing required key"):
        from_yaml("{preset: null, names: {variants: []}}")
    with pytest.raises(ConfigError, match="which is not a mesh axis"):
        from_yaml("{preset: null, params: {embed: ''}}")
