"""Steps compiled for devices that are not there; and for eight CPU devices as if they were not."""

import functools
import importlib.util
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.errors import ConfigError, DoesNotFitError, MeshError, MissingExtraError
from shardlib.explain.ahead import compile_step, devices_of
from shardlib.explain.captured import captured_errors
from shardlib.explain.gpu_targets import TARGETS
from shardlib.explain.memory import read_memory
from shardlib.explain.moving import Move
from shardlib.explain.oversized import compile_larger
from shardlib.explain.program import read_program
from shardlib.hardware import CHIPS, chip_for, parse_cluster
from shardlib.mesh import describe

CPU, TPU = parse_cluster("cpu:8"), parse_cluster("v5e-8")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path / "cache"))


def cpu_mesh(**sizes):
    """A mesh whose devices stand in another order than `make_mesh` would give them."""
    devices = np.array(jax.devices()[::-1]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def abstract_mesh(**sizes):
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize(
    ("name", "hosts", "slices"),
    [
        ("v4-32", 4, 1),
        ("v5e-1", 1, 1),
        ("v5e-8", 1, 1),
        ("v5e-16", 4, 1),
        ("v5p-8", 1, 1),
        ("v5p-32", 4, 1),
        ("v5p:4x4x8", 32, 1),
        ("v5p-17920", 2240, 1),
        ("v6e-64", 16, 1),
        ("tpu7x:2x2x1", 1, 1),
        ("2xv5e-256", 128, 2),
    ],
)
def test_devices_of_tpu_slices(name, hosts, slices):
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    cluster = parse_cluster(name)
    devices = devices_of(cluster)
    assert len(devices) == cluster.num_devices
    assert {chip_for(device) for device in devices} == {cluster.chip}
    assert len({device.process_index for device in devices}) == hosts == cluster.num_hosts
    assert len({getattr(device, "slice_index", 0) for device in devices}) == slices
    assert sl.make_mesh("auto", devices=devices).size == len(devices)


@pytest.mark.parametrize("chip", [chip for chip in CHIPS.values() if chip.kind == "gpu"])
def test_devices_of_gpu_hosts(chip):
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra cuda")
    cluster = parse_cluster(f"2x4x{chip.name}")
    devices = devices_of(cluster)
    assert [device.process_index for device in devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {chip_for(device) for device in devices} == {chip}


def test_every_gpu_has_its_facts():
    assert set(TARGETS) == {chip.name for chip in CHIPS.values() if chip.kind == "gpu"}
    for name, target in TARGETS.items():
        # What CUDA reports is within a few percent of what is sold, in either unit.
        assert target.memory_bytes == pytest.approx(CHIPS[name].memory_bytes, rel=0.075)
        bandwidth = CHIPS[name].memory_bytes_per_second
        assert target.memory_bytes_per_second == pytest.approx(bandwidth, rel=0.05)


def test_cpu_devices_are_those_of_this_process():
    assert devices_of(CPU) == jax.devices("cpu")
    with pytest.raises(MeshError) as raised:
        devices_of(parse_cluster("cpu:9"))
    assert str(raised.value) == (
        "cpu:9 needs 9 CPU devices, and JAX has started 8.\n  Start with JAX_NUM_CPU_DEVICES=9."
    )


@pytest.mark.parametrize(
    ("name", "modules", "what", "extra"),
    [
        ("v5p-128", ["libtpu"], "libtpu", "tpu"),
        (
            "8xh100",
            ["jax_cuda12_plugin", "jax_cuda13_plugin"],
            "the CUDA plugin of JAX",
            "cuda",
        ),
    ],
)
def test_a_missing_compiler_is_named_with_what_installs_it(monkeypatch, name, modules, what, extra):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError) as raised:
        devices_of(parse_cluster(name))
    assert str(raised.value) == (
        f"compiling for {name} needs {what}, which is not installed: pip install "
        f"'shardlib[{extra}]'"
    )


def test_a_slice_that_cannot_be():
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    with pytest.raises(MeshError, match=r"^v5e:3x4 cannot be compiled for: INVALID_ARGUMENT: "):
        devices_of(parse_cluster("v5e:3x4"))


def test_what_is_set_stays_set(monkeypatch):
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    devices_of(TPU)
    assert os.environ["TPU_ACCELERATOR_TYPE"] == "v5litepod-8"
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "localhost"


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


def found(step):
    return sorted(
        (c.kind, c.mesh_axes, c.bytes) for c in read_program(step.text, step.mesh).collectives
    )


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


def test_a_function_on_an_abstract_mesh():
    mesh = abstract_mesh(data=8)

    def total(x):
        return jnp.sum(x, axis=0)

    step = compile_step(total, (struct(mesh, (16, 4), "data"),), on=CPU)
    assert found(step) == [("all-reduce", ("data",), 16)]
    assert step.mesh.devices.size == 8
    assert step.cluster is CPU
    assert step.arguments[0].sharding.mesh is step.mesh


def test_arguments_on_the_devices_stay_where_they_are():
    mesh = cpu_mesh(data=8)
    x = jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, P("data")))
    for cluster in (None, CPU):
        step = compile_step(jax.jit(lambda x: jnp.sum(x, axis=0)), (x,), on=cluster)
        assert step.mesh is mesh
        assert found(step) == [("all-reduce", ("data",), 16)]


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
        function, placed = Move(mesh, other).function(jax.jit(step), arguments)
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
    # Moved to other devices it is the same: what it writes into modules is not lost.
    moved, placed = Move(mesh, other).function(train, arguments)
    text = moved.trace(*placed).lower().compile().as_text()
    sizes = [c.bytes for c in read_program(text, other).collectives]
    assert sum(sizes) == 4 * (8 * 4 + 4 + 1)


