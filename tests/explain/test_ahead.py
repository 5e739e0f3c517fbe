"""Steps compiled without being run."""

import functools
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from on_meshes import CPU, abstract_mesh, cpu_mesh, struct

from shardlib.errors import ConfigError, DoesNotFitError, MeshError
from shardlib.explain.analysis.memory import read_memory
from shardlib.explain.aot.capture_stderr import captured_errors
from shardlib.explain.aot.compile import compile_step
from shardlib.explain.aot.oom_fallback import compile_larger
from shardlib.hardware import chip_for, parse_cluster

pytestmark = pytest.mark.usefixtures("own_cache")


def test_arguments_whose_devices_cannot_be():
    plain = jax.ShapeDtypeStruct((8,), jnp.float32)
    abstract = struct(abstract_mesh(data=8), (8,), "data")
    mesh = abstract_mesh(data=2, fsdp=4)
    with pytest.raises(
        MeshError, match=r"the step runs on a mesh of 8 devices(.|\n)*\n  Place its arguments on a"
    ):
        compile_step(jnp.sum, (struct(mesh, (8,), "data"),), on=parse_cluster("cpu:4"))
    for argument, cluster, fault in (
        (plain, None, r"are on no mesh\.\n  Name a cluster"),
        (abstract, None, "are on an abstract mesh"),
        (plain, CPU, r"no sharding over the 8 devices of cpu:8: .*\n  Give them NamedShardings"),
    ):
        with pytest.raises(MeshError, match=fault):
            compile_step(jnp.sum, (argument,), on=cluster)
    assert compile_step(jnp.sum, (plain,), on=parse_cluster("cpu:1")).mesh.size == 1


def test_attention_by_cudnn_without_cudnn():
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra cuda")
    if importlib.util.find_spec("nvidia") is not None:
        pytest.skip("cuDNN may be there")
    heads = struct(abstract_mesh(data=8), (8, 64, 2, 64), "data", dtype=jnp.bfloat16)

    def attend(q):
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    with pytest.raises(
        ConfigError, match=r"cuDNN attention cannot be compiled: cuDNN is not(.|\n)*\n  pip install"
    ):
        compile_step(attend, (heads,), on=parse_cluster("8xh100"))


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


def test_arguments_in_the_memory_of_the_hosts_are_no_part_of_the_peak():
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    mesh = abstract_mesh(data=1)
    here = NamedSharding(mesh, P(), memory_kind="device")
    weights = jax.ShapeDtypeStruct(
        (4096, 4096), jnp.float32, sharding=NamedSharding(mesh, P(), memory_kind="pinned_host")
    )
    x = jax.ShapeDtypeStruct((4096, 128), jnp.float32, sharding=here)

    @jax.jit
    def step(weights, x):
        return jax.device_put(weights, jax.memory.Space.Device) @ x

    found = compile_step(step, (weights, x), on=parse_cluster("v5e-1"))
    assert found.memory["peak"] == 4096 * 4096 * 4 + 2 * 4096 * 128 * 4


def test_jax_has_a_cache_that_cannot_give_programs_for_absent_devices(tmp_path, monkeypatch):
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    compilation_cache.reset_cache()
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        for number in range(2):  # The second one finds an entry, which is no error.
            monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path / str(number)))
            x = struct(abstract_mesh(data=8), (1024, 1024), "data")
            found = compile_step(lambda x: x @ x, (x,), on=parse_cluster("v5e-8"))
            assert found.compiled is not None
        assert list((tmp_path / "jax").iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.rest("aot")
@pytest.mark.parametrize(
    ("cluster", "module"), [("v5e-1", "libtpu"), ("1xh100", "jax_cuda12_plugin")]
)
def test_temporaries_in_the_memory_of_the_hosts_are_no_part_of_the_peak(cluster, module):
    pytest.importorskip(module, reason="needs a compiler")
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["wide"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        return jnp.tanh(checkpoint_name(x @ w, "wide") @ w.T), None

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    here = NamedSharding(abstract_mesh(data=1), P(), memory_kind="device")
    shapes = (32, 256, 4096), (2048, 256)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=here) for shape in shapes]
    found = compile_step(jax.jit(jax.grad(loss)), arguments, on=parse_cluster(cluster))
    stats = found.compiled.memory_analysis()
    assert stats.host_temp_size_in_bytes >= 32 * 2048 * 4096 * 4
    # XLA's peak is that of the host's memory, so that the one by live ranges counts.
    assert stats.peak_memory_in_bytes >= stats.host_temp_size_in_bytes
    assert "peak" not in found.memory
    gradients = weights = 32 * 256 * 4096 * 4
    inputs = 32 * 2048 * 256 * 4
    of_layer = 2048 * 4096 * 4
    least = weights + gradients + inputs
    assert least <= read_memory(found).peak_bytes <= least + 6 * of_layer


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
    assert 200 <= raised.value.needed_bytes / 2**30 <= 220


def test_who_stands_in_for_a_chip_that_is_too_small():
    asked = []

    def refused(cluster):
        asked.append((cluster.name, cluster.num_devices, cluster.num_slices))
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Invalid TPU program.")

    for name in ("2xv5e-16", "v5p-128", "8xh100"):
        cluster = parse_cluster(name)
        fault = rf"does not fit {name}: it needs 33.0 GiB .*\n  Use more"
        with pytest.raises(DoesNotFitError, match=fault) as raised:
            compile_larger(cluster, 33 * 2**30, refused)
        assert raised.value.needed_bytes == 33 * 2**30
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


SCRIPT = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from shardlib.explain.aot.compile import compile_step
from shardlib.explain.lint import Subject, lint

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
cut = lambda h, *spec: jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P(*spec)))

def step(x):
    h = cut(x, "fsdp", "tensor").reshape(64, 32, 1024)
    return jnp.sum(jnp.sin(cut(h, None, ("tensor", "fsdp"))))

x = jax.ShapeDtypeStruct((2048, 1024), "float32", sharding=NamedSharding(mesh, P("fsdp")))
made = compile_step(step, (x,))
print(made.warnings is None, [finding.code for finding in lint(Subject.of(made))].count("SL104"))
"""


@pytest.mark.aot
def test_hidden_warnings_are_not_taken_for_none(tmp_path):
    base = {**os.environ, "SHARDLIB_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    found = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**base, "TF_CPP_MIN_LOG_LEVEL": level},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        # What is hidden is not taken for nothing, neither then nor by a later run.
        for level in ("2", "1", "3")
    ]  # fmt: skip
    assert found == ["True 0", "False 1", "False 1"]
