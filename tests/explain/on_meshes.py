"""Meshes, arrays on them, and what a compiled step sends over their axes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.explain.analysis.collectives import read_program
from shardlib.hardware import parse_cluster

CPU, TPU = parse_cluster("cpu:8"), parse_cluster("v5e-8")


def cpu_mesh(**sizes):
    """A mesh whose devices stand in another order than `make_mesh` would give them."""
    devices = np.array(jax.devices()[::-1]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def abstract_mesh(**sizes):
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def found(step):
    return sorted(
        (c.kind, c.mesh_axes, c.bytes) for c in read_program(step.text, step.mesh).collectives
    )
