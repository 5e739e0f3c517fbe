"""Costs from traced programs: closed forms, and the analytic model where there is one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.cost.machine import fabric
from shardlib.cost.machine.constants import committed
from shardlib.cost.traced.costs import step_costs
from shardlib.cost.transformer.flops import step_flops
from shardlib.hardware import parse_cluster
from shardlib.plan import Job, Layout, Software, Transformer, peak_memory, step_time
from shardlib.plan.problem import Choice
from shardlib.plan.search import capacity_bytes, search
from shardlib.plan.workloads.tracing import trace_workload
from shardlib.registry import DataSpec
from shardlib.sharding.manual import NESTS_IN_MESH_ORDER_ONLY
from shardlib_models import resnet, transformer

H100S = parse_cluster("8xh100")
IMAGES = 64


@functools.cache
def resnet50():
    data = DataSpec(num_classes=1000, image_shape=(224, 224, 3))
    config = resnet.FAMILY.config(depth=50)
    return trace_workload(
        lambda rngs: resnet.FAMILY.make(config, data, rngs),
        optax.sgd(0.1, 0.9),
        functools.partial(resnet.FAMILY.loss, train=True),
        {
            "images": jax.ShapeDtypeStruct((IMAGES, 224, 224, 3), jnp.float32),
            "labels": jax.ShapeDtypeStruct((IMAGES,), jnp.int32),
        },
        rules=sl.rules.STANDARD,
        precision="bf16",
    )


LAYERS, EMBED, HEADS, KV_HEADS, HIDDEN, VOCAB, LENGTH, BATCH = 3, 256, 8, 4, 1024, 2048, 512, 32
JOB = Job(Transformer(LAYERS, EMBED, HEADS, KV_HEADS, EMBED // HEADS, HIDDEN, VOCAB), LENGTH, BATCH)
UNFUSED = Software(attention="unfused")


@functools.cache
def llama(remat="none", optimizer="adamw", rules=sl.rules.STANDARD, layers=LAYERS):
    config = transformer.FAMILY.config(
        num_layers=layers,
        embed_dim=EMBED,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        mlp_dim=HIDDEN,
        vocab_size=VOCAB,
        attention="xla",
        remat=remat,
    )
    data = DataSpec(vocab_size=VOCAB, sequence_length=LENGTH)
    names = ("tokens", "targets", "segment_ids", "positions")
    return trace_workload(
        lambda rngs: transformer.FAMILY.make(config, data, rngs),
        optax.contrib.muon(1e-2) if optimizer == "muon" else optax.adamw(1e-3),
        functools.partial(transformer.FAMILY.loss, train=True),
        dict.fromkeys(names, jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)),
        rules=rules,
        precision="bf16",
        batch_axes=dict.fromkeys(names, ("batch", "length")),
    )


def num_params(workload):
    return sum(leaf.size for leaf in jax.tree.leaves(workload.step.params))


def traffic(workload, layout, *, of_param=None):
    """Bytes of collectives by kind and axes, in a microbatch."""
    found = {}
    for (_, moved), count in workload.costs(layout)[0].moved.items():
        if of_param is None or moved.of_param == of_param:
            key = moved.kind, moved.axes
            found[key] = found.get(key, 0.0) + count * moved.num_bytes
    return found


@pytest.mark.mesh
def test_resnet50_has_the_published_size_and_flops():
    work = resnet50()
    # He et al. 2016 count 3.8e9 multiply-adds with the strides in the 1x1 convolutions; in the 3x3,
    # as here and in the reference of PyTorch, they are 4.09e9. 25.6 M parameters.
    assert num_params(work) == 25_557_032
    costs, _ = work.costs(Layout())
    forward = costs.flops("forward") / 2 / IMAGES
    assert forward == pytest.approx(4.089e9, rel=1e-3)
    # Backward is twice that, less the gradient of the images: 118 M of 7x7x3x64 on 112x112.
    images = 7 * 7 * 3 * 64 * 112**2
    assert costs.flops("backward") / 2 / IMAGES == pytest.approx(2 * forward - images, rel=1e-6)
    assert costs.flops("again") == 0


@pytest.mark.mesh
def test_resnet50_shares_out_its_work_and_sums_its_gradients():
    work = resnet50()
    whole, _ = work.costs(Layout())
    for sizes in ({"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 4}):
        part, _ = work.costs(Layout(**sizes))
        assert part.flops() == pytest.approx(whole.flops() / 8), sizes
    norms = 26_560  # Channels that are normalised, each with a scale and a bias.
    summed = traffic(work, Layout(data=8))
    # Of kernels in bfloat16, of norms in float32, whose statistics are those of the global batch:
    # two sums for each channel forward, and three backward.
    kernels = 2 * (num_params(work) - 2 * norms)
    assert summed == {("all_reduce", ("data",)): pytest.approx(kernels + 4 * norms * 5, rel=1e-4)}
    moved = traffic(work, Layout(fsdp=8), of_param=True)
    split = 2 * (num_params(work) - 2 * norms - 1000 - 2048 * 1000)
    # All kernels are gathered as bfloat16, forward and (but for the first, of the images) backward.
    first = 7 * 7 * 3 * 64
    assert moved["all_gather", ("fsdp",)] == pytest.approx(2 * split - 2 * first, rel=1e-6)
    assert moved["reduce_scatter", ("fsdp",)] == pytest.approx(split, rel=1e-6)


@pytest.mark.mesh
def test_resnet50_has_about_the_published_rate():
    work = resnet50().with_batch(1024)
    cluster = parse_cluster("8xa100-80")
    rate = 1024 / 8 / search(work, cluster, top=1).plans[0].seconds
    # NVIDIA DeepLearningExamples, ResNet-50 v1.5 in mixed precision: about 2,500 images/s per A100.
    assert 2000 < rate < 3000


@pytest.mark.mesh
def test_resnet50_is_planned():
    found = search(resnet50(), H100S)
    best = found.plans[0]
    assert best.layout.batch_shards == 8
    assert best.memory.fits(80e9)
    # Eight H100 are known to train it at 1 to 3 thousand images a second each.
    assert 500 < IMAGES / 8 / best.seconds < 6000
    assert best.time.total == pytest.approx(sum(best.time.parts.values()))
    assert resnet50().degrees("tensor", 8) == (1,)
    assert resnet50().degrees("stage", 8) == (1,)
    assert resnet50().degrees("expert", 8) == (1,)
    assert resnet50().faults(Layout(expert=2)) == ["expert=2: the model has no experts"]


def test_a_transformers_flops_are_those_of_the_formula():
    work = llama()
    # Attention by plain matmuls multiplies all pairs: the convention `full`, to the last one.
    assert work.costs(Layout())[0].flops() == step_flops(JOB, "full")
    again = llama("full").costs(Layout())[0]
    # Every product but the layer's last, whose result nothing reads.
    layer = step_flops(JOB, "full") / 3 - 2.0 * EMBED * VOCAB * LENGTH * BATCH
    down = 2.0 * LAYERS * HIDDEN * EMBED * LENGTH * BATCH
    assert again.flops("recompute") == pytest.approx(layer - down)


@pytest.mark.parametrize(
    "sizes", [{"data": 8}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "tensor": 4}]
)
def test_a_transformers_collectives_are_those_of_the_closed_forms(sizes):
    layout = Layout(**sizes, sequence_parallel=False)
    work = llama()
    params = (
        sum(leaf.size for leaf in jax.tree.leaves(work.step.params) if len(leaf.shape) > 1)
        - 2 * LAYERS * EMBED
    )
    moved = traffic(work, layout)
    tensor, fsdp = layout.tensor, layout.fsdp
    if fsdp > 1:
        # Forward and backward but for the embedding, which is looked up once; scales are whole.
        twice = 2 * (2 * params - VOCAB * EMBED)
        assert moved["all_gather", ("fsdp",)] == pytest.approx(twice / tensor, rel=2e-3)
        assert moved["reduce_scatter", ("fsdp",)] == pytest.approx(2 * params / tensor, rel=2e-3)
    if layout.data > 1:
        # Gradients are summed in the dtype of the computation; scales and sums of the loss besides.
        assert moved["all_reduce", ("data",)] == pytest.approx(2 * params / tensor, rel=2e-2)
    if tensor > 1:
        # Shoeybi et al. 2019, section 3: two of the residual stream in each layer, each way, and
        # one each of embedding and head; the norms of the loss besides.
        residual = 2 * EMBED * LENGTH * BATCH / layout.batch_shards
        expected = (4 * LAYERS + 2) * residual
        assert moved["all_reduce", ("tensor",)] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"data": 2, "tensor": 4}])
def test_a_residual_stream_in_parts_is_gathered_and_scattered_twice_a_layer_each_way(sizes):
    """Korthikanti et al. 2022, section 4.2.2: as much as whole sequences send. The gradient of a
    sum is gathered once for both products that read it."""
    layout = Layout(**sizes)
    moved = traffic(llama(rules=sl.rules.SEQUENCE), layout, of_param=False)
    residual = 2 * EMBED * LENGTH * BATCH / layout.batch_shards
    over = {kind: size for (kind, axes), size in moved.items() if axes == ("tensor",)}
    assert set(over) == {"all_gather", "reduce_scatter", "all_reduce"}
    assert over["all_gather"] == (4 * LAYERS + 1) * residual
    table = 2 * VOCAB * EMBED  # of the gradient of the embedding, to which devices have own rows
    assert over["reduce_scatter"] == (4 * LAYERS + 2) * residual + table
    # The loss sums a maximum, a sum and a target of each row in float32, and whether it is one.
    assert over["all_reduce"] == (3 * 4 + 1) * LENGTH * BATCH / layout.batch_shards


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}])
def test_loops_scatter_the_gradients_of_each_layer(sizes):
    """A device never holds the whole gradients of all layers."""
    layout = Layout(**sizes)
    few, many = (llama(layers=layers).peak_memory(layout, H100S) for layers in (2, 8))
    assert many.recomputed == pytest.approx(few.recomputed, rel=0.01)
    assert many.gradients > 2 * few.gradients


def test_gradients_that_no_axis_cuts_are_summed_whole():
    mlp = 3 * LAYERS * EMBED * HIDDEN
    summed = traffic(llama(), Layout(fsdp=8, zero=1))["all_reduce", ("fsdp",)]
    assert summed == pytest.approx(2 * mlp, rel=0.002)  # scales of norms besides


def test_a_parameter_that_nothing_reads_is_priced():
    class Unread(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)
            self.scale = nnx.Param(jnp.float32(1))

    work = trace_workload(
        Unread,
        optax.sgd(0.1),
        lambda model, batch: model.linear(batch).mean(),
        jax.ShapeDtypeStruct((8, 8), jnp.float32),
        rules=sl.rules.STANDARD,
        precision="f32",
    )
    assert work.step_time(Layout(fsdp=2), H100S).total > 0


@pytest.mark.parametrize("step", [jnp.sin, lambda y: y + jnp.sin(y)], ids=["chain", "diamonds"])
def test_long_unrolled_programs_are_priced_quickly(step):
    def loss_fn(model, batch):
        y = model(batch)
        jax.debug.callback(lambda value: None, y)
        for _ in range(1200):
            y = step(y)
        return y.mean()

    work = trace_workload(
        lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        optax.sgd(0.1),
        loss_fn,
        jax.ShapeDtypeStruct((8, 8), jnp.float32),
        rules=sl.rules.STANDARD,
        precision="f32",
    )
    assert work.step_time(Layout(fsdp=2, tensor=4), H100S).total > 0


def test_both_models_time_a_transformer_alike():
    layout = Layout(fsdp=8, sequence_parallel=False)
    traced = llama().step_time(layout, H100S)
    analytic = step_time(JOB, layout, H100S, UNFUSED)
    assert traced.matmul == pytest.approx(
        analytic.matmul + analytic.attention + analytic.head, rel=0.5
    )
    held, formula = llama().peak_memory(layout, H100S), peak_memory(JOB, layout, H100S, UNFUSED)
    assert held.params == pytest.approx(formula.params, rel=0.01)
    assert held.optimizer == pytest.approx(formula.optimizer, rel=0.01)
    # The program keeps scores in float32, which the formula does not.
    assert formula.activations < held.activations < 2.5 * formula.activations


@pytest.mark.parametrize("stages", [2, 3], ids=["unequal stages", "equal stages"])
def test_a_stage_runs_its_part_of_the_layers_and_their_forward_pass_twice(stages):
    layout = Layout(stage=stages, fsdp=2, microbatches=4)
    assert not llama().faults(layout)
    (whole, _), (part, _) = (llama().costs(one) for one in (Layout(fsdp=2, microbatches=4), layout))
    layers = part.staged
    for own in ("forward", "backward"):
        outside = part.flops(own) - layers.flops(own)
        head = 2 * BATCH / 4 / 2 * LENGTH * EMBED * VOCAB * (1 if own == "forward" else 2)
        assert outside == pytest.approx(head)
        assert outside + stages * layers.flops(own) == pytest.approx(whole.flops(own))
    assert layers.flops("recompute") == pytest.approx(layers.flops("forward"))
    # A residual stream in bfloat16 goes on and back in each turn; two tables and a norm are summed.
    residual = 2 * BATCH / 4 / 2 * LENGTH * EMBED
    sends, summed, *exchanged = llama().between_stages(layout, part)
    assert (sends.kind, sends.num_bytes) == ("shift", pytest.approx(residual))
    assert sends.count == 2 * (4 + stages - 1)
    assert summed.num_bytes == pytest.approx(4 * (2 * VOCAB + 1) / 2 * EMBED, rel=1e-3)
    # Three layers on two stages are stored in halves: in bfloat16 they come, in float32 they go.
    leaves = (
        sum(leaf.size for leaf in jax.tree.leaves(llama().step.params)) - (2 * VOCAB + 1) * EMBED
    )
    assert [one.num_bytes for one in exchanged] == (
        [pytest.approx(width * leaves / 2 / 2, rel=0.01) for width in (2, 4)] if stages == 2 else []
    )


def test_a_stage_writes_what_its_backward_pass_reads_once():
    """More recomputation is not quicker, as in a step without stages."""
    layout = Layout(stage=3, fsdp=2, microbatches=6)
    none, full = (llama(remat).step_time(layout, H100S).total for remat in ("none", "full"))
    assert none < full
    layers = llama().costs(layout)[0].staged
    kept = llama().costs(dataclasses.replace(layout, stage=1))[0].kept_bytes
    written = layers.fused_bytes["recompute"] - layers.fused_bytes["forward"]
    assert written == pytest.approx(kept / 3, rel=0.1)


def test_a_stage_holds_its_layers_and_the_inputs_of_its_microbatches():
    layout = Layout(stage=3, fsdp=2, microbatches=6)
    parts = dataclasses.replace(layout, stage=1)
    whole, part = (llama().peak_memory(one, H100S) for one in (parts, layout))
    tables = 4 * (2 * VOCAB + 1) * EMBED / 2
    assert part.params == pytest.approx((whole.params - tables) / 3 + tables, rel=1e-3)
    # With 1F1B a stage keeps 2 S - 3 inputs, here in bfloat16.
    inputs = 3 * 2 * BATCH / 6 / 2 * LENGTH * EMBED
    kept = part.activations - inputs
    assert whole.activations / 3 < kept < whole.activations / 2


def test_microbatches_and_recomputation_hold_less():
    layout = Layout(fsdp=8, sequence_parallel=False)
    one = llama().peak_memory(layout, H100S)
    four = llama().peak_memory(Layout(fsdp=8, microbatches=4, sequence_parallel=False), H100S)
    assert four.activations == pytest.approx(one.activations / 4, rel=0.05)
    full = llama("full").peak_memory(layout, H100S)
    assert full.activations < 0.3 * one.activations
    assert full.recomputed > one.recomputed
    assert llama("full").step_time(layout, H100S).recompute > 0


@pytest.mark.mesh
def test_replicas_sum_in_each_microbatch_or_once_a_step():
    def data(microbatches, **uses):
        layout = Layout(data=8, microbatches=microbatches, sequence_parallel=False, **uses)
        return llama().step_time(layout, H100S).data

    # With several microbatches replicas run apart and sum in float32, with nothing to hide behind;
    # but not where the model has state, such as running statistics.
    assert data(2) == data(4) == data(8) < 4 * data(8, stateless=False)
    assert data(2, stateless=False) == pytest.approx(2 * data(1), rel=0.2)
    assert data(8, stateless=False) == pytest.approx(2 * data(4, stateless=False), rel=0.2)
    assert [used.stateless for used in llama().variants(Layout(data=8), H100S)] == [True]
    assert [used.stateless for used in resnet50().variants(Layout(data=8), H100S)] == [False]
    found = search(resnet50(), H100S, accepts=lambda layout: layout.microbatches == 4)
    assert {plan.layout.reduces_once for plan in found.plans} == {False}


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("sizes", "is_late"),
    [({"data": 2, "context": 4}, True), ({"fsdp": 2, "context": 4}, not NESTS_IN_MESH_ORDER_ONLY)],
)
def test_context_sums_once_where_regions_nest(sizes, is_late):
    layout, workload = Layout(**sizes, microbatches=4, sequence_parallel=False), llama()
    late = workload.late_axes(layout)
    costs = step_costs(*workload.costs(layout), layout, late=late, sums_twice=False)

    def summed(collectives):
        return {axis for one in collectives if one.kind == "all_reduce" for axis in one.axes}

    assert ("context" in summed(costs.collectives_once)) is is_late
    assert ("context" in summed(costs.collectives)) is not is_late


def test_an_optimizer_that_multiplies_costs_what_it_does():
    layout = Layout(data=8, sequence_parallel=False)
    _, adam = llama().costs(layout)
    _, muon = llama(optimizer="muon").costs(layout)
    assert adam.flops() == 0
    assert muon.flops() > 0
    cut = llama(optimizer="muon").costs(Layout(fsdp=8, sequence_parallel=False))[1]
    assert cut.flops() < muon.flops()
    assert any(moved.kind == "all_gather" for _, moved in cut.moved)


class Mixer(nnx.Module):
    """A user's own module, with no logical names at all."""

    def __init__(self, rngs):
        self.rows = nnx.Linear(512, 1024, rngs=rngs)
        self.back = nnx.Linear(1024, 512, rngs=rngs)

    def __call__(self, x):
        return x + self.back(jax.nn.gelu(self.rows(x)))


