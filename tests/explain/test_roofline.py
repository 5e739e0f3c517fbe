"""FLOPs of traced steps against closed forms, bytes of compiled ones, and what binds them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.cost.transformer.flops import step_flops
from shardlib.cost.workload import NONE, Experts, Job, Transformer
from shardlib.explain.analysis.collectives import Collective, ProgramReport, read_program
from shardlib.explain.analysis.flops import count_flops
from shardlib.explain.analysis.roofline import read_roofline, vocabularies_of
from shardlib.explain.analysis.timing import collective_times
from shardlib.explain.hlo.text import parse
from shardlib.hardware import parse_cluster
from shardlib.registry import DataSpec
from shardlib_models.moe import MoEConfig
from shardlib_models.transformer import loss, make
from shardlib_models.transformer_config import TransformerConfig

LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 4, 64, 4, 2, 16, 160, 256
ROWS, LENGTH = 16, 32
MODEL = Transformer(LAYERS, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB)
JOB = Job(MODEL, LENGTH, ROWS)
# The head's columns are cut over `tensor`, its rows over `fsdp`.
HELD = {VOCAB: {VOCAB, VOCAB // 2}}
LAYER_WEIGHTS = sum(MODEL.layer_weights) * LAYERS


def flops_of(function, *arguments, **options):
    return count_flops(jax.jit(function).trace(*arguments).jaxpr, **options)


def transformer(mesh="fsdp=4,tensor=2", microbatches=1, **changes):
    """Returns the traced step of a transformer, and the sizes of its mesh."""
    config = TransformerConfig(
        num_layers=LAYERS, embed_dim=EMBED, num_heads=HEADS, num_kv_heads=KV_HEADS, mlp_dim=MLP,
        attention="xla", **changes,
    )  # fmt: skip
    mesh = sl.make_mesh(mesh)
    with sl.use(mesh, sl.rules.STANDARD):
        state = sl.abstract_state(
            lambda rngs: make(config, DataSpec(VOCAB, LENGTH), rngs), optax.adamw(1e-3)
        )
    step = sl.make_train_step(
        lambda model, batch, rng: loss(model, batch, rng, train=True),
        microbatches=microbatches,
        batch_axes=dict.fromkeys(("tokens", "targets"), ("batch", "length")),
    )
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), "int32")
    batch = {"tokens": tokens, "targets": tokens}
    return step.program(state, batch).trace(state, batch), dict(mesh.shape)


@pytest.fixture(scope="module")
def whole():
    return transformer(remat="full")


@pytest.mark.parametrize("microbatches", [1, 2])
def test_model_flops_of_a_transformer_are_the_closed_form(microbatches):
    flops = count_flops(transformer("fsdp=8", microbatches)[0].jaxpr, {VOCAB})
    # 6 a weight and token, and attention over all pairs: exactly, for nothing else is a matmul.
    assert flops.total_model == step_flops(JOB, "full")
    assert flops.total_hardware == flops.total_model
    tokens = ROWS * LENGTH
    attention = 4 * LAYERS * HEADS * HEAD_DIM * LENGTH * tokens
    assert flops.model == {
        "forward": 2 * LAYER_WEIGHTS * tokens + attention,
        "backward": 4 * LAYER_WEIGHTS * tokens + 2 * attention,
        "head": 6 * VOCAB * EMBED * tokens,
    }


def test_hardware_flops_count_what_is_computed_again(whole):
    flops = count_flops(whole[0].jaxpr, {VOCAB})
    assert flops.total_model == step_flops(JOB, "full")
    # All of a layer but its last matmul, which nothing reads.
    forward = flops.model["forward"]
    last = 2 * LAYERS * MLP * EMBED * ROWS * LENGTH
    assert flops.hardware["recompute"] == forward - last
    assert flops.total_hardware == flops.total_model + forward - last


def test_experts_multiply_the_rows_that_arrive():
    moe = MoEConfig(num_experts=4, experts_per_token=2, mlp_dim=96)
    model = dataclasses.replace(MODEL, experts=Experts(4, 2, 96))
    wanted = step_flops(dataclasses.replace(JOB, model=model, remat=NONE), "full")
    # Where each device has all experts, its rows are at hand, and there are no more.
    flops = count_flops(transformer("fsdp=8", moe=moe)[0].jaxpr, {VOCAB})
    assert flops.total_model == pytest.approx(wanted, rel=1e-12)
    assert flops.ragged > 0


def matmul(x, y):
    return x @ y


def ones(*shape):
    return jnp.ones(shape)


def test_loops_branches_and_manual_regions():
    x, y = ones(8, 16), ones(16, 16)
    one = 2 * 8 * 16 * 16

    def scanned(x, y):
        return jax.lax.scan(lambda h, _: (h @ y, None), x, None, length=5)[0]

    assert flops_of(scanned, x, y).hardware == {"forward": 5 * one}

    def branched(x, y):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ y @ y, lambda: x @ y)

    assert flops_of(branched, x, y).total_hardware == 2 * one

    def unbounded(x, y):
        return jax.lax.while_loop(lambda h: h[0, 0] < 9, lambda h: h @ y, x)

    flops = flops_of(unbounded, x, y)
    assert (flops.total_hardware, flops.uncounted_loops) == (one, 1)
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2
    )
    split = jax.shard_map(matmul, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    # Replicas along b do the same again.
    assert flops_of(split, x, y).total_hardware == 2 * one
    inner = jax.shard_map(
        matmul, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), axis_names={"a"}
    )
    assert flops_of(inner, x, y).total_hardware == one


def test_what_an_optimizer_multiplies_is_hardware_flops_alone():
    x, y = ones(8, 16), ones(16, 16)

    def step(x, y):
        gradient = jax.grad(lambda y: jnp.sum((x @ y) ** 2))(y)
        return gradient @ gradient

    flops = flops_of(step, x, y)
    one, squared = 2 * 8 * 16 * 16, 2 * 16**3
    assert flops.model == {"forward": one, "backward": one}
    assert flops.hardware == {"forward": one, "backward": one, "optimizer": squared}


def test_convolutions_and_their_gradients():
    images, kernel = ones(2, 8, 8, 3), ones(3, 3, 3, 16)

    def convolve(images, kernel):
        return jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    one = 2 * (2 * 8 * 8 * 16) * (3 * 3 * 3)
    assert flops_of(convolve, images, kernel).total_model == one
    gradient = jax.grad(lambda x, k: convolve(x, k).sum(), argnums=(0, 1))
    # The window that the gradient of a kernel slides is the image: windows at the border count
    # whole there, as everywhere.
    assert flops_of(gradient, images, kernel).total_model == pytest.approx(3 * one, rel=1e-12)
    grouped = jax.lax.conv_general_dilated(
        ones(2, 8, 8, 4), ones(3, 3, 1, 16), (1, 1), "SAME", feature_group_count=4,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    assert grouped.shape == (2, 8, 8, 16)


def test_kernels_count_their_grid():
    def kernel(x, y, o):
        o[...] = jnp.dot(x[...], y[...])

    call = pl.pallas_call(
        kernel,
        grid=(4,),
        in_specs=[
            pl.BlockSpec((32, 64), lambda i: (i, 0)),
            pl.BlockSpec((64, 16), lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((32, 16), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((128, 16), "float32"),
    )
    assert flops_of(call, ones(128, 64), ones(64, 16)).total_hardware == 2 * 128 * 64 * 16


def test_fused_attention_has_a_formula(monkeypatch):
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    # Tracing asks for cuDNN, which only running needs.
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda _: True)
    q = jax.ShapeDtypeStruct((2, 256, 4, 64), "bfloat16")

    def attended(q, k, v):
        y = jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
        return jnp.sum(y.astype(jnp.float32))

    flops = flops_of(jax.grad(attended, argnums=(0, 1, 2)), q, q, q)
    forward = 4 * 2 * 4 * 256 * 256 * 64
    assert flops.model == {"forward": forward, "backward": 2 * forward}
    assert flops.hardware == {"forward": forward, "backward": 2.5 * forward}


def test_a_kernel_without_a_formula_is_named():
    def called(x):
        return jax.ffi.ffi_call("my_kernel", jax.ShapeDtypeStruct((4,), "float32"))(x)

    def step(x):
        return jax.lax.scan(lambda h, _: (called(h), None), x, None, length=3)[0]

    assert flops_of(step, ones(4)).uncounted == {"my_kernel": 3}


@pytest.mark.aot
def test_a_compiled_step_of_a_transformer(whole):
    traced, mesh = whole
    text = traced.lower().compile().as_text()
    module, cluster = parse(text), parse_cluster("8xh100")
    flows = collective_times(read_program(text, mesh), cluster, module)
    found = read_roofline(traced.jaxpr, module, mesh, cluster, flows, vocabularies=HELD)
    # The program that is compiled multiplies what the traced one does, and nothing twice.
    assert found.redundancy == pytest.approx(1.0, rel=0.01)
    assert found.notes == ()
    assert {stage.stage for stage in found.stages} == {
        "forward", "backward", "recompute", "head", "optimizer",
    }  # fmt: skip
    seconds, peak = found.seconds, 989.5e12 / 2  # TF32
    assert seconds["compute"] == pytest.approx(
        found.flops.total_hardware / 8 * max(found.redundancy, 1.0) / peak
    )
    assert seconds["memory"] == pytest.approx(found.memory_bytes / 3350e9)
    assert seconds["network"] == pytest.approx(sum(f.total_seconds for f in flows))
    # So small a model is never bound by its matmuls.
    assert found.intensity < peak / 3350e9
    assert found.binding == "network" == max(seconds, key=lambda name: seconds[name])
    optimizer = next(stage for stage in found.stages if stage.stage == "optimizer")
    assert (optimizer.flops, optimizer.intensity) == (0.0, 0.0)
    # AdamW reads parameter, gradient and two moments and writes three of them, each device an
    # eighth or, of what only one axis cuts, more.
    assert optimizer.memory_bytes >= 7 * 4 * MODEL.num_params / 8


WHOLE = P()


def compiled_matmul(spec=WHOLE):
    """Returns a traced matmul of a batch on eight devices, its program and its collectives."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",), axis_types=(AxisType.Auto,))

    def array(rows, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct((rows, 512), "bfloat16", sharding=sharding)

    traced = jax.jit(matmul).trace(array(1024, spec), array(512, P()))
    text = traced.lower().compile().as_text()
    return traced.jaxpr, parse(text), read_program(text, dict(mesh.shape))


@pytest.mark.parametrize(("spec", "times"), [(WHOLE, 8), (P("data"), 1)])
def test_what_every_device_computes_alike_counts_on_each(spec, times):
    jaxpr, module, _ = compiled_matmul(spec=spec)
    found = read_roofline(jaxpr, module, {"data": 8}, parse_cluster("8xh100"))
    assert found.redundancy == times
    (stage,) = found.stages
    flops = 2 * 1024 * 512 * 512 * times / 8
    assert (stage.stage, stage.flops) == ("forward", flops)
    assert stage.compute_seconds == pytest.approx(flops / 989.5e12)
    assert found.intensity == pytest.approx(flops / found.memory_bytes)


def test_what_is_known_of_the_network_is_summed():
    jaxpr, module, _ = compiled_matmul()

    def gather(axes):
        return Collective(
            "all-gather", axes, 8 * 2**20, ("f32[1]",), 1, False, True, "jit(f)/dot", "", "g", 8
        )

    cluster = parse_cluster("8xh100")
    program = ProgramReport({"data": 8}, (gather(("data",)), gather(None), gather(("data",))), {})
    flows = collective_times(program, cluster)
    found = read_roofline(jaxpr, module, {"data": 8}, cluster, flows)
    known = next(flow.total_seconds for flow in flows if flow.total_seconds)
    assert found.seconds["network"] == pytest.approx(2 * known)
    assert found.notes == (
        "network seconds leave out 1 of 3 collectives: 7.0 MiB sent by a device",
    )
    lost = tuple(flow for flow in flows if flow.total_seconds is None)
    none = read_roofline(jaxpr, module, {"data": 8}, cluster, lost)
    assert none.seconds["network"] is None
    assert none.notes == ("network seconds are not known",)


@pytest.mark.parametrize(
    ("dtype", "cluster", "peak", "notes"),
    [
        ("float16", "8xv100-32", 125e12, ()),
        ("bfloat16", "8xv100-32", None, ("the V100-SXM2 32GB has no matmul in bf16",)),
        ("float8_e4m3fn", "8xh100", 1979e12, ()),
        ("int8", "v5e-8", 393e12, ()),
        ("float32", "8xh100", 989.5e12 / 2, ()),  # TF32
        ("float32", "8xt4", 8.1e12, ()),
        ("float32", "v5e-8", 197e12, ()),
    ],
)
def test_the_peak_is_that_of_what_is_multiplied(dtype, cluster, peak, notes):
    x = jax.ShapeDtypeStruct((8, 8), dtype)

    def step(x):
        # What is multiplied less is not what counts.
        return jax.lax.dot(x, x, preferred_element_type=jnp.float32), jnp.ones((2, 2)) @ ones(2, 2)

    jaxpr = jax.jit(step).trace(x).jaxpr
    found = read_roofline(jaxpr, parse(""), {"data": 8}, parse_cluster(cluster), ())
    assert found.peak_flops == peak
    assert found.notes == notes


@pytest.mark.parametrize(
    ("dtype", "cluster", "rates"),
    [("int8", "v5e-8", (393e12, 197e12)), ("float8_e5m2", "8xh100", (1979e12, 989.5e12))],
)
def test_seconds_are_by_the_dtype_of_each_product(dtype, cluster, rates):
    x, y = jax.ShapeDtypeStruct((64, 64), dtype), jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)

    def step(x, y):
        return jax.lax.dot(x, x, preferred_element_type=jnp.float32), y @ y

    jaxpr = jax.jit(step).trace(x, y).jaxpr
    found = read_roofline(jaxpr, parse(""), {"data": 8}, parse_cluster(cluster), ())
    parts = zip((2 * 64**3, 2 * 32**3), rates, strict=True)
    assert found.seconds["compute"] == pytest.approx(sum(n / rate for n, rate in parts) / 8)


@pytest.mark.parametrize(
    ("mesh", "held"),
    [
        ("fsdp=4,tensor=2", {1024, 512}),
        ("fsdp=8", {1024}),  # 1024 / 8 is the embedding's 128, and `fsdp` cuts no vocabulary.
        ("tensor=8", {1024}),  # `tensor` does, into parts that look like it.
    ],
)
def test_the_head_is_known_by_what_cuts_the_vocabulary(mesh, held):
    config = TransformerConfig(
        num_layers=2, embed_dim=128, num_heads=8, num_kv_heads=8, mlp_dim=160, attention="xla"
    )
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        state = sl.abstract_state(
            lambda rngs: make(config, DataSpec(1024, LENGTH), rngs), optax.adamw(1e-3)
        )
    assert vocabularies_of(sl.explain(state)) == {1024: held}
