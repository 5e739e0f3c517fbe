"""Plans for clusters of several kinds of GPUs."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib import cli
from shardlib.config import load
from shardlib.cost.workload import Job
from shardlib.errors import ConfigError, MeshError, ModelError
from shardlib.hardware import CHIPS, Cluster, MixedCluster, parse_mixed
from shardlib.humanize import duration
from shardlib.mesh import MeshConfig, make_mesh
from shardlib.plan import Choice, Layout, Transformer, plan
from shardlib.plan.mixed_result import MixedPlans
from shardlib.plan.mixed_search import group_layouts, search_mixed, share_out, shared_out, together
from shardlib.plan.search import capacity_bytes, least_layers
from shardlib.plan.workloads.named_models import named_model
from shardlib.plan.workloads.tracing import trace_workload
from shardlib.plan.workloads.transformer import TransformerWorkload
from shardlib.registry import DataSpec
from shardlib.run import RunConfig
from shardlib.run.checks import check_config
from shardlib.run.setup import make_scope
from shardlib.train.reduce.reduction import plan_reduction
from shardlib.train.reduce.uneven import balance
from shardlib_models import resnet, transformer

SMALL = Transformer(4, 512, 8, 4, 64, 2048, 4096)
ON = "8xh100+16xa100-80"


def workload(batch=96, model=SMALL, length=2048, **changes):
    return TransformerWorkload(Job(model, length, batch), **changes)


def refusal(kind, *args, **options):
    with pytest.raises(kind) as refused:
        plan(*args, **options)
    return str(refused.value)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(0, 40),
)
def test_shares_are_those_of_the_trainer(kinds, more):
    seconds, groups = zip(*kinds, strict=True)
    total = sum(groups) + more
    counts = share_out(seconds, groups, total)
    assert [len(own) for own in counts] == list(groups)
    each = [one for one, number in kinds for _ in range(number)]
    assert tuple(count for own in counts for count in own) == balance(each, total)


NETWORKED = [chip for chip in CHIPS.values() if chip.network_bytes_per_second_per_host]
GPUS = [chip.name for chip in NETWORKED if chip.kind == "gpu" and chip.bf16_flops]


@pytest.mark.mesh
@settings(deadline=None, max_examples=15)
@given(
    chips=st.lists(st.sampled_from(GPUS), min_size=2, max_size=3, unique=True),
    hosts=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    per_host=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 30).map(lambda n: 8 * n),
)
def test_a_plan_shares_out_the_batch_and_fits(chips, hosts, per_host, batch):
    names = [f"{n}x{per_host}x{chip}" for n, chip in zip(hosts, chips, strict=False)]
    cluster = parse_mixed("+".join(names))
    found = search_mixed(workload(batch), cluster, top=2)
    if batch >= cluster.num_devices:  # Then at least every device can be a group.
        assert found.plans
    for one in found.plans:
        counts = one.group_microbatches
        assert sum(counts) * one.rows == batch
        assert one.layout.data == len(counts)
        assert one.layout.num_devices == cluster.num_devices
        assert one.layout.stage == one.layout.context == 1
        for share in one.shares:
            assert share.memory.fits(capacity_bytes(share.cluster))
            group = one.layout.num_devices // one.layout.data
            assert len(share.microbatches) * group == share.cluster.num_devices
        assert one.seconds == pytest.approx(sum(one.time.parts.values()))
        between_ideal_and_equal(one)


def between_ideal_and_equal(one):
    """The split is no better than one of fractions of microbatches, and no worse than one that
    gives all groups as many."""
    total = sum(one.group_microbatches)
    working = one.seconds - one.time.waiting
    beside = working - one.slowest.busy_seconds
    rate = sum(len(share.microbatches) / share.microbatch_seconds for share in one.shares)
    ideal = (total / rate + beside) * one.seconds / working
    assert one.seconds >= ideal * (1 - 1e-9)
    most = math.ceil(total / one.layout.data)
    slowest = max(share.microbatch_seconds for share in one.shares)
    assert one.seconds <= (most * slowest + beside) * one.seconds / working * (1 + 1e-9)


@pytest.mark.mesh
def test_nothing_is_lost_by_pruning():
    work, cluster = workload(48), parse_mixed("4xh100+2x4xa100-40")
    best = {}
    for layout in group_layouts(work, cluster):
        for choice in work.choices(layout, cluster.kinds[0]):
            capacities = {kind: capacity_bytes(kind) for kind in together(cluster)}
            least = [least_layers(work, layout, choice, k, c) for k, c in capacities.items()]
            if None in least:
                continue
            most = max(least, key=lambda one: one.layers or 0)
            seconds = shared_out(work, cluster, layout, most).seconds
            mesh = (layout.fsdp, layout.expert, layout.tensor)
            best[mesh] = min(best.get(mesh, math.inf), seconds)
    found = search_mixed(work, cluster, top=3)
    assert [one.seconds for one in found.plans] == sorted(best.values())[:3]
    alone = search_mixed(work, cluster, keep=Layout(fsdp=4))
    assert [one.seconds for one in alone.plans] == [best[4, 1, 1]]


@pytest.mark.parametrize("group", [Layout(fsdp=4, tensor=2), Layout(fsdp=8), Layout(tensor=2)])
@pytest.mark.parametrize("choice", [Choice(), Choice("full", loss_chunks=8)])
def test_two_names_of_one_chip_are_planned_like_one(group, choice):
    h100 = CHIPS["h100"]
    twin = dataclasses.replace(h100, name="h200")  # Of the same family of constants.
    kinds = tuple(Cluster(f"8x{chip.name}", chip, 1, 8) for chip in (h100, twin))
    groups, each = 16 // group.num_devices, 6
    work = workload(groups * each * group.fsdp)
    layout = dataclasses.replace(group, microbatches=groups * each)
    mixed = shared_out(work, MixedCluster(kinds), layout, choice)
    assert mixed.group_microbatches == (each,) * groups
    one = Cluster("2x8xh100", h100, 2, 8)
    plain = dataclasses.replace(group, data=groups, microbatches=each)
    expected = work.time(plain, choice, one)
    for name, seconds in expected.parts.items():
        assert mixed.time.parts[name] == pytest.approx(seconds, rel=1e-9, abs=1e-12), name
    assert mixed.memory == work.memory(plain, choice, one)


def test_an_offloaded_state_moves_once_a_step():
    work, cluster = workload(96), parse_mixed(ON)
    layout = Layout(fsdp=8, microbatches=12)
    here = shared_out(work, cluster, layout, Choice())
    away = shared_out(work, cluster, dataclasses.replace(layout, offload_optimizer=True), Choice())
    assert away.group_microbatches == here.group_microbatches
    assert here.time.offload == 0
    # Both moments come and go, of the eighth that a device holds.
    moved = 2 * 8 * SMALL.num_params / 8
    slowest = min(kind.chip.pcie_bytes_per_second for kind in cluster.kinds)
    assert away.time.offload == pytest.approx(moved / slowest)
    assert away.memory.optimizer < here.memory.optimizer


@pytest.mark.mesh
def test_the_report_and_its_data():
    found = plan("llama3-8b", on=ON, top=2, why_not=["data=3,fsdp=8"], tokens="1T", days=900)
    assert isinstance(found, MixedPlans)
    text = str(found)
    faster = found.alone[0]
    assert faster.plan is not None
    ratio = faster.plan.seconds / found.best.seconds
    assert ratio > 1.3
    for part in (
        "llama3-8b (8.03B parameters) on 8xh100+16xa100-80 (8 H100 SXM, 16 A100-80GB SXM)",
        f"{faster.cluster.name} alone: ",
        f"mixing is {ratio:.2f} times as fast",
        "Start the processes on 8xh100 first",
        "XLA_PYTHON_CLIENT_MEM_FRACTION=.95 for plans 1, 2.",
        "\nWhy not\n  data=3,fsdp=8: ",
    ):
        assert part in text
    # A device of either kind holds more than 60 GB of its 80.
    assert found.best.memory.total > 60e9
    assert found.run_seconds == pytest.approx(1e12 / found.rate)
    assert found.chip_hours == pytest.approx(found.run_seconds * 24 / 3600)
    facts = json.loads(json.dumps(found.to_dict()))
    assert facts["devices"] == facts["chips"] == 24
    shares = facts["plans"][0]["kinds"]
    counts = [count for share in shares for count in share["microbatches"]]
    assert sum(counts) * facts["plans"][0]["rows_per_microbatch"] == facts["batch"] == 512
    assert [share["groups"] for share in shares] == [len(s.microbatches) for s in found.best.shares]
    assert [one["cluster"] for one in facts["alone"]] == [one.cluster.name for one in found.alone]


@pytest.mark.mesh
def test_why_not_a_mesh():
    found = plan("llama3-8b", on=ON, top=1)

    def why(mesh):
        return str(found.why_not(mesh))

    best = str(found.best.layout)
    assert why(best) == f"{best}: this is the plan"
    other = found.why_not("data=6,fsdp=4")
    assert other.slower is not None
    assert other.reasons == (
        f"{other.slower:.1%} slower ({duration(other.plan.seconds)} against "
        f"{duration(found.best.seconds)} a step)",
    )
    assert why("stage=2,data=12") == (
        "stage=2,data=12: stage=2: groups that take unequal shares cannot split it"
    )
    assert why("fsdp=8,tensor=3").startswith(
        "fsdp=8,tensor=3: groups of 24 devices do not divide the 8 of 8xh100; groups of 24 devices "
        "do not divide the 16 of 16xa100-80; tensor=3 does not divide the 32 heads"
    )
    assert why("data=3,expert=8") == "data=3,expert=8: expert=8: the model has no experts"
    assert why("data=24").startswith("data=24: does not fit: a device of ")
    with pytest.raises(
        MeshError, match=r"data=3,model=9: the planner does not know model\.\n  Use"
    ):
        found.why_not("data=3,model=9")


@pytest.mark.parametrize(
    ("kind", "on", "options", "match"),
    [
        (MeshError, "v5p-8+8xh100", {}, r"'v5p-8\+8xh100' mixes TPUs and GPUs, .*\n  Plan for"),
        (ConfigError, ON, {"objective": "cost", "price": 2.0},
         r"objective of cost .*\n  Leave objective at time.\nprice is .*\n  Leave it out"),
        (ConfigError, "8xh100+8xv100-32", {}, r"V100-SXM2 32GB has no matmul in bf16.\n  Choose"),
        (MeshError, "8xh100+8xa10", {}, r"network between hosts of A10 .*\n  Plan for one host"),
        (MeshError, ON, {"tokens": "1T", "days": 1}, r"1T in 1 days allow 362 ms.\n  Take"),
    ],
)  # fmt: skip
@pytest.mark.mesh
def test_what_is_refused(kind, on, options, match):
    with pytest.raises(kind, match=match):
        plan("llama3-8b", on=on, **options)


def test_a_batch_that_groups_cannot_divide():
    # 13 rows are 13 microbatches at most, of groups that 8 GPUs can only form in powers of two.
    assert re.match(
        r"the transformer cannot be divided over(.|\n)*\n  Take a batch of 3, or",
        refusal(MeshError, SMALL, on=ON, global_batch=2, length=2048),
    )
    assert plan(SMALL, on=ON, global_batch=3, length=2048).best.group_microbatches == (1, 1, 1)


def test_a_model_that_fits_no_group():
    fault = re.match(
        r"llama3-70b does not fit 8xh100\+16xa100-80: with the leanest mesh, data=3,(\S+), a "
        r"device of 8xh100 needs (\S+) GiB and has 75.2 GiB, .*\n  A group has at most 8 devices",
        refusal(MeshError, "llama3-70b", on=ON),
    )
    assert fault
    group = Layout.of(MeshConfig.parse(fault[1]).sizes)
    work = workload(512, named_model("llama3-70b").model, 8192)
    cluster = parse_mixed(ON)
    held = [
        work.memory(one, choice, together(cluster)[0]).total / 2**30
        for one in group_layouts(work, cluster)
        for choice in work.choices(one, cluster.kinds[0])
    ]
    assert group.num_devices == 8
    assert 75.2 < float(fault[2]) <= min(held) + 0.05


CONFIG = """
run_dir: unused
model:
  name: transformer
  num_layers: 4
  embed_dim: 256
  num_heads: 8
  num_kv_heads: 4
  mlp_dim: 512
  vocab_size: 512
