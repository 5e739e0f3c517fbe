"""Moves from layout to layout keep the value, and cost what ring collectives send."""

import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import shardlib as sl
from shardlib.partitioner.choose import CutProblem, choose
from shardlib.partitioner.factors import Factors
from shardlib.partitioner.layout import ValueLayout, from_spec, made, move, moved_bytes, scattered

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
SPECS = (
    (),
    ("data",),
    (None, "data"),
    (("data", "fsdp"),),
    (("fsdp", "data"),),
    ("fsdp", "data"),
    ("data", "fsdp"),
    (("data", "fsdp"), "tensor"),
    ("tensor", ("data", "fsdp")),
    (None, ("data", "fsdp")),
    (None, ("tensor", "data")),
    ("fsdp", ("tensor", "data")),
)


def test_every_move_keeps_the_value(mesh):
    x = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    pairs = list(itertools.permutations(SPECS, 2))
    layouts = [(from_spec(a, 2), from_spec(b, 2)) for a, b in pairs]

    def run(*xs):
        return [move(x, have, want, SIZES) for x, (have, want) in zip(xs, layouts, strict=True)]

    region = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(have.spec for have, _ in layouts),
        out_specs=[want.spec for _, want in layouts],
        check_vma=False,
    )
    for pair, moved in zip(pairs, jax.jit(region)(*[x] * len(pairs)), strict=True):
        np.testing.assert_array_equal(moved, x, err_msg=str(pair))


@pytest.mark.parametrize(
    ("want", "collectives"),
    [
        ((), ["psum"]),
        (("data",), ["reduce_scatter", "psum"]),
        (("fsdp", "data"), ["reduce_scatter"] * 2),
        ((("tensor", "fsdp"),), ["psum"]),
        ((("data", "fsdp"),), ["reduce_scatter"]),
        ((("fsdp", "data"), "tensor"), ["reduce_scatter"]),
    ],
)
def test_pending_sums_are_taken_once(mesh, want, collectives):
    """Each device along `data` and `fsdp` holds a term: the sum counts every term once. Axes that
    cut one dim take it together."""
    x = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
    have, to = ValueLayout(((), ()), frozenset({"data", "fsdp"})), from_spec(want, 2)

    def run(x):
        rank = jax.lax.axis_index("data") * 2 + jax.lax.axis_index("fsdp")
        return move(x * (rank + 1).astype(x.dtype), have, to, SIZES)

    region = jax.shard_map(
        run, mesh=mesh, in_specs=PartitionSpec(), out_specs=to.spec, check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(region)(x), x * (1 + 2 + 3 + 4))
    sums = re.findall(r"\b(psum|reduce_scatter)\w*\[", str(jax.make_jaxpr(region)(x)))
    assert sums == collectives


def test_bytes_of_ring_collectives():
    """Of n devices with shards of s bytes: all-gather (n - 1) s, all-to-all (n - 1) / n s,
    reduce-scatter (n - 1) / n s, all-reduce twice that (Thakur et al. 2005)."""
    cut, whole = from_spec(("data",), 2), from_spec((), 2)
    pending = ValueLayout(((), ()), frozenset({"data"}))
    assert moved_bytes(800, cut, whole.dims, SIZES) == 400
    assert moved_bytes(800, cut, from_spec((None, "data"), 2).dims, SIZES) == 200
    both = from_spec((("data", "fsdp"),), 2)
    assert moved_bytes(800, both, from_spec((None, ("data", "fsdp")), 2).dims, SIZES) == 150
    assert moved_bytes(800, pending, cut.dims, SIZES) == 400
    assert moved_bytes(800, pending, whole.dims, SIZES) == 800
    assert moved_bytes(800, whole, cut.dims, SIZES) == 0


