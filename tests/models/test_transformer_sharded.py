"""One step on several meshes: the same numbers, and only the collectives that are called for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.functional import functional
from shardlib.mesh import make_mesh
from shardlib.registry import DataSpec
from shardlib.rules import STANDARD
from shardlib.sharding.constrain import use
from shardlib_models.transformer import loss, make
from shardlib_models.transformer_config import TransformerConfig

pytestmark = pytest.mark.mesh

VOCAB, BATCH, LENGTH = 24, 8, 6
CONFIG = TransformerConfig(num_layers=2, embed_dim=32, num_heads=8, mlp_dim=40, dropout=0.1)
COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
MODULE = functional(lambda rngs: make(CONFIG, DataSpec(vocab_size=VOCAB), rngs))


def value(params, batch):
    model = MODULE.merge(params, {}, jax.random.key(1))
    return loss(model, batch, jax.random.key(1), train=True)[0].value


def arguments():
    params, _ = jax.jit(MODULE.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(2), (BATCH, LENGTH), 0, VOCAB, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], tokens.shape)
    ones = jnp.ones_like(tokens)
    batch = {"tokens": tokens, "targets": tokens, "segment_ids": ones, "positions": positions}
    return params, batch


@pytest.fixture(scope="module")
def on_one_device():
    return jax.jit(jax.value_and_grad(value))(*arguments())


@pytest.mark.parametrize(
    ("mesh", "allowed"),
    [("data=8", {"all-reduce"}), ("tensor=8", {"all-reduce"}), ("data=2,fsdp=2,tensor=2", None)],
)
def test_loss_and_gradient_with_dropout_on_a_mesh(mesh, allowed, on_one_device, capfd):
    params, batch = arguments()
    with use(make_mesh(mesh), STANDARD) as scope:
        at = jax.tree_util.tree_map_with_path(
            lambda path, x: scope.sharding(MODULE.axes["/".join(k.key for k in path)], x.shape),
            params,
        )
        batch_at = {
            name: scope.sharding(("batch", "length"), x.shape, "activations")
            for name, x in batch.items()
        }
        step = jax.jit(jax.value_and_grad(value), in_shardings=(at, batch_at))
        compiled = step.lower(params, batch).compile()
    actual = compiled(jax.device_put(params, at), jax.device_put(batch, batch_at))
    # Sums over devices in another order: some units of the last place of the largest entry.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * max(1.0, float(abs(b).max()))),
        jax.device_get(actual),
        jax.device_get(on_one_device),
    )
    found = COLLECTIVE.findall(compiled.as_text())
    gathered = [shape for shape, kind in found if kind == "all-gather"]
    whole_logits = (f"{VOCAB}]", f"{BATCH},{LENGTH}")
    assert not [s for s in gathered if any(part in s for part in whole_logits)]
    if allowed is not None:
        assert {kind for _, kind in found} == allowed
    # What XLA says of a lookup that it can partition in no other way.
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
