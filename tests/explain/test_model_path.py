"""Source lines and parts of the model that collectives come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.explain.analysis.collectives import read_program
from shardlib.explain.hlo.model_path import came_from
from shardlib.explain.hlo.text import parse

WIDTH, ROWS = 64, 32


class Inner(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.up(x)


class Outer(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = Inner(rngs), Inner(rngs)

    def __call__(self, x):
        def twice(x):
            return self.second(jax.nn.relu(self.first(x)))

        return jax.checkpoint(twice)(x)


def compiled(step, *arguments):
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",), axis_types=(AxisType.Auto,))
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P("fsdp"))
        ),
        arguments,
    )
    return read_program(jax.jit(step).lower(*placed).compile(), mesh)


@pytest.mark.parametrize("name", ["step", "<lambda>"])
def test_modules_are_named_by_their_classes(name):
    graph, state = nnx.split(nnx.eval_shape(lambda: Outer(nnx.Rngs(0))))

    def loss(state, x):
        return jnp.mean(jnp.square(nnx.merge(graph, state)(x)))

    def step(state, x):
        return jax.grad(loss)(state, x)

    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    found = compiled(step if name == "step" else lambda *given: step(*given), state, x)
    gathers = {c.model_path for c in found.collectives if c.bytes == WIDTH * WIDTH * 4}
    # Neither the test, which is a function, nor what calls it; compilers differ in which operation
    # of the outer module they gather for.
    assert "Outer/Inner" in gathers <= {"Outer/Inner", "Outer"}
    assert all(__file__ in c.source for c in found.collectives)


def test_what_has_no_modules_has_no_part():
    weights = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    found = compiled(lambda w, x: x @ w, weights, weights)
    assert {(c.model_path, c.source.rpartition(":")[0]) for c in found.collectives} == {
        ("", __file__)
    }


METADATA = 'metadata={{op_name="{}" source_file="model.py" source_line={}}}'
TEXT = f"""HloModule jit_step, num_partitions=8

%all-reduce-scatter (p: f32[64]) -> f32[8] {{
  %p = f32[64]{{0}} parameter(0)
  %summed = f32[64]{{0}} all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8], \
use_global_device_ids=true, to_apply=%add
  ROOT %cut = f32[8]{{0}} dynamic-slice(%summed, %i), dynamic_slice_sizes={{8}}
}}

ENTRY %main (w: f32[8]) -> f32[64] {{
  %w = f32[8]{{0}} parameter(0), metadata={{op_name="params['w']"}}
  %start = (f32[8]{{0}}, f32[64]{{0}}) all-gather-start(%w), channel_id=2, \
replica_groups=[1,8]<=[8], use_global_device_ids=true, dimensions={{0}}
  %done = f32[64]{{0}} all-gather-done(%start)
  %used = f32[64]{{0}} negate(%done), {METADATA.format("jit(step)/jvp(Net)/block_0/mlp/neg", 7)}
  %late = f32[64]{{0}} negate(%used), {METADATA.format("jit(step)/mul", 8)}
  %scattered = f32[8]{{0}} fusion(%late), kind=kCustom, calls=%all-reduce-scatter, \
{METADATA.format("jit(step)/transpose(jvp(Net))/while/body/attention/jit(silu)/ij,jk->ik/dot", 9)}
  %copied = f32[64]{{0}} copy(%p.1)
  ROOT %last = f32[64]{{0}} all-reduce(%copied), channel_id=3, replica_groups=[1,8]<=[8], \
use_global_device_ids=true, to_apply=%add
}}
"""


@pytest.mark.parametrize(
    ("name", "place"),
    [
        # Of an argument it has the name, and the line of what first reads it.
        ("start", ("params['w']", "model.py:7", "Net/block_0/mlp")),
        # Inside of a fusion it is the fusion's.
        (
            "summed",
            (
                "jit(step)/transpose(jvp(Net))/while/body/attention/jit(silu)/ij,jk->ik/dot",
                "model.py:9",
                "Net/attention",
            ),
        ),
        ("last", ("", "", "")),
    ],
)
def test_what_the_compiler_adds_comes_from_what_is_around_it(name, place):
    module = parse(TEXT)
    (found,) = (
        came_from(module, where, instruction)
        for where, instructions in module.computations.items()
        for instruction in instructions
        if instruction.name == name
    )
    assert found == place
    (collective,) = (c for c in read_program(TEXT, {"fsdp": 8}).collectives if c.name == name)
    assert (collective.op_name, collective.source, collective.model_path) == place