def mixer(batch=256, **options):
    def loss_fn(model, batch, rng):
        return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))

    shape = jax.ShapeDtypeStruct((batch, 512), jnp.float32)
    return trace_workload(Mixer, optax.adam(1e-3), loss_fn, {"x": shape, "y": shape}, **options)


MIXED = 2 * 512 * 1024 + 1024 + 512


def test_a_users_own_module_is_planned():
    work = mixer(rules=sl.rules.FSDP)
    assert num_params(work) == MIXED
    # Forward, and two more of each but the gradient of the inputs.
    assert work.costs(Layout())[0].flops() == 2 * 256 * 512 * 1024 * (2 + 4 - 1)
    assert work.batch == 256
    assert work.faults(Layout(fsdp=3)) != []
    assert work.faults(Layout(tensor=2)) == ["tensor=2: the rules put nothing of this model on it"]
    none = "stage=2: the rules put no single stack of layers on it"
    assert work.faults(Layout(stage=2)) == [none]
    found = search(work, H100S)
    assert {plan.layout.tensor for plan in found.plans} == {1}
    assert found.plans[0].choice == Choice()


def test_all_gradients_are_summed_with_one_start():
    plain = Software(overlap_data=False)
    link = fabric.links(H100S, Layout(data=8), committed())["data"]
    assert link.seconds_per_collective > 0
    summed = mixer(software=plain).step_time(Layout(data=8), H100S).data
    loss = link.all_reduce(4)  # The loss itself is no array that is summed over devices.
    assert summed == pytest.approx(link.all_reduce(4 * MIXED), abs=2 * loss)
    assert summed < 1.2 * link.all_reduce(4 * MIXED)


