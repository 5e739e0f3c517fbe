"""The baseline computes what shardlib's transformer computes, on every one of its meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import plain_jax as plain
from shardlib import registry
from shardlib.functional import functional
from shardlib.paths import named_leaves

pytestmark = pytest.mark.docs

CONFIG = plain.PlainConfig(
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    vocab_size=64,
)
LENGTH = 16


@pytest.fixture(scope="module")
def ours():
    """Returns shardlib's transformer of the same sizes: its family and its functional view."""
    family = registry.family("transformer")
    sizes = {name: getattr(CONFIG, name) for name in vars(CONFIG)}
    for name in ("dtype", "remat", "attention"):
        del sizes[name]
    data = registry.DataSpec(vocab_size=CONFIG.vocab_size, sequence_length=LENGTH)
    config = family.config(**sizes)
    return family, functional(lambda rngs: family.make(config, data, rngs))


def packed_batch(rows):
    """Rows of two documents and padding."""
    batch = plain.random_batch(CONFIG, rows, LENGTH)
    ends = (6, 13)
    segments = np.repeat([1, 2, 0], np.diff([0, *ends, LENGTH])).astype(np.int32)
    positions = np.concatenate([np.arange(6), np.arange(7), np.arange(3)]).astype(np.int32)
    tiled = {"segment_ids": segments, "positions": positions}
    return batch | {name: np.tile(row, (rows, 1)) for name, row in tiled.items()}


@pytest.fixture(scope="module")
def params():
    # On the host, where no step can donate them.
    return jax.device_get(jax.jit(plain.init, static_argnums=0)(CONFIG, jax.random.key(0)))


def test_parameters_have_the_same_paths_shapes_and_deviations(ours, params):
    _, module = ours
    mine, _ = jax.eval_shape(module.init, jax.random.key(1))
    assert {path: (x.shape, x.dtype) for path, x in named_leaves(params).items()} == {
        path: (x.shape, x.dtype) for path, x in named_leaves(mine).items()
    }
    for path, x in named_leaves(params).items():
        residual = path.endswith(("out/kernel", "down/kernel"))
        stddev = 0.0 if path.endswith("scale") else 0.02 / (2 if residual else 1)
        # The deviation of n samples has a relative error of 1 / sqrt(2n); five of these.
        assert np.std(x) == pytest.approx(stddev, rel=5 / np.sqrt(2 * x.size)), path


def test_loss_and_gradients_are_the_transformers(ours, params):
    family, module = ours
    batch, key = packed_batch(4), jax.random.key(2)

    def mine(params):
        mean, _ = family.loss(module.merge(params, {}, key), batch, key, train=True)
        return mean.value

    # The same sums in another order, in float32: a few roundings of 6e-8 on every value.
    value, grads = jax.jit(jax.value_and_grad(mine))(params)
    want, want_grads = jax.jit(jax.value_and_grad(lambda p: plain.loss(CONFIG, p, batch)))(params)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for path, grad in named_leaves(want_grads).items():
        atol = 1e-5 * float(jnp.max(jnp.abs(grad)))
        np.testing.assert_allclose(named_leaves(grads)[path], grad, rtol=1e-4, atol=atol)


def losses(strategy, num_devices, params=None, steps=3, **keys):
    mesh = plain.make_mesh(strategy, jax.devices()[:num_devices])
    optimizer, schedule = plain.make_optimizer(steps, learning_rate=1e-3)
    if params is None:
        state = plain.init_state(CONFIG, optimizer, mesh)
    else:
        placed = plain.state_shardings(CONFIG, optimizer, mesh)
        state = jax.device_put((params, optimizer.init(params)), placed)
    step = plain.make_step(CONFIG, optimizer, schedule, mesh, **keys)
    found = []
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers.
        for index in range(steps):
            batch = plain.random_batch(CONFIG, 16, LENGTH, index)
            state, metrics = step(state, batch, jnp.int32(index))
            found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    assert step._cache_size() == 1
    return np.array(found), state


@pytest.fixture(scope="module")
def on_one_device(params):
    return losses("data", 1, params)[0]


@pytest.mark.parametrize(
    ("strategy", "keys"),
    [("data", {}), ("fsdp", {"microbatches": 2}), ("data=2,fsdp=2,tensor=2", {"microbatches": 2})],
)
def test_every_mesh_gives_the_same_losses(on_one_device, params, strategy, keys):
    made = params if strategy == "data" else None  # None: made on the shards.
    found, (params, opt_state) = losses(strategy, 8, made, **keys)
    np.testing.assert_allclose(found, on_one_device, rtol=1e-5)
    for path, x in named_leaves((params, opt_state)).items():
        sharded = x.ndim > 1 and "scale" not in path
        parts = {"data": 1, "fsdp": 8}.get(strategy, 4) if sharded else 1
        assert x.addressable_shards[0].data.size == x.size // parts, path


def test_remat_and_bfloat16_change_no_more_than_rounding(params):
    batch = plain.random_batch(CONFIG, 4, LENGTH)
    changes = [{}, {"remat": "dots"}, {"remat": "full"}, {"dtype": "bfloat16"}]

    @jax.jit
    def values(params):
        return [plain.loss(dataclasses.replace(CONFIG, **c), params, batch) for c in changes]

    with jax.numpy_dtype_promotion("standard"):
        exact, *recomputed, low = values(params)
    np.testing.assert_allclose(recomputed, exact, rtol=1e-6)
    assert low.dtype == jnp.float32
    np.testing.assert_allclose(low, exact, rtol=2**-8)
