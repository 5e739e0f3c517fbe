"""Steps on another mesh than that of their arguments: that of devices that are not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from on_meshes import CPU, TPU, abstract_mesh, cpu_mesh, found, struct

import shardlib as sl
from shardlib.errors import MeshError
from shardlib.explain.analysis.collectives import read_program
from shardlib.explain.aot.call import Call
from shardlib.explain.aot.compile import compile_step
from shardlib.explain.aot.retarget import Move
from shardlib.hardware import chip_for
from shardlib.mesh import describe

pytestmark = pytest.mark.usefixtures("own_cache")


def closed_over_step(mesh):
    """A user's step that holds its mesh in every place where one can be."""

    def place(*spec):
        return NamedSharding(mesh, P(*spec))

    def rows(h):
        return jax.lax.psum(h, "tensor")

    def loss(params, x):
        h = jax.lax.with_sharding_constraint(x @ params["w"], place("data", "tensor"))
        mapped = jax.shard_map(
            rows, mesh=mesh, in_specs=P("data", "tensor"), out_specs=P("data", None)
        )
        return jnp.mean(mapped(jnp.tanh(h)) ** 2)

    placed = {"w": place(None, "tensor")}

    @functools.partial(
        jax.jit,
        donate_argnums=0,
        static_argnums=2,
        in_shardings=(placed, place("data")),
        out_shardings=(placed, None),
    )
    def my_step(params, batch, rate):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients), value

    return my_step


@pytest.mark.parametrize("cluster", [CPU, TPU], ids=lambda c: c.name)
def test_a_users_function_moves_with_all_the_meshes_it_holds(cluster):
    if cluster is TPU:
        pytest.importorskip("libtpu", reason="needs the extra tpu")
    mesh = cpu_mesh(data=2, tensor=4)
    # The batch says nothing of its place: `in_shardings` does.
    batch = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    arguments = ({"w": struct(mesh, (32, 64), None, "tensor")}, batch, 0.1)
    step = compile_step(closed_over_step(mesh), arguments, on=cluster)
    assert describe(step.mesh) == "data=2,tensor=4"
    assert {chip_for(device) for device in step.mesh.devices.flat} == {cluster.chip}
    # The rows of the local half of `h`, summed over `tensor`; the gradient over `data`.
    assert ("all-reduce", ("tensor",), 8 * 16 * 4) in found(step)
    assert ("all-reduce", ("data",), 32 * 16 * 4 + 4) in found(step)  # And the loss.
    assert None not in {axes for _, axes, _ in found(step)}
    assert step.argument_names == {"params/w": "params", "batch": "batch"}
    assert step.argument_categories() == {0: "params", 1: "batch"}
    assert step.donated == (True, False)
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(step.arguments)] == [
        P(None, "tensor"),
        P("data"),
    ]
    assert step.memory["alias"] >= 32 * 16 * 4  # Donated, and padded on a TPU.
    sources = {c.source for c in read_program(step.text, step.mesh).collectives}
    assert any(source.startswith(__file__) for source in sources)
    assert "jit(my_step)" in step.text


def test_explicit_axes_and_the_mesh_of_the_caller():
    devices = np.array(jax.devices()[::-1]).reshape(2, 4)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)

    def step(*arrays):
        w, x = arrays
        h = jnp.einsum("bd,df->bf", x, w, out_sharding=P("data", "tensor"))
        return jnp.sum(jax.sharding.reshard(h, P("data", None)), axis=0)

    arguments = (struct(mesh, (32, 64), None, "tensor"), struct(mesh, (16, 32), "data"))
    with jax.set_mesh(mesh):
        here = compile_step(step, arguments)
        other = Mesh(np.array(jax.devices()).reshape(2, 4), mesh.axis_names, mesh.axis_types)
        function, placed = Move(mesh, other).function(Call.of(jax.jit(step), arguments))
    with jax.set_mesh(other):
        text = function.trace(*placed).lower().compile().as_text()
    assert found(here) == sorted(
        (c.kind, c.mesh_axes, c.bytes) for c in read_program(text, other).collectives
    )
    assert {axes for _, axes, _ in found(here)} == {("data",), ("tensor",)}
    assert here.argument_names == {"arrays/0": "other", "arrays/1": "other"}
    assert sorted(here.argument_categories()) == [0, 1]


