"""Mistakes of a first program in Python are refused with the fix, not by a fault deep inside."""

import re

import flax.linen as linen
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
import shardlib.run
from shardlib.data import TextData, open_data
from shardlib.errors import ConfigError, DataError, MeshError, ModelError

X = np.ones((16, 8), np.float32)
HEADS = np.ones((2, 8, 4, 16), np.float32)


def loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


class Encoder(linen.Module):
    def setup(self):
        self.up = linen.Dense(4)

    def encode(self, x):
        return self.up(x)


class Perceptron(nnx.Module):
    def __init__(self, width=8, *, rngs):
        self.layer = nnx.Linear(8, width, rngs=rngs)


def start(make, optimizer, **options):
    rules = sl.rules.STANDARD.override(paths={"kernel": ("embed", None), "bias": (None,)})
    return sl.init_state(make, optimizer, mesh=sl.make_mesh("fsdp=8"), rules=rules, **options)


def linear(rngs):
    return nnx.Linear(8, 8, rngs=rngs)


def train_on(loss_fn):
    return sl.make_train_step(loss_fn)(start(linear, optax.sgd(0.1)), {"x": X})


def train(*arguments):
    return sl.make_train_step(loss)(*arguments)


def swapped(batch, model):
    return loss(model, batch)


@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
        (
            lambda: sl.make_train_step(swapped),
            ModelError,
            "the loss function swapped takes (batch, model), but is called as loss_fn(model, batch)"
            ".\n  Let its first two parameters be the model and the batch.",
        ),
        (
            lambda: sl.evaluate(sl.make_train_step(loss), None, [{"x": X}]),
            ModelError,
            "evaluate was given a training step, which would change the state.\n  Pass a step from",
        ),
        (
            lambda: sl.evaluate(sl.make_eval_step(loss), None, {"x": X}),
            DataError,
            "evaluate was given one batch in place of several.\n  Pass an iterable of batches",
        ),
        (
            lambda: sl.Engine("tiny-llama"),
            ModelError,
            "an engine serves a loaded model, not 'tiny-llama'.\n  Load it: sl.Engine(sl.hf.load(",
        ),
        (
            lambda: start(lambda: linear(nnx.Rngs(0)), optax.sgd(0.1)),
            ModelError,
            "the model function <lambda> cannot be called as make(rngs): too many positional "
            "arguments.\n  Pass a function of one argument, such as lambda rngs: Model(",
        ),
        (
            lambda: start(Perceptron, optax.sgd(0.1)),
            ModelError,
            "the model function Perceptron cannot be called as make(rngs): missing a required ",
        ),
        (
            lambda: start(linear, None),
            ModelError,
            "the optimizer is None, which is not an optax transformation.\n  Pass one, such as",
        ),
        (
            lambda: start(Encoder(), optax.sgd(0.1), inputs=(X,)),
            ModelError,
            "Encoder is a linen module without __call__, which makes its parameters.\n  Define a",
        ),
        (
            lambda: train({"x": X}, start(linear, optax.sgd(0.1))),
            ModelError,
            "the state of a step is a dict, not a TrainState.\n  Call step(state, batch)",
        ),
        (
            lambda: sl.make_eval_step(loss)(start(linear, optax.sgd(0.1)).params, {"x": X}),
            ModelError,
            "the state of a step is a dict, not a TrainState.\n  Call step(state, batch)",
        ),
        (
            lambda: train(start(linear, optax.sgd(0.1)), {"x": X.tolist()}),
            DataError,
            "the batch's x is a Python list, not an array [batch, ...].\n  Convert lists",
        ),
        (
            lambda: sl.make_train_step(lambda model: 0.0),
            ModelError,
            "the loss function <lambda> cannot be called as loss_fn(model, batch).\n  Let it take",
        ),
        (
            lambda: train_on(lambda model, batch: (loss(model, batch), {}, 3)),
            ModelError,
            "the loss function returned a tuple of 3.\n  Return the loss, or (loss, {name:",
        ),
        (
            lambda: sl.use(sl.rules.STANDARD, sl.make_mesh("fsdp=8")).__enter__(),
            MeshError,
            "the mesh is of type AxisRules, not a jax.sharding.Mesh.\n  Make one, as in",
        ),
        (
            lambda: sl.attention.attend(HEADS, HEADS, HEADS, backend="flash"),
            ModelError,
            "no attention backend is called 'flash'. Did you mean 'splash'?\n  Choose one of: auto",
        ),
        (
            lambda: sl.attention.attend(HEADS, HEADS, HEADS, context="rnig"),
            ModelError,
            "context='rnig' is not known to attention. Did you mean 'ring'?\n  Choose one of: auto",
        ),
        (
            lambda: sl.plan(linear, optimizer="adam", loss=loss, batch={"x": X}, on="8xh100"),
            ModelError,
            "the optimizer is 'adam', which is not an optax transformation.\n  Pass one, such as",
        ),
        (
            lambda: sl.find_rules(linear, optimizer="adam", loss=loss, batch={"x": X}, on="8xh100"),
            ModelError,
            "the optimizer is 'adam', which is not an optax transformation.\n  Pass one, such as",
        ),
        (
            lambda: shardlib.run.train("run.yaml"),
            ConfigError,
            "the config is 'run.yaml', not a RunConfig.\n  Read one: shardlib.config.load(",
        ),
        (
            lambda: open_data(TextData(), global_batch=8, seed=0, split="test"),
            DataError,
            "no split is called 'test'.\n  Choose 'train' or 'eval'.",
        ),
        (
            lambda: sl.draw(X),
            TypeError,
            "draw takes an array with a sharding, or a sharding, not ndarray.\n  Place the array",
        ),
        (
            lambda: sl.explain(sl.make_train_step(loss), {}),
            TypeError,
            "TrainStep cannot be called with the arguments given: missing a required argument: "
            "'batch'.\n  Give all arguments",
        ),
    ],
    ids=[
        *("reversed", "train-step", "one-batch", "engine"),
        *(
            "no-rngs",
            "keyword",
            "optimizer",
            "linen",
            "order",
            "evaluated",
            "list",
            "loss",
            "tuple",
            "swapped",
            "backend",
            "context",
        ),
        *("plan", "find", "config", "split", "draw", "explain"),
    ],
)
def test_a_mistake_is_refused_with_its_fix(mistake, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        mistake()


def test_an_error_of_a_loss_says_what_it_was_called_with():
    with pytest.raises(KeyError, match="y") as error:
        train_on(lambda model, batch: loss(model, batch) + jnp.mean(batch["y"]))
    note = (
        "The loss was called as loss_fn(model, batch) with a Linear and a batch of x float32[16, 8]"
    )
    assert error.value.__notes__[0] == f"{note}."
