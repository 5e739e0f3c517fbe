"""Attention of traced programs: priced as the kernel that a platform has for it."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.cost.traced.costs import Walk
from shardlib.cost.traced.layout import replicated
from shardlib.cost.transformer.flops import step_flops
from shardlib.errors import ModelError
from shardlib.hardware import parse_cluster
from shardlib.mesh import abstract_mesh
from shardlib.nn.attention import attend
from shardlib.nn.attention.as_one import attention_as_one
from shardlib.plan import Job, Layout, Transformer, peak_memory, step_time
from shardlib.plan.workloads.tracing import naming, trace_workload
from shardlib.registry import DataSpec
from shardlib_models import transformer

LAYERS, EMBED, HEADS, KV_HEADS, HIDDEN, VOCAB, LENGTH, BATCH = 2, 512, 8, 2, 512, 512, 1024, 16
JOB = Job(Transformer(LAYERS, EMBED, HEADS, KV_HEADS, EMBED // HEADS, HIDDEN, VOCAB), LENGTH, BATCH)
ON = {"tpu": parse_cluster("v5p-16"), "gpu": parse_cluster("8xh100")}


@functools.cache
def llama(platform, rules=sl.rules.STANDARD, **options):
    config = transformer.FAMILY.config(
        num_layers=LAYERS,
        embed_dim=EMBED,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        mlp_dim=HIDDEN,
        vocab_size=VOCAB,
        **options,
    )
    return trace_workload(
        lambda rngs: transformer.FAMILY.make(
            config, DataSpec(vocab_size=VOCAB, sequence_length=LENGTH), rngs
        ),
        optax.adamw(1e-3),
        functools.partial(transformer.FAMILY.loss, train=True),
        dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)),
        rules=rules,
        precision="bf16",
        platform=platform,
    )


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_both_models_time_attention_alike(platform):
    """With more devices over `tensor` than key-value heads, each device computes its query heads.
    A ring over `context` has its own rate."""
    cluster = ON[platform]
    for layout in (Layout(fsdp=8), Layout(fsdp=2, tensor=4), Layout(fsdp=2, context=4)):
        formula = step_time(JOB, layout, cluster)
        traced = llama(platform).step_time(layout, cluster)
        assert traced.attention == pytest.approx(formula.attention, rel=1e-3), layout


def test_a_step_without_a_platform_is_traced_for_that_of_the_cluster():
    for platform, cluster in ON.items():
        traced = llama(None).step_time(Layout(fsdp=8), cluster)
        assert traced == llama(platform).step_time(Layout(fsdp=8), cluster)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_recomputed_layers_run_the_kernel_again(platform):
    costs, _ = llama(platform, remat="full").costs(Layout(fsdp=8), platform)
    flops = {during: count for (during, _), count in costs.attended.items()}
    assert flops["recompute"] == flops["forward"] == flops["backward"] / 2


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_kernels_keep_no_scores(platform, remat):
    layout, cluster = Layout(fsdp=8), ON[platform]
    kernel = llama(platform, remat=remat).peak_memory(layout, cluster)
    plain = llama(platform, remat=remat, attention="xla").peak_memory(layout, cluster)
    scores = 4 * HEADS * LENGTH**2 * BATCH / layout.fsdp
    saved = plain.activations + plain.recomputed - kernel.activations - kernel.recomputed
    assert saved > scores * (LAYERS if remat == "none" else 1)
    if remat == "none":
        formula = peak_memory(JOB, layout, cluster)
        assert kernel.activations == pytest.approx(formula.activations, rel=0.5)


def test_heads_are_cut_as_attend_asks_the_rules_for_them():
    """Rows that `tensor` cuts elsewhere are exchanged for heads."""
    either = {name: ["tensor", None] for name in ("heads", "kv_heads", "mlp", "vocab")}
    rules = sl.rules.STANDARD.override(activations={**either, "length": "tensor"})
    layout, cluster = Layout(tensor=2), ON["tpu"]
    apart, whole = (llama("tpu", rules=one) for one in (rules, sl.rules.STANDARD))
    assert apart.step_time(layout, cluster).attention == whole.step_time(layout, cluster).attention
    sent = {m.kind for _, m in apart.costs(layout, "tpu")[0].moved if m.axes == ("tensor",)}
    assert "all_to_all" in sent


def test_model_flops_are_those_of_all_pairs():
    for platform in ("tpu", "gpu"):
        for remat in ("none", "full"):
            counted = llama(platform, remat=remat).flops
            assert counted == llama(platform, remat=remat, attention="xla").flops
    assert counted == pytest.approx(step_flops(JOB, "full"), rel=0.01)


def counted(function, arrays, platform):
    """Returns the counts of a program that is traced for a platform."""
    mesh = abstract_mesh("data=1", 1).update(
        abstract_device=jax.sharding.AbstractDevice(platform, None, platform=platform)
    )
    with attention_as_one(platform), sl.use(mesh, sl.rules.STANDARD):  # type: ignore[arg-type]
        program = jax.make_jaxpr(function)(*arrays).jaxpr
    walk = Walk({}, lambda names, shape, kind: ((),) * len(shape), platform)
    given = (*program.constvars, *program.invars)
    return walk.run(program, [replicated(var.aval) for var in given])[1]


def gradient_costs(platform, *shapes, **options):
    """Returns the counts of the gradients of attention between arrays of some shapes."""

    def loss(*arrays):
        return jnp.sum(attend(*(jnp.sin(x) for x in arrays), **options).astype(jnp.float32))

    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return counted(jax.grad(loss, (0, 1, 2)), arrays, platform)


def test_devices_may_share_a_head_of_keys():
    """Each computes its query heads, and the gradients of what they share are summed."""

    def loss(query, key):
        placed = sl.constrain(query, "batch", None, "heads", None)
        return jnp.sum(attend(placed, key, key).astype(jnp.float32))

    query, key = (jax.ShapeDtypeStruct((2, 512, n, 64), jnp.bfloat16) for n in (4, 1))
    with naming(sl.rules.STANDARD, ("heads", "batch"), "gpu"):
        program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(query, key).jaxpr
    whole = abstract_mesh("tensor=4", 4)

    def resolve(names, shape, kind):
        spec = sl.rules.STANDARD.spec(names, shape, whole, kind)
        return tuple(() if entry is None else (entry,) for entry in spec)

    walk = Walk({"tensor": 4}, resolve, "gpu")
    given = (*program.constvars, *program.invars)
    laid, costs = walk.run(program, [replicated(var.aval) for var in given])
    pairs = 2 * 512 * 512 * 4 * 2 * 64
    assert sum(costs.attended.values()) == 2 * pairs * (1 + 2) / 4
    assert "tensor" in laid[1].partial


def test_kernels_compute_blocks_with_a_visible_pair():
    def share(length, platform="gpu", **options):
        row = (2, length, 4, 64)
        (kernel,) = {one for _, one in gradient_costs(platform, row, row, row, **options).attended}
        assert kernel.head_dim == 64
        return kernel.share

    assert share(512, causal=False) == 1
    # Four blocks of 128 see 1, 2, 3 and 4 of them; one block of 512 sees itself.
    assert share(512) == 10 / 16
    assert share(512, "tpu") == 1
    # The first query of a block sees the last 15 keys of the block before.
    assert share(512, window=16) == pytest.approx(7 / 16, abs=1e-4)
    assert share(512, window=1) == 4 / 16


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_long_rows_take_no_memory_of_the_host(platform):
    length = 2**17
    row = (1, length, 1, 64)
    costs = gradient_costs(platform, row, row, row)
    # Operands and results of about one kernel forward and three backward, and sines.
    assert sum(costs.fused_bytes.values()) < 40 * 2 * length * 64


def test_a_policy_keeps_nothing_within_a_kernel():
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def layer(x):
        heads = (x @ x.mT).reshape(2, 512, 8, 64)
        return attend(heads, heads, heads).reshape(x.shape)

    def loss(x):
        return jnp.sum(layer(jnp.sin(x)).astype(jnp.float32) ** 2)

    row = jax.ShapeDtypeStruct((2, 512, 512), jnp.bfloat16)
    assert counted(jax.grad(loss), [row], "gpu").kept_bytes < 8 * row.size


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_copies_of_vmap_are_rows(platform):
    row = jax.ShapeDtypeStruct((4, 2, 512, 4, 64), jnp.bfloat16)

    def loss(attention, rows):
        return jnp.sum(attention(rows, rows, rows).astype(jnp.float32))

    def flat(*arrays):
        return attend(*(x.reshape(-1, *x.shape[2:]) for x in arrays))

    mapped, merged = (
        counted(jax.grad(functools.partial(loss, how)), [row], platform).attended
        for how in (jax.vmap(attend), flat)
    )
    assert mapped == merged
    assert mapped


def test_copies_of_vmap_share_their_sinks():
    row, sinks = (jax.ShapeDtypeStruct(n, jnp.bfloat16) for n in ((3, 2, 512, 4, 64), (3, 4)))

    def loss(rows, sinks, which):
        def one(x, sinks):
            with attention_as_one("gpu", "rows"):
                return attend(x, x, x, sinks=sinks).astype(jnp.float32)

        return jnp.sum(jax.vmap(one, (0, which))(rows, sinks if which == 0 else sinks[0]))

    gradients = jax.eval_shape(lambda *a: jax.grad(loss, (0, 1))(*a, None), row, sinks)
    assert [one.shape for one in gradients] == [row.shape, sinks.shape]
    with pytest.raises(ModelError, match=r"sinks differ.*\n.*share"):
        jax.eval_shape(lambda *a: loss(*a, 0), row, sinks)


@pytest.mark.parametrize("platform", ["tpu", "gpu", "cpu"])
def test_blockwise_attention_has_no_kernel(platform):
    """It may be differentiated twice, as in a run."""
    row = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)

    def loss(x):
        return jnp.sum(attend(x, x, x, backend="blockwise").astype(jnp.float32))

    costs = counted(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x))), [row], platform)
    assert costs.products
    assert not costs.attended


def test_one_kernel_may_follow_another():
    def loss(query, key, value):
        first = attend(query, key, value)
        return jnp.sum(attend(first, key, value).astype(jnp.float32))

    row = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    costs = counted(jax.grad(loss, (0, 1, 2)), [row] * 3, "gpu")
    assert costs.kept_bytes >= 2 * row.size


def test_attention_without_a_kernel_is_priced_as_written():
    row, text = (2, 256, 4, 64), (2, 300, 4, 64)
    for platform, shapes, has_kernel in (
        ("tpu", (row, text, text), False),
        ("gpu", (row, text, text), True),
        ("tpu", (row, row, row), True),
        ("cpu", (row, row, row), False),
    ):
        costs = gradient_costs(platform, *shapes, causal=False)
        assert bool(costs.attended) is has_kernel, (platform, shapes)
        assert bool(costs.products) is not has_kernel
        scores = 4 * 2 * 4 * 256 * shapes[1][1]
        assert (costs.kept_bytes > scores) is not has_kernel


def test_a_stack_of_one_layer_costs_what_the_layer_costs():
    """XLA removes loops of one trip."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(64, 256, rngs=rngs)
            self.down = nnx.Linear(256, 64, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jax.nn.gelu(self.up(x)))

    class Once(nnx.Module):
        def __init__(self, rngs):
            self.layer = Layer(rngs)

        def __call__(self, x):
            return self.layer(x)

    class Stacked(nnx.Module):
        def __init__(self, rngs):
            self.layers = sl.stack_layers(Layer, 1, rngs)

        def __call__(self, x):
            return sl.scan_layers(lambda layer, x, _: (layer(x), None), self.layers, x)[0]

    def costs_of(make, platform):
        batch = jax.ShapeDtypeStruct((512, 64), jnp.float32)
        loss = lambda model, batch: jnp.mean(model(batch) ** 2)  # noqa: E731
        work = trace_workload(make, optax.sgd(0.1), loss, batch, platform=platform)
        costs, _ = work.costs(Layout(data=8), platform)
        return costs.flops(), sum(costs.fused_bytes.values()), costs.kept_bytes

    for platform in ("tpu", "gpu"):
        assert costs_of(Stacked, platform) == pytest.approx(costs_of(Once, platform))
