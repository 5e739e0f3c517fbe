"""Which way attention takes over `context`, why, and what is refused; the zig-zag order."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.errors import ModelError, RuleError
from shardlib.nn.attention import attend, plan_context, unzigzag, zigzag
from shardlib.sharding.manual import manual

STANDARD = sl.rules.STANDARD
WHOLE = STANDARD.override(activations={"length": None})


def plan(mesh, length=32, heads=8, kv_heads=2, rules=STANDARD, **options):
    with sl.use(sl.make_mesh(mesh), rules):
        return plan_context(length, heads, kv_heads, **options)


RING, TURNS = "ring: memory of one shard", "zigzag order: an early and a late chunk"
EQUAL = "all chunks have equal work"


@pytest.mark.parametrize(
    ("mesh", "options", "method", "order", "reasons"),
    [
        ("data=8", {}, "none", "contiguous", ["no axis context"]),
        ("context=8", {"rules": WHOLE}, "none", "contiguous", ["leave 'length' whole"]),
        ("context=8", {}, "ring", "zigzag", [RING, TURNS]),
        ("context=8", {"window": 5}, "ring", "contiguous", [RING, f"with a window {EQUAL}"]),
        ("context=8", {"causal": False}, "ring", "contiguous", [RING, f"causal mask {EQUAL}"]),
        ("context=8", {"dropout": 0.1, "context": "gather"}, "gather", "contiguous",
         ["gather: asked for", "the masks of dropout=0.1"]),
        ("context=8", {"length": 40}, "ring", "contiguous", ["40 positions cannot be cut into 16"]),
        ("stage=2,context=4", {}, "gather", "zigzag", ["idle pipeline stages", TURNS]),
        ("context=4,tensor=2", {"backend": "xla"}, "ulysses", "contiguous",
         ["the backend xla needs whole rows"]),
        ("context=8", {"order": "contiguous"}, "ring", "contiguous", [RING, "order: given"]),
    ],
)  # fmt: skip
def test_a_way_is_chosen_for_a_reason(mesh, options, method, order, reasons):
    found = plan(mesh, **options)
    assert (found.method, found.order) == (method, order)
    assert all(reason in found.reason for reason in reasons)


@pytest.mark.parametrize(
    ("mesh", "options", "match"),
    [
        ("context=4,tensor=2", {"context": "ulysses", "heads": 12},
         r"ulysses over context=4 .* 6 heads \(of 12, .*\n  Use context 'ring' or"),
        ("stage=2,context=4", {"context": "ring"},
         r"ring over context=4 .* stage=2\.\n  Use context 'auto' or 'gather'"),
        # All reasons at once.
        ("context=8",
         {"context": "gather", "backend": "xla", "order": "zigzag", "length": 8, "dropout": 0.5},
         r"dropout=0.5; .* xla needs whole rows; half of a shard of 1 .*\n  Use backend 'auto'"),
        ("context=8", {"length": 8 * 1031}, r"a shard of 1031 .*\n  Use backend 'auto'"),
        ("context=8", {"length": 24, "order": "zigzag", "context": "ulysses"},
         r"a shard of 3 positions cannot be halved .*\n  Use context 'ring'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_all_reasons(mesh, options, match):
    with pytest.raises(ModelError, match=match):
        plan(mesh, **options)


def test_a_length_that_the_axis_does_not_divide_is_refused_by_the_rule():
    with pytest.raises(RuleError, match="context=8 does not divide 100"):
        plan("context=8", length=100)


def test_length_over_another_axis_is_refused():
    rules = STANDARD.override(activations={"length": "context+tensor"})
    with pytest.raises(
        ModelError, match=r"over context\+tensor, but .*\n  Set the activation rule"
    ):
        plan("context=4,tensor=2", rules=rules)


@pytest.mark.parametrize("method", ["auto", "ring", "gather", "ulysses"])
def test_zigzag_over_devices_that_do_not_split_the_row_is_refused(method):
    """`zigzag` permutes for every mesh with the axis: taken as contiguous, the row were another."""
    arrays = [jnp.ones((2, 32, 8, 8))] * 3
    with (
        sl.use(sl.make_mesh("context=4,data=2"), WHOLE),
        pytest.raises(ModelError, match=r"rules leave 'length' whole: .*\n  Leave out both"),
    ):
        jax.jit(lambda *arrays: attend(*arrays, order="zigzag", context=method))(*arrays)


def test_inside_of_a_region_over_context_a_shard_is_a_row():
    x = jax.random.normal(jax.random.key(0), (2, 32, 8, 8))

    def run(order):
        rows = P(None, "context")
        region = manual(lambda x: attend(x, x, x, order=order), ("context",), (rows,), rows)
        return jax.jit(region)(x)

    with sl.use(sl.make_mesh("context=4,data=2"), STANDARD):
        found = run("contiguous")
        with pytest.raises(ModelError, match=r"context is manual in .*\n  Leave out both `zigzag`"):
            run("zigzag")
    shards = jnp.split(x, 4, axis=1)
    wanted = jnp.concatenate([jax.jit(attend)(x, x, x) for x in shards], axis=1)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("mesh", ["data=2,context=1", "data=2", None])
def test_on_one_device_along_context_zigzag_is_the_own_order(mesh):
    x = jax.random.normal(jax.random.key(0), (2, 8, 2, 8))
    wanted = jax.jit(attend)(x, x, x)
    scope = sl.use(sl.make_mesh(mesh, devices=jax.devices()[:2]), STANDARD) if mesh else None
    with scope or contextlib.nullcontext():
        y = zigzag(x)
        np.testing.assert_array_equal(y, x)
        for method in ("auto", "ring", "gather", "ulysses"):
            run = functools.partial(attend, order="zigzag", context=method)
            found = jax.jit(run)(y, y, y)
            np.testing.assert_array_equal(found, wanted)


def test_explicit_positions_are_left_to_the_compiler():
    query, key = jnp.ones((2, 3, 4, 8)), jnp.arange(2 * 16 * 4 * 8.0).reshape(2, 16, 4, 8) / 1024
    rows = jnp.array([[5, 6, 7]] * 2)
    wanted = jax.jit(attend)(query, key, key, positions=rows)
    with sl.use(sl.make_mesh("context=8"), STANDARD) as scope:
        placed = jax.device_put(key, jax.NamedSharding(scope.mesh, P(None, "context")))
        run = (
            jax.jit(functools.partial(attend))
            .lower(query, placed, placed, positions=rows)
            .compile()
        )
    assert "all-reduce" in run.as_text()
    np.testing.assert_allclose(run(query, placed, placed, positions=rows), wanted, atol=1e-6)


def test_zigzag_gives_each_shard_an_early_and_a_late_chunk():
    mesh = sl.make_mesh("data=2,context=4")
    x = np.stack([np.arange(16), 100 + np.arange(16)]).astype(np.int32)
    with sl.use(mesh, STANDARD):
        y = jax.jit(zigzag)(x)
        back = jax.jit(unzigzag)(y)
        last = jax.jit(lambda x: zigzag(x, dim=-1))(x[:, None, :])
    row = [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    np.testing.assert_array_equal(y, np.stack([row, 100 + np.array(row)]))
    assert y.sharding.spec[1] == "context"
    np.testing.assert_array_equal(back, x)
    np.testing.assert_array_equal(last[:, 0], y)


def test_zigzag_gathers_and_never_permutes():
    """Idle pipeline stages must not be needed for it."""
    with sl.use(sl.make_mesh("data=2,context=4"), STANDARD):
        placed = jax.NamedSharding(sl.make_mesh("data=2,context=4"), P("data", "context"))
        x = jax.ShapeDtypeStruct((2, 16), jnp.int32, sharding=placed)
        text = jax.jit(zigzag).lower(x).compile().as_text()
    assert "all-gather" in text
    assert "collective-permute" not in text
