"""Mistakes of a first program in Python are refused with the fix, not by a fault deep inside."""

import re

import flax.linen as linen
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import DataError, ModelError

X = np.ones((16, 8), np.float32)


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


def train(*arguments):
    return sl.make_train_step(loss)(*arguments)


@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
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
            lambda: train(start(linear, optax.sgd(0.1)), {"x": X.tolist()}),
            DataError,
            "the batch's x is a Python list, not an array [batch, ...].\n  Convert lists",
        ),
        (
            lambda: sl.make_train_step(lambda model: 0.0),
            ModelError,
            "the loss function <lambda> cannot be called as loss_fn(model, batch).\n  Let it take",
        ),
    ],
    ids=["no-rngs", "keyword", "optimizer", "linen", "order", "list", "loss"],
)
def test_a_mistake_is_refused_with_its_fix(mistake, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        mistake()
