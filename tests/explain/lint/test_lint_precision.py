"""Float32 where bfloat16 was meant, planted."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from planted import EMBED, ROWS, array, compiled, descend, line_of, make_mesh, place, weights

from shardlib.explain.lint import Subject, lint
from shardlib.hardware import parse_cluster

MESH = make_mesh(fsdp=4, tensor=2)


def widened(params, x):
    h, _ = jax.lax.scan(lambda h, m: (jnp.tanh(h @ m["up"]) @ m["down"], None), x, params["layers"])
    logits = h.astype(jnp.float32) @ params["head"].astype(jnp.float32)  # planted
    return jnp.mean(logits**2)


def test_a_matmul_in_float32_among_those_in_bfloat16():
    params = {"layers": weights(MESH, "bfloat16"), "head": array(MESH, (EMBED, 256), "fsdp")}
    params["head"] = array(MESH, (EMBED, 256), "fsdp", dtype="bfloat16")
    x = array(MESH, (ROWS, EMBED), "fsdp", dtype="bfloat16")
    jaxpr = jax.jit(jax.value_and_grad(widened)).trace(params, x).jaxpr
    (found,) = lint(Subject("", dict(MESH.shape), arguments=(params, x), jaxpr=jaxpr))
    # 256 of 256 + 4 x 2 x 1024 columns.
    assert str(found).startswith(f"{line_of(widened, 'planted')}: SL402 float32[2048,512] times")
    assert ", 3% of its FLOPs with its gradients" in found.message


# Cut from a program for H100s: a parameter that is gathered before it is cast, and activations
# that are summed in float32 because the matmul returns them so.
GPU = """HloModule jit_step, is_scheduled=true, num_partitions=8, \
entry_computation_layout={(f32[256,2048]{1,0})->f32[]}

%cast (q: f32[1024,2048]) -> bf16[1024,2048] {
  %q = f32[1024,2048]{1,0} parameter(0)
  ROOT %c = bf16[1024,2048]{1,0} convert(%q)
}

ENTRY %main (p: f32[256,2048], x: f32[8,512,1024]) -> f32[] {
  %p = f32[256,2048]{1,0} parameter(0), metadata={op_name="params['up']"}
  %x = f32[8,512,1024]{2,1,0} parameter(1), metadata={op_name="x"}
  %y = f32[1024,2048]{1,0} parameter(2), metadata={op_name="y"}
  %g = (f32[256,2048]{1,0}, f32[1024,2048]{1,0}) all-gather-start(%p), channel_id=1, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, use_global_device_ids=true, \
metadata={op_name="jit(step)/jvp()/dot_general" source_file="model.py" source_line=7}, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %d = f32[1024,2048]{1,0} all-gather-done(%g)
  %w = bf16[1024,2048]{1,0} fusion(%d), kind=kLoop, calls=%cast
  %s = f32[8,512,1024]{2,1,0} all-reduce(%x), channel_id=2, replica_groups=[4,2]<=[8], \
use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(step)/jvp()/dot_general" \
source_file="model.py" source_line=9}
  %e = f32[1024,2048]{1,0} all-reduce(%y), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), \
use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(step)/transpose(jvp())/dot" \
source_file="model.py" source_line=11}
  ROOT %r = f32[] custom-call(%w, %s, %e), custom_call_target="end"
}
"""


def traced():
    """A step whose matmuls are in bfloat16."""
    params = {"up": array(MESH, (1024, 2048), "fsdp")}
    x = array(MESH, (32, 512, 1024), "fsdp", dtype="bfloat16")

    def loss(params, x):
        return jnp.mean((x @ params["up"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    return (params, x), jax.jit(jax.grad(loss)).trace(params, x).jaxpr


@pytest.fixture(scope="module")
def subject():
    arguments, jaxpr = traced()
    cluster = parse_cluster("8xh100")
    return Subject(GPU, {"fsdp": 4, "tensor": 2}, cluster, arguments, jaxpr=jaxpr)


def test_float32_that_travels_in_a_bfloat16_step(subject):
    summed, gathered = lint(subject)
    assert re.match(
        r"model\.py:7: SL401 all-gather of f32\[1024,2048\] over(.|\n)*\n  Cast to bfloat16 before",
        str(gathered),
    )
    assert summed.message == (
        "all-reduce of f32[8,512,1024] over tensor is in float32 in a step of bfloat16 matmuls: "
        "bfloat16 would save 8.0 MiB a step."
    )
    assert summed.source == "model.py:9"


def test_a_parameter_that_an_all_reduce_gathers_is_no_activation(subject):
    assert subject.is_leaf_in_shards((4, 256, 2048))
    assert subject.is_leaf_in_shards((2048, 256, 4))
    assert not subject.is_leaf_in_shards((8, 512, 1024))
    assert not subject.is_leaf_in_shards((16, 64, 2048))
    text, (arguments, jaxpr) = GPU.replace("f32[8,512,1024]", "f32[4,256,2048]"), traced()
    (found,) = lint(Subject(text, subject.mesh, subject.cluster, arguments, jaxpr=jaxpr))
    assert found.message.startswith("all-gather")


def test_float32_is_no_fault_in_a_float32_step_nor_on_a_cpu(subject):
    assert lint(dataclasses.replace(subject, jaxpr=None)) == ()
    assert lint(dataclasses.replace(subject, cluster=parse_cluster("cpu:8"))) == ()


def test_what_a_cpu_makes_of_bfloat16_is_no_fault():
    def loss(params, x):
        h = x @ params["up"][0] @ params["down"][0]
        h = jax.lax.with_sharding_constraint(h, place(MESH, "fsdp"))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - (0.1 * g).astype(p.dtype), params, gradients), value

    x = array(MESH, (ROWS, EMBED), "fsdp", dtype="bfloat16")
    made = compiled(step, weights(MESH, "bfloat16"), x)
    assert any(c.shapes[0].startswith("f32") for c in made.program.collectives)
    assert lint(made) == ()
    assert lint(compiled(descend(loss), weights(MESH), array(MESH, (ROWS, EMBED), "fsdp"))) == ()
