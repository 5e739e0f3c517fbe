"""A factor that is claimed free is free: operations computed in pieces give the whole."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Primitive, primitives

from shardlib.jaxprs import CALLS, REMAT, flatten, is_literal
from shardlib.partitioner import partitioned  # noqa: F401 (registers the rules)
from shardlib.partitioner.factors import ELEMENTWISE, RULES, DevicePiece, bind, factors_of

_JOIN = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min, "and": jnp.all, "or": jnp.any}


def check(fn, *args):
    """Runs a function operation by operation, each also in pieces; returns the names it cut."""
    closed = jax.make_jaxpr(fn)(*args)
    flat = flatten(closed.jaxpr)
    names = []

    def run(*leaves):
        env = dict(zip(flat.invars, [*closed.consts, *leaves], strict=True))
        found = []
        for operation in flat.operations:
            atoms = operation.invars
            values = [jnp.asarray(v.val, v.aval.dtype) if is_literal(v) else env[v] for v in atoms]
            whole = bind(operation, values)
            if (factors := factors_of(operation)) is not None:
                for cuts in cuts_of(factors):
                    names.append(operation.name)
                    found.append((whole, in_pieces(operation, factors, values, cuts)))
            env.update(zip(operation.outvars, whole, strict=True))
        return found

    # One program for all of them: most of the time goes into compiling.
    pairs = jax.jit(run)(*jax.tree.leaves(args))
    for name, (whole, pieces) in zip(names, pairs, strict=True):
        for want, got in zip(whole, pieces, strict=True):
            assert_same(name, np.asarray(got), np.asarray(want))
    return set(names)


def cuts_of(factors):
    """Yields every factor with every number of parts, and pairs of factors in halves."""
    named = {f for dims in (*factors.operands, *factors.results) for f in dims if f is not None}
    cuts = [(f, p) for f in sorted(named) for p in (2, 3) if factors.sizes[f] % p == 0]
    yield from ([cut] for cut in cuts)
    yield from itertools.combinations([cut for cut in cuts if cut[1] == 2], 2)


class Piece(DevicePiece):
    """A piece that is known at trace time: its assignment maps a factor to (parts, index)."""

    def parts(self, factor):
        return self.assignment.get(factor, (1, 0))[0]

    def index(self, factor):
        return jnp.int32(self.assignment.get(factor, (1, 0))[1])


def in_pieces(operation, factors, values, cuts, at=None):
    """Returns the results of an operation joined from pieces."""
    at = at or {}
    if not cuts:
        pairs = zip(values, factors.operands, strict=True)
        return factors.compute(operation, [part(x, dims, at) for x, dims in pairs], Piece(at, {}))
    (factor, parts), *rest = cuts
    found = [
        in_pieces(operation, factors, values, rest, {**at, factor: (parts, i)})
        for i in range(parts)
    ]
    results = []
    for number, pieces in enumerate(zip(*found, strict=True)):
        dims = factors.results[number]
        if factor in dims:
            results.append(jnp.concatenate(pieces, axis=dims.index(factor)))
        else:
            assert factor in factors.reduced, f"{operation.name}: factor {factor} goes nowhere"
            results.append(_JOIN[factors.reduced[factor]](jnp.stack(pieces), axis=0))
    return results


def part(x, dims, at):
    for dim, factor in enumerate(dims):
        if factor in at:
            parts, index = at[factor]
            size = x.shape[dim] // parts
            x = lax.slice_in_dim(x, index * size, (index + 1) * size, axis=dim)
    return x


def assert_same(name, got, want):
    assert got.shape == want.shape, name
    if np.issubdtype(want.dtype, np.inexact):
        # Terms of a sum of at most `size` numbers about 1 are added in another order.
        close = float(np.finfo(want.dtype).eps) * 16 * max(2, want.size)
        np.testing.assert_allclose(got, want, rtol=close, atol=close, err_msg=name)
    else:
        np.testing.assert_array_equal(got, want, err_msg=name)


def numbers(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def indices(high, *shape):
    # Some out of bounds, which every mode of indexing treats in its own way.
    return np.random.default_rng(shape).integers(-1, high + 2, shape).astype(np.int32)


dims = st.sampled_from([1, 2, 3, 4])
shapes = st.lists(dims, min_size=1, max_size=3).map(tuple)
many = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


@many
@given(st.lists(dims, min_size=5, max_size=5), st.booleans(), st.booleans())
def test_products(sizes, has_batch, second):
    b, m, k, j, n = sizes
    left = numbers(*([b] if has_batch else []), m, k, *([j] if second else []))
    right = numbers(*([b] if has_batch else []), *([j] if second else []), n, k)
    batch = "b" if has_batch else ""
    inner = "j" if second else ""
    einsum = f"{batch}mk{inner},{batch}{inner}nk->{batch}mn"

    def loss(x, y):
        return jnp.sum(jnp.sin(jnp.einsum(einsum, x, y)))

    is_one = max(*left.shape, *right.shape) == 1
    assert check(jax.grad(loss, argnums=(0, 1)), left, right) or is_one


@pytest.mark.mesh
@many
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from(["SAME", "VALID"]),
    st.sampled_from([1, 2]),
    st.sampled_from([2, 4, 6]),
)
def test_convolutions(groups, stride, padding, dilation, batch):
    x, w = numbers(batch, 6, 7, 8), numbers(3, 2, 8 // groups, 12)

    def loss(x, w):
        y = lax.conv_general_dilated(
            x,
            w,
            (stride, 1),
            padding,
            rhs_dilation=(1, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return jnp.sum(jnp.sin(y))

    # The gradient of a grouped kernel is a convolution with groups of the batch.
    assert "conv_general_dilated" in check(jax.grad(loss, argnums=(0, 1)), x, w)


@many
@given(shapes, st.data())
def test_shapes(shape, data):
    x = numbers(*shape)
    order = data.draw(st.permutations(range(len(shape))))
    total = math.prod(shape)
    first = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    start = [data.draw(st.integers(0, n - 1)) for n in shape]
    stride = [data.draw(st.integers(1, 2)) for _ in shape]
    axis = data.draw(st.integers(0, len(shape) - 1))

    def fn(x):
        y = jnp.transpose(x, order).reshape(first, total // first).T
        z = lax.slice(x, start, shape, stride)
        p = lax.pad(x, jnp.float32(0), [(1, -1, 0), *[(0, 1, 1)] * (len(shape) - 1)])
        w = jnp.concatenate([x, jnp.flip(x, axis)], axis)
        b = jnp.broadcast_to(x[None], (2, *shape)) * jnp.expand_dims(x, 0)
        a, c = jnp.split(w, 2, axis)
        return y, z, p, b, a + c, lax.rev(x, (axis,)), jnp.squeeze(x[:1], 0)

    check(fn, x)


@pytest.mark.mesh
@many
@given(shapes, st.data())
def test_stacks_and_repetitions(shape, data):
    x, axis = numbers(*shape), data.draw(st.integers(0, len(shape)))
    reps = [data.draw(st.integers(1, 2)) for _ in shape]

    def fn(x):
        y = lax.stack([x, 2 * x], axis)
        return lax.unstack(y, axis), lax.unstack(y, 0), lax.tile(x, reps)

    check(fn, x)
    assert check(lambda x: lax.stack([x, x], 1), numbers(2, 3)) == {"stack"}
    assert check(lambda x: lax.unstack(x, 1), numbers(2, 3)) == {"unstack"}
    assert check(lambda x: lax.tile(x, (1, 3)), numbers(2, 3)) == {"tile"}


@many
@given(shapes, st.data())
def test_reductions_and_orders(shape, data):
    x = numbers(*shape)
    axis = data.draw(st.integers(0, len(shape) - 1))

    def fn(x):
        both = x > 0
        sums = (x.sum(axis), x.max(axis), x.min(axis), x.prod(axis), x.argmax(axis))
        flags = both.all(axis), both.any(axis)
        ordered = jnp.sort(x, axis), lax.top_k(x, 1), lax.cumsum(x, axis), lax.cummax(x, axis)
        return sums, flags, ordered, jnp.fft.fft(x, axis=-1), lax.cumlogsumexp(x, axis)

    check(fn, x)


@pytest.mark.mesh
@many
@given(dims, dims, dims, st.sampled_from(["clip", "fill", "promise_in_bounds"]))
def test_lookups(rows, columns, count, mode):
    table, at = numbers(rows * 2, columns), indices(rows * 2, count * 2, 3)
    along = np.clip(indices(columns, rows * 2, 1), 0, columns - 1)

    def loss(table):
        taken = jnp.take(table, at, axis=0, mode=mode if mode != "promise_in_bounds" else "clip")
        chosen = table.at[at].get(mode=mode)
        return (
            jnp.nansum(jnp.sin(taken))
            + jnp.sum(jnp.take_along_axis(table, along, 1) ** 2)
            + (jnp.nansum(chosen))
        )

    assert {"gather", "scatter-add"} <= check(jax.value_and_grad(loss), table)


@pytest.mark.mesh
@many
@given(dims, dims, st.sampled_from(["clip", "drop"]))
def test_updates(rows, columns, mode):
    x, at, new = numbers(rows * 2, columns), indices(rows * 2, 6), numbers(6, columns)

    def fn(x, new):
        by_index = x.at[at].add(new, mode=mode), x.at[at].max(new, mode=mode)
        taken = x.at[at].subtract(new, mode=mode)
        pairs = x.at[at, 0].add(new[:, 0], mode=mode)
        window = lax.dynamic_update_slice(x, new[:1] * 2, (at[0], jnp.int32(0)))
        row = lax.dynamic_slice(x, (at[1], at[2]), (1, columns))
        return by_index, taken, pairs, window, row, jax.ops.segment_sum(new, at, rows * 2)

    check(fn, x, new)


@pytest.mark.mesh
@many
@given(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from(["SAME", "VALID"]))
def test_windows(size, stride, padding):
    x = numbers(4, 6, 6, 2)

    def loss(x):
        window, strides = (1, size, size, 1), (1, stride, stride, 1)
        top = lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)
        mean = lax.reduce_window(x, 0.0, lax.add, window, strides, padding)
        return jnp.sum(jnp.sin(top) * mean)

    assert check(jax.grad(loss), x)


def test_stacked_matrices():
    x = numbers(4, 3, 3)
    positive = x @ np.swapaxes(x, -1, -2) + 3 * np.eye(3, dtype=np.float32)

    def fn(a, b):
        factor = jnp.linalg.cholesky(a)
        return lax.linalg.triangular_solve(factor, b, left_side=True, lower=True)

    assert {"cholesky", "triangular_solve"} <= check(fn, positive, x)


def test_ragged_products():
    x, w = numbers(6, 4), numbers(3, 4, 2)
    groups = np.array([2, 1, 3], np.int32)
    assert "ragged_dot_general" in check(lambda x, w: lax.ragged_dot(x, w, groups), x, w)


def test_what_is_made_in_pieces():
    """Numbers that count up, and random bits, which are those of the whole bit for bit."""

    def fn(key):
        return jax.random.bits(key, (4, 6)), lax.broadcasted_iota(jnp.int32, (4, 6), 1)

    assert check(fn, jax.random.key(3)) == {"random_bits", "iota"}


def test_each_of_several_keys_makes_its_own_bits():
    keys = jax.random.split(jax.random.key(3), 4)
    assert "random_bits" in check(jax.vmap(lambda key: jax.random.bits(key, (6,))), keys)


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_other_keys_make_bits_whole(kind):
    traced = jax.make_jaxpr(lambda k: jax.random.bits(k, (4, 6)))(jax.random.key(0, impl=kind))
    flat = flatten(traced.jaxpr)
    assert [factors_of(o) for o in flat.operations if o.name == "random_bits"] == [None]


# What is computed whole, since nobody met it in a large model yet, or as its parts do not add up.
WHOLE = """
    approx_top_k custom_lin custom_linear_solve eig empty2 hessenberg random_fold_in random_gamma
    random_seed random_split reduce reduce_window rng_bit_generator rng_uniform schur
    select_and_scatter tridiagonal tridiagonal_solve
