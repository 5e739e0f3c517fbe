"""A training step in bfloat16 on a GPU, and flash attention against the plain one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from shardlib import registry
from shardlib.nn.attention import attend, resolve_backend

pytestmark = pytest.mark.gpu

LENGTH = 256


def qkv(dtype, heads=8, kv_heads=2, head_dim=64):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, LENGTH, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]


def documents():
    ids = np.repeat([1, 2, 0], [100, LENGTH - 106, 6]).astype(np.int32)
    return jnp.asarray(np.tile(ids, (2, 1)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 32])
def test_cudnn_attention_and_its_gradient_are_the_plain_ones(packed, window):
    inputs = qkv(jnp.bfloat16)
    segment_ids = documents() if packed else None

    def total(backend, *arrays):
        y = attend(*arrays, segment_ids=segment_ids, window=window, backend=backend)
        seen = True if segment_ids is None else (segment_ids > 0)[:, :, None, None]
        return jnp.sum(jnp.square(y.astype(jnp.float32)), where=seen), y

    def both(backend, arrays):
        f = functools.partial(total, backend)
        (_, y), grads = jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))(*arrays)
        return [np.asarray(x, np.float32) for x in (y, *grads)]

    exact = both("xla", [x.astype(jnp.float32) for x in inputs])
    seen = np.ones((2, LENGTH), bool) if segment_ids is None else np.asarray(segment_ids) > 0
    for found, want in zip(both("cudnn", inputs), exact, strict=True):
        # bfloat16 has 8 bits: inputs, weights and outputs are each rounded to 2**-9 relative.
        scale = np.max(np.abs(want))
        np.testing.assert_allclose(found[seen], want[seen], rtol=2**-5, atol=2**-6 * scale)


def test_auto_takes_cudnn_for_sixteen_bits_only():
    choose = functools.partial(resolve_backend, "auto", head_dim=64, lengths=(LENGTH, LENGTH))
    assert choose(dtype=jnp.bfloat16).backend == "cudnn"
    assert choose(dtype=jnp.float32).backend == "xla"


def train(precision, attention, steps=5):
    """Returns the losses of a small transformer on one repeated batch."""
    family = registry.family("transformer")
    config = family.config(
        num_layers=2, embed_dim=128, num_heads=2, head_dim=64, attention=attention
    )
    data = registry.DataSpec(vocab_size=512, sequence_length=LENGTH)
    tokens = np.random.default_rng(0).integers(0, 512, (4, LENGTH + 1)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    mesh = sl.make_mesh("data=1", devices=jax.devices()[:1])
    with sl.use(mesh, sl.rules.STANDARD):
        state = sl.init_state(lambda rngs: family.make(config, data, rngs), optax.adamw(1e-3))
        loss = functools.partial(family.loss, train=True)
        step = sl.make_train_step(loss, precision=precision)
        before, losses = jax.tree.leaves(state.params), []
        for _ in range(steps):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    assert all(x.is_deleted() for x in before), "the state is donated"
    assert state.step.devices() == {jax.devices("gpu")[0]}
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    return losses


def test_a_step_in_bfloat16_follows_float32():
    exact, flash = train("f32", "xla"), train("bf16", "cudnn")
    assert flash[-1] < flash[0] - 0.1
    # Rounding of 2**-9 in each of some ten matmuls of a forward pass, averaged over 1,024 tokens.
    np.testing.assert_allclose(flash, exact, rtol=1e-2)
    np.testing.assert_allclose(train("bf16", "xla"), flash, rtol=1e-2)
