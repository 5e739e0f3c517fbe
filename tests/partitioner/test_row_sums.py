"""What the proof says of a program over rows, against the numbers of its parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.partitioner import trace
from shardlib.partitioner.row_sums import spreads
from shardlib.partitioner.spread import KEY, ROWS, SAME, lost

PARTS, ROWS_EACH = 4, 3
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((PARTS * ROWS_EACH, 6), dtype=np.float32)
IDS = RANDOM.integers(0, 6, X.shape[:1]).astype(np.int32)
W = RANDOM.standard_normal((6, 6), dtype=np.float32)


def proven(fn):
    """Returns the relation of the result of `fn(w, x, ids, key)`, checked against its numbers."""
    key = jax.random.key(0)
    size = PARTS * ROWS_EACH
    whole = trace(fn, (W, X, IDS, key))
    part = trace(fn, (W, X[:ROWS_EACH], IDS[:ROWS_EACH], key))
    (found,) = spreads(whole, part, [SAME, ROWS, ROWS, lost(KEY)], PARTS)
    if found.kind == "lost":
        return found
    values = [
        fn(W, X[at : at + ROWS_EACH], IDS[at : at + ROWS_EACH], key)
        for at in range(0, size, ROWS_EACH)
    ]
    join = {
        "same": lambda all: all[0],
        "rows": jnp.concatenate,
        "sum": sum,
        "max": lambda all: jnp.max(jnp.stack(all), 0),
        "min": lambda all: jnp.min(jnp.stack(all), 0),
    }[found.kind]
    expected = jnp.asarray(join(values)) * float(PARTS) ** found.degree
    np.testing.assert_allclose(fn(W, X, IDS, key), expected, rtol=2e-5, atol=2e-5)
    return found


def scanned(w, x, _, key):
    return jax.lax.scan(lambda c, row: (c + jnp.sum(x * row), None), 0.0, w)[0]


def embedded(w, x, ids, key):
    return jax.grad(lambda w: jnp.mean(jnp.tanh(w[ids] * x)))(w)


def looped(w, x, _, key):
    return jnp.sum(jax.lax.fori_loop(0, jnp.int32(w[0, 0] > 0) + 2, lambda _, y: y @ w, x))


@pytest.mark.parametrize(
    ("fn", "kind", "degree"),
    [
        (lambda w, x, ids, key: jnp.sum(x @ w), "sum", 0),
        (lambda w, x, ids, key: jnp.mean(jax.nn.softmax(x @ w)), "sum", -1),
        (lambda w, x, ids, key: jnp.mean(x) + 0.1 * jnp.sum(w * w), "sum", -1),
        (lambda w, x, ids, key: w / x.shape[0], "same", -1),
        (lambda w, x, ids, key: jnp.max(x), "max", 0),
        (lambda w, x, ids, key: jnp.min(x, axis=0), "min", 0),
        (lambda w, x, ids, key: jax.nn.relu(x @ w)[:, ::2], "rows", 0),
        (lambda w, x, ids, key: jnp.cumsum(x, 1).reshape(-1, 2), "rows", 0),
        (lambda w, x, ids, key: jax.nn.one_hot(ids, 6).T @ x, "sum", 0),
        (lambda w, x, ids, key: jnp.take_along_axis(x, ids[:, None], 1), "rows", 0),
        (lambda w, x, ids, key: jnp.sum(ids) / 3, "sum", 0),
        (lambda w, x, ids, key: jnp.bincount(ids, length=6), "sum", 0),
        (lambda w, x, ids, key: jax.vmap(lambda a: jnp.sort(a) @ w)(x), "rows", 0),
        (lambda w, x, ids, key: x + 0 * jax.random.normal(jax.random.key(1), (6,)), "rows", 0),
        (embedded, "sum", -1),
        (scanned, "sum", 0),
        (looped, "sum", 0),
    ],
)
def test_sums_and_rows(fn, kind, degree):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = proven(fn)
    assert (found.kind, found.degree) == (kind, degree), found


def halves(w, x, _, key):
    return jax.lax.scan(lambda c, row: (jnp.tanh(c + row), None), w[0], x)[0]


def until(w, x, _, key):
    return jax.lax.while_loop(lambda y: jnp.max(y) < 9, lambda y: y + 1, x)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda w, x, ids, key: x @ x.T, "may meet in dot_general"),
        (lambda w, x, ids, key: x - jnp.mean(x, 0), "may meet in sub"),
        (lambda w, x, ids, key: jnp.exp(jnp.mean(x)), "a sum over rows enters exp"),
        (lambda w, x, ids, key: jnp.sum(x) / jnp.sum(ids), "a sum over rows enters div"),
        (lambda w, x, ids, key: jnp.sum(ids) // 3, "a sum over rows enters"),
        (lambda w, x, ids, key: jnp.maximum(jnp.sum(x), 1), "a sum over rows enters max"),
        (lambda w, x, ids, key: jnp.max(x) + jnp.max(x * w[0]), "a sum over rows enters add"),
        (lambda w, x, ids, key: jnp.sum(x) ** 2, "a sum over rows enters"),
        (lambda w, x, ids, key: jnp.log(x.shape[0] * w[0, 0] ** 2), "a sum over rows enters log"),
        (lambda w, x, ids, key: jnp.sum(x) + 1, "a sum over rows enters add"),
        (lambda w, x, ids, key: x[::-1], "may meet in rev"),
        (lambda w, x, ids, key: x[1:], "may meet in slice"),
        (lambda w, x, ids, key: jnp.sum(x[0]), "may meet in slice"),
        (lambda w, x, ids, key: jnp.roll(x, 1, 0), "another way"),
        (lambda w, x, ids, key: jnp.sort(x, 0), "may meet in sort"),
        (lambda w, x, ids, key: x.reshape(6, -1), "may meet in reshape"),
        (lambda w, x, ids, key: x.T.reshape(-1), "may meet in reshape"),
        (lambda w, x, ids, key: jnp.cumsum(x, 0), "may meet in cumsum"),
        (lambda w, x, ids, key: x * jnp.arange(x.shape[0])[:, None], "may meet in iota"),
        (lambda w, x, ids, key: x * np.linspace(0, 1, x.shape[0])[:, None], "another way"),
        (lambda w, x, ids, key: w.at[ids].add(x), "may meet in scatter-add"),
        (lambda w, x, ids, key: x.at[0].add(1.0), "may meet in scatter-add"),
        (lambda w, x, ids, key: x.at[1].subtract(2 * x[1]), "may meet in"),
        (
            lambda w, x, ids, key: (
                jnp.sum(x, 0).at[jnp.array([0, 9])].get(mode="fill", fill_value=1)
            ),
            "a sum over rows enters gather",
        ),
        (lambda w, x, ids, key: x[ids], "may meet in add"),
        (lambda w, x, ids, key: x[jnp.argsort(ids)], "may meet in"),
        (lambda w, x, ids, key: jnp.argmax(x[:, 0]), "may meet in argmax"),
        (lambda w, x, ids, key: x * 2 if x.shape[0] > 3 else x, "another way"),
        (lambda w, x, ids, key: x * (2.0 if x.shape[0] > 3 else 5.0), "another way"),
        (lambda w, x, ids, key: x + jax.random.normal(key, x.shape), "draws random numbers"),
        (lambda w, x, ids, key: jax.random.normal(jax.random.key(0), x.shape), "may meet in"),
        (lambda w, x, ids, key: x + jax.random.key_data(key)[0], "reads the random key"),
        (lambda w, x, ids, key: jax.pure_callback(np.tanh, x, x), "another way"),
        (halves, "another way"),
        (until, "a sum over rows enters lt"),
    ],
)
def test_what_is_not_a_sum_over_rows(fn, why):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = proven(fn)
    assert found.kind == "lost"
    assert why in found.why


def test_a_value_that_nothing_reads_does_not_matter():
    def layer(carry, w):
        y, key = carry
        key, own = jax.random.split(key)
        noise = jax.random.normal(own, y.shape)
        return (y @ w, key), jnp.sum(noise)

    def fn(w, x, ids, key):
        (y, _), _ = jax.lax.scan(layer, (x, key), jnp.stack([w, w]))
        return jnp.sum(y)

    assert proven(fn).kind == "sum"


def test_a_rule_of_a_gradient_by_hand_is_read():
    @jax.custom_vjp
    def normed(x):
        return x

    normed.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))
    found = proven(lambda w, x, ids, key: jax.grad(lambda w: jnp.sum(normed(x @ w)))(w))
    assert "a sum over rows enters sqrt" in found.why