def test_axes_that_are_summed_over_together_are_one_ring():
    work = mixer(software=Software(overlap_data=False))
    one = work.step_time(Layout(data=8), H100S)
    for sizes in ({"data": 2, "fsdp": 4}, {"data": 4, "fsdp": 2}):
        several = work.step_time(Layout(**sizes, zero=1), H100S)
        assert several.data == pytest.approx(one.data), sizes
        assert several.fsdp == 0


@pytest.mark.parametrize("slices", [2, 4])
def test_slices_sum_what_each_device_is_left_with(slices):
    work = mixer(batch=1024, software=Software(overlap_data=False))
    inner = work.step_time(Layout(data=64), parse_cluster("v5e-64")).data
    cluster = parse_cluster(f"{slices}xv5e-64")
    layout = Layout(data=64 * slices, slices=slices)
    network = cluster.network_bytes_per_second_per_device * committed()["dcn"]
    start = fabric.links(cluster, layout, committed())["slices"].seconds_per_collective
    # Scattered over the 64 devices of a slice, then over the network: forth and back.
    across = 2 * ((slices - 1) / slices * 4 * MIXED / 64 / network + start)
    assert work.step_time(layout, cluster).data - inner == pytest.approx(across, rel=1e-6)


def test_a_search_finds_what_trying_everything_finds():
    work, small = mixer(batch=2**24), parse_cluster("v5e-8")
    found = search(work, small, top=1).plans[0]
    tried = [
        dataclasses.replace(variant, microbatches=2**power)
        for sizes in ({"data": 8}, {"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 4}, {"fsdp": 8})
        for variant in work.variants(Layout(**sizes), small)
        for power in range(8)
    ]
    fitting = [one for one in tried if work.peak_memory(one, small).fits(capacity_bytes(small))]
    assert 0 < len(fitting) < len(tried)
    best = min(fitting, key=lambda one: work.step_time(one, small).total)
    assert found.seconds == work.step_time(best, small).total
    assert found.layout.microbatches > 1


def as_counted(costs):
    found = {"flops": costs.flops(), "peak": costs.peak_bytes, "kept": costs.kept_bytes}
    found["passed"] = sum(costs.fused_bytes.values())
    for (way, moved), count in costs.moved.items():
        key = f"{way} {moved.kind} {moved.axes} {moved.of_param}"
        found[key] = found.get(key, 0.0) + count * moved.num_bytes
    return found


@pytest.mark.mesh
@pytest.mark.parametrize("batch", [512, 128, 192])
def test_another_batch_costs_what_its_own_trace_does(batch):
    known, own = mixer().with_batch(batch), mixer(batch)
    assert known.batch == own.batch == batch
    for layout in (Layout(), Layout(data=4, microbatches=2), Layout(data=2, fsdp=4)):
        for mine, theirs in zip(known.costs(layout), own.costs(layout), strict=True):
            assert as_counted(mine) == pytest.approx(as_counted(theirs)), layout
        assert known.peak_memory(layout, H100S).total == pytest.approx(
            own.peak_memory(layout, H100S).total
        )
    assert known.with_batch(batch) is known
    assert (llama().tokens, llama().unit) == (BATCH * LENGTH, "tokens")
    assert (resnet50().with_batch(16).tokens, resnet50().unit) == (16, "images")


def test_long_attention_is_priced():
    """It runs in tiles, in loops whose programs hold arrays of their own, and leaves out about half
    of the scores."""
    config = transformer.FAMILY.config(num_layers=1, embed_dim=64, num_heads=2, vocab_size=64)
    data = DataSpec(vocab_size=64, sequence_length=8192)
    workload = trace_workload(
        lambda rngs: transformer.FAMILY.make(config, data, rngs),
        optax.adamw(1e-3),
        functools.partial(transformer.FAMILY.loss, train=True),
        dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((8, 8192), jnp.int32)),
    )
    scores = 2 * 2 * 8 * 8192**2 * 64
    assert workload.flops > 3 * scores / 2
