"""Faults of how a step is written, planted: the host in it, and layers one by one."""

import dataclasses

import jax
import jax.numpy as jnp
from planted import EMBED, ROWS, array, compiled, descend, line_of, make_mesh, mean_square, weights

from shardlib.explain.lint import lint

MESH = make_mesh(fsdp=4, tensor=2)
X = array(MESH, (ROWS, EMBED), "fsdp")


def printing(params, x):
    jax.debug.print("mean {}", jnp.mean(x))  # planted
    return mean_square(MESH, params, x)


def test_a_print_in_the_step():
    subject = compiled(descend(printing), weights(MESH), X)
    (found,) = lint(subject)
    assert str(found) == (
        f"{line_of(printing, 'planted')}: SL501 debug_print runs once in a step: devices wait for "
        "the host.\n  Return the value as a metric of the step, and read it outside."
    )
    # The same out of the compiled program, where nothing was traced.
    (read,) = lint(dataclasses.replace(subject, jaxpr=None))
    assert (read.code, read.source, read.place) == (found.code, found.source, found.place)


def one_by_one(params, x):
    h = x
    for index in range(12):
        h = jnp.tanh(h @ params["up"][index % 4])[:, :EMBED]  # planted
    return jnp.mean(h**2)


def test_layers_that_are_unrolled():
    subject = compiled(descend(one_by_one), weights(MESH), X)
    (found,) = [finding for finding in lint(subject) if finding.code == "SL502"]
    assert str(found).startswith(f"{line_of(one_by_one, 'planted')}: SL502 the matmul of this")
