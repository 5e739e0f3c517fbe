"""Lookup in a table that is cut over the mesh, against one device's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.nn.lookup import MIN_WIDTH, lookup
from shardlib.sharding.manual import manual

ROWS, WIDTH, BATCH, LENGTH = 512, 8 * MIN_WIDTH, 16, 16
AXES = ("vocab", "embed")
RESIDUAL = ("batch", "residual_length", "embed")
EXCHANGES = [
    "fsdp=8",
    "data=2,fsdp=4",
    "fsdp=4,tensor=2",
    "context=2,fsdp=4",
    "data=2,fsdp=2,tensor=2",
]


def value(table, ids, target):
    return jnp.sum(lookup(table, ids, AXES, vector_axes=RESIDUAL).astype(jnp.float32) * target)


@pytest.fixture(scope="module")
def arguments():
    """Small whole numbers, whose sums are exact in any order."""
    random = np.random.default_rng(0)
    table = random.integers(-8, 9, (ROWS, WIDTH)).astype(np.float32)
    ids = random.integers(0, ROWS, (BATCH, LENGTH)).astype(np.int32)
    ids[0, :4] = [ROWS, ROWS + 7, -1, 2**31 - 1]
    ids[3, 5:9] = ids[4, 2]
    target = random.integers(-4, 5, (BATCH, LENGTH, WIDTH)).astype(np.float32)
    return table, ids, target


def compiled(mesh, rules, arguments, function=value):
    """Returns the program of value and gradient on a mesh, its arguments placed by the rules."""

    def run(table, ids, target):
        with sl.use(mesh, rules):
            return jax.value_and_grad(function)(table, ids, target)

    with sl.use(mesh, rules) as scope:
        table = scope.sharding(AXES, arguments[0].shape, "params")
        ids = scope.sharding(("batch", "length"), arguments[1].shape, "activations")
        target = scope.sharding(RESIDUAL, arguments[2].shape, "activations")
    placed = jax.device_put(arguments, (table, ids, target))
    return jax.jit(run, out_shardings=(None, table)).lower(*placed).compile(), placed


def text_of(program):
    text = program.as_text()
    assert text is not None
    return text


@pytest.mark.rest("mesh", keep=3)
@pytest.mark.parametrize("rules", [sl.rules.STANDARD, sl.rules.SEQUENCE], ids=["standard", "seq"])
@pytest.mark.parametrize("mesh", EXCHANGES)
def test_value_and_gradient_are_those_of_one_device(mesh, rules, arguments):
    expected = jax.jit(jax.value_and_grad(value))(*arguments)
    program, placed = compiled(sl.make_mesh(mesh), rules, arguments)
    found = program(*placed)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    text = text_of(program)
    assert len(re.findall(r" all-to-all\(", text)) == 2
    # Where `tensor` cuts the rows and the length of the residual, each device needs the gradients
    # of all positions for its own rows.
    sequence = rules == sl.rules.SEQUENCE and "tensor" in mesh
    assert len(re.findall(r"f32\S* all-gather\(", text)) == sequence
    assert len(re.findall(r" reduce-scatter\(", text)) == sequence


def test_a_gradient_of_many_ids_in_bfloat16_is_summed_in_float32():
    table = jnp.zeros((ROWS, WIDTH), jnp.bfloat16)
    ids = jnp.zeros((8, 63), jnp.int32)
    target = jnp.ones((8, 63, WIDTH))
    program, placed = compiled(sl.make_mesh("fsdp=8"), sl.rules.STANDARD, (table, ids, target))
    # In bfloat16, a running sum of ones stops at 256.
    np.testing.assert_array_equal(program(*placed)[1][0].astype(np.float32), 504.0)


@pytest.mark.parametrize(
    ("mesh", "shape"), [("fsdp=8", (1024, 8)), ("tensor=2,fsdp=4", (BATCH, 256))], ids=str
)
def test_the_table_is_gathered_where_that_sends_less(mesh, shape, arguments):
    table, _, _ = arguments
    batch, length = shape[0], shape[1]
    ids = np.arange(batch * length, dtype=np.int32).reshape(batch, length) % ROWS
    target = np.ones((batch, length, WIDTH), np.float32)
    program, placed = compiled(sl.make_mesh(mesh), sl.rules.STANDARD, (table, ids, target))
    assert " all-to-all(" not in text_of(program)
    expected = jax.value_and_grad(value)(table, ids, target)
    np.testing.assert_array_equal(program(*placed)[1], expected[1])


def test_a_narrow_table_is_gathered(arguments):
    table, ids, target = arguments
    narrow = table[:, : WIDTH // 2], ids, target[..., : WIDTH // 2]
    program, _ = compiled(sl.make_mesh("fsdp=8"), sl.rules.STANDARD, narrow)
    assert " all-to-all(" not in text_of(program)


def test_a_narrow_table_of_a_slice_travels_in_two_hops(arguments, monkeypatch):
    monkeypatch.setattr("shardlib.nn.lookup.slice_axis_of", lambda scope, rows: "fsdp")
    halves = [slice(8), slice(8, None)]
    monkeypatch.setattr("shardlib.nn.lookup.summed_columns", lambda size, chips: halves)
    table, ids, target = arguments
    narrow = table[:, : WIDTH // 2], ids, target[..., : WIDTH // 2]
    program, placed = compiled(sl.make_mesh("fsdp=8"), sl.rules.STANDARD, narrow)
    assert "replica_groups={{0,2,4,6},{1,3,5,7}}" in text_of(program)
    found, expected = program(*placed), jax.value_and_grad(value)(*narrow)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def grouped(table, ids, target):
    """The value as the sum over a region in which `data` is manual."""

    def group(table, ids, target):
        return jax.lax.psum(value(table, ids, target), "data")

    return manual(group, ("data",), (P(), P("data"), P("data")), P())(table, ids, target)


def test_an_exchange_nests_in_a_region_over_data(arguments):
    program, placed = compiled(sl.make_mesh("data=2,fsdp=4"), sl.rules.STANDARD, arguments, grouped)
    assert " all-to-all(" in text_of(program)
    expected = jax.value_and_grad(value)(*arguments)
    np.testing.assert_array_equal(program(*placed)[1], expected[1])


def staged(table, ids, target):
    """The value in a region in which `stage` is manual."""
    return manual(value, ("stage",), (P(), P(), P()), P())(table, ids, target)


@pytest.mark.parametrize("mesh", ["stage=2,data=2,tensor=2", "stage=2,fsdp=2,tensor=2"])
def test_more_ids_than_rows_are_looked_up_in_a_region_over_stages(mesh, arguments):
    table, ids, target = arguments
    arguments = table[:128], ids % 128, target
    program, placed = compiled(sl.make_mesh(mesh), sl.rules.STANDARD, arguments, staged)
    found, expected = program(*placed), jax.value_and_grad(value)(*arguments)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_where_regions_cannot_nest_the_table_is_gathered(arguments, monkeypatch):
    monkeypatch.setattr("shardlib.sharding.manual.NESTS_IN_MESH_ORDER_ONLY", True)
    mesh = jax.make_mesh((4, 2), ("fsdp", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    program, placed = compiled(mesh, sl.rules.STANDARD, arguments, grouped)
    assert " all-to-all(" not in text_of(program)
    expected = jax.value_and_grad(value)(*arguments)
    np.testing.assert_array_equal(program(*placed)[1], expected[1])
