"""On a GPU: optimizer state and activations in host memory, 8-bit products, experts, chunks of the
loss; each against the plain step on the same GPU."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

import shardlib as sl
from shardlib import registry
from shardlib.train.offload import offload_optimizer
from shardlib.train.state import abstract_state, materialize
from shardlib_models.moe import MoEConfig

pytestmark = pytest.mark.gpu

VOCAB, LENGTH = 512, 128
DATA = registry.DataSpec(vocab_size=VOCAB, sequence_length=LENGTH)


@pytest.fixture(autouse=True)
def highest():
    with jax.default_matmul_precision("highest"):
        yield


def batch():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (8, LENGTH + 1)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def trained(*, device=None, offloads=False, steps=4, precision="f32", **changes):
    """Returns the last state, the losses of a small transformer on one repeated batch, and its
    compiled step."""
    family = registry.family("transformer")
    config = family.config(num_layers=2, embed_dim=128, num_heads=2, head_dim=64)
    config = dataclasses.replace(config, **changes)
    mesh = sl.make_mesh("data=1", devices=[device or jax.devices()[0]])
    with sl.use(mesh, sl.rules.STANDARD):
        state = abstract_state(lambda rngs: family.make(config, DATA, rngs), optax.adamw(1e-2))
        state = materialize(offload_optimizer(state) if offloads else state, seed=0)
        step = sl.make_train_step(functools.partial(family.loss, train=True), precision=precision)
        text = step.lower(state, batch()).compile().as_text()
        losses = []
        for _ in range(steps):
            state, metrics = step(state, batch())
            losses.append(float(metrics["loss"]))
    return state, losses, text


EXPERTS = MoEConfig(num_experts=4, mlp_dim=64)


@pytest.mark.parametrize(
    "changes",
    [{}, {"moe": EXPERTS}, {"loss_chunks": 4}, {"attention": "blockwise"}, {"remat": "full"}],
    ids=["dense", "experts", "loss chunks", "blockwise", "remat"],
)
def test_a_gpu_trains_as_the_cpu_does(changes):
    _, on_gpu, _ = trained(**changes)
    _, on_cpu, _ = trained(device=jax.devices("cpu")[0], **changes)
    # Adam divides by the root of a mean square: it magnifies rounding where gradients are near 0.
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-4)
    assert on_gpu[-1] < on_gpu[0] - 0.1


def test_the_optimizer_state_waits_in_host_memory():
    plain, losses, _ = trained()
    state, found, _ = trained(offloads=True)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}
    assert kinds == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(plain.opt_state)} == {"device"}


def test_activations_wait_in_host_memory():
    _, losses, _ = trained()
    _, found, text = trained(remat="offload:layer_in")
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert "S(5)" in text  # XLA's number of host memory in a layout.


def test_eight_bit_products_train():
    _, wide, _ = trained(precision="bf16", steps=2)
    _, narrow, text = trained(precision="fp8", steps=20)
    assert "__cublas$lt$matmul$f8" in text
    assert narrow[-1] < narrow[0] - 0.5
    # e4m3 keeps 4 bits, so that a product of 128 terms is off by 2**-4 / sqrt(128) relative; later
    # steps of Adam at this rate part from each other as they do for any other rounding.
    np.testing.assert_allclose(narrow[:2], wide, rtol=2**-4 / np.sqrt(128))
