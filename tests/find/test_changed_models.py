"""Rules that were found for one model are refused for another, before anything is allocated."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import RuleError
from shardlib.rules import from_yaml, to_yaml

ADAM = optax.adamw(1e-3)
MESH = "fsdp=4,tensor=2"


class Plain(nnx.Module):
    def __init__(self, rngs, width=512, hidden=2048, turned=False, extra=False):
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.mid = nnx.Linear(hidden, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)
        self.turned = turned
        if extra:
            self.extra = self.down
            del self.down

    def __call__(self, x):
        x = jax.nn.gelu(self.up(x))
        x = jax.nn.gelu(x @ self.mid.kernel.T if self.turned else self.mid(x))
        return (self.down if hasattr(self, "down") else self.extra)(x)


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["x"]) ** 2)


def batch_of(width=512):
    return {"x": jax.ShapeDtypeStruct((16, width), jnp.float32)}


@functools.cache
def rules(make=Plain):
    found = sl.find_rules(make, loss=loss, batch=batch_of(), optimizer=ADAM, on="8xh100", mesh=MESH)
    return from_yaml(to_yaml(found.rules))


def test_paths_and_shapes_that_changed_are_named():
    def make(rngs):
        return Plain(rngs, hidden=4096, extra=True)

    with pytest.raises(RuleError) as caught:
        sl.init_state(make, ADAM, mesh=sl.make_mesh(MESH), rules=rules())
    assert str(caught.value).splitlines() == [
        "these rules were found for another Plain:",
        "  extra/bias is new",
        "  extra/kernel is new",
        "  mid/kernel has shape [4096, 4096], and had up=2048, mid=2048",
        "  up/bias has shape [4096], and had up=2048",
        "  up/kernel has shape [512, 4096], and had x_1=512, up=2048",
        "  down/bias is gone",
        "  down/kernel is gone",
        "  Find rules for this model: sl.find_rules, or rules: auto in the config of a new run.",
    ]


def test_another_size_has_rules_of_its_own():
    def make(rngs):
        return Plain(rngs, 64, 256)

    with sl.use(sl.make_mesh(MESH), rules()), pytest.raises(RuleError, match="at_other_sizes"):
        sl.abstract_state(make, ADAM)
    with sl.use(sl.make_mesh(MESH), rules().at_other_sizes()):
        step = sl.make_train_step(loss)
        assert step.partition(sl.abstract_state(make, ADAM), batch_of(64)).by == "shardlib"


class Layers(nnx.Module):
    def __init__(self, rngs, layers=2):
        self.layers = nnx.List([nnx.Dict() for _ in range(layers)])
        for layer in self.layers:
            layer.linear1 = nnx.Linear(512, 2048, rngs=rngs)
            layer.linear2 = nnx.Linear(2048, 512, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer.linear2(jax.nn.gelu(layer.linear1(x)))
        return x


def test_numbers_in_names_are_no_layers_and_another_depth_has_the_same_rules():
    kernels = {"layers/*/linear1/kernel", "layers/*/linear2/kernel"}
    assert kernels <= set(dict(rules(Layers).paths))
    with sl.use(sl.make_mesh(MESH), rules(Layers)):
        state = sl.abstract_state(lambda rngs: Layers(rngs, 3), ADAM)
        assert sl.make_train_step(loss).partition(state, batch_of()).by == "shardlib"


def test_axes_that_are_now_one_are_named():
    """The kernel of a square layer is used transposed: paths and shapes stay."""

    def make(rngs):
        return Plain(rngs, turned=True)

    with sl.use(sl.make_mesh(MESH), rules()):
        state = sl.abstract_state(make, ADAM)
        text = r"dim 0 of mid/kernel \(up\) is now one axis with dim 0 of down/kernel \(mid\)"
        with pytest.raises(RuleError, match=text):
            sl.make_train_step(loss).partition(state, batch_of())
    with pytest.raises(RuleError, match="another model"), sl.use(sl.make_mesh(MESH), rules()):
        sl.make_eval_step(loss)(state, {"x": jnp.zeros((16, 512))})


@pytest.mark.soak
def test_the_fingerprint_does_not_depend_on_the_process():
    code = "import test_changed_models as t; print(t.rules().names.fingerprint)"
    for seed in "01":
        environ = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        found = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == rules().names.fingerprint
