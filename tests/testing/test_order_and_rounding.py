"""What is read out of a traced program: who comes first, and how much is added up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib.testing.deviations import Expected, Quantity
from shardlib.testing.rounding import NUM_PROBES, perturbation, perturbations, reductions
from shardlib.testing.traced import LAST, Use, first_uses
from shardlib.testing.training import by_layer, use_of

U = 2.0**-24


def traced(fn, *shapes, dtype=jnp.float32):
    return jax.jit(fn).trace(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).jaxpr.jaxpr


def uses_by_index(jaxpr):
    uses = first_uses(jaxpr)
    return {i: uses[variable] for i, variable in enumerate(jaxpr.invars) if variable in uses}


def test_arguments_in_the_order_of_their_use():
    @jax.remat
    def block(x, up, down):
        return jnp.sin(x @ up) @ down

    def program(unused, head, downs, ups, x, table):
        x = table * x

        def layer(x, weights):
            up, down = weights
            return block(x, up, down), None

        x, _ = jax.lax.scan(layer, x, (ups, downs))
        return jax.jit(jnp.matmul)(x, head)

    uses = uses_by_index(traced(program, (3,), (4, 4), (5, 4, 4), (5, 4, 4), (4, 4), (4, 4)))
    keys = {name: uses[i] for i, name in enumerate(["unused", *"hdux", "t"]) if i in uses}
    assert "unused" not in keys
    assert {name: use.layers for name, use in keys.items()} == {
        **dict.fromkeys("hxt"),
        "d": 5,
        "u": 5,
    }
    in_order = sorted(
        [("t", None), ("h", None)] + [(name, i) for name in "du" for i in range(2)],
        key=lambda entry: keys[entry[0]].key(entry[1]),
    )
    assert in_order == [("t", None), ("u", 0), ("d", 0), ("u", 1), ("d", 1), ("h", None)]


def test_branches_and_gradients_keep_the_order():
    def loss(first, second, third, flag):
        x = jax.lax.cond(flag[0] > 0, lambda: jnp.sin(second), lambda: jnp.cos(second))
        return jnp.sum(x * first) + jnp.sum(third)

    uses = uses_by_index(traced(jax.grad(loss, argnums=(0, 1, 2)), *[(4,)] * 4))
    assert uses[3].key(None) < uses[1].key(None) < uses[0].key(None)


@pytest.mark.parametrize(
    ("program", "shapes", "terms"),
    [
        (lambda a, b: a @ b, [(8, 64), (64, 4)], 64),
        (lambda a: jnp.sum(a, axis=(0, 2)), [(8, 3, 16)], 128),
        (lambda a: a * 2, [(8,)], 1),
        (lambda a: jax.lax.scan(lambda s, x: (s + jnp.sum(x), None), 0.0, a)[0], [(10, 8)], 80),
        (lambda a: jnp.zeros(4).at[jnp.zeros(32, jnp.int32)].add(a), [(32,)], 32),
        (lambda a: jnp.cumsum(a), [(128,)], 128),
    ],
)
def test_the_largest_sum_of_a_program(program, shapes, terms):
    found = reductions(traced(program, *shapes))
    assert found == (terms, U)
    assert found.relative == U * max(1.0, np.log2(terms))


def test_the_narrowest_dtype_counts():
    def rounded(a):
        return jnp.sum(a.astype(jnp.bfloat16).astype(jnp.float32))

    assert reductions(traced(rounded, (8,))).unit_roundoff == 2.0**-8
    assert reductions(traced(lambda a: a + 1, (8,), dtype=jnp.int32)) == (1, U)


@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e-3))
def test_a_perturbation_is_relative_and_leaves_integers_alone(seed, relative):
    leaves = {
        "x": np.random.default_rng(seed).normal(size=64).astype(np.float32),
        "n": np.arange(3),
    }
    changed = {name: perturbation(relative, seed)(leaf) for name, leaf in leaves.items()}
    np.testing.assert_array_equal(changed["n"], leaves["n"])
    assert changed["x"].dtype == np.float32
    moved = changed["x"].astype(np.float64) / leaves["x"] - 1
    np.testing.assert_allclose(np.abs(moved), relative, atol=1.01 * U)
    assert {*np.sign(moved)} == {-1.0, 1.0}


def test_probes_differ_from_each_other():
    leaf = np.ones(64, np.float32)
    assert len({change(leaf).tobytes() for change in perturbations(1e-3)}) == NUM_PROBES


GRADIENT = Quantity("gradient", "w")


def values(gradient):
    return {GRADIENT: np.asarray(gradient, np.float32)}


@pytest.mark.parametrize(
    ("gradient", "error"),
    [
        ([1.0 + 2.0**-20, 0.5], None),
        ([1.0 + 2.0**-10, 0.5], 2.0**-10),
        ([np.nan, 0.5], np.inf),
        ([np.inf, 0.5], np.inf),
        ([1.0], np.inf),
    ],
)
def test_what_deviates(gradient, error):
    probe = values([1.0 + 2.0**-22, 0.5])
    expected = Expected.measured(values([1.0, 0.5]), [probe], 2.0**-22)
    # Four times the change of the probe and the rounding of the sum itself.
    assert expected.bounds == {GRADIENT: 4 * (2.0**-22 + 2.0**-22)}
    errors = [(str(d.quantity), d.error) for d in expected.deviations(values(gradient))]
    assert errors == ([] if error is None else [("the gradient of w", error)])


def test_layers_are_sorted_by_their_use():
    uses = {"up": Use((3,), (0,), 2), "down": Use((3,), (1,), 2), "head": Use((4,)), "table": LAST}
    stack, whole = np.zeros((2, 3)), np.zeros(3)
    shapes = {"table": whole, "head": whole, "0/mu/down": stack, "0/mu/up": stack}
    assert use_of("0/mu/up", uses) == uses["up"]
    assert use_of("0/count", uses) == LAST
    forward = ["0/mu/up 0", "0/mu/down 0", "0/mu/up 1", "0/mu/down 1", "head None", "table None"]
    for kind, expected in (("parameter", forward), ("gradient", forward[::-1])):
        ordered = by_layer({Quantity(kind, path): x for path, x in shapes.items()}, uses)
        assert [f"{q.path} {q.layer}" for q in ordered] == expected
