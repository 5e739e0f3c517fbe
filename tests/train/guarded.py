"""A small training with what guards have to get right, on any mesh, and batches that spoil it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import shardlib as sl
from shardlib.losses import Mean
from shardlib.nn.stack import scan_layers, stack_layers
from shardlib.train.guards import GuardsConfig, SpikeConfig
from shardlib.train.offload import offload_optimizer
from shardlib.train.reduce.reduction import ReductionConfig
from shardlib.train.state import abstract_state, materialize

ROWS, WIDTH, LAYERS = 16, 64, 4
GUARDS = GuardsConfig()
SPIKES = GuardsConfig(spike=SpikeConfig(metric="grad_norm", threshold=8.0, window=16, warmup=8))


@jax.custom_vjp
def scale_gradient(x, factor):
    """`x`, whose gradient is multiplied by the mean of `factor`."""
    return x


scale_gradient.defvjp(
    lambda x, factor: (x, factor),
    lambda factor, g: (g * jnp.mean(factor).astype(g.dtype), jnp.zeros_like(factor)),
)


class Layer(nnx.Module):
    def __init__(self, rngs):
        kernel = jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / WIDTH**0.5
        self.kernel = nnx.Param(kernel, out_sharding=("embed", "mlp"), eager_sharding=False)
        self.bias = nnx.Param(jnp.zeros(WIDTH), out_sharding=("norm",), eager_sharding=False)

    def __call__(self, x):
        x = sl.constrain(x, "batch", None) @ self.kernel[...]
        return jnp.tanh(sl.constrain(x, "batch", "mlp") + self.bias[...][None])


class Model(nnx.Module):
    """A scanned stack between two layers, with dropout; `counts` gives it a state of its own."""

    def __init__(self, rngs, counts=False, rate=0.25):
        self.layers = stack_layers(Layer, LAYERS, rngs)
        self.first, self.last = Layer(rngs), Layer(rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs if rate else None)
        self.counts = counts
        if counts:
            self.seen = nnx.BatchStat(jnp.zeros(WIDTH))

    def __call__(self, x, factor):
        self.last.bias.set_value(scale_gradient(self.last.bias[...], factor))
        x = scan_layers(lambda layer, x, _=None: (layer(x), None), self.layers, self.first(x))[0]
        if self.counts:
            mean = jnp.mean(x.astype(jnp.float32), axis=0)
            self.seen.set_value(0.9 * self.seen[...] + mean.astype(self.seen[...].dtype))
        return self.last(self.dropout(x))


def loss_fn(model, batch, rng):
    error = jnp.square(model(batch["x"], batch["factor"]) - batch["y"]).astype(jnp.float32)
    rows = jnp.sum(error, axis=1) + batch["add"].astype(jnp.float32)
    return Mean(jnp.sum(rows), jnp.float32(rows.size))


def good_batch(seed=0, scale=1.0):
    random = np.random.default_rng(seed)
    x, y = (random.standard_normal((ROWS, WIDTH), dtype=np.float32) for _ in range(2))
    return {
        "x": x,
        "y": y * np.float32(scale),
        "add": np.zeros(ROWS, np.float32),
        "factor": np.ones(ROWS, np.float32),
    }


def bad_batches():
    """Faults by name: of the loss alone, of one gradient alone, and of the last rows alone."""
    faults = {
        "nan in the loss": {"add": np.full(ROWS, np.nan, np.float32)},
        "inf in the loss": {"add": np.full(ROWS, np.inf, np.float32)},
        "nan in one gradient": {"factor": np.full(ROWS, np.nan, np.float32)},
        "inf in one gradient": {"factor": np.full(ROWS, np.inf, np.float32)},
    }
    x = good_batch(5)["x"]
    x[-1] = np.nan
    return {
        name: {**good_batch(5), **change}
        for name, change in {**faults, "nan in one microbatch": {"x": x}}.items()
    }


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: str
    num_devices: int = 8
    rules: str = "standard"
    precision: str = "f32"
    counts: bool = False
    offloads: bool = False
    step: dict = dataclasses.field(default_factory=dict)

    def abstract(self, optimizer, guards=GUARDS, rate=0.25):
        abstract = abstract_state(
            lambda rngs: Model(rngs, self.counts, rate),
            optimizer,
            precision=self.precision,
            guards=guards,
            mesh=sl.make_mesh(self.mesh, devices=jax.devices()[: self.num_devices]),
            rules=sl.rules.preset(self.rules),
        )
        return offload_optimizer(abstract) if self.offloads else abstract

    def state(self, *args, **kwargs):
        return materialize(self.abstract(*args, **kwargs), seed=0)

    def make_step(self, guards=GUARDS, schedule=None):
        options = {"precision": self.precision, "schedule": schedule, "guards": guards}
        return sl.make_train_step(loss_fn, **options, **self.step)


CASES = {
    "one device": Case("data=1", 1, counts=True, step={"microbatches": 2}),
    "fsdp": Case("fsdp=8", counts=True),
    "three axes": Case("data=2,fsdp=2,tensor=2", counts=True, step={"microbatches": 2}),
    "pipeline": Case("data=2,stage=2,fsdp=2", step={"microbatches": 2}),
    "zero1": Case("fsdp=8", rules="zero1"),
    "zero2": Case("data=2,fsdp=4", rules="zero2"),
    "bf16 params": Case("fsdp=8", precision="bf16_params", counts=True),
    "reduced in bf16": Case("data=2,fsdp=4", step={"reduction": ReductionConfig(dtype="bf16")}),
    "offloaded": Case("fsdp=8", offloads=True),
}
