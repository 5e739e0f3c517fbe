"""A scale, a bound of the scores, sinks, and values of other dims: every method against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardlib as sl
from shardlib.errors import ModelError
from shardlib.nn.attention import attend, resolve_backend

BATCH, LENGTH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 256, 4, 2, 16, 24
SCALE, SOFTCAP = 0.6, 1.5
OPTIONS = {"scale": SCALE, "softcap": SOFTCAP}
MESHES = [
    ("data=2,tensor=4", {"backend": "xla"}),
    ("data=2,tensor=4", {"backend": "blockwise"}),
    ("context=4,data=2", {"context": "ring"}),
    ("context=2,tensor=4", {"context": "ring"}),
    ("context=4,data=2", {"context": "gather"}),
    ("context=2,data=2,tensor=2", {"context": "ulysses"}),
]


def arrays():
    rng = np.random.default_rng(0)
    shapes = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM)]
    rows = [rng.normal(size=(BATCH, LENGTH, *shape)).astype(np.float32) for shape in shapes]
    # One sink far below the scores, and one far above them.
    return [*rows, np.array([-3.0, 1.0, 2.0, 6.0], np.float32)]


def reference(query, key, value, sinks):
    """Attention in float64, as its formula says."""
    key, value = (np.repeat(x.astype(np.float64), HEADS // KV_HEADS, axis=2) for x in (key, value))
    scores = SOFTCAP * np.tanh(np.einsum("bthd,bshd->bhts", query, key) * SCALE / SOFTCAP)
    scores = np.where(np.tril(np.ones((LENGTH, LENGTH), bool)), scores, -np.inf)
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sinks.astype(np.float64))[:, None, None]
    return np.einsum("bhts,bshd->bthd", weights, value)


def results(**options):
    """The output of attention, and the gradients of a sum of squares of it."""

    def loss(arrays):
        query, key, value = (
            sl.constrain(x, "batch", "length", heads, "head_dim")
            for x, heads in zip(arrays, ("heads", "kv_heads", "kv_heads"), strict=False)
        )
        y = attend(query, key, value, sinks=arrays[3], **OPTIONS, **options)
        return jnp.sum(jnp.square(y)), y

    with jax.default_matmul_precision("highest"):
        inputs = [jnp.asarray(x) for x in arrays()]
        (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
    return y, grads


def close(actual, expected):
    # Sums of 256 float32 products, relative to the largest: 256 * 2**-24 is 1.5e-5.
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1.5e-5 * np.abs(y).max())


@pytest.mark.mesh
def test_every_method_computes_the_formula():
    y, grads = results(backend="xla")
    close(y, reference(*arrays()))
    close(results(backend="blockwise"), (y, grads))
    for mesh, options in MESHES:
        with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
            close(results(**options), (y, grads))


def test_gradients_are_those_of_finite_differences():
    _, (of_query, _, of_value, of_sinks) = results(backend="blockwise")
    step = 1e-4
    for number, grad, at in (
        (0, of_query, (1, 200, 1, 3)),
        (2, of_value, (1, 200, 1, 3)),
        (3, of_sinks, (1,)),
    ):
        moved = [[x.astype(np.float64) for x in arrays()] for _ in range(2)]
        moved[0][number][at] += step
        moved[1][number][at] -= step
        high, low = (np.sum(reference(*x) ** 2) for x in moved)
        np.testing.assert_allclose(grad[at], (high - low) / (2 * step), rtol=1e-3)


def test_cudnn_is_not_chosen_for_what_it_lacks():
    common = {"dtype": jnp.bfloat16, "head_dim": 64, "platform": "gpu"}
    assert resolve_backend("auto", **common).backend == "cudnn"
    for options, reason in (
        ({"softcap": 50.0}, "softcap"),
        ({"value_dim": 32}, "of values 32"),
        ({"sinks": True}, "heads have sinks"),
    ):
        resolved = resolve_backend("auto", **common, **options)
        assert resolved.backend == "xla"
        assert reason in resolved.reason


@pytest.mark.parametrize("backend", ["cudnn", "splash"])
def test_kernels_without_sinks_refuse_them(backend):
    query, key, value, sinks = map(jnp.asarray, arrays())
    with pytest.raises(ModelError, match=r"heads have sinks(.|\n)*Use backend 'auto' or 'xla'"):
        attend(query, key, value, sinks=sinks, backend=backend)


def test_there_is_a_sink_for_each_head():
    query, key, value, sinks = map(jnp.asarray, arrays())
    with pytest.raises(ModelError, match=r"sinks have shape \(2,\), expected \(4,\)"):
        attend(query, key, value, sinks=sinks[:2])


@pytest.mark.parametrize("option", [{"scale": 0.0}, {"softcap": -1.0}, {"scale": float("nan")}])
def test_options_out_of_range_are_refused(option):
    (name,) = option
    with pytest.raises(ModelError, match=rf"{name} of attention(.|\n)*Set {name}=None"):
        attend(*(jnp.asarray(x) for x in arrays()[:3]), **option)