data: {path: /nowhere, tokenizer: bytes, sequence_length: 256, eval_fraction: 0.2}
train: {steps: 20, global_batch: 60, sample_length: 0}
mesh: data=-1
precision: bf16
"""
EIGHT = "4xh100+4xa100-80"


@pytest.fixture
def file(tmp_path):
    """A config file whose data need not be there."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


OWN_RULES = "rules={preset: zero1, activations: {residual_length: context+tensor}}"


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("batch", [8, 60, 100])
@pytest.mark.parametrize("overrides", [(), ("eval.every_steps=0",), (OWN_RULES,)])
def test_train_takes_the_fragment_as_it_is(file, batch, overrides):
    overrides = (*overrides, f"train.global_batch={batch}")
    found = plan(load(RunConfig, file, overrides), on=EIGHT, top=4)
    for one in found.found.plans:
        again = load(RunConfig, file, [*overrides, *found.overrides(one)])
        tree = yaml.safe_load(CONFIG)
        for key, value in yaml.safe_load(found.fragment(one)).items():
            tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
        text = file.with_name("planned.yaml")
        text.write_text(yaml.safe_dump(tree))
        assert load(RunConfig, text, [o for o in overrides if "global" not in o]) == again
        check_config(again, lambda again=again: make_scope(again, jax.devices()))
        mesh = make_mesh(again.mesh)
        assert mesh.shape["data"] == len(one.group_microbatches)
        assert one.layout.zero == (1 if OWN_RULES in overrides and one.layout.fsdp > 1 else 3)
        reduction = plan_reduction(again.reduction(), mesh)
        assert reduction.counts == one.group_microbatches
        assert again.train.microbatches == 1
        assert again.train.compilation_cache is None


