"""A small model with what pipelines have to get right, and its gradients on any mesh."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib as sl
from shardlib.functional.precision import precision
from shardlib.losses import Mean
from shardlib.mesh import MeshConfig
from shardlib.nn.stack import scan_layers, stack_layers
from shardlib.sharding.constrain import constrain
from shardlib.train.gradients import LossArguments, PartLoss, accumulate_gradients
from shardlib.train.pipeline.gradients import pipelined_gradients, pipelined_sums

WIDTH, HIDDEN, VOCAB, BATCH = 4, 8, 16, 64


def normal(rngs, *shape):
    return 0.3 * jax.random.normal(rngs.params(), shape)


class Layer(nnx.Module):
    """Adds a small MLP; `gain` is no parameter and differs from layer to layer."""

    def __init__(self, rngs, rate=0.2):
        self.up = nnx.Param(normal(rngs, WIDTH, HIDDEN), out_sharding=("embed", "mlp"))
        self.down = nnx.Param(normal(rngs, HIDDEN, WIDTH), out_sharding=("mlp", "embed"))
        self.plain = nnx.Param(normal(rngs, WIDTH))
        self.gain = nnx.Variable(1.0 + normal(rngs, WIDTH))
        self.dropout = nnx.Dropout(rate, rngs=rngs if rate else None)

    def __call__(self, x, shift):
        hidden = constrain(jnp.tanh(x @ self.up[...] + shift[:, None]), "batch", "mlp")
        y = self.dropout(hidden @ self.down[...]) * self.gain[...].astype(x.dtype)[None]
        return x + y + self.plain[...][None]


class Model(nnx.Module):
    """Its table is both embedding and head, `shift` reaches all layers, `spare` nothing."""

    def __init__(self, num_layers, rngs, layer=Layer):
        self.table = nnx.Param(normal(rngs, VOCAB, WIDTH), out_sharding=("vocab", "embed"))
        self.layers = stack_layers(layer, num_layers, rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.shift = nnx.Param(jnp.float32(0.3), out_sharding=())
        self.spare = nnx.Param(jnp.ones(WIDTH), out_sharding=("norm",))

    def embed(self, tokens):
        table = constrain(self.table[...], "vocab", "embed")
        return self.dropout(constrain(table[tokens], "batch", "embed"))


def nll(model, x, batch):
    """The summed loss of the tokens that count, and how many do."""
    table = constrain(model.table[...], "vocab", "embed")
    # What a model returns is in float32, whatever its parameters are computed in.
    logits = constrain(x.astype(table.dtype) @ table.T, "batch", "vocab")
    is_target = jnp.arange(VOCAB)[None] == batch["targets"][:, None]
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    found = jnp.sum(jnp.where(is_target, log_p, 0.0), axis=1)
    weight = (batch["tokens"] % 3 != 0).astype(jnp.float32)
    return Mean(-jnp.sum(found * weight), jnp.sum(weight))


def loss(model, batch, rng):
    """Its carry adds up a penalty and counts layers beside the activations."""
    del rng
    shift = jnp.where(batch["tokens"] % 2 == 0, model.shift[...], 0)

    def call(layer, carry, _):
        x, penalty, depth = carry
        x = layer(x, shift)
        return (x, penalty + jnp.sum(x.astype(jnp.float32) ** 2), depth + 1), None

    carry = (model.embed(batch["tokens"]), jnp.float32(0), jnp.int32(0))
    (x, penalty, depth), _ = scan_layers(call, model.layers, carry)
    mean = nll(model, x, batch)
    metrics = {"penalty": Mean(penalty, jnp.float32(1)), "depth": depth.astype(jnp.float32)}
    return Mean(mean.total + 0.01 * penalty, mean.weight), metrics


def make_batch(size=BATCH):
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, VOCAB, size).astype(np.int32) for name in ("tokens", "targets")}


@dataclasses.dataclass(frozen=True)
class Job:
    """A loss of a model, on a mesh."""

    mesh: Any
    loss: PartLoss
    state: sl.TrainState
    batch: Any

    def gradients(self, config, microbatches):
        """The jitted gradients: of the pipeline, or with config None of the plain engine."""

        engine = functools.partial(accumulate_gradients, microbatches=microbatches)
        if config is not None:
            engine = functools.partial(
                pipelined_gradients, microbatches=microbatches, config=config
            )
        return self._jit(engine)

    def sums(self, microbatches, config=None):
        """The jitted sums of the pipeline, without gradients."""

        return self._jit(
            functools.partial(pipelined_sums, microbatches=microbatches, config=config)
        )

    def _jit(self, compute):
        def run(*arguments):
            with sl.use(self.mesh, sl.rules.STANDARD):
                return compute(self.loss, LossArguments(*arguments))

        return jax.jit(run)

    @property
    def arguments(self):
        return LossArguments(
            self.state.params, self.state.model_state, self.batch, jax.random.key(1)
        )


def make_job(
    mesh, *, num_layers=8, make=None, loss=loss, batch=None, dtypes="f32", is_abstract=False
):
    sizes = [axis.size for axis in MeshConfig.parse(mesh).axes]
    mesh = sl.make_mesh(mesh, devices=jax.devices()[: math.prod(sizes)])
    make = make or (lambda rngs: Model(num_layers, rngs))
    with sl.use(mesh, sl.rules.STANDARD):
        init = sl.abstract_state if is_abstract else functools.partial(sl.init_state, seed=0)
        state = init(make, optax.sgd(0.1), precision=dtypes)
    part = PartLoss(state.definition, loss, precision(dtypes))
    return Job(mesh, part, state, make_batch() if batch is None else batch)