def test_sums_are_scattered_behind_axes_of_other_dims(mesh):
    """`tensor` comes first, so that the sum over `fsdp` is scattered: half the bytes of a whole
    sum. Behind an axis of its own dim a sum cannot be, and the cost says so."""
    x = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
    have = ValueLayout(((), ("tensor",)), frozenset({"fsdp"}))
    to = ValueLayout((("tensor", "fsdp"), ()))

    def run(x):
        rank = jax.lax.axis_index("fsdp")
        return move(x * (rank + 1).astype(x.dtype), have, to, SIZES)

    region = jax.shard_map(run, mesh=mesh, in_specs=have.spec, out_specs=to.spec, check_vma=False)
    np.testing.assert_array_equal(jax.jit(region)(x), x * (1 + 2))
    text = str(jax.make_jaxpr(region)(x))
    assert "reduce_scatter" in text
    assert "psum" not in text
    assert moved_bytes(800, have, to.dims, SIZES) == 200 + 200
    behind = ValueLayout((("tensor",), ()), frozenset({"fsdp"}))
    assert moved_bytes(800, behind, (("fsdp", "tensor"), ()), SIZES) == 400 + 400


def test_sums_are_taken_into_the_part_that_is_read():
    layout = ValueLayout((("tensor",), ()), frozenset({"data", "fsdp"}))
    wanted = (("tensor", "fsdp"), ())
    assert scattered(layout, wanted, (8, 4), SIZES) == ValueLayout((("tensor", "fsdp"), ()))
    assert scattered(layout, (("fsdp",), ()), (8, 4), SIZES) is None
    assert scattered(layout, wanted, (2, 4), SIZES) is None


@pytest.mark.aot
def test_sums_along_the_last_dim_are_cut_on_tpus(tpu_devices):
    """XLA makes an all-reduce and a slice of `psum_scatter` along a last dim of 128 elements."""
    mesh = sl.make_mesh("fsdp=4", devices=tpu_devices("v5e:2x2"))
    have, want = ValueLayout(((), ()), frozenset({"fsdp"})), from_spec((None, "fsdp"), 2)

    def run(x, y):
        return move(x.T @ y, have, want, {"fsdp": 4})

    rows = PartitionSpec("fsdp")
    region = jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=want.spec)
    x, y = (
        jax.ShapeDtypeStruct((4096, n), "bfloat16", sharding=jax.NamedSharding(mesh, rows))
        for n in (2048, 512)
    )
    report = sl.explain(jax.jit(region), x, y)
    assert [c.kind for c in report.collectives] == ["reduce-scatter"]


def test_a_planned_result_is_cut_where_the_sum_would_send_more():
    """The rows of a small update go to the dim that the large result is cut along."""
    rows, width = 64, 1024
    factors = Factors(
        ((0, 1), (2, None), (2, 1)), ((0, 1),), (100_000, width, rows), reduced={2: "sum"}
    )
    by_rows = from_spec(("tensor",), 2)
    problem = CutProblem(
        factors,
        (made((100_000, width)), by_rows, by_rows),
        (400_000 * width, 4 * rows, 4 * rows * width),
        (400_000 * width,),
        (((), ("tensor",)),),
        (((), ("tensor",)),),
    )
    assert choose(problem, SIZES) == {1: ("tensor",)}
    assert choose(dataclasses.replace(problem, planned=(None,)), SIZES) == {2: ("tensor",)}


def test_products_that_are_added_share_their_sum():
    """The gradient of what queries, keys and values read: one of three gathers its operand, all
    three are summed over devices once."""
    rows, width, heads = 2048, 1024, 1024
    factors = Factors(((0, 2), (1, 2)), ((0, 1),), (rows, width, heads), reduced={2: "sum"})
    by_heads = from_spec((None, "tensor"), 2)
    problem = CutProblem(
        factors,
        (by_heads, by_heads),
        (2 * rows * heads, 2 * width * heads),
        (2 * rows * width,),
        (None,),
        (((), ("tensor",)),),
        sharers=(2, 1),
        is_placed=True,
    )
    assert choose(problem, SIZES) == {1: ("tensor",)}
    assert choose(dataclasses.replace(problem, terms=(3,)), SIZES) == {2: ("tensor",)}
