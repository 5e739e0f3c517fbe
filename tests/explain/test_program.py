"""Collectives read out of real CPU programs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.explain.analysis.collectives import collectives, read_program

LAYERS, EMBED, MLP, BATCH = 3, 32, 64, 16


def make_mesh(**sizes):
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def compile_step(mesh):
    """One step of a scanned two-matrix MLP, sharded over whichever axes the mesh has."""

    def place(*names):
        spec = []
        for name in names:
            group = name if isinstance(name, tuple) else (name,)
            spec.append(tuple(axis for axis in group if axis in mesh.axis_names) or None)
        return NamedSharding(mesh, P(*spec))

    rows = ("data", "fsdp")
    shapes = {"up": (LAYERS, EMBED, MLP), "down": (LAYERS, MLP, EMBED)}
    placed = {"up": place(None, "fsdp", "tensor"), "down": place(None, "tensor", "fsdp")}

    def loss(params, x):
        def layer(h, weights):
            h = jax.lax.with_sharding_constraint(h, place(rows, None))
            hidden = jax.nn.relu(h @ weights["up"])
            hidden = jax.lax.with_sharding_constraint(hidden, place(rows, "tensor"))
            return h + hidden @ weights["down"], None

        h, _ = jax.lax.scan(layer, x, params)
        return jnp.mean(h**2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = {
        k: jax.ShapeDtypeStruct(s, jnp.float32, sharding=placed[k]) for k, s in shapes.items()
    }
    x = jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32, sharding=place(rows, None))
    return jax.jit(step, out_shardings=(placed, None)).lower(params, x).compile()


def sent(report, kind, axes, at_least_bytes=0):
    """Returns the bytes of one kind over some axes in one step."""
    return sum(
        total.bytes
        for total in report.totals(at_least_bytes)
        if (total.kind, total.mesh_axes) == (kind, axes)
    )


MATRIX = EMBED * MLP * 4  # bytes of one matrix of one layer


def test_all_three_and_where_they_come_from():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    report = read_program(compile_step(mesh), mesh)
    shard = MATRIX // 2  # of a matrix, over tensor
    assert sent(report, "all-gather", ("fsdp",)) == 2 * 2 * LAYERS * shard
    assert sent(report, "all-reduce", ("tensor",)) == 2 * LAYERS * BATCH // 4 * EMBED * 4
    assert sent(report, "all-reduce", ("data", "fsdp")) == 4
    assert report.unattributed() == []
    assert report.unread == {}
    largest = max(report.collectives, key=lambda c: c.total_bytes)
    assert largest.op_name.startswith("jit(step)/")
    assert __file__ in largest.source
    (table,) = report.parts()
    assert len(table.rows) == len(report.totals())


@pytest.mark.parametrize("axes", ["context", ("data", "context")])
def test_exchanges_inside_of_shard_map(axes):
    mesh = make_mesh(data=2, context=4)
    width = 8 if isinstance(axes, tuple) else 4

    def exchange(x):
        ring = [(i, (i + 1) % width) for i in range(width)]
        x = jax.lax.ppermute(x, axes, ring)
        return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)

    mapped = jax.shard_map(exchange, mesh=mesh, in_specs=P(axes), out_specs=P(axes))
    found = collectives(jax.jit(mapped).lower(jnp.ones((64, 2))).compile(), mesh)
    names = axes if isinstance(axes, tuple) else (axes,)
    assert {(c.kind, c.mesh_axes) for c in found} == {
        ("collective-permute", names),
        ("all-to-all", names),
    }


def test_a_program_for_the_cpu_is_folded():
    mesh = make_mesh(fsdp=8)
    report = read_program(compile_step(mesh), mesh)
    folded = sum(c.folded_bytes for c in report.collectives if c.bytes > 4)
    # Gathered twice, and reduced and scattered once.
    assert folded == 3 * 2 * LAYERS * MATRIX * 7 / 8
    assert sum(c.sent_bytes for c in report.collectives if c.bytes > 4) == folded * 4 / 3
