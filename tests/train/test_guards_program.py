"""What guards add to a compiled step: nothing that is sent, and nothing that is held."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from guarded import CASES, GUARDS, SPIKES, Case, good_batch

from shardlib.explain.analysis.collectives import collectives
from shardlib.train.local_sgd.outer import LocalSGDConfig, make_local_sgd
from shardlib.train.update import gated_update

LOCAL = Case("data=2,fsdp=2,tensor=2", counts=True)


def program(case, state, guards):
    step = case.make_step(guards)
    if case is LOCAL:
        step = make_local_sgd(step, LocalSGDConfig(inner_steps=4))
        state = step.init(state)
    return step.lower(state, good_batch())


def sent(case, guards, *, clips):
    """What a step sends: its collectives, and the arrays that they carry by kind and axes."""
    clip = [optax.clip_by_global_norm(1.0)] if clips else []
    state = case.abstract(optax.chain(*clip, optax.adamw(1e-2)), guards)
    text = program(case, state, guards).compile().as_text()
    whole, arrays = collections.Counter(), collections.Counter()
    for c in collectives(text, state.definition.scope.mesh):
        whole[c.kind, c.mesh_axes, tuple(sorted(c.shapes)), c.count] += 1
        for shape in c.shapes:
            arrays[c.kind, c.mesh_axes, shape] += c.count
    return whole, arrays


@pytest.mark.mesh
@pytest.mark.rest("soak", keep=4)
@pytest.mark.parametrize("name", ["three axes", "pipeline", "zero1", "local sgd", "fsdp"])
def test_guards_send_nothing(name):
    case = CASES.get(name, LOCAL)
    assert sent(case, SPIKES, clips=True)[0] == sent(case, None, clips=True)[0]


@pytest.mark.mesh
@pytest.mark.rest("soak", keep=2)
@pytest.mark.parametrize("name", ["zero1", "offloaded", "fsdp"])
def test_guards_take_no_memory(name):
    case = CASES.get(name, LOCAL)

    def needed(guards):
        state = case.abstract(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), guards
        )
        compiled = program(case, state, guards).compile().memory_analysis()
        return compiled.temp_size_in_bytes + compiled.output_size_in_bytes

    # A second copy of one moment would take 12 KiB; of a single kernel 2 KiB.
    before = needed(None)
    assert needed(GUARDS) <= before + 4096
    assert needed(SPIKES) <= before + 4096


def momentum_twice():
    """Hands out its state as its update, and the same count twice; one leaf never changes."""

    def init(params):
        return {"trace": params, "counts": (jnp.int32(0), jnp.int32(0)), "seed": jnp.int32(7)}

    def update(grads, state, params=None):
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, state["trace"], grads)
        count = state["counts"][0] + 1
        return trace, {"trace": trace, "counts": (count, count), "seed": state["seed"]}

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    "optimizer",
    [momentum_twice(), optax.adamw(1e-2), optax.MultiSteps(optax.adam(1e-2), 2), optax.sgd(0.1)],
    ids=["odd", "adamw", "multi steps", "no state"],
)
def test_a_gated_update_is_the_update_or_nothing(optimizer):
    params, grads = {"w": jnp.arange(3.0), "b": jnp.ones(2)}, {"w": jnp.ones(3), "b": -jnp.ones(2)}
    state = optimizer.init(params)

    def update(*arguments):
        # optax mixes dtypes.
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(*arguments)

    gated = jax.jit(functools.partial(gated_update, update))
    for _ in range(2):
        expected = jax.jit(update)(grads, state, params)
        good = gated(jnp.bool_(True), grads, state, params)
        jax.tree.map(np.testing.assert_array_equal, good, expected)
        nan = jax.tree.map(lambda x: x * jnp.nan, grads)
        _, refused = gated(jnp.bool_(False), nan, state, params)
        jax.tree.map(np.testing.assert_array_equal, refused, state)
        state = expected[1]
