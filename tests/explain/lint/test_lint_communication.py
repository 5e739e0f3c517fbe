"""Faults of communication, planted: what travels for no rule, too often, or along slow links."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from planted import (
    EMBED,
    ROWS,
    array,
    compiled,
    descend,
    layer,
    line_of,
    make_mesh,
    mean_square,
    place,
    weights,
)

from shardlib.explain.lint import Subject, lint
from shardlib.hardware import parse_cluster

MESH = make_mesh(fsdp=4, tensor=2)
TENSOR = make_mesh(tensor=8)


def batch(*spec):
    return array(MESH, (ROWS, EMBED), *spec)


def turned(params, x):
    h = jax.lax.with_sharding_constraint(jnp.tanh(x), place(MESH, "fsdp", "tensor"))
    h = jax.lax.with_sharding_constraint(h * 2, place(MESH, "tensor", "fsdp"))  # planted
    return jnp.mean(h**2) + params["up"].mean()


def test_an_activation_that_changes_its_sharding():
    x = array(MESH, (4 * ROWS, EMBED), "fsdp")
    findings = lint(compiled(descend(turned), weights(MESH), x))
    assert {(finding.code, finding.source) for finding in findings} == {
        ("SL201", line_of(turned, "planted"))
    }
    first = findings[0]
    assert first.message == (
        "f32[4096,128] (2.0 MiB) is resharded by a collective-permute over fsdp+tensor: no rule "
        "asks for it."
    )
    assert first.fix == (
        "Constrain the tensor to the same sharding before and after this line, or to the sharding "
        "of the rest of the layer."
    )


def mixed(mesh, h, matrices, shared):
    table = jax.lax.with_sharding_constraint(shared, place(mesh))  # planted
    return layer(mesh, h @ table, matrices)


def test_a_gather_that_each_layer_repeats():
    def loss(params, x):
        call = jax.checkpoint(
            lambda h, matrices: (mixed(MESH, h, matrices, params["shared"]), None)
        )
        layers = {k: params[k] for k in ("up", "down")}
        h, _ = jax.lax.scan(call, x, layers)  # scanned
        return jnp.mean(h**2)

    params = {**weights(MESH), "shared": array(MESH, (EMBED, EMBED), "fsdp")}
    (found,) = lint(compiled(descend(loss), params, batch("fsdp")))
    # A later JAX names the scan as what the gather is from.
    scanned = line_of(test_a_gather_that_each_layer_repeats, "scanned")
    assert found.source in (line_of(mixed, "planted"), scanned)
    # Of 4 turns backward 3 are for nothing; each sends 3/4 of 1 MiB.
    assert str(found).startswith(f"{found.source}: SL202 all-gather of f32[512,512] over fsdp")
    place, _, function = found.place.partition(" in test_lint_communication.py:")
    assert place in ("sharding_constraint (recompute)", "scan (backward)", "(backward)")
    assert function in ("mixed", "test_a_gather_that_each_layer_repeats.loss")
    assert found.bytes == 3 * 3 / 4 * 2**20


def test_a_parameter_that_each_microbatch_gathers_is_meant():
    def loss(params, parts):
        def one(total, part):
            return total + mean_square(MESH, params, part), None

        return jax.lax.scan(jax.checkpoint(one), 0.0, parts)[0]

    parts = array(MESH, (4, ROWS, EMBED), None, "fsdp")
    params = {"up": array(MESH, (1, EMBED, EMBED), None, "fsdp"),
              "down": array(MESH, (1, EMBED, EMBED), None, "fsdp")}  # fmt: skip
    subject = compiled(descend(loss), params, parts)
    assert [f for f in lint(subject) if f.code == "SL202"] == []


# Of a program for GPUs: devices 0 and 5 are neighbours along no axis.
STRANGE = """HloModule jit_step, is_scheduled=true, num_partitions=8, \
entry_computation_layout={(f32[2048,1024]{1,0})->f32[2048,1024]{1,0}}

ENTRY %main (p: f32[2048,1024]) -> f32[2048,1024] {
  %p = f32[2048,1024]{1,0} parameter(0), metadata={op_name="x"}
  %sum = f32[2048,1024]{1,0} all-reduce(%p), channel_id=1, \
replica_groups={{0,5},{1,4},{2,7},{3,6}}, use_global_device_ids=true, to_apply=%add, \
metadata={op_name="jit(step)/reshape" source_file="model.py" source_line=12}
  ROOT %all = f32[2048,1024]{1,0} all-reduce(%sum), channel_id=2, replica_groups=[4,2]<=[8], \
use_global_device_ids=true, to_apply=%add
}
"""


def test_groups_that_are_no_mesh_axes():
    (found,) = lint(Subject(STRANGE, {"fsdp": 4, "tensor": 2}))
    assert str(found).startswith("model.py:12: SL203 an all-reduce of f32[2048,1024] (8.0 MiB")


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("8xh100", None),
        ("v5e:2x4", None),
        ("8xl4", None),
        ("2x4xh100", "tensor=8 spans 8 devices, but an NVLink domain of 2x4xh100 has 4: "
         "7.0 MiB a step cross the network at 50 GB/s instead of 450 GB/s."),
        ("2xv5e:2x2", "tensor=8 spans 8 devices, but a slice of 2xv5e:2x2 has 4: 7.0 MiB a "
         "step cross the network at 3.12 GB/s instead of 50 GB/s."),
        ("2x4xl4", "tensor=8 spans 8 devices, but a host of 2x4xl4 has 4: 7.0 MiB a step cross the "
         "network at 1.56 GB/s instead of 31 GB/s."),
    ],
)  # fmt: skip
def test_an_axis_that_leaves_the_fast_domain(cluster, message):
    def loss(params, x):
        hidden = jax.nn.relu(x @ params["up"])
        hidden = jax.lax.with_sharding_constraint(hidden, place(TENSOR, None, "tensor"))
        return jnp.mean((hidden @ params["down"]) ** 2)  # planted

    params = {
        "up": array(TENSOR, (EMBED, 1024), None, "tensor"),
        "down": array(TENSOR, (1024, EMBED), "tensor"),
    }
    subject = compiled(descend(loss), params, array(TENSOR, (ROWS, EMBED)))
    found = lint(dataclasses.replace(subject, cluster=parse_cluster(cluster)))
    if message is None:
        assert found == ()
        return
    assert str(found[0]) == (
        f"{line_of(test_an_axis_that_leaves_the_fast_domain, 'planted')}: SL204 {message}\n  Make "
        "tensor at most 4, and another axis larger."
    )
    assert (len(found), found[0].place) == (1, "mesh/tensor")


def test_a_loop_without_a_count():
    def until(params, x):
        def turn(h):
            return layer(MESH, h, jax.tree.map(lambda w: w[0], params))

        small = lambda h: jnp.sum(h**2) < 1e6  # noqa: E731
        return jnp.mean(jax.lax.while_loop(small, turn, x))  # planted

    subject = compiled(until, weights(MESH), batch("fsdp"),
        donate_argnums=(), out_shardings=None,
    )  # fmt: skip
    (found,) = [finding for finding in lint(subject) if finding.code == "SL503"]
    assert "a loop with 2 collectives" in found.message
    assert str(found).startswith(f"{line_of(test_a_loop_without_a_count, 'planted')}: SL503 a")
    # The sum over `tensor` of what a device holds of the rows, and a number over all devices.
    assert found.bytes == 2 * 1 / 2 * ROWS / 4 * EMBED * 4 + 2 * 3 / 4 * 4
