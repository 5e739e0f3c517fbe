"""What of a program the check for wrong numbers reads, and what it leaves out."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.explain.hlo import parse
from shardlib.explain.wrong_numbers.alike import without_copies
from shardlib.explain.wrong_numbers.suspects import is_suspect

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