@pytest.mark.mesh
def test_what_a_config_decides_otherwise(file):
    options = "train={global_batch: 60, local_sgd: {inner_steps: 4}}"
    assert re.match(
        r"a plan for a mixed cluster sets(.|\n)*\n  Leave train\.local_sgd",
        refusal(ConfigError, load(RunConfig, file, [options]), on=EIGHT),
    )
    options = "train.reduction.group_seconds=[1,2]"
    assert re.match(
        r"a plan for a mixed cluster sets(.|\n)*\n  Leave train\.reduction\.gr",
        refusal(ConfigError, load(RunConfig, file, [options]), on=EIGHT),
    )
    # What was planned before is planned anew.
    before = load(RunConfig, file, ["train.reduction.group_microbatches=[1,2]", "mesh=data=2"])
    assert plan(before, on=EIGHT).notes == plan(load(RunConfig, file), on=EIGHT).notes


def shardlib(capfd, *words):
    with pytest.raises(SystemExit) as exited:
        cli.main(list(map(str, words)))
    out, err = capfd.readouterr()
    return exited.value.code, out, err


@pytest.mark.mesh
def test_the_command(capfd, file):
    code, out, _ = shardlib(capfd, "plan", file, "--on", EIGHT, "--json")
    assert code == 0
    clusters = [share["cluster"] for share in json.loads(out)["plans"][0]["kinds"]]
    assert clusters == ["4xh100", "4xa100-80"]
    for words, fault in (
        (("plan", file, "--verify", "1"), f"but {EIGHT} has several.\n  Leave it out"),
        (("explain", file), "several kinds of chips, which only plan supports.\n  Name one"),
    ):
        code, out, err = shardlib(capfd, *words, "--on", EIGHT)
        assert (code, out) == (2, "")
        assert fault in err


