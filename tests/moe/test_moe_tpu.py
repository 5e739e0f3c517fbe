"""The program for TPU, compiled ahead of time: tokens travel as ragged rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import shardlib as sl
from shardlib.explain.analysis.collectives import collectives
from shardlib.nn.moe import ExpertWeights, apply_experts, gated, route

pytestmark = pytest.mark.aot

ROWS, LENGTH, EMBED, MLP, EXPERTS, K = 8, 256, 256, 512, 8, 2


@pytest.fixture(scope="module")
def program(tpu_devices):
    devices = np.array(tpu_devices("v5e:4x2")).reshape(2, 4)
    mesh = Mesh(devices, ("fsdp", "expert"), axis_types=(AxisType.Auto,) * 2)
    shapes = [(ROWS, LENGTH, EMBED), (ROWS, LENGTH, EXPERTS)]
    up, down = (EXPERTS, EMBED, MLP), (EXPERTS, MLP, EMBED)

    def loss(x, logits, weights):
        with sl.use(mesh, sl.rules.STANDARD):
            y, _ = apply_experts(x, route(logits, K), weights, gated(jax.nn.silu))
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    with sl.use(mesh, sl.rules.STANDARD) as scope:

        def abstract(shape, dtype, axes, kind):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=scope.sharding(axes, shape, kind))

        tokens = ("batch", "length", None)
        x = abstract(shapes[0], jnp.bfloat16, tokens, "activations")
        logits = abstract(shapes[1], jnp.float32, tokens, "activations")
        gate = abstract(up, jnp.bfloat16, ("expert", "embed", "mlp"), "params")
        back = abstract(down, jnp.bfloat16, ("expert", "mlp", "embed"), "params")
    step = jax.jit(jax.grad(loss, argnums=(0, 2)))
    compiled = step.lower(x, logits, ExpertWeights(gate, gate, back)).compile()
    return collectives(compiled.as_text(), mesh)


def of_kind(program, kind):
    return [c for c in program if c.kind == kind]


def test_tokens_travel_there_and_back_each_way_as_ragged_rows(program):
    sent = of_kind(program, "ragged-all-to-all")
    assert [c.mesh_axes for c in sent] == [("expert",)] * 4
    assert not of_kind(program, "all-to-all")


def test_weights_are_gathered_for_each_pass_and_gradients_scattered(program):
    gathered = [c for c in of_kind(program, "all-gather") if c.mesh_axes == ("fsdp",)]
    assert {shape for c in gathered for shape in c.shapes} == {"bf16[2,256,512]", "bf16[2,512,256]"}
    assert {"rematted" in c.op_name for c in gathered} == {False, True}
    # Of what is gathered over experts, there are counts alone.
    others = [c for c in of_kind(program, "all-gather") if c.mesh_axes != ("fsdp",)]
    assert {c.shapes for c in others} == {(f"s32[4,4,{EXPERTS // 4}]",)}
    assert {c.mesh_axes for c in of_kind(program, "reduce-scatter")} == {("fsdp",)}
