"""Products with kernels of several dims, and how often their kernels are gathered."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardlib as sl
from shardlib.explain.analysis.collectives import collectives
from shardlib.explain.aot.topology import devices_of
from shardlib.hardware import parse_cluster
from shardlib.nn import remat
from shardlib.nn.project import project

EMBED, HEADS, HEAD_DIM, VOCAB, BATCH, LENGTH = 32, 4, 8, 16, 8, 4
QUERY, OUT, HEAD = (
    ("embed", "heads", "head_dim"),
    ("heads", "head_dim", "embed"),
    ("embed", "vocab"),
)


def value(x, query, out, head):
    """A sum over squares, in whole numbers, of projections to heads, back, and to logits."""
    heads = jnp.square(project(x, query, QUERY, 1))
    logits = project(x, head, HEAD, 1).astype(jnp.float32)
    return jnp.sum(jnp.square(project(heads, out, OUT, 2))) + jnp.sum(jnp.square(logits))


def of_layers(x, query, out, head):
    """The sum after two layers, which are computed again in the backward pass."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, kernels):
        heads = jnp.square(project(x, kernels[0], QUERY, 1))
        return x + project(heads, kernels[1], OUT, 2), None

    kernels = jax.tree.map(lambda kernel: jnp.stack([kernel, 2 * kernel]), (query, out))
    x = jax.lax.scan(layer, x, kernels)[0]
    return jnp.sum(jnp.square(project(x, head, HEAD, 1).astype(jnp.float32)))


@pytest.fixture(scope="module")
def arguments():
    random = np.random.default_rng(0)
    shapes = (
        *((BATCH, LENGTH, EMBED), (EMBED, HEADS, HEAD_DIM)),
        *((HEADS, HEAD_DIM, EMBED), (EMBED, VOCAB)),
    )
    return tuple(random.integers(-1, 2, shape).astype(np.float32) for shape in shapes)


# Without loops of overlapped products, which send the same bytes in many small hops.
WHOLE_PRODUCTS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 100000}


def compiled(mesh, arguments, function=value, options=None):
    """Returns the program of value and gradients on a mesh, and the places of its arguments."""

    def run(*arguments):
        with sl.use(mesh, sl.rules.STANDARD):
            return jax.value_and_grad(function, argnums=(0, 1, 2, 3))(*arguments)

    with sl.use(mesh, sl.rules.STANDARD) as scope:
        x, query, out, head = arguments
        places = (
            scope.sharding(("batch", "length", "embed"), x.shape, "activations"),
            scope.sharding(QUERY, query.shape),
            scope.sharding(OUT, out.shape),
            scope.sharding(HEAD, head.shape),
        )
    jitted = jax.jit(run, in_shardings=places, out_shardings=(None, places))
    return jitted.lower(*arguments).compile(compiler_options=options), places


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=2,tensor=2", "fsdp=4,context=2"])
def test_gradients_are_those_of_one_device(mesh, arguments):
    expected = jax.value_and_grad(value, argnums=(0, 1, 2, 3))(*arguments)
    program, places = compiled(sl.make_mesh(mesh), arguments)
    found = program(*jax.device_put(arguments, places))
    assert float(expected[0]) < 2**24, "whole numbers up to here are exact"
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_kernels_of_a_slice_travel_in_two_hops(arguments, monkeypatch):
    monkeypatch.setattr("shardlib.nn.project.slice_axis_of", lambda scope, rows: "fsdp")
    halves = [slice(8), slice(8, None)]
    monkeypatch.setattr("shardlib.nn.project.summed_columns", lambda size, chips: halves)
    monkeypatch.setattr("shardlib.nn.project.LEAST_GATHERED", 8)
    expected = jax.value_and_grad(value, argnums=(0, 1, 2, 3))(*arguments)
    program, places = compiled(sl.make_mesh("fsdp=8"), arguments)
    assert "replica_groups={{0,2,4,6},{1,3,5,7}}" in str(program.as_text())
    found = program(*jax.device_put(arguments, places))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    with sl.use(sl.make_mesh("fsdp=8"), sl.rules.STANDARD):
        head = jax.grad(lambda x, head: jnp.sum(project(x, head, HEAD, 1)), argnums=(0, 1))
        assert str(jax.make_jaxpr(head)(arguments[0], arguments[3])).count("dot_general[") == 3


