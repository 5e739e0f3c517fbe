"""Small steps that are compiled with faults planted in them, and what is asked about them."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.explain.aot.compile import compile_step
from shardlib.explain.lint import Subject

EMBED, MLP, LAYERS, ROWS = 512, 1024, 4, 2048


def make_mesh(**sizes):
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def place(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def array(mesh, shape, *spec, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place(mesh, *spec))


def weights(mesh, dtype="float32"):
    """Matrices of a stack of layers, cut as fully sharded and tensor parallel ones are."""
    up, down = (LAYERS, EMBED, MLP), (LAYERS, MLP, EMBED)
    return {
        "up": array(mesh, up, None, "fsdp", "tensor", dtype=dtype),
        "down": array(mesh, down, None, "tensor", "fsdp", dtype=dtype),
    }


def layer(mesh, h, matrices):
    """A residual layer as it should be."""
    h = h + jax.nn.relu(h @ matrices["up"]) @ matrices["down"]
    return jax.lax.with_sharding_constraint(h, place(mesh, "fsdp"))


def mean_square(mesh, params, x, call=layer):
    h, _ = jax.lax.scan(lambda h, matrices: (call(mesh, h, matrices), None), x, params)
    return jnp.mean(h**2)


def descend(loss):
    """A step that takes gradients of `loss(params, *batch)` and goes down them."""

    def step(params, *batch):  # step
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def compiled(step, *arguments, **jit):
    """Returns what is known of a step that donates its state and leaves it where it was."""
    options = {
        "donate_argnums": 0,
        "out_shardings": (jax.tree.map(lambda a: getattr(a, "sharding", None), arguments[0]), None),
        **jit,
    }
    return Subject.of(compile_step(jax.jit(step, **options), arguments, keep=False))


def line_of(function, mark):
    """Returns `file:line` of the one line of a function's source that ends with a mark."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [n for n, line in enumerate(lines, start=first) if line.endswith(f"# {mark}\n")]
    return f"{inspect.getsourcefile(function)}:{found}"
