"""Plans to serve a model: bytes as an engine allocates them, FLOPs as a trace counts them."""

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import shardlib as sl
from shardlib.cost.layout import Layout
from shardlib.cost.serving.step import ServedStep, active_experts, cache_elements, flops
from shardlib.cost.traced.products import matmul_flops
from shardlib.engine.abstract import abstract_step
from shardlib.engine.sizes import engine_sizes
from shardlib.errors import ConfigError, MeshError, ModelError
from shardlib.nn.attention import empty_pages
from shardlib.plan.serving import plan_serving
from shardlib.plan.serving.question import Slo
from shardlib.plan.serving.served_model import served_model
from shardlib.registry import DataSpec
from shardlib.rules import SERVE
from shardlib.run.reports.explaining_serving import explain_serving
from shardlib.sharding.constrain import Scope, use
from shardlib_models.moe import MoEConfig
from shardlib_models.transformer import FAMILY
from shardlib_models.transformer_config import LatentConfig, TransformerConfig

SMALL = {"embed_dim": 64, "num_layers": 2, "num_heads": 4, "mlp_dim": 96, "vocab_size": 96}
MODELS = {
    "grouped": {"num_kv_heads": 2},
    "one head": {"num_kv_heads": 1, "qk_norm": True},
    "gpt2": {
        "positions": "learned", "norm": "layer", "mlp": "plain", "qkv_bias": True,
        "mlp_bias": True, "tied_embeddings": True, "dropout": 0.1,
    },
    "windows": {"window": 32, "global_every": 2, "num_kv_heads": 2},
    "latent": {
        "latent": LatentConfig(
            query_rank=24, kv_rank=16, plain_dims=16, rotary_dims=8, value_dim=12
        )
    },
    "experts": {
        "moe": MoEConfig(
            num_experts=4, experts_per_token=2, mlp_dim=32, num_shared_experts=1, dense_layers=1
        ),
    },
}  # fmt: skip
SLOTS, LANES, LANE = 3, 2, 8


def config_of(name):
    return TransformerConfig(**SMALL, max_positions=256, **MODELS[name])


@dataclasses.dataclass(frozen=True)
class Served:
    """A model, as `hf.load` returns one."""

    model: nnx.Module
    config: Any
    scope: Scope
    tokenizer: Any = None
    end_tokens: tuple[int, ...] = ()
    family: Any = FAMILY


def held(tree):
    """Returns the bytes of numbers on one device."""
    numbers = [x for x in jax.tree.leaves(tree) if x.dtype in (jnp.float32, jnp.int8)]
    return sum(x.addressable_shards[0].data.nbytes for x in numbers)


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(("name", "bits"), [*((name, None) for name in MODELS), ("latent", "int8")])
def test_bytes_are_those_that_an_engine_allocates(name, bits):
    config = config_of(name)
    scope = Scope(sl.make_mesh("expert=2,tensor=2", devices=jax.devices()[:4]), SERVE)
    model = FAMILY.make(config, DataSpec(), nnx.Rngs(0))
    model.eval()
    with use(scope.mesh, scope.rules):
        sl.shard(model)
    engine = sl.Engine(Served(model, config, scope), slots=SLOTS, context=64, page_size=8,
                       weights=bits, cache=bits)  # fmt: skip
    served = served_model(config, jnp.float32, weights=bits, cache=bits)
    layout = Layout(expert=2, tensor=2)
    assert served.weight_bytes(layout) == held(engine._params)
    # 8 pages of each sequence, and one that nothing reads.
    assert served.page_bytes(layout, 8) * (8 * SLOTS + 1) == held(engine._state.pages)
    elements = cache_elements(dataclasses.replace(served.dims, windowed_layers=0), 1)
    parts = 1 if config.kv_heads == 1 else 2
    assert served.page_bytes(layout, 1) == served.widths.cached * elements / parts


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("tensor", [4, 3], ids=["a copy for each", "whole"])
def test_bytes_of_fewer_heads_than_devices(tensor):
    config = TransformerConfig(**{**SMALL, "num_heads": 12, "num_kv_heads": 2, "head_dim": 16})
    layers = config.num_layers
    with use(sl.make_mesh(f"tensor={tensor}", devices=jax.devices()[:tensor]), SERVE):
        made = jax.jit(lambda: empty_pages(layers, 1, 4, 8, (12, 2), (16, 16), jnp.float32))
        pages = made()
    served = served_model(config, jnp.float32)
    assert served.page_bytes(Layout(tensor=tensor), 8) * 4 == held(pages)


