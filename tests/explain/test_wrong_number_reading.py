"""What of a program the check for wrong numbers reads, and what it leaves out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.explain.hlo.text import parse
from shardlib.explain.wrong_numbers import wrong_numbers
from shardlib.explain.wrong_numbers.prescan import is_suspect, without_copies

PROGRAM = """HloModule m, num_partitions=8

%one (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %a.1 = f32[4]{0} add(%p, %p), metadata={op_name="jit(f)/layer_0/add"}
}

%two (q.7: f32[4]) -> f32[4] {
  %q.7 = f32[4]{0} parameter(0)
  ROOT %b.2 = f32[4]{0} add(%q.7, %q.7), metadata={op_name="jit(f)/layer_1/add"}
}

%outer.1 (x: f32[4], y: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %f.1 = f32[4]{0} fusion(%x), kind=kLoop, calls=%one
  ROOT %s.1 = f32[4]{0} subtract(%f.1, %y)
}

%outer.2 (x.2: f32[4], y.2: f32[4]) -> f32[4] {
  %x.2 = f32[4]{0} parameter(0)
  %y.2 = f32[4]{0} parameter(1)
  %f.2 = f32[4]{0} fusion(%x.2), kind=kLoop, calls=%two
  ROOT %s.2 = f32[4]{0} subtract(%f.2, %y.2)
}

%turned (x.3: f32[4], y.3: f32[4]) -> f32[4] {
  %x.3 = f32[4]{0} parameter(0)
  %y.3 = f32[4]{0} parameter(1)
  %f.3 = f32[4]{0} fusion(%x.3), kind=kLoop, calls=%two
  ROOT %s.3 = f32[4]{0} subtract(%y.3, %f.3)
}

ENTRY %main (z: f32[4]) -> f32[4] {
  %z = f32[4]{0} parameter(0)
  ROOT %c = f32[4]{0} fusion(%z, %z), kind=kLoop, calls=%outer.2
}
"""


def test_what_differs_in_names_alone_is_read_once():
    text, stands_for = without_copies(PROGRAM)
    assert stands_for == {
        "one": "one",
        "two": "one",
        "outer.1": "outer.1",
        "outer.2": "outer.1",
        "turned": "turned",
    }
    assert set(parse(text).computations) == {"one", "outer.1", "turned", "main"}


@pytest.mark.parametrize("mark", ["replica_groups={{0,1}}", 'metadata={op_name="shard_map/add"}'])
def test_what_is_told_by_its_place_is_kept(mark):
    text = PROGRAM.replace("add(%q.7, %q.7), ", f"add(%q.7, %q.7), {mark}, ")
    text = text.replace("add(%p, %p), ", f"add(%p, %p), {mark}, ")
    assert {"one", "two"} <= set(parse(without_copies(text)[0]).computations)


@pytest.mark.parametrize(("axes", "suspect"), [(("data", "fsdp"), False), (("data",), True)])
def test_a_region_that_handles_all_axes_is_not_read(axes, suspect):
    mesh = sl.make_mesh("data=4,fsdp=2")

    def local(x, w):
        return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

    def sums(x, w):
        own = P(axes)
        region = jax.shard_map(
            local, mesh=mesh, in_specs=(own, P()), out_specs=own, axis_names=set(axes)
        )
        return jnp.sum(region(x, w))

    rows = jax.ShapeDtypeStruct((8, 16, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    kernel = jax.ShapeDtypeStruct((3, 4, 4), jnp.float32, sharding=NamedSharding(mesh, P()))
    traced = jax.jit(sums).trace(rows, kernel)
    text = traced.lower().compile().as_text()
    assert is_suspect(text, {"data": 4, "fsdp": 2}, traced.jaxpr) == suspect
    assert is_suspect(text, {"data": 4, "fsdp": 2})


def layers(ws, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


def products(w, xs):
    return jax.lax.map(lambda x: x @ w, xs)


def recurrent(w, xs):
    def cell(h, x):
        h = jnp.tanh(x + h @ w)
        return h, h

    return jax.lax.scan(cell, jnp.zeros_like(xs[0]), xs)[1]


def window(w, x):
    return jnp.tanh(lax.reduce_window(x @ w, 0.0, lax.add, (1, 4), (1, 1), "SAME") @ w)


def gradient(function):
    return jax.grad(lambda w, x: jnp.sum(jnp.sin(function(w, x))))


ROWS, STEPS = P(("data", "fsdp")), P(None, ("data", "fsdp"))
WEIGHT, WEIGHTS = P("fsdp", "tensor"), P(None, "fsdp", "tensor")
SUMMED = P(None, ("data", "fsdp"), "tensor")


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(
    ("function", "shapes", "places", "result"),
    [
        (gradient(layers), [(4, 16, 16), (16, 16)], (WEIGHTS, ROWS), WEIGHTS),
        (gradient(recurrent), [(16, 16), (4, 16, 16)], (WEIGHT, STEPS), WEIGHT),
        (products, [(16, 16), (4, 16, 16)], (P("tensor", "fsdp"), SUMMED), SUMMED),
        (gradient(window), [(16, 16), (16, 16)], (WEIGHT, ROWS), WEIGHT),
    ],
    ids=["carried", "stacked", "within", "window"],
)
def test_rows_that_change_their_order_in_a_loop_or_a_window_are_told(
    function, shapes, places, result
):
    mesh = sl.make_mesh("data=2,fsdp=2,tensor=2")
    normal = np.random.default_rng(0).standard_normal
    arguments = [normal(shape).astype("f") / 4 for shape in shapes]
    shardings = tuple(NamedSharding(mesh, spec) for spec in places)
    jitted = jax.jit(function, in_shardings=shardings, out_shardings=NamedSharding(mesh, result))
    expected, got = function(*arguments), jitted(*arguments)
    assert np.linalg.norm(got - expected) > 0.01 * np.linalg.norm(expected)
    traced = jitted.trace(*arguments)
    told = wrong_numbers(traced.lower().compile(), mesh, traced.jaxpr)
    assert {fault.code for fault in told} == {"SL205"}
    assert all("test_wrong_number_reading.py" in fault.where.source for fault in told)
