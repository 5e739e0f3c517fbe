"""Shapes in annotations, checked at each call of attention, experts and losses."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 4)
attention = ("attend", "blockwise", "gather", "plain", "region", "ring", "ulysses")
checked = [f"shardlib.nn.attention.{name}" for name in attention]
checked += [f"shardlib.nn.moe.{name}" for name in (
    # Not `exchange`: its plan passes through JAX with other things in place of arrays.
    *("capacity", "dropless", "experts", "routing", "rows", "statistics"),
)]
checked += ["shardlib.losses.chunked", "shardlib.losses.weighted"]
with install_import_hook(checked, "beartype.beartype"):
    import shardlib as sl
    from shardlib import moe
    from shardlib.losses import chunked_cross_entropy, cross_entropy
    from shardlib.nn.attention import attend

query, key = jnp.ones((4, 64, 8, 4)), jnp.ones((4, 64, 2, 4))
segments = jnp.ones((4, 64), jnp.int32)
x, router = jnp.ones((4, 64, 16)), jnp.ones((4, 64, 4))
weights = moe.ExpertWeights(jnp.ones((4, 16, 8)), jnp.ones((4, 16, 8)), jnp.ones((4, 8, 16)))


def experts(x, dispatch, **options):
    routing = moe.route(router, 2, bias=jnp.zeros(4))
    glu = moe.gated(jax.nn.silu)
    result, kept = moe.apply_experts(x, routing, weights, glu, dispatch=dispatch, **options)
    moe.router_stats(routing, kept, mask=options.get("mask"), bias=jnp.zeros(4))
    return result


def loss(x, labels):
    project, options = lambda weights, x: x @ weights, {"axes": ("embed", "vocab"), "num_chunks": 5}
    mean, _ = chunked_cross_entropy(
        project, jnp.ones((16, 32)), x, labels, label_smoothing=0.1, **options
    )
    return mean.total


# A call is checked where it is traced: nothing is compiled.
trace = jax.eval_shape
for mesh in ("context=4", "data=2,expert=2"):
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        for options in ({}, {"backend": "blockwise"}, {"segment_ids": segments}, {"window": 5}):
            trace(jax.grad(lambda q: attend(q, key, key, **options).sum()), query)
        trace(jax.grad(lambda x: experts(x, "dropless", chunks=2).sum()), x)
        trace(jax.grad(lambda x: experts(x, "capacity", mask=segments > 0).sum()), x)
        trace(jax.grad(loss), x, segments)
attend(query[:, :8], key, key, positions=jnp.arange(8)[None], kv_positions=jnp.arange(64)[None])
cross_entropy(router, segments, segments > 0)

refused = 0
for wrong in (
    lambda: attend(query, key, key[:2]),
    lambda: attend(query, key[..., 0], key),
    lambda: experts(x[:, :8], "dropless"),
    lambda: cross_entropy(router, segments[:, :8]),
):
    try:
        wrong()
    except Exception as error:
        assert "beartype" in type(error).__module__ or "jaxtyping" in type(error).__module__, error
        refused += 1
print(refused)
"""


@pytest.mark.mesh
def test_annotations_hold_at_every_call():
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["4"]