class Tiny(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return sl.constrain(self.layer(x), "batch", None)


def tiny_step(mesh):
    rules = sl.rules.STANDARD.override(paths={"layer/kernel": ("embed", None)})
    with sl.use(mesh, rules):
        state = sl.abstract_state(lambda rngs: Tiny(rngs), optax.adam(1e-3))
    step = sl.make_train_step(lambda model, batch, rng: jnp.mean(model(batch["x"]) ** 2))
    return step, state, {"x": jax.ShapeDtypeStruct((16, 16), jnp.float32)}


@pytest.mark.parametrize("make", [cpu_mesh, abstract_mesh])
def test_a_state_takes_its_mesh_along(make):
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    step, state, batch = tiny_step(make(data=2, fsdp=4))
    compiled = compile_step(step, (state, batch), on=TPU)
    moved = compiled.arguments[0]
    assert moved.definition.scope.mesh is compiled.mesh
    assert state.definition.scope.mesh is not compiled.mesh
    assert moved.params["layer"]["kernel"].sharding.spec == P("fsdp", None)
    assert compiled.mesh_sizes == {"data": 2, "fsdp": 4}
    assert {axes for _, axes, _ in found(compiled)} >= {("fsdp",)}
    assert compiled.argument_names["state/opt_state/0/mu/layer/kernel"] == "optimizer"
    assert compiled.jaxpr is not None


def test_sizes_that_do_not_match_the_cluster():
    mesh = abstract_mesh(data=2, fsdp=4)
    with pytest.raises(MeshError) as raised:
        compile_step(jnp.sum, (struct(mesh, (8,), "data"),), on=parse_cluster("cpu:4"))
    assert str(raised.value) == (
        "the step runs on a mesh of 8 devices (data=2,fsdp=4), and cpu:4 has 4.\n"
        "  Place its arguments on a mesh of 4, which may be an AbstractMesh, or name a cluster of "
        "as many."
    )


def test_arguments_that_say_nothing_of_devices():
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(MeshError) as raised:
        compile_step(jnp.sum, (x,))
    assert str(raised.value) == (
        "nothing says which devices to compile the step for: its arguments lie on no mesh.\n"
        "  Name a cluster, as in on='v5e-16', or place the arguments on a mesh."
    )
    with pytest.raises(MeshError, match="its arguments lie on an abstract mesh"):
        compile_step(jnp.sum, (struct(abstract_mesh(data=8), (8,), "data"),))
    with pytest.raises(MeshError) as raised:
        compile_step(jnp.sum, (x,), on=CPU)
    assert str(raised.value) == (
        "nothing says how the step is spread over the 8 devices of cpu:8: its arguments lie on no "
        "mesh.\n  Give them NamedShardings, on an AbstractMesh if need be, or name a cluster of "
        "one device."
    )
    assert compile_step(jnp.sum, (x,), on=parse_cluster("cpu:1")).mesh.size == 1


def test_arguments_on_several_meshes():
    arguments = (
        struct(abstract_mesh(data=8), (8,), "data"),
        struct(abstract_mesh(data=4, fsdp=2), (8,), "data"),
    )
    with pytest.raises(MeshError) as raised:
        compile_step(jnp.add, arguments, on=CPU)
    assert str(raised.value) == (
        "the arguments of the step lie on several meshes: data=8 and data=4,fsdp=2.\n"
        "  Place all of them on one, with jax.device_put or in their ShapeDtypeStructs."
    )


def test_attention_by_cudnn_without_cudnn():
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra cuda")
    if importlib.util.find_spec("nvidia") is not None:
        pytest.skip("cuDNN may be there")
    heads = struct(abstract_mesh(data=8), (8, 64, 2, 64), "data", dtype=jnp.bfloat16)

    def attend(q):
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    with pytest.raises(ConfigError) as raised:
        compile_step(attend, (heads,), on=parse_cluster("8xh100"))
    assert str(raised.value) == (
        "attention by cuDNN cannot be compiled: cuDNN is not installed.\n"
        "  pip install 'shardlib[cuda]', or let another back end compute it (model.attention=xla)."
    )


def test_what_the_compiler_complains_of_is_kept():
    mesh = cpu_mesh(data=4, fsdp=2)

    def place(*spec):
        return NamedSharding(mesh, P(*spec))

    @jax.jit
    def gather(table, tokens):
        y = jax.lax.with_sharding_constraint(table[tokens], place("data", None, None))
        z = jax.lax.with_sharding_constraint(jnp.sin(y), place(None, ("fsdp", "data"), None))
        return jax.lax.with_sharding_constraint(jnp.cos(z), place("fsdp", None, "data"))

    arguments = (
        struct(mesh, (64, 32), "data", "fsdp"),
        struct(mesh, (8, 16), "data", dtype=jnp.int32),
    )
    step = compile_step(gather, arguments)
    assert "Involuntary full rematerialization" in step.warnings
    assert compile_step(gather, arguments).warnings == step.warnings
    assert compile_step(lambda x: x + 1, arguments[:1]).warnings == ""


# The compiler takes a minute until it gives up on arrays of this size.
@pytest.mark.soak
def test_a_step_far_too_large_for_its_chip_is_read_on_a_larger_one():
    pytest.importorskip("libtpu", reason="needs the extra tpu")

    def stack(x):
        _, rows = jax.lax.scan(lambda c, _: (c * x, c), x, None, length=20)
        return jnp.sum(rows.astype(jnp.float32), axis=(1, 2))

    x = jax.ShapeDtypeStruct((2**15, 2**15), jnp.bfloat16)
    one = parse_cluster("v5e-1")
    step = compile_step(stack, (x,), on=one)
    assert (step.cluster, step.compiled_for) == (one, "1xv5p-2")
    assert chip_for(step.mesh.devices.flat[0]) is one.chip
    # Twenty rows of 2 GiB and the argument, and copies that the compiler makes.
    report = read_memory(step)
    assert 42 <= report.peak_bytes / 2**30 <= 50
    assert not report.fits
    assert sum(report.categories.values()) == report.peak_bytes
    assert compile_step(stack, (x,), on=one).compiled_for == "1xv5p-2"


@pytest.mark.soak
def test_a_step_too_large_for_any_chip():
    pytest.importorskip("libtpu", reason="needs the extra tpu")

    def stack(x):
        _, rows = jax.lax.scan(lambda c, _: (c * x, c), x, None, length=100)
        return jnp.sum(rows.astype(jnp.float32), axis=(1, 2))

    x = jax.ShapeDtypeStruct((2**15, 2**15), jnp.bfloat16)
    with pytest.raises(DoesNotFitError) as raised:
        compile_step(stack, (x,), on=parse_cluster("v5e-1"))
    needed = raised.value.needed_bytes / 2**30
    assert 200 <= needed <= 220
    assert str(raised.value) == (
        f"the step does not fit v5e-1: it needs {needed:.1f} GiB on each device, too much to be "
        "compiled.\n"
        "  Take more microbatches, rematerialisation or devices; shardlib plan says which."
    )


def test_who_stands_in_for_a_chip_that_is_too_small():
    asked = []

    def refused(cluster):
        asked.append((cluster.name, cluster.num_devices, cluster.num_slices))
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Invalid TPU program.")

    for name in ("2xv5e-16", "v5p-128", "8xh100"):
        cluster = parse_cluster(name)
        with pytest.raises(DoesNotFitError) as raised:
            compile_larger(cluster, 33 * 2**30, refused)
        assert raised.value.needed_bytes == 33 * 2**30
        assert str(raised.value) == (
            f"the step does not fit {name}: it needs 33.0 GiB on each device, too much to be "
            "compiled.\n"
            "  Take more microbatches, rematerialisation or devices; shardlib plan says which."
        )
    # Of the largest there is none larger.
    assert asked == [("2xv5p-32", 32, 2)]
    found = compile_larger(parse_cluster("v5e-1"), 1, lambda cluster: cluster.num_devices)
    assert found == 1


def test_only_what_the_compiler_writes_is_gathered(capfd):
    with captured_errors() as said:
        os.write(2, b"W1121 12:45:24.953107   18619 spmd_partitioner.cc:656] careful\n")
        print("mine", file=sys.stderr)
    print("after", file=sys.stderr)
    assert said.text == "W1121 12:45:24.953107   18619 spmd_partitioner.cc:656] careful\n"
    assert capfd.readouterr().err == "mine\nafter\n"


def test_what_was_compiled_once_is_read(tmp_path):
    x = struct(cpu_mesh(data=8), (16, 4), "data")
    first = compile_step(jnp.sum, (x,))
    again = compile_step(jnp.sum, (x,))
    assert first.compiled is not None
    assert again.compiled is None
    assert (again.text, again.memory, again.lowered_hash) == (
        first.text,
        first.memory,
        first.lowered_hash,
    )
    assert compile_step(jnp.sum, (x,), keep=False).compiled is not None
    assert compile_step(jnp.max, (x,)).compiled is not None
    assert len(list((tmp_path / "cache" / "programs").iterdir())) == 2
