"""Rows of the batch that the compiler puts into another order: told where the result is wrong."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from planted import line_of

import shardlib as sl
from shardlib.explain.aot.compile import compile_step
from shardlib.explain.lint import Subject, lint
from shardlib.testing import Reference

ROWS = 64
MESH = "data=2,fsdp=2,tensor=2"
INIT = nnx.initializers.lecun_normal()


class Chain(nnx.Module):
    """Matmuls, each cut over fsdp and tensor in one order (up) or the other (down)."""

    def __init__(self, sizes, ways, constrained, rngs):
        axes = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
        self.constrained = constrained
        self.layers = nnx.List(
            nnx.Linear(a, b, kernel_init=nnx.with_partitioning(INIT, axes[way]), rngs=rngs)
            for a, b, way in zip(sizes, sizes[1:], ways.split(), strict=False)
        )

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))  # planted
            x = sl.constrain(x, "batch", "embed") if self.constrained else x
        return x


def loss(model, batch, rng):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch_of(sizes):
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((ROWS, size), np.float32) for size in (sizes[0], sizes[-1]))
    return {"x": x, "y": y}


def subject_of(sizes, ways, constrained=False, mesh=MESH, devices=None):
    """Returns what is known of the step of a chain."""
    with sl.use(sl.make_mesh(mesh, devices=devices), sl.rules.STANDARD):
        state = sl.abstract_state(
            lambda rngs: Chain(sizes, ways, constrained, rngs), optax.sgd(1.0)
        )
    return Subject.of(compile_step(sl.make_train_step(loss), (state, batch_of(sizes)), keep=False))


def told(subject):
    return [finding for finding in lint(subject) if finding.code == "SL205"]


def permuted(subject):
    """The axes that each permutation of a step runs over."""
    found = subject.program.collectives
    return {c.mesh_axes for c in found if c.kind == "collective-permute"}


@pytest.mark.aot
@pytest.mark.rest("soak", keep=8)
@pytest.mark.parametrize(
    ("sizes", "ways", "constrained", "mesh"),
    [
        # With the compilers of today the gradients of these are wrong, ...
        ((64, 256, 64, 64), "up up up", False, MESH),
        ((64, 64, 64), "up up", False, MESH),
        # ... and of these the loss.
        ((64, 64, 64, 64), "up down down", False, MESH),
        ((64, 64, 64, 64), "down down down", False, MESH),
        # Right: constrained; with permutations over fsdp+tensor, data+fsdp+tensor; without any.
        ((64, 256, 64, 64), "up up up", True, MESH),
        ((64, 64, 64, 64), "up down down", True, MESH),
        ((64, 128, 64), "up up", False, MESH),
        ((64, 128, 64), "down up", False, MESH),
        ((64, 256, 64, 64), "up up up", False, "fsdp=4,tensor=2"),
        ((64, 256, 64, 64), "up up up", False, "data=2,fsdp=4"),
    ],
)
def test_it_is_told_exactly_where_the_result_is_wrong(sizes, ways, constrained, mesh):
    def make(rngs):
        return Chain(sizes, ways, constrained, rngs)

    reference = Reference(make, loss, batch_of(sizes), optimizer=optax.sgd(1.0))
    compared = reference.compare(mesh, steps=1)
    found = told(subject_of(sizes, ways, constrained, mesh))
    assert bool(compared.deviations) == bool(found), (
        "Where rows are told to change their order the compiler gives what one device gives, or "
        f"the other way round: does it compile this in another way now? {compared}"
    )
    assert not (constrained and found)


def test_where_it_is_from():
    subject = subject_of((64, 256, 64, 64), "up up up")
    if ("data", "fsdp") not in permuted(subject):
        pytest.skip("this compiler leaves the rows in their order")
    assert {finding.source for finding in told(subject)} == {line_of(Chain.__call__, "planted")}


def test_a_tpu_program_is_read_too(tpu_devices):
    subject = subject_of((64, 256, 64, 64), "up up up", devices=tpu_devices("v5e:2x4"))
    assert bool(told(subject)) == (("data", "fsdp") in permuted(subject))