@pytest.mark.rest("mesh", keep=2)
@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_of_the_traced_step(name):
    config = config_of(name)
    scope = Scope(sl.make_mesh("tensor=1", devices=jax.devices()[:1]), SERVE)
    sizes = engine_sizes(
        slots=SLOTS, context=64, pages=None, page_size=8, chunk=LANES * LANE, lane=LANE,
        max_length=256, deterministic=False,
    )  # fmt: skip
    step = abstract_step(FAMILY, config, scope, sizes, num_lanes=LANES)
    arguments = step.params, step.state, step.arrays
    traced = jax.make_jaxpr(step.programs._step)(*arguments)
    counted = ServedStep(SLOTS, seen=10, chunk=LANES * LANE, lane=LANE, before=10)
    assert flops(served_model(config).dims, counted) == of_weights(traced.jaxpr)


def of_weights(jaxpr):
    """Returns the FLOPs of a program outside of its loops of unknown length, which attend, and its
    branches, which score prompts."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("while", "cond"):
            continue
        total += matmul_flops(equation) or 0.0
        times = equation.params.get("length", 1)
        for inner in jaxprs_in_params(equation.params):
            total += times * of_weights(inner)
    return total


def test_a_window_bounds_what_a_row_reads_and_few_rows_choose_few_experts():
    dims = served_model(config_of("windows")).dims
    width = 2 * 2 * 16
    assert cache_elements(dims, 20) == 2 * width * 20
    assert cache_elements(dims, 100) == width * 32 + width * 100
    experts = served_model(config_of("experts")).dims
    assert active_experts(experts, 1) == pytest.approx(2)
    assert 2 < active_experts(experts, 2) < active_experts(experts, 50) <= 4


@pytest.fixture(scope="module")
def plans():
    return plan_serving("llama3-8b", on="8xh100", context="8k", slo="ttft=1s,itl=50ms")


def test_the_best_plan_keeps_the_times_and_fits(plans):
    best = plans.best
    assert best.first_token_seconds <= 1
    assert best.token_seconds < best.slowest_token_seconds <= 0.05
    assert best.engines * best.copies * best.layout.tensor == 8
    assert best.slots <= best.most_slots
    assert best.memory.total < 76 * 2**30
    # 16.06 GB of weights, and 128 KiB of keys and values for a position.
    assert best.memory.weights * best.layout.tensor == pytest.approx(16.06e9, rel=1e-3)
    cache = best.slots / best.copies * 8192 * 2**17 / best.layout.tensor
    assert best.memory.cache == pytest.approx(cache, rel=1e-3)
    most = max(plan.tokens_per_second for plan in plans.plans)
    assert best.tokens_per_second >= 0.98 * most


def test_a_step_takes_at_least_the_time_to_read_what_it_reads(plans):
    for plan in plans.by_slots:
        seen = plan.prompt + plan.answer / 2
        read = plan.memory.weights + plan.slots / plan.copies * seen * 2**17 / plan.layout.tensor
        least = read / 3.35e12
        assert least < plan.decode.total < 2 * least + 3e-3


def test_one_engine_along_data_has_the_slots_of_all_copies_and_reads_prompts_in_more_steps(plans):
    alone = plans.best
    whole = dataclasses.replace(alone, engines=1, slots=alone.slots * alone.engines)
    assert (alone.copies, whole.copies) == (1, alone.engines)
    assert whole.mesh == f"data={alone.engines},{alone.mesh}"
    assert whole.token_seconds == alone.token_seconds
    assert whole.first_token_seconds == alone.first_token_seconds
    assert whole.reading_share == pytest.approx(1 - (1 - alone.reading_share) ** alone.engines)
    assert whole.tokens_per_second < alone.tokens_per_second
    assert plans.other is not None
    assert plans.other.layout == alone.layout
    assert {alone.engines, plans.other.engines} == {alone.engines, 1}


def test_8_bits_halve_weights_and_cache_and_read_them_sooner(plans):
    best, context = plans.best, plans.question.context
    small = plan_serving("llama3-8b", on="8xh100", context=context, weights="int8", cache="int8")
    same = next(p for p in small.plans if (p.mesh, p.engines) == (best.mesh, best.engines))
    # 1.05 billion weights of embedding and head keep 16 bits. Scales: 4 bytes for 128 numbers.
    assert same.memory.weights / best.memory.weights == pytest.approx(
        (6.98e9 + 2 * 1.05e9) / 16.06e9, rel=5e-3
    )
    a_slot = [p.memory.cache / p.slots for p in (same, best)]
    assert a_slot[0] / a_slot[1] == pytest.approx((1 + 4 / 128) / 2, rel=5e-3)
    assert same.most_slots > 1.9 * best.most_slots
    assert same.decode.attention / same.slots < 0.55 * best.decode.attention / best.slots
    assert "weights int8, cache int8" in str(small)


def test_the_report_tells_mesh_memory_and_times(plans):
    text, facts = str(plans), plans.to_dict()
    assert f"mesh={plans.best.mesh}, rules serve: slots={plans.best.slots}" in text
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in text
    assert facts["slo"] == {"ttft": 1.0, "itl": 0.05}
    assert json.loads(json.dumps(facts))["plans"][0]["slots"] == plans.best.slots


def test_a_model_that_does_not_fit_is_told_what_is_missing():
    with pytest.raises(MeshError, match=r"leanest mesh \(tensor=8\) .* 2\.\d GiB are missing") as e:
        plan_serving("llama3-70b", on="v5e-8", context="8k")
    assert str(e.value).endswith("Add --weights int8.\n  Take v5e-16.")
    assert plan_serving("llama3-70b", on="v5e-8", context="8k", weights="int8").best.fits


@pytest.mark.parametrize(
    ("model", "context", "fixes"),
    [
        ("qwen2.5-7b", "4k", ["--weights int8.", "--cache int8."]),
        ("llama3.1-8b", "48k", ["--weights int8 --cache int8."]),
    ],
)
def test_a_cache_in_8_bits_is_suggested_where_it_helps(model, context, fixes):
    with pytest.raises(MeshError, match="does not fit v5e-1") as e:
        plan_serving(model, on="v5e-1", context=context)
    lines = str(e.value).splitlines()
    assert [line for line in lines if "int8" in line] == [f"  Add {fix}" for fix in fixes]
    options = dict(re.findall(r"--(\w+) (\w+)", fixes[-1]))
    assert plan_serving(model, on="v5e-1", context=context, **options).best.fits


def test_times_that_nothing_keeps_are_told_with_those_that_it_keeps():
    with pytest.raises(
        MeshError, match="no plan of llama3-70b on v5e-16 keeps ttft=1s,itl=50ms"
    ) as e:
        plan_serving("llama3-70b", on="v5e-16", context="8k", slo="ttft=1s,itl=50ms")
    found = str(e.value).split("Allow ttft=")[1].split(":")[0]
    kept = plan_serving("llama3-70b", on="v5e-16", context="8k", slo=f"ttft={found},itl=50ms")
    assert kept.best.mesh == "tensor=16"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"slo": "ttft=1"}, ConfigError, "ttft=1s,itl=50ms"),
        ({"slo": "tpot=1s"}, ConfigError, "'tpot=1s'"),
        ({"context": "8q"}, ConfigError, "8q"),
        ({"context": 8, "prompt": 8}, ConfigError, "shorter prompt"),
        ({"context": "16k"}, ModelError, "at most 8192"),
        ({"precision": "int8"}, ConfigError, "bf16, f32"),
        ({"weights": "int4"}, ModelError, "weights='int4'"),
        ({"top": 0}, ConfigError, "top is 0"),
    ],
)
def test_wrong_arguments_are_named(options, error, words):
    with pytest.raises(error, match=words):
        plan_serving("llama3-8b", on="8xh100", **options)


@pytest.mark.mesh
def test_models_that_are_not_served_are_named():
    with pytest.raises(ModelError, match="gemma3-27b cannot be served: its dimensions are known"):
        plan_serving("gemma3-27b", on="8xh100")
    with pytest.raises(ModelError, match=r"t5-small is not a decoder"):
        plan_serving("t5-small", on="8xh100")
    with pytest.raises(ModelError, match=r"llama3-9b"):
        plan_serving("llama3-9b", on="8xh100")


def test_slo_reads_times():
    assert Slo.parse("ttft=1.5s, itl=50ms") == Slo(1.5, 0.05)
    assert Slo.parse(None) == Slo()


@pytest.fixture
def small_folder(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "intermediate_size": 96, "vocab_size": 96, "max_position_embeddings": 128,
                "rms_norm_eps": 1e-5,
            }
        )
    )  # fmt: skip
    return folder


def test_the_command_plans_a_folder_and_a_run(shardlib, small_folder):
    for model in (small_folder, "configs/quickstart.yaml"):
        code, out, _ = shardlib(
            "plan", "--serve", model, "--on", "v5e-4", "--context", 64, "--cache", "int8", "--json"
        )
        assert code == 0
        facts = json.loads(out)
        assert facts["cache"] == "int8"
        assert facts["plans"][0]["engines"] == 4
    given = "configs/quickstart.yaml", "--on", "v5e-4"
    code, _, err = shardlib("plan", *given, "--serve", small_folder)
    assert code == 2
    assert "CONFIG" in err
    code, _, err = shardlib("plan", *given, "--slo", "itl=1s")
    assert code == 2
    assert "Add --serve MODEL, or leave it out." in err
    code, _, err = shardlib("explain", *given, "--slots", 3)
    assert code == 2
    assert "--slots explains how to serve" in err


def test_an_engine_is_explained_as_it_is_planned(shardlib, small_folder):
    asked = "explain", small_folder, "--serve", "--on", "v5e-4", "--abstract", "--context", 64
    code, out, _ = shardlib(*asked, "--mesh", "data=2,tensor=2", "--slots", 5, "--json")
    assert code == 0
    facts = json.loads(out)
    # Three for each of two copies.
    assert (facts["mesh"], facts["slots"], facts["compiled"]) == ("data=2,tensor=2", 6, {})
    assert facts["first_token_seconds"] == sum(facts["mixed"].values())
    assert facts["token_seconds"] == sum(facts["decode"].values())
    code, out, _ = shardlib(*asked)
    assert code == 0
    assert "an engine of mesh=data=4, rules serve" in out
    assert "sequences of 64 tokens fit, or one of 128" in out
    code, out, _ = shardlib(*asked, "--mesh", "data=4", "--slots", 8, "--chunk", 64)
    assert "Decoding: 2 rows a device. Reading: those rows and 64 prompt tokens." in out
    code, _, err = shardlib(*asked, "--mesh", "context=2,tensor=2")
    assert code == 2
    assert "Choose one of: " in err
    code, _, err = shardlib(*asked, "--diff")
    assert "--diff how to train" in err


ON_V5E: dict[str, Any] = {"on": "v5e-8", "compiles": False}


def test_an_engine_with_given_slots_has_a_chunk_that_fits():
    fits = explain_serving("llama3-8b", **ON_V5E, mesh="tensor=8", slots=95)
    assert fits.fits
    assert (
        fits.plan.tokens_per_second
        > 0.98
        * (
            explain_serving("llama3-8b", **ON_V5E, mesh="tensor=8", slots=95, chunk=128)
        ).plan.tokens_per_second
    )
    over = explain_serving("llama3-8b", **ON_V5E, slots=200)
    assert not over.fits
    assert "it does not fit: " in str(over)
    assert (over.plan.mesh, over.plan.chunk) == ("tensor=8", 128)


@pytest.mark.mesh
def test_a_mesh_or_chunk_that_does_not_fit_is_told_one_that_does():
    with pytest.raises(MeshError, match=r"^mesh=data=8 does not fit .* GiB are missing") as e:
        explain_serving("llama3-8b", **ON_V5E, mesh="data=8")
    assert str(e.value).endswith("Leave --mesh out, or use tensor=8.\n  Add --weights int8.")
    with pytest.raises(MeshError, match=r"^chunk=1000000 does not fit llama3-8b on v5e-8") as e:
        explain_serving("llama3-8b", **ON_V5E, chunk=1_000_000)
    most = int(str(e.value).split("at most ")[1].split()[0])
    assert explain_serving("llama3-8b", **ON_V5E, chunk=most).fits
    with pytest.raises(MeshError, match="does not fit"):
        explain_serving("llama3-8b", **ON_V5E, chunk=most + 32)
    # Any number of slots is as much in vain, where not one fits.
    with pytest.raises(MeshError, match=r"^mesh=data=8 does not fit .* GiB are missing"):
        explain_serving("llama3-8b", **ON_V5E, mesh="data=8", slots=4)
    with pytest.raises(MeshError, match=r"Leave --mesh and --chunk out\.$"):
        explain_serving("llama3-8b", **ON_V5E, mesh="data=8", chunk=1_000_000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": "64k"}, "at most 8192"),
        ({"chunk": 100}, r"Give 96 or 128\."),
        ({"chunk": 8}, r"Give 32\."),
        ({"slots": 0}, "slots=0 is less than 1"),
    ],
)
def test_sizes_that_no_engine_has_are_refused_before_anything_is_compiled(options, words):
    with pytest.raises(ModelError, match=words):
        explain_serving("llama3-8b", **ON_V5E, **options)


@pytest.mark.aot
def test_the_command_compiles_both_steps(shardlib, small_folder):
    code, out, _ = shardlib(
        "explain", small_folder, "--serve", "--on", "v5e-1", "--slots", 4, "--chunk", 64,
        "--context", 64, "--json",
    )  # fmt: skip
    assert code == 0
    facts = json.loads(out)
    assert set(facts["compiled"]) == {"decoding", "reading"}
    for one in facts["compiled"].values():
        assert one["weights"] == facts["memory"]["weights"]
        assert one["cache"] == facts["memory"]["cache"]
        assert one["temporaries"] < facts["memory"]["temporaries"]


@pytest.mark.aot
@pytest.mark.soak
@pytest.mark.parametrize(
    ("on", "mesh", "bits"), [("v5e-1", "data=1", "int8"), ("v5e-4", "tensor=4", None)]
)
def test_compiled_steps_hold_what_is_predicted(on, mesh, bits):
    fields = {**SMALL, "embed_dim": 512, "mlp_dim": 1024, "head_dim": 128, "vocab_size": 1024}
    config = TransformerConfig(**fields, max_positions=2048)
    report = explain_serving(
        config, on=on, mesh=mesh, slots=32, chunk=256, context=2048,
        weights=bits, cache=bits,
    )  # fmt: skip
    assert report.fits
    predicted = report.plan.memory
    assert set(report.compiled) == {"decoding", "reading"}
    for one in report.compiled.values():
        assert one.weights == predicted.weights
        assert one.cache == predicted.cache
        assert one.temporaries < predicted.temporaries