"""
# What is followed by other means, or belongs to regions and references that XLA keeps.
ELSEWHERE = """
    after_all all_gather all_to_all axis_index call cond create_token device_put get
    ragged_all_to_all scan sharding_constraint swap while
"""


def test_every_public_primitive_is_known():
    """A version of JAX that adds an operation shows here, and not as memory that models lose."""
    public = [p for p in vars(primitives).values() if isinstance(p, Primitive)]
    known = {*RULES, *ELEMENTWISE, *CALLS, *REMAT, *WHOLE.split(), *ELSEWHERE.split()}
    assert {p.name for p in public} - known == set()
    assert not (RULES.keys() | ELEMENTWISE) & {*WHOLE.split(), *ELSEWHERE.split()}


def test_operands_that_repeat_each_other():
    assert check(lambda x, y: x * y, numbers(4, 1), numbers(1, 6)) == {"mul"}


def test_sums_over_an_axis_of_vmap():
    def fn(x):
        sums = jax.vmap(lambda x: x / lax.psum(x**2, "rows"), axis_name="rows")(x)
        extremes = jax.vmap(lambda x: x - lax.pmax(x, "rows"), axis_name="rows")(x)
        return sums, extremes, jax.vmap(lambda x: lax.pmean(x, "rows"), axis_name="rows")(x)

    assert {"psum", "pmax"} <= check(fn, numbers(4, 6, 2))


def test_unknown_operations_have_no_factors():
    traced = jax.make_jaxpr(lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a * b + a, (0,)))
    flat = flatten(traced(jnp.ones((4, 2))).jaxpr)
    assert [factors_of(operation) for operation in flat.operations] == [None]
