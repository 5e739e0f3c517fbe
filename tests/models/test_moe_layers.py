"""Layers with experts in a scan: memory, rematerialisation, sequence parallelism."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardlib as sl
from shardlib.explain.analysis.collectives import collectives
from shardlib.functional import functional
from shardlib.nn.moe import RouterStats
from shardlib.nn.stack import scan_layers, stack_layers
from shardlib_models.moe import MoE, MoEConfig, losses

LAYERS, BATCH, LENGTH, EMBED, MLP, EXPERTS = 3, 8, 8, 16, 24, 4
CONFIG = MoEConfig(num_experts=EXPERTS, balance="bias", router_z_loss=0.01)


class Layers(nnx.Module):
    """A residual stream through experts, the statistics in the carry."""

    def __init__(self, rngs):
        def layer(rngs):
            return MoE(CONFIG, EMBED, MLP, stddev=0.3, rngs=rngs)

        self.layers = stack_layers(layer, LAYERS, rngs)

    def __call__(self, x, mask, remat="none"):
        def call(layer, carry, _):
            x, stats = carry
            y, new = layer(x, mask)
            return (x + y, stats + new), None

        carry = (x, RouterStats.zeros())
        return scan_layers(call, self.layers, carry, remat=remat)[0]


MODULE = functional(Layers)


def value(params, x, mask, remat="none"):
    model = MODULE.merge(params, {}, jax.random.key(0))
    y, stats = model(x, mask, remat)
    return jnp.mean(jnp.square(y)) + losses(stats, CONFIG, LAYERS)[0]


@pytest.fixture(scope="module")
def arguments():
    params = jax.jit(MODULE.init)(jax.random.key(0))[0]
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, EMBED))
    return params, x, jnp.ones((BATCH, LENGTH), jnp.bool_).at[:, -1].set(False)


def compiled(mesh, arguments, remat="none", rules=sl.rules.STANDARD):
    mesh = sl.make_mesh(mesh)

    def step(*args):
        with sl.use(mesh, rules):
            return jax.value_and_grad(lambda *a: value(*a, remat))(*args)

    with sl.use(mesh, rules) as scope:
        at = jax.tree_util.tree_map_with_path(
            lambda path, x: scope.sharding(MODULE.axes["/".join(k.key for k in path)], x.shape),
            arguments[0],
        )
        rows = scope.sharding(("batch", "length"), (BATCH, LENGTH), "activations")
    step = jax.jit(step, in_shardings=(at, rows, rows), out_shardings=(None, at))
    return step.lower(*arguments).compile(), mesh


@pytest.fixture(scope="module")
def on_one_device(arguments):
    return jax.jit(jax.value_and_grad(value))(*arguments)


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("mesh", "remat", "rules"),
    [
        ("expert=4,fsdp=2", "none", sl.rules.STANDARD),
        ("expert=2,tensor=2,fsdp=2", "full", sl.rules.STANDARD),
        ("expert=2,tensor=4", "none", sl.rules.SEQUENCE),
    ],
)
def test_layers_are_the_same_on_every_mesh(mesh, remat, rules, arguments, on_one_device):
    found = compiled(mesh, arguments, remat, rules)[0](*arguments)

    def close(a, b):
        # Sums in another order, through three layers.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(np.abs(b).max()))

    jax.tree.map(close, jax.device_get(found), jax.device_get(on_one_device))


@pytest.mark.mesh
def test_gathered_weights_are_not_kept_for_the_backward_pass(arguments):
    """No array holds the whole experts of all layers: each layer gathers its own, twice."""
    program, mesh = compiled("fsdp=8", arguments)
    text = program.as_text()
    whole = [EXPERTS, EMBED, MLP]
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    assert tuple(whole) in shapes
    assert not {s for s in shapes if sorted(s) == sorted([LAYERS, *whole])}
    gathered = [c for c in collectives(text, mesh) if "shard_map" in c.op_name]
    assert [c.kind for c in gathered].count("all-gather") == 6
    assert all(c.in_loop and c.count == LAYERS for c in gathered)


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("remat", "exchanges"), [("none", 4), ("full", 6), ("save:moe_rows,moe_results", 4)]
)
def test_what_travels_again_under_a_policy(remat, exchanges, arguments):
    program, mesh = compiled("expert=4,fsdp=2", arguments, remat)
    sent = [c for c in collectives(program.as_text(), mesh) if c.kind == "all-to-all"]
    assert len(sent) == exchanges
    assert {c.count for c in sent} == {LAYERS}
