"""Values are cast where they enter and leave a model, and targets are never rounded."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardlib as sl
from shardlib.functional.boundary import boundary
from shardlib.nn.stack import scan_layers, stack_layers

X = np.random.default_rng(0).standard_normal((16, 64), dtype=np.float32)
TARGETS = np.full((16, 64), 1001.0, np.float32) + np.arange(16, dtype=np.float32)[:, None] / 64


class MLP(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(
            64, 256, kernel_init=nnx.with_partitioning(init, ("embed", "mlp")), rngs=rngs
        )
        self.down = nnx.Linear(
            256, 64, kernel_init=nnx.with_partitioning(init, ("mlp", "embed")), rngs=rngs
        )

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))

    def encode(self, *, x):
        return jax.nn.gelu(self.up(x))


class LinenMLP(linen.Module):
    def setup(self):
        self.up, self.down = linen.Dense(256), linen.Dense(64)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))

    def encode(self, *, x):
        return jax.nn.gelu(self.up(x))


def called(model, batch):
    return model(batch["x"])


def in_parts(model, batch):
    return model.down(model.encode(x=batch["x"]))


def submodules(model, batch):
    return model.down(jax.nn.gelu(model.up(batch["x"])))


def start(kind, precision, mesh="data=2,fsdp=2,tensor=2"):
    make, inputs = (MLP, ()) if kind == "nnx" else (LinenMLP(), (X[:1],))
    rules = sl.rules.STANDARD if kind == "nnx" else sl.rules.FSDP
    with sl.use(sl.make_mesh(mesh if kind == "nnx" else "fsdp=8"), rules):
        return sl.init_state(make, optax.sgd(1e-3), inputs=inputs, precision=precision)


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("policy", ["bf16", "bf16_params"])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize("predict", [called, in_parts, submodules])
def test_products_are_in_bfloat16_and_the_loss_in_float32(kind, predict, policy):
    seen = []

    def loss_fn(model, batch, rng):
        error = (predict(model, batch) - batch["y"]) ** 2
        seen.append((batch["x"].dtype, batch["y"].dtype, error.dtype))
        loss = jnp.mean(error)
        return loss, {"target": jnp.mean(batch["y"])}

    state, batch = start(kind, policy), {"x": X, "y": TARGETS}
    step = sl.make_train_step(loss_fn, precision=policy, microbatches=2)
    jaxpr = str(step.program(state, batch).trace(state, batch).jaxpr)
    dots = re.findall(r":(\w+)\[[\d,]*\] = dot_general", jaxpr)
    # Two forward, two for the gradients of the kernels, one for that of the hidden layer.
    assert len(dots) == 5
    assert set(dots) == {"bf16"}
    assert set(seen) == {(jnp.dtype("float32"),) * 3}
    _, metrics = step(state, batch)
    # A sum of 1,024 values in float32; bfloat16 would read 1000 or 1008.
    assert float(metrics["target"]) == pytest.approx(float(TARGETS.mean()), rel=1e-6)


def test_the_loss_of_targets_that_bfloat16_cannot_hold():
    def loss_fn(model, batch, rng):
        return jnp.mean(jnp.abs(0.0 * model(batch["x"]) - batch["y"]))

    state = start("nnx", "bf16")
    evaluated = sl.make_eval_step(loss_fn, precision="bf16")(state, {"x": X, "y": TARGETS})
    _, metrics = sl.make_train_step(loss_fn, precision="bf16")(state, {"x": X, "y": TARGETS})
    assert float(metrics["loss"]) == pytest.approx(float(TARGETS.mean()), rel=1e-6)
    assert float(evaluated["loss"].value) == pytest.approx(float(TARGETS.mean()), rel=1e-6)
    assert metrics["loss"].dtype == jnp.float32


def run(model, batch, fn, dtype=jnp.bfloat16):
    with boundary(model, dtype, batch):
        return fn(model, batch)


@nnx.dataclass
class Notes(nnx.Pytree):
    given: list = nnx.static(default_factory=list)


class Watched(nnx.Module):
    """Remembers the dtypes that it is given."""

    kind = "watched"

    def __init__(self, rngs=None, **given):
        self.scale = nnx.Param(jnp.ones((), jnp.bfloat16))
        self.notes = Notes()

    def __call__(self, *args, **kwargs):
        found = [x.dtype if hasattr(x, "dtype") else x for x in jax.tree.leaves((args, kwargs))]
        self.notes.given.append(list(map(str, found)))
        return self.narrow(jnp.ones(2))

    def narrow(self, x):
        self.notes.given.append([str(x.dtype)])
        return {"wide": x, "narrow": x.astype(jnp.bfloat16), "count": jnp.arange(2), "name": "a"}

    @property
    def twice(self):
        return 2 * self.scale[...]

    @staticmethod
    def same(x):
        return x


def test_what_is_cast_and_what_is_left():
    model, x = Watched(), jnp.ones(2)
    nested = {"a": (x, np.ones(2, np.float64)), "b": [jnp.arange(2), x > 0, None, "text"], "c": 1.5}
    found = run(model, {"x": x}, lambda model, batch: model(x, nested, key=x))
    assert model.notes.given == [
        ["bfloat16", "bfloat16", "bfloat16", "int32", "bool", "text", "1.5", "bfloat16"],
        ["float32"],  # A call within the call.
    ]
    assert {name: str(getattr(v, "dtype", v)) for name, v in found.items()} == {
        "wide": "float32",
        "narrow": "float32",
        "count": "int32",
        "name": "a",
    }


def test_a_batch_that_is_handed_over_whole_is_not_cast():
    model, batch = Watched(), {"x": jnp.ones(2), "y": jnp.ones(2)}
    run(model, batch, lambda model, batch: model(batch))
    assert model.notes.given[0] == ["float32", "float32"]
    run(model, batch["x"], lambda model, batch: model(batch))
    assert model.notes.given[2] == ["bfloat16"]


def test_the_model_stays_what_it_was():
    model = Watched()
    run(model, {}, lambda model, batch: model(jnp.ones(2)))
    assert isinstance(model, Watched)
    assert type(model).__name__ == "Watched"
    assert model.kind == "watched"
    assert model.twice.dtype == jnp.bfloat16
    assert model.same(3) == 3
    before = len(model.notes.given)
    model(jnp.ones(2))
    assert model.notes.given[before] == ["float32"]  # Outside of a loss nothing is cast.
    again = nnx.merge(*nnx.split(model))
    assert type(again) is type(model)


def test_a_wide_dtype_changes_nothing():
    model = Watched()
    kind = type(model)
    found = run(model, {}, lambda model, batch: model(jnp.ones(2, jnp.bfloat16)), jnp.float32)
    assert type(model) is kind
    assert model.notes.given[0] == ["bfloat16"]
    assert found["narrow"].dtype == jnp.bfloat16


def test_unusual_modules():
    class Plain(nnx.Module, pytree=False):
        def __init__(self):
            self.inner = nnx.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

        @functools.partial(nnx.jit)
        def __call__(self, x):
            return self.inner(x)

    @dataclasses.dataclass
    class Data(nnx.Module):
        inner: nnx.Module

        def __call__(self, x):
            return self.inner(x)

    x = jnp.ones((1, 2))
    for make in (Plain, lambda: Data(Plain()), lambda: nnx.Sequential(Plain(), jnp.tanh)):
        found = jax.make_jaxpr(lambda x, make=make: run(make(), {}, lambda m, _: m(x)))(x)
        assert "bf16[1,2] = dot_general" in str(found)
        assert found.out_avals[0].dtype == jnp.float32


def test_a_linen_module_of_its_own_is_left_as_it_is():
    teacher = linen.Dense(64)
    variables = teacher.init(jax.random.key(0), X)

    def loss_fn(model, batch, rng):
        wide = teacher.apply(variables, batch["x"])
        twice = model(batch["x"]) + model(batch["x"])
        assert wide.dtype == jnp.float32
        return jnp.mean((twice - wide) ** 2)

    state = start("linen", "bf16")
    step = sl.make_train_step(loss_fn, precision="bf16", constrain="user")
    jaxpr = str(step.program(state, {"x": X}).trace(state, {"x": X}).jaxpr)
    forward = re.findall(r":(\w+)\[16,(?:64|256)\] = dot_general", jaxpr)
    assert forward.count("f32") == 1
    assert forward.count("bf16") >= 4


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.layers = stack_layers(lambda rngs: nnx.Linear(64, 64, rngs=rngs), 2, rngs)


@pytest.mark.parametrize("mesh", ["data=8", "stage=2,data=4"])
def test_layers_that_a_loss_runs_itself(mesh):
    def loss_fn(model, batch):
        call = lambda layer, x, _: (jnp.tanh(layer(x)), None)  # noqa: E731
        y, _ = scan_layers(call, model.layers, batch["x"])
        return jnp.mean((y - batch["y"]) ** 2)

    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        state = sl.init_state(Stacked, optax.sgd(1e-3))
    step = sl.make_train_step(loss_fn, precision="bf16", microbatches=2)
    batch = {"x": X, "y": TARGETS}
    jaxpr = str(step.program(state, batch).trace(state, batch).jaxpr)
    dots = re.findall(r":(\w+)\[[\d,]*\] = dot_general", jaxpr)
    assert set(dots) == {"bf16"}
    _, metrics = step(state, batch)
    # The targets, less values below 1, squared.
    assert float(metrics["loss"]) == pytest.approx(float(np.mean(TARGETS**2)), rel=1e-2)