def traced(family, config, data, batch):
    return trace_workload(
        lambda rngs: family.make(config, data, rngs),
        optax.adamw(1e-3),
        functools.partial(family.loss, train=True),
        batch,
        rules=sl.rules.STANDARD,
        precision="bf16",
    )


@pytest.mark.mesh
def test_a_traced_model_is_planned():
    config = transformer.FAMILY.config(
        num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=4, mlp_dim=128, vocab_size=256
    )
    shape = jax.ShapeDtypeStruct((24, 64), jnp.int32)
    data = DataSpec(vocab_size=256, sequence_length=64)
    work = traced(transformer.FAMILY, config, data, {"tokens": shape, "targets": shape})
    found = plan(work, on="4xh100+2x4xa100-80", top=2)
    best = found.best
    assert sum(best.group_microbatches) * best.rows == 24
    assert best.time.data > 0
    between_ideal_and_equal(best)


@pytest.mark.mesh
def test_a_model_with_state_of_its_own_is_refused():
    config = resnet.FAMILY.config(depth=18)
    images = {
        "images": jax.ShapeDtypeStruct((24, 16, 16, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((24,), jnp.int32),
    }
    data = DataSpec(num_classes=10, image_shape=(16, 16, 3))
    work = traced(resnet.FAMILY, config, data, images)
    assert re.match(
        r"ResNet updates state of its own as it runs, and(.|\n)*\n  Plan for one kind alone:",
        refusal(ModelError, work, on=ON),
    )
