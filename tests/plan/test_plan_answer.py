"""Answers: named models, clusters by objective, why not, fixes, levers, text and data."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from shardlib.config import from_dict
from shardlib.cost.machine.constants import fit_errors
from shardlib.cost.workload import Job
from shardlib.errors import MeshError, ModelError
from shardlib.hardware import parse_cluster
from shardlib.humanize import duration
from shardlib.plan import Choice, Layout, cheapest_fixes, plan
from shardlib.plan.api import of_dims
from shardlib.plan.fixes import smallest
from shardlib.plan.objective import clusters, next_larger
from shardlib.plan.search import capacity_bytes, search
from shardlib.plan.settings import mesh_text, rules, settings, to_overrides, to_yaml
from shardlib.plan.workloads.named_models import NAMED, named_model
from shardlib.plan.workloads.transformer import TransformerWorkload
from shardlib.registry import DataSpec, family, sizes

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "published_runs.json"
LLAMA8 = named_model("llama3-8b").model


def workload(batch=512, **changes):
    return TransformerWorkload(Job(LLAMA8, 8192, batch, **changes))


def refusal(kind, *args, **options):
    with pytest.raises(kind) as refused:
        plan(*args, **options)
    return str(refused.value)


# Parameters as published: model cards and papers, in billions.
PARAMS = {
    "llama2-7b": 6.74, "llama2-13b": 13.02, "llama2-70b": 68.98, "llama3-8b": 8.03,
    "llama3-70b": 70.55, "llama3-405b": 405.8, "llama3.2-1b": 1.236, "llama3.2-3b": 3.21,
    "mistral-7b": 7.24, "mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6, "deepseek-v2": 236,
    "deepseek-v3": 671, "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02,
    "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235, "gpt2": 0.124, "gpt2-xl": 1.558, "gpt3-175b": 174.6,
    "gemma-2b": 2.51, "gemma-7b": 8.54, "gemma3-4b": 3.884, "gemma3-12b": 11.77,
    "gemma3-27b": 27.02, "gemma2-2b": 2.614, "gemma2-9b": 9.242, "gemma2-27b": 27.23,
    "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7, "qwen2.5-32b": 32.5, "qwen2.5-72b": 72.7, "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83, "opt-125m": 0.1252, "opt-1.3b": 1.316, "opt-2.7b": 2.652,
    "opt-6.7b": 6.658, "opt-13b": 12.85, "opt-30b": 29.97, "opt-66b": 65.72, "opt-175b": 174.6,
    "gpt-j-6b": 6.05, "bert-base": 0.1095, "bert-large": 0.3351, "vit-b-16": 0.0866,
    "vit-l-16": 0.3043, "vit-h-14": 0.632,
}  # fmt: skip
# Meta 2025, model cards of Llama 4: these count the vision encoder, which no plan has.
WITH_VISION = {"llama4-scout": 109, "llama4-maverick": 400}


def test_named_models_have_their_published_sizes():
    assert set(PARAMS) | set(WITH_VISION) == set(NAMED)
    for name, billions in PARAMS.items():
        assert NAMED[name].model.num_params / 1e9 == pytest.approx(billions, rel=0.01), name
    for name, billions in WITH_VISION.items():
        model = NAMED[name].model
        assert model.num_params / 1e9 == pytest.approx(billions, rel=0.02), name
        assert (model.active_weights + model.vocab_weights) / 1e9 == pytest.approx(17, rel=0.05)
    assert NAMED["deepseek-v3"].model.active_weights / 1e9 == pytest.approx(37, rel=0.03)
    assert NAMED["mixtral-8x7b"].model.active_weights / 1e9 == pytest.approx(12.9, rel=0.03)


def test_named_models_agree_with_the_dims_of_published_runs():
    known = json.loads(DATA.read_text())["model_dims"]["dims"]
    names = {"layers": "layers", "d_model": "embed", "heads": "heads", "vocab": "vocab"}
    compared = 0
    for name, dims in known.items():
        mine = NAMED.get(name.lower().replace("llama3.1", "llama3"))
        for theirs, field in names.items():
            if mine is not None and dims.get(theirs):
                # Checkpoints of Gemma 3 pad 262,144 tokens to 262,208.
                close = pytest.approx(dims[theirs], rel=3e-4 if theirs == "vocab" else 0)
                assert getattr(mine.model, field) == close, (name, theirs)
                compared += 1
    assert compared >= 12, list(known)


def test_named_models_are_those_that_can_be_trained():
    """Both tables have the same layers. Vocabularies are padded here, the planner knows groups of
    experts, and a family names nonlinearities that do not matter to a plan."""
    known = {name: size for name, size in sizes().items() if name in NAMED}
    assert len(known) >= 45
    for name, (of, fields) in known.items():
        config = from_dict(family(of).config, fields, name)
        mine, theirs = NAMED[name].model, of_dims(family(of).dims(config, DataSpec()))
        experts = mine.experts and dataclasses.replace(mine.experts, groups=(1, 1))
        ignored = ("vocab", "activation", "learned_positions")
        changes = {field: getattr(theirs, field) for field in ignored}
        assert dataclasses.replace(mine, experts=experts, **changes) == theirs, name


def test_an_unknown_model():
    with pytest.raises(ModelError, match=r"no model is known by the name 'lama3-8b'. Did you mean"):
        named_model("lama3-8b")
    assert named_model(" LLAMA3_8B ") is named_model("Llama-3-8B") is NAMED["llama3-8b"]
    found = refusal(ModelError, "t5-bas", on="v5e-16")
    assert "Did you mean 't5-base'?" in found


def test_an_encoder_has_full_attention():
    encoder = plan("bert-large", on="8xa100-80", global_batch=256).workload
    assert isinstance(encoder, TransformerWorkload)
    decoder = dataclasses.replace(encoder, job=dataclasses.replace(encoder.job, causal=True))
    # The pairs of positions above the diagonal, forward and twice backward, in 24 layers.
    above = 3 * 2 * 2 * 512**2 / 2 * 1024 * 24 * 256
    assert encoder.flops - decoder.flops == pytest.approx(above)


def test_clusters_by_objective():
    assert [c.name for c in clusters("v5p-128")] == ["v5p-128"]
    assert [c.num_chips for c in clusters("v5p-128", "chips")] == [4, 8, 16, 32, 64]
    assert [c.num_devices for c in clusters("4x8xh100", "cost")] == [1, 2, 4, 8, 16, 24, 32]
    assert [c.num_chips for c in clusters("v5e", "chips")][:4] == [1, 4, 8, 16]
    assert next_larger(parse_cluster("v5e-256")).name == "2xv5e-256"
    assert next_larger(parse_cluster("tpu7x:4x4x4")).num_chips == 128
    assert next_larger(parse_cluster("cpu:8")) is None
    with pytest.raises(MeshError, match=r"cluster 'v5p' has no size\.\n  Add it, as in v5p-64; or"):
        clusters("v5p", deadline=False)


@pytest.mark.mesh
def test_how_many_chips_for_a_trillion_tokens_in_thirty_days():
    found = plan("llama3-8b", on="v5p", tokens="1T", days=30, price=4.2)
    assert found.run_seconds < 30 * 86400
    chips = found.cluster.num_chips
    # The next smaller slice is too slow.
    smaller = parse_cluster(f"v5p-{chips}")
    best = search(found.workload, smaller, top=1).plans[0]
    assert best.seconds * 1e12 / found.workload.tokens > 30 * 86400
    assert found.chip_hours == pytest.approx(found.run_seconds * chips / 3600)
    assert found.cost == pytest.approx(4.2 * found.chip_hours)
    # The answer is what arithmetic expects: 6 N D and attention at the MFU that it names.
    flops = found.workload.flops * 1e12 / found.workload.tokens
    peak = chips * found.cluster.chip.bf16_flops
    assert found.run_seconds == pytest.approx(flops / (peak * found.mfu()))
    assert 0.4 < found.mfu() < 0.75


@pytest.mark.mesh
def test_cost_and_chips_look_at_smaller_clusters():
    fastest, cheapest, fewest = (
        plan("llama3-8b", on="v5p-64", objective=objective, tokens="1T", top=1)
        for objective in ("time", "cost", "chips")
    )
    assert fastest.cluster.num_chips == 32
    assert cheapest.chip_hours <= min(fastest.chip_hours, fewest.chip_hours)
    assert fewest.cluster.num_chips == min(
        c.num_chips for c in clusters("v5p-64", "chips") if search(fewest.workload, c, top=1).plans
    )


def test_nothing_fits():
    text = refusal(MeshError, "llama3-70b", on="8xh100")
    assert text.startswith("llama3-70b does not fit 8xh100: its leanest plan (")
    assert "remat offload:layer_in, the optimizer state on the host) needs " in text
    # Of 70.55e9 parameters over 8 devices gradients in 4 bytes and two moments of 4 bytes, of which
    # an eighth and a matrix of all layers is updated at a time, and there before and after.
    each = 70.55e9 / 8 / 2**30
    updated = 1 / 8 + 80 * 8192 * 28672 / 70.55e9
    assert f"(optimizer {2 * 8 * each * updated:.1f} GiB, params 4" in text
    assert f"GiB, gradients {4 * each:.1f} GiB)" in text
    assert "\n  Take 2x8xh100: " in text


def test_only_with_other_numbers():
    """A cluster that holds the model with moments in bfloat16 only."""
    cluster = parse_cluster("8xh100")
    asked = dataclasses.replace(workload(8), offload_optimizer=(False,))
    held, less = (smallest(w, cluster).memory.total for w in (asked, asked.relaxed()))
    # 2 bytes for each of 8.03e9 parameters, of which a device holds an eighth.
    assert held - less == pytest.approx(2 * 8.03e9 / 8, rel=1e-3)
    share = (held + less) / 2 / 0.96 / capacity_bytes(cluster)
    chip = dataclasses.replace(cluster.chip, memory_bytes=share * cluster.chip.memory_bytes)
    tight = dataclasses.replace(cluster, chip=chip)
    found = plan(asked, on=tight, top=1)
    assert found.best.choice.moments == "bfloat16"
    assert found.settings()["optimizer.momentum_dtype"] == "bfloat16"
    assert found.notes[0] == "A plan exists only with the optimizer's first moment in bfloat16."


@pytest.mark.mesh
def test_a_plan_that_needs_more_of_a_gpu_than_jax_takes():
    def said(**options):
        found = plan("llama3-8b", on="64xh100", top=2, **options)
        # Of the 80 GiB (less what the driver keeps) of an H100.
        share = 0.75 * capacity_bytes(found.cluster) / 0.95
        return [number for number, one in enumerate(found.found.plans, 1)
                if one.memory.total > share], found.notes  # fmt: skip

    beyond, notes = said()
    assert beyond == [1, 2]
    assert notes == (
        "JAX takes 75% of a GPU's memory unless told otherwise: set "
        "XLA_PYTHON_CLIENT_MEM_FRACTION=.95 for plans 1, 2.",
    )
    assert said(global_batch=64, length=512) == ([], ())
    assert plan("llama3-8b", on="v5p-128", top=1).notes == ()


@pytest.mark.mesh
def test_devices_that_nothing_divides():
    assert re.match(
        r"llama3-70b cannot be split over the 8960 devices of(.|\n)*\n  Take a batch of 448 or",
        refusal(MeshError, "llama3-70b", on="v5p-17920"),
    )
    for batch in (448, 560):
        assert plan("llama3-70b", on="v5p-17920", global_batch=batch, top=1).best


@pytest.mark.mesh
def test_why_not():
    found = plan("llama3-8b", on="64xh100", top=3)

    def why(mesh):
        return found.why_not(mesh)

    assert why("stage=64").reasons == ("stage=64 exceeds the 32 layers",)
    assert why("expert=2,fsdp=32").reasons == ("expert=2: the model has no experts",)
    assert why("tensor=64").reasons == ("tensor=64 does not divide the 32 heads",)
    small = plan("llama3-8b", on="64xh100", global_batch=16, top=1).why_not("fsdp=64")
    assert small.reasons == (
        "data x fsdp x expert = 64 does not divide the 16 sequences of a batch",
    )
    data = why("data=64")
    assert data.plan is None
    # Gradients of 8.03e9 parameters take 4 bytes each. Of the optimizer state, which waits on the
    # host, 8 bytes of an eighth and of a matrix of all layers lie here twice.
    updated = 1 / 8 + 32 * 4096 * 14336 / 8.03e9
    state, sums = 2 * 8 * 8.03e9 * updated / 2**30, 4 * 8.03e9 / 2**30
    held = re.fullmatch(
        r"does not fit: a device needs (\S+) GiB \(optimizer (\S+) GiB, params (\S+) GiB, "
        r"gradients (\S+) GiB\) and has 75.2 GiB, even with remat offload:layer_in, the optimizer "
        r"state on the host and 8 microbatches",
        data.reasons[0],
    )
    assert held
    needed, optimizer, params, gradients = map(float, held.groups())
    assert (optimizer, gradients) == (pytest.approx(state, rel=0.01), pytest.approx(sums, abs=0.06))
    assert needed > optimizer + params + gradients > 75.2
    assert why(mesh_text(found.best.layout)).reasons == ("this is the plan",)
    slow = why("fsdp=2,tensor=32")
    assert slow.slower > 0.5
    assert slow.reasons[0].startswith(f"{slow.slower:.1%} slower ({duration(slow.plan.seconds)}")
    assert slow.reasons[1].startswith(f"collectives over tensor {duration(slow.plan.time.tensor)}")
    # Whether or not it would fill the devices.
    for mesh in ("tensr=3", "tensr=64"):
        with pytest.raises(
            MeshError, match=r"not know tensr. Did you mean 'tensor'\?\n  Use the axes"
        ):
            why(mesh)
    with pytest.raises(MeshError, match="needs 128 devices but 64 are available"):
        why("fsdp=128")


@pytest.mark.mesh
def test_fixes_fit_and_are_priced():
    cluster, layout = parse_cluster("v5e-256"), Layout(data=32, fsdp=8)
    fixes = cheapest_fixes(workload(), layout, Choice(), cluster)
    assert len(fixes) == 3
    before = workload().time(layout, Choice(), cluster).total
    for fix in fixes:
        assert fix.plan.memory.fits(capacity_bytes(cluster))
        assert fix.slower == pytest.approx(fix.plan.seconds / before - 1)
        changed = " ".join(to_overrides(fix.settings))
        assert str(fix).startswith(f"{changed}: {fix.memory_bytes / 2**30:.1f} GiB, ")
    seconds = [fix.plan.seconds for fix in fixes]
    assert seconds == sorted(seconds)
    assert len({str(fix.settings) for fix in fixes}) == 3
    # Where one key is enough it is offered.
    roomy = parse_cluster("64xh100")
    fixes = cheapest_fixes(workload(), Layout(data=8, fsdp=8, microbatches=8), Choice(), roomy)
    assert any(set(fix.settings) == {"model.remat"} for fix in fixes)
    # What the compiler found above the prediction has to fit too.
    tighter = cheapest_fixes(
        workload(), Layout(data=8, fsdp=8, microbatches=4), Choice(), roomy, over_bytes=10e9
    )
    changes = [fix.plan.memory for fix in tighter if fix.settings]
    assert changes
    assert all(memory.fits(capacity_bytes(roomy) - 10e9) for memory in changes)


@pytest.fixture(scope="module")
def found():
    """A plan with all that can be asked beside it."""
    return plan("llama3-8b", on="v5p-64", why_not="fsdp=16,tensor=2", tokens="1T", price=2)


@pytest.mark.mesh
def test_levers_are_searches_of_their_own(found):
    larger = next(lever for lever in found.levers if lever.change == "on v5p-128")
    again = search(found.workload, parse_cluster("v5p-128"), top=1).plans[0]
    assert larger.seconds == again.seconds
    assert larger.rate == pytest.approx(found.best.seconds / again.seconds)
    assert larger.cost == pytest.approx(2 * again.seconds / found.best.seconds)
    rates = [lever.rate for lever in found.levers]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.mesh
def test_memory_that_costs_time_is_named():
    """A chip with so little memory that layers are computed again: twice as much is faster."""
    cluster = parse_cluster("v5e-16")
    found = plan("llama3-8b", on=cluster, global_batch=128, top=1)
    held = {k: v for k, v in vars(found.best.memory).items() if k != "host"}
    largest = max(held, key=held.__getitem__)
    named = f"with twice the memory a device ({largest} {held[largest] / 2**30:.1f} GiB now)"
    assert next(lever for lever in found.levers if lever.change == named).rate > 1
    twice = dataclasses.replace(cluster.chip, memory_bytes=2 * cluster.chip.memory_bytes)
    roomy = dataclasses.replace(cluster, chip=twice)
    assert capacity_bytes(roomy) == pytest.approx(2 * capacity_bytes(cluster))


@pytest.mark.mesh
def test_settings_of_a_plan():
    found = plan("llama3-8b", on="2xv5e-256", top=5)
    best = found.best
    assert yaml.safe_load(found.fragment())["mesh"] == mesh_text(best.layout)
    layout = Layout(stage=2, data=8, fsdp=4, slices=4, microbatches=8, chunks=2)
    plain = dataclasses.replace(best, layout=layout, choice=Choice("full", 8, "bfloat16", 8))
    asked = settings(plain, 32, batch=64)
    assert asked == {
        "mesh": "stage=2,data=4x2,fsdp=4",
        "rules": "standard",
        "train.global_batch": 64,
        "train.microbatches": 8,
        "train.reduction.dtype": "f32",
        "train.pipeline.schedule": "interleaved",
        "train.pipeline.chunks_per_stage": 2,
        "model.remat": "0-7:full,8-:none",
        "model.loss_chunks": 8,
        "optimizer.momentum_dtype": "bfloat16",
    }
    # Sums of a dense model without stages wait for the end of a step by default.
    assert "train.reduction.dtype" in settings(plain, 32)
    assert "train.reduction.dtype" not in settings(plain, 32, sums_once=True)
    flat = dataclasses.replace(layout, stage=1, chunks=1)
    assert found.workload.sums_once(flat)
    assert not found.workload.sums_once(layout)
    assert yaml.safe_load(to_yaml(asked))["train"]["pipeline"] == {
        "schedule": "interleaved",
        "chunks_per_stage": 2,
    }
    assert rules(Layout(fsdp=4, tensor=2, zero=1)) == {
        "preset": "zero1",
        "activations": {"residual_length": "context+tensor"},
    }
    assert rules(Layout(fsdp=4, tensor=2)) == "sequence"
    assert rules(Layout(fsdp=4, tensor=2, sequence_parallel=False)) == "standard"


@pytest.mark.mesh
def test_text_and_data_say_the_same(found):
    text, facts = str(found), json.loads(json.dumps(found.to_dict()))
    larger = next(lever for lever in found.levers if lever.change == "on v5p-128")
    assert len(facts["plans"]) == 5
    assert facts["plans"][0]["seconds"] == found.best.seconds
    assert sum(facts["plans"][0]["time"].values()) == pytest.approx(found.best.seconds)
    memory = facts["plans"][0]["memory"]
    parts = sum(size for name, size in memory.items() if name not in ("host", "total"))
    assert parts == pytest.approx(memory["total"])
    for part in (
        "llama3-8b (8.03B parameters) on v5p-64 (32 TPU v5p), 512 sequences",
        f"mesh: {facts['plans'][0]['settings']['mesh']}\n",
        f"are predicted within {fit_errors()['cv_interval']:.0%}.\n",
        f"  on v5p-128: {duration(larger.seconds)} a step, ",
        "Why not\n  fsdp=16,tensor=2: ",
        f"{found.chip_hours:,.0f} chip-hours, ${found.cost:,.0f} at $2 an hour",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        pytest.param(
            100,
            "100 sequences divide over 4 of the 8 devices at most; 96 (786K tokens) or 104 (852K "
            "tokens) would divide over all",
            marks=pytest.mark.mesh,
            id="100",
        ),
        (5, "5 sequences divide over 1 of the 8 devices at most; 8 (65.5K tokens) would divide"),
        (4, None),
        pytest.param(64, None, marks=pytest.mark.mesh),
    ],
)
def test_a_batch_that_few_meshes_divide(batch, line):
    text = str(plan("llama3-8b", on="v5p-16", global_batch=batch))
    assert ("divide over" in text) == (line is not None)
    assert (line or "") in text


@pytest.mark.mesh
def test_another_mesh_alone_is_a_fix_within_the_error_of_the_prediction():
    run, cluster = workload(128), parse_cluster("v5e-16")
    layout = Layout(data=2, fsdp=8, microbatches=8)
    over = {"over_bytes": -2.5 * 2**30}
    fixes = cheapest_fixes(run, layout, Choice("full"), cluster, count=6, **over)
    assert {"mesh": "fsdp=16"} in [fix.settings for fix in fixes]
    fixes = cheapest_fixes(run, layout, Choice("full"), cluster, count=6)
    assert all(fix.memory_bytes < capacity_bytes(fix.plan.cluster) for fix in fixes)
