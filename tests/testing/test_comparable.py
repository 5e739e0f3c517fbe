"""What cannot be compared is refused, and the refusal names the side that is to blame."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardlib.errors import ModelError
from shardlib.sharding.manual import axis_size
from shardlib.testing import Reference, assert_equivalent
from shardlib.testing.rounding import roundings
from shardlib.train.reduce.reduction import ReductionConfig

BATCH = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}


class Model(nnx.Module):
    """`head` is `width` wide, and if `narrow` rounded to bfloat16 where `data` is split."""

    def __init__(self, rngs, width=8, narrow=False):
        self.body = nnx.Linear(8, 8, rngs=rngs)
        self.head = nnx.Linear(8, width, use_bias=False, rngs=rngs)
        self.narrow = narrow

    def __call__(self, x):
        kernel = self.head.kernel[...]
        if self.narrow and axis_size("data") > 1:
            kernel = kernel.astype(jnp.bfloat16)
        return jnp.tanh(self.body(x)).astype(jnp.float32) @ kernel.astype(jnp.float32)


def loss(model, batch, rng):
    return jnp.mean(jnp.square(model(batch["x"])))


def refusal(mesh="data=8", make=Model, **options):
    """The text of the refusal, without places in files."""
    reference = Reference(Model, loss, BATCH, optimizer=optax.sgd(0.1))
    with pytest.raises(ModelError) as error:
        reference.compare(mesh, make_model=make, steps=1, **options)
    return re.sub(r"\(at /\S+:\d+:\d+ \(\S+\)\)", "(at FILE)", str(error.value))


@pytest.mark.mesh
def test_a_model_that_is_narrower_on_a_mesh():
    narrow = lambda rngs: Model(rngs, narrow=True)  # noqa: E731
    fault, fix = refusal(make=narrow).split("\n")
    assert "mesh data=8 cannot be compared: its step rounds the parameter head/kernel to" in fault
    assert fix.startswith("  Leave out what asks for bfloat16 there")
    # Only where `data` is split.
    assert_equivalent(narrow, loss, BATCH, "fsdp=8", steps=1)


@pytest.mark.mesh
def test_a_step_that_is_narrower_on_a_mesh():
    assert refusal("fsdp=8", precision="bf16").startswith(
        "mesh fsdp=8 cannot be compared: its step rounds the parameter body/bias to bfloat16 (at "
    )
    # What is rounded here is made of many things.
    assert refusal(reduction=ReductionConfig(dtype="bf16")).startswith(
        "mesh data=8 cannot be compared: its step rounds a result to bfloat16 (at FILE), but "
    )


def test_a_model_that_is_narrower_everywhere_is_not_the_fault_of_a_mesh():
    def rounded(model, batch, rng):
        return jnp.mean(jnp.square(model(batch["x"]).astype(jnp.bfloat16).astype(jnp.float32)))

    fault = r"loss of step 1 cannot .* already\.\n  Compute in float32, .* bfloat16 \(at .*comp"
    with pytest.raises(ModelError, match=fault):
        assert_equivalent(Model, rounded, BATCH, "data=8", steps=1)


def test_a_model_with_other_variables_on_a_mesh():
    def other(rngs):
        model = Model(rngs, width=4)
        model.extra, model.body = (
            nnx.Param(jnp.zeros(3)),
            nnx.Linear(8, 8, use_bias=False, rngs=rngs),
        )
        return model

    assert refusal(make=other) == (
        "mesh data=8 has a different model than one device:\n"
        "  the parameter body/bias is absent, on one device float32[8].\n"
        "  the parameter head/kernel is float32[8,4], on one device float32[8,8].\n"
        "  the parameter extra is float32[3], on one device absent.\n"
        "  Make the same variables on every mesh."
    )


def test_roundings_are_found_in_loops_and_traced_to_their_argument():
    def program(x, layers):
        def body(carry, layer):
            return carry @ layer.T.astype(jnp.bfloat16).astype(jnp.float32), None

        x, _ = jax.lax.scan(jax.checkpoint(body), x, layers)
        return x.astype(jnp.float16)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 4), (2, 4, 4))]
    found = list(roundings(jax.jit(program).trace(*shapes).jaxpr.jaxpr))
    assert [(str(r.dtype), r.argument) for r in found] == [("bfloat16", 1), ("float16", None)]
    assert all(__file__ in r.source for r in found)


def test_a_rounding_in_the_condition_of_a_loop():
    def run(limit, step, x):
        def go_on(x):
            return jnp.sum(x) < jnp.sum(limit.astype(jnp.bfloat16)).astype(jnp.float32)

        return jax.lax.while_loop(go_on, lambda x: x + step, x)

    found = list(roundings(jax.make_jaxpr(run)(jnp.ones(3), jnp.ones(3), jnp.zeros(3)).jaxpr))
    assert {rounding.argument for rounding in found} == {0}
