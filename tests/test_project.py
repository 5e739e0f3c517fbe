"""Products with kernels of several dims, and how often their kernels are gathered."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardlib as sl
from shardlib.nn.project import project

EMBED, HEADS, HEAD_DIM, BATCH, LENGTH = 32, 4, 8, 8, 4
QUERY, OUT = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")


def value(x, query, out):
    """A sum over squares, in whole numbers, of a projection to heads and back."""
    heads = jnp.square(project(x, query, QUERY, 1))
    return jnp.sum(jnp.square(project(heads, out, OUT, 2)))


def of_layers(x, query, out):
    """The sum after two layers, which are computed again in the backward pass."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, kernels):
        heads = jnp.square(project(x, kernels[0], QUERY, 1))
        return x + project(heads, kernels[1], OUT, 2), None

    kernels = jax.tree.map(lambda kernel: jnp.stack([kernel, 2 * kernel]), (query, out))
    return jnp.sum(jax.lax.scan(layer, x, kernels)[0].astype(jnp.float32))


@pytest.fixture(scope="module")
def arguments():
    random = np.random.default_rng(0)
    shapes = (BATCH, LENGTH, EMBED), (EMBED, HEADS, HEAD_DIM), (HEADS, HEAD_DIM, EMBED)
    return tuple(random.integers(-1, 2, shape).astype(np.float32) for shape in shapes)


def compiled(mesh, arguments, function=value):
    """Returns the program of value and gradients on a mesh, and the places of its arguments."""

    def run(*arguments):
        with sl.use(mesh, sl.rules.STANDARD):
            return jax.value_and_grad(function, argnums=(0, 1, 2))(*arguments)

    with sl.use(mesh, sl.rules.STANDARD) as scope:
        x, query, out = arguments
        places = (
            scope.sharding(("batch", "length", "embed"), x.shape, "activations"),
            scope.sharding(QUERY, query.shape),
            scope.sharding(OUT, out.shape),
        )
    jitted = jax.jit(run, in_shardings=places, out_shardings=(None, places))
    return jitted.lower(*arguments).compile(), places


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=2,tensor=2", "fsdp=4,context=2"])
def test_gradients_are_those_of_one_device(mesh, arguments):
    expected = jax.value_and_grad(value, argnums=(0, 1, 2))(*arguments)
    program, places = compiled(sl.make_mesh(mesh), arguments)
    found = program(*jax.device_put(arguments, places))
    assert float(expected[0]) < 2**24, "whole numbers up to here are exact"
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.aot
def test_a_kernel_is_gathered_once_a_pass(arguments, tpu_devices):
    mesh = sl.make_mesh("fsdp=8", devices=tpu_devices("v5e:2x4"))
    wide = [jax.ShapeDtypeStruct([16 * n for n in a.shape], jnp.bfloat16) for a in arguments]
    text = compiled(mesh, wide, of_layers)[0].as_text()
    assert text is not None
    # In the loop forward, and in the loop backward, which also computes the layer again.
    gathered = re.findall(r"bf16\S* all-gather\(", text)
    assert len(gathered) == 4, gathered
