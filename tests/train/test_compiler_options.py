"""Compiler options of steps: those of the platform, those given, and what the TPU compiler does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import ConfigError
from shardlib.explain.analysis.collectives import read_program
from shardlib.explain.analysis.timing import collective_times
from shardlib.explain.aot.call import Call
from shardlib.explain.aot.compile import compile_step
from shardlib.explain.hlo.text import parse
from shardlib.hardware import parse_cluster
from shardlib.hardware.compiler_options import OPTIONS, options_on

SMALL = {"x": np.ones((8, 32), np.float32)}
GIVEN = {"xla_cpu_enable_fast_math": False}
(WINDOWED,) = (option.name for option in OPTIONS["tpu"] if "windowed" in option.name)


class Chain(nnx.Module):
    def __init__(self, rngs, width=32, depth=1):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        options = {"kernel_init": kernel, "use_bias": False, "rngs": rngs}
        self.layers = nnx.List(nnx.Linear(width, width, **options) for _ in range(depth))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def loss(model, batch, rng):
    return jnp.mean(model(batch["x"]) ** 2)


def small_state():
    with sl.use(sl.make_mesh("fsdp=8"), sl.rules.STANDARD):
        return sl.init_state(Chain, optax.sgd(1e-2), seed=0)


def options_of(step, state):
    return Call.of(step.program(state, SMALL), (state, SMALL)).compiler_options


def test_cpu_programs_have_the_given_options_only():
    state = small_state()
    for make in (sl.make_train_step, sl.make_eval_step):
        assert options_of(make(loss), state) == {}
        assert options_of(make(loss, compiler_options=GIVEN), state) == GIVEN


def test_a_step_with_options_compiles_once_and_runs_inside_of_another_program(compilations):
    step = sl.make_train_step(loss, compiler_options=GIVEN)
    state = small_state()
    alone = step(state, SMALL)[1]["loss"]
    assert sum("train_step" in message for message in compilations()) == 1

    @jax.jit
    def twice(state, batch):
        state, first = step(state, batch)
        return first["loss"], step(state, batch)[1]["loss"]

    first, second = twice(small_state(), jax.tree.map(jnp.asarray, SMALL))
    assert first == alone
    assert second < first


def test_options_that_the_compiler_refuses():
    wrong = {"xla_cpu_enable_fast_math": "yes", "xla_gpu_enable_pipelined_all_gathers": True}
    with pytest.raises(ConfigError) as refused:
        sl.make_train_step(loss, compiler_options=wrong)(small_state(), SMALL)
    first, second, fix = str(refused.value).split("\n")
    assert "xla_cpu_enable_fast_math='yes' is refused" in first
    assert "has no option 'xla_gpu_enable_pipelined_all_gathers'" in second
    assert "Did you mean 'xla_gpu_enable_pipelined_all_gather'?" in second
    assert fix == "  Correct or remove each of them."
    with pytest.raises(ConfigError, match=f"no default is named .*Did you mean '{WINDOWED}'"):
        options_on(sl.make_mesh("fsdp=8"), {f"{WINDOWED[:-4]}": None})


def test_flags_of_the_process_stay(monkeypatch, tpu_devices):
    mesh = jax.sharding.Mesh(tpu_devices("v5e:2x4"), ("fsdp",))
    assert WINDOWED in options_on(mesh)
    assert WINDOWED not in options_on(mesh, {WINDOWED: None})
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{WINDOWED}=1000")
    assert WINDOWED not in options_on(mesh)


@pytest.mark.aot
def test_a_program_for_a_tpu_hides_gathers_behind_matmuls(tpu_devices):
    mesh, width = jax.sharding.Mesh(tpu_devices("v5e:2x4"), ("fsdp",)), 2048
    with sl.use(mesh, sl.rules.STANDARD):
        model = functools.partial(Chain, width=width, depth=3)
        state = sl.abstract_state(model, optax.sgd(1e-2), precision="bf16")
    step = sl.make_train_step(loss, precision="bf16")
    batch = {"x": jax.ShapeDtypeStruct((8 * 512, width), jnp.float32)}
    cluster = parse_cluster("v5e-8")
    found = compile_step(step, (state, batch), on=cluster, optimize=True)
    assert found.options == options_on(mesh)
    module = parse(found.text)
    flows = collective_times(read_program(module, found.mesh), cluster, module)
    gathers = [flow for flow in flows if flow.collective.kind == "all-gather"]
    # Each gather of a weight counts once, though up to three instructions of the text hold it.
    assert {flow.collective.bytes for flow in gathers} == {2 * width**2}
    assert len(gathers) <= 3
    hidden = [flow for flow in gathers if flow.overlap == "overlapped"]
    assert hidden
    assert all(0 < flow.hidden_seconds <= flow.total_seconds for flow in hidden)
    others = [flow for flow in flows if flow not in hidden]
    assert {(flow.overlap, flow.hidden_seconds) for flow in others} == {("blocking", 0.0)}