WIDE = (128, 64, 2048), (2048, 16, 128), (16, 128, 2048), (2048, 128256)


def wide():
    """Arguments of real widths: a part of a device has whole registers."""
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in WIDE]


def test_the_policy_dots_keeps_the_products(arguments):
    layer = remat.apply("dots", value)
    with sl.use(sl.make_mesh("fsdp=8"), sl.rules.STANDARD):
        program = jax.make_jaxpr(jax.grad(layer, argnums=(0, 1, 2, 3)))(*arguments)
    # Three forward, six backward, and none again.
    assert str(program).count("dot_general[") == 9


@pytest.mark.aot
@pytest.mark.parametrize(
    "mesh", ["fsdp=8", "fsdp=16", pytest.param("fsdp=64", marks=pytest.mark.soak)]
)
def test_a_tpu_gathers_kernels_once_a_pass_and_reduces_gradients_to_parts(mesh, tpu_devices):
    of_mesh = {"fsdp=8": "v5e:2x4", "fsdp=16": "v5e:4x4", "fsdp=64": "v5p:4x4x4"}
    devices = tpu_devices(of_mesh[mesh])
    mesh = sl.make_mesh(mesh, devices=devices)
    program = compiled(mesh, wide(), of_layers, WHOLE_PRODUCTS)[0]
    assert_sent(program.as_text(), mesh)


@pytest.mark.aot
@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=4,tensor=2"])
def test_a_gpu_gathers_kernels_once_a_pass(mesh):
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra cuda")
    mesh = sl.make_mesh(mesh, devices=devices_of(parse_cluster("8xh100")))
    program = compiled(mesh, wide(), of_layers)[0]
    assert_sent(program.as_text(), mesh)


def assert_sent(text, mesh):
    """Asserts what kernels send: both are gathered in the loop forward, and in the loop backward,
    which also computes the layer again; the head is gathered once."""
    sent = collections.defaultdict(float)
    for c in collectives(text, mesh):
        if c.mesh_axes and "fsdp" in c.mesh_axes and c.bytes > 2**16:
            sent[c.kind] += c.sent_bytes
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape.get("tensor", 1)
    layers, head = 2 * 2 * (2048 * 16 * 128), 2048 * 128256
    width = 2 * (fsdp - 1) / fsdp / tensor
    expected = {
        "all-gather": width * (2 * layers + head),
        "reduce-scatter": width * (layers + head),
    }
    assert sent == pytest.approx(expected, rel=0.02)


@pytest.mark.aot
def test_on_gpus_the_gradient_of_the_head_is_in_its_parts_before_the_layers_go_backward():
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra cuda")
    mesh = sl.make_mesh("fsdp=8", devices=devices_of(parse_cluster("8xh100")))

    def loss(stack, head, x):
        x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, stack)
        return jnp.sum(jnp.sin(project(x, head, ("embed", "vocab"), 1).astype(jnp.float32)))

    with sl.use(mesh, sl.rules.STANDARD) as scope:
        named = {
            (2, 256, 256): ("layers", "embed", None),
            (256, 1024): ("embed", "vocab"),
            (16, 64, 256): ("batch", "length", None),
        }
        arguments = []
        for shape, axes in named.items():
            place = scope.sharding(axes, shape, "activations" if "batch" in axes else "params")
            arguments.append(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place))
        places = tuple(argument.sharding for argument in arguments[:2])
        step = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=places)
        text = str(step.lower(*arguments).compile().as_text())
    program = text[text.index("ENTRY") :]
    assert 0 < program.index(" reduce-scatter-start(") < program.rindex(" while(")
