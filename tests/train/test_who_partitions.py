"""A step says who partitions its loss, and why; nothing is compiled or run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl

INIT = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
BATCH = {name: np.ones((64, 16), np.float32) for name in "xy"}
MESH = "data=2,fsdp=2,tensor=2"


class Chain(nnx.Module):
    """Two matmuls, whose results are constrained where `names` are given."""

    def __init__(self, names, rngs):
        self.names = names
        self.layers = nnx.List(nnx.Linear(16, 16, kernel_init=INIT, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
            x = sl.constrain(x, *self.names) if self.names else x
        return x


def loss(model, batch, rng):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def partition(names=(), mesh=MESH, abstract=True, **options):
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        make = sl.abstract_state if abstract else sl.init_state
        state = make(lambda rngs: Chain(names, rngs), optax.sgd(0.1))
    batch = jax.eval_shape(lambda: BATCH) if abstract else BATCH
    found = sl.make_train_step(loss, **options).partition(state, batch)
    return found.by, found.why


OPEN = "the model constrains no activation"
DECIDED = "the constraints of the model decide where each product lies"
ONCE, UNEVEN = sl.ReductionConfig(dtype="bf16"), sl.ReductionConfig(group_microbatches=(1, 3))


@pytest.mark.parametrize(
    ("options", "by", "why"),
    [
        ({}, "shardlib", OPEN),
        ({"abstract": False}, "shardlib", OPEN),
        ({"names": ("batch", "mlp")}, "shardlib", "no constraint decides the layout of"),
        ({"names": ("batch", "mlp"), "mesh": "data=8"}, "XLA", DECIDED),
        ({"constrain": "user"}, "XLA", "constrain is 'user'"),
        # Inside of groups that sum their gradients there is less to cut.
        ({"mesh": "data=8", "reduction": ONCE}, "XLA", "nothing is left to cut here"),
        ({"mesh": "data=8", "reduction": ONCE, "microbatches": 2}, "XLA", "nothing is left to cut"),
        ({"mesh": "data=8", "microbatches": 2}, "XLA", "nothing is left to cut"),
        # The batch of unequal groups is arranged first.
        ({"reduction": UNEVEN}, "shardlib", OPEN),
        ({"reduction": UNEVEN, "abstract": False}, "shardlib", OPEN),
    ],
)
def test_who_partitions_and_why(options, by, why):
    found = partition(**options)
    assert found[0] == by
    assert found[1].startswith(why)


def test_the_compiler_where_shardlib_cannot_keep_a_constraint():
    mesh = sl.make_mesh(MESH)

    def uneven(model, batch, rng):
        y = model(batch["x"])[:63]
        placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        return jnp.mean(jax.lax.with_sharding_constraint(y, placed) ** 2)

    with sl.use(mesh, sl.rules.STANDARD):
        state = sl.abstract_state(lambda rngs: Chain((), rngs), optax.sgd(0.1))
    found = sl.make_train_step(uneven).partition(state, jax.eval_shape(lambda: BATCH))
    assert found.by == "XLA"
    assert found.why.startswith("a constraint of an array (63, 16)")