def test_flax_modules_are_arguments_like_others():
    mesh = cpu_mesh(data=8)
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    everywhere = NamedSharding(mesh, P())
    for module in (model, optimizer):
        nnx.update(module, jax.device_put(nnx.state(module), everywhere))

    @nnx.jit
    def train(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    other = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    arguments = (model, optimizer, struct(mesh, (16, 8), "data"))
    step = compile_step(train, arguments, on=CPU)
    # What goes over `data`: the gradients of kernel and bias, and the loss.
    assert sum(size for _, _, size in found(step)) == 4 * (8 * 4 + 4 + 1)
    assert step.argument_names["model/kernel/value"] == "params"
    assert step.argument_names["optimizer/opt_state/0/trace/kernel/value"] == "optimizer"
    # What it does is known, and not only what it is compiled to.
    assert len(step.jaxpr.out_avals) == 1 + len(jax.tree.leaves((model, optimizer)))
    # Moved to other devices it is the same: what it writes into modules is not lost.
    moved, placed = Move(mesh, other).function(Call.of(train, arguments))
    text = moved.trace(*placed).lower().compile().as_text()
    sizes = [c.bytes for c in read_program(text, other).collectives]
    assert sum(sizes) == 4 * (8 * 4 + 4 + 1)


class Tiny(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return sl.constrain(self.layer(x), "batch", None)


def tiny_step(mesh, finish=lambda h: h):
    rules = sl.rules.STANDARD.override(paths={"layer/kernel": ("embed", None)})
    with sl.use(mesh, rules):
        state = sl.abstract_state(lambda rngs: Tiny(rngs), optax.adam(1e-3))
    step = sl.make_train_step(lambda model, batch, rng: jnp.mean(finish(model(batch["x"])) ** 2))
    return step, state, {"x": jax.ShapeDtypeStruct((16, 16), jnp.float32)}


def test_a_state_takes_along_the_mesh_that_its_loss_holds():
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    mesh = cpu_mesh(data=2, fsdp=4)

    def finish(h):
        return jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P("data", "fsdp")))

    step, state, batch = tiny_step(mesh, finish)
    compiled = compile_step(step, (state, batch), on=TPU)
    assert compiled.arguments[0].definition.scope.mesh is compiled.mesh
    # As a loss does that asks for the mesh of where it runs.
    step, state, batch = tiny_step(mesh, lambda h: sl.constrain(h, "batch", None))
    scoped = compile_step(step, (state, batch), on=TPU)
    assert (compiled.argument_names, compiled.donated) == (scoped.argument_names, scoped.donated)
    assert compiled.memory["argument"] == scoped.memory["argument"]
    assert {chip_for(device) for device in compiled.mesh.devices.flat} == {TPU.chip}


@pytest.mark.parametrize("cluster", [None, CPU, TPU], ids=["here", "cpu", "tpu"])
@pytest.mark.parametrize("said", ["in_shardings", "out_shardings"])
def test_a_mesh_that_only_the_function_names(cluster, said):
    if cluster is TPU:
        pytest.importorskip("libtpu", reason="needs the extra tpu")
    rows = NamedSharding(cpu_mesh(data=8), P("data"))
    step = jax.jit(lambda x: x - jnp.sum(x, axis=0, keepdims=True), **{said: rows})
    compiled = compile_step(step, (jax.ShapeDtypeStruct((16, 4), jnp.float32),), on=cluster)
    assert compiled.mesh_sizes == {"data": 8}
    if said == "in_shardings":
        assert found(compiled) == [("all-reduce", ("data",), 16)]
        assert compiled.arguments[0].sharding.spec == P("data")


@pytest.mark.parametrize("cluster", [None, TPU], ids=["here", "tpu"])
def test_two_meshes_of_the_same_devices(cluster):
    if cluster is TPU:
        pytest.importorskip("libtpu", reason="needs the extra tpu")
    mesh = cpu_mesh(fsdp=4, tensor=2)
    flat = Mesh(mesh.devices.reshape(8), ("x",), axis_types=(AxisType.Auto,))
    arguments = struct(mesh, (16, 4), "fsdp", "tensor"), struct(flat, (16,), "x")
    step = compile_step(lambda a, b: jnp.sum(a, axis=0) + jnp.sum(b), arguments, on=cluster)
    assert step.mesh_sizes == {"fsdp": 4, "tensor": 2}
    assert {axes for _, axes, _ in found(step)} == {("fsdp",), ("fsdp", "tensor")}


def test_arguments_on_several_meshes():
    mesh = cpu_mesh(data=8)
    here, abstract = struct(mesh, (8,), "data"), struct(abstract_mesh(data=8), (8,), "data")
    turned = Mesh(mesh.devices[::-1], ("x",), axis_types=(AxisType.Auto,))
    with pytest.raises(
        MeshError,
        match=r"the arguments of the step are on several meshes:(.|\n)*\n  Place all of them on",
    ):
        compile_step(jnp.add, (here, struct(turned, (8,), "x")))
    cut = struct(abstract_mesh(data=4, fsdp=2), (8,), "data")
    with pytest.raises(MeshError, match="several meshes: data=8 and data=4,fsdp=2"):
        compile_step(jnp.add, (abstract, cut), on=CPU)
    # Of the same sizes, the one that has devices.
    assert compile_step(jnp.add, (abstract, here)).mesh is mesh
