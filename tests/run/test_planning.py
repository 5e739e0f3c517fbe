"""Plans for the config of a run: what `train` and `explain` take, and the mesh of `mesh: auto`."""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import pytest
import yaml

from shardlib import run
from shardlib.config import configclass, load
from shardlib.cost.transformer.flops import step_flops
from shardlib.errors import ConfigError, MeshError
from shardlib.hardware import parse_cluster
from shardlib.mesh import mesh_sizes
from shardlib.plan import plan
from shardlib.registry import DataSpec
from shardlib.run import RunConfig
from shardlib.run.plans.planning import (
    choice_of,
    flops_per_step,
    layout_of,
    planned_mesh,
    workload_of,
)
from shardlib.run.reports.explaining import explain_compiled
from shardlib.run.setup import make_scope
from shardlib_models import transformer

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = """
run_dir: unused
model:
  name: transformer
  num_layers: 8
  embed_dim: 512
  num_heads: 8
  num_kv_heads: 2
  mlp_dim: 2048
  vocab_size: 512
data: {path: /nowhere, tokenizer: bytes, sequence_length: 1024, eval_fraction: 0.2}
train: {steps: 20, global_batch: 64, sample_length: 0}
eval: {every_steps: 0}
mesh: data=-1
precision: bf16
"""
EXPERTS = "model.moe={num_experts: 8, experts_per_token: 2, mlp_dim: 1024}"


@configclass
class OwnRematConfig(transformer.TransformerConfig):
    name: str = f"{__name__}:OWN_REMAT"
    remat: Literal["mine"] = "mine"


OWN_REMAT = dataclasses.replace(transformer.FAMILY, config=OwnRematConfig, validate=None)


@pytest.fixture
def file(tmp_path):
    """A config file whose data need not be there."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def merged(text, fragment):
    def merge(into, new):
        for key, value in new.items():
            known = into.get(key)
            nested = isinstance(value, dict) and isinstance(known, dict)
            into[key] = merge(known, value) if nested else value
        return into

    return yaml.safe_dump(merge(yaml.safe_load(text), yaml.safe_load(fragment)))


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("on", "overrides", "meshes"),
    [
        ("2xv5e-8", (), ("", "data=2x4,tensor=2", "fsdp=2x4,tensor=2", "stage=2,fsdp=2x4")),
        ("2x8xh100", (), ("", "data=2,fsdp=4,context=2", "stage=8,data=2")),
        ("v5e-16", (EXPERTS,), ("", "stage=2,expert=8", "fsdp=2,expert=4,tensor=2")),
    ],
)
def test_explain_takes_the_fragment_as_it_is(file, on, overrides, meshes):
    config = load(RunConfig, file, overrides)
    found = plan(config, on=on, why_not=[mesh for mesh in meshes if mesh], top=1)
    plans = [found.best, *(asked.plan for asked in found.asked[1:])]
    assert len(plans) == len(meshes)
    for one in plans:
        again = load(RunConfig, file, [*overrides, *found.overrides(one)])
        text = file.with_name("planned.yaml")
        text.write_text(merged(CONFIG, found.fragment(one)))
        assert load(RunConfig, text, overrides) == again
        report = run.explain(again, on)
        assert report.mesh == {axis: one.layout.size(axis) for axis in report.mesh}
        assert again.train.microbatches == one.layout.microbatches


@pytest.mark.mesh
def test_memory_that_decides_writes_ranges_that_explain_takes(file):
    """On chips with little memory: ranges of layers, chunks of the loss."""
    config = load(RunConfig, file, ["model.num_layers=16", "model.embed_dim=1024"])
    _, workload = workload_of(config)
    assert workload.num_layers == 16
    cluster = parse_cluster("v5e-16")
    chip = dataclasses.replace(cluster.chip, memory_bytes=3.0e9)
    found = plan(config, on=dataclasses.replace(cluster, chip=chip), top=40)
    ranged = [p for p in found.found.plans if p.choice.layers not in (None, 0, 16)]
    assert ranged
    text = ranged[0].choice.policy(16)
    assert text.endswith("-:none")
    asked = ["model.num_layers=16", "model.embed_dim=1024", *found.overrides(ranged[0])]
    again = load(RunConfig, file, asked)
    assert again.model.remat == text
    assert run.explain(again, "v5e-16").mesh


@pytest.mark.mesh
def test_the_mesh_of_the_config_is_explained(file):
    found = plan(load(RunConfig, file), on="8xh100", why_not=["data=4,tensor=2"])
    assert [asked.mesh for asked in found.asked] == ["data=8", "data=4,tensor=2"]
    assert [asked.of_config for asked in found.asked] == [True, False]
    assert "\nWhy not\n  data=8 (the config's): " in str(found)
    assert [one["of_config"] for one in found.to_dict()["why_not"]] == [True, False]
    assert found.asked[0].slower > 0
    assert found.tokens == 20 * 64 * 1024
    assert found.workload.batch == 64
    changed = plan(load(RunConfig, file), on="8xh100", global_batch=128, length=512)
    assert (changed.workload.batch, changed.workload.job.length) == (128, 512)


def test_the_config_says_how_long_the_run_is(file):
    config = load(RunConfig, file)
    found = plan(config, on="h100", days=30, price=2, top=1)
    assert found.cluster.name == "1xh100"
    assert found.tokens == 20 * 64 * 1024
    assert found.cost == pytest.approx(2 * found.chip_hours)
    with pytest.raises(ConfigError, match=r"precision is nonsense, .*\n  Leave it out, and set"):
        plan(config, on="8xh100", precision="nonsense")


@pytest.mark.mesh
def test_a_plan_says_that_products_in_8_bits_are_not_priced(file):
    said = "the 8 bits of precision=fp8 are not priced."
    assert said in str(plan(load(RunConfig, file, ["precision=fp8"]), on="8xh100", top=1))
    assert "not priced" not in str(plan(load(RunConfig, file), on="8xh100", top=1))


ADAPTERS = "finetune={rank: 4, targets: ['**/attention/*', '**/mlp/*']}"


@pytest.mark.mesh
def test_frozen_weights_are_planned_without_gradients(file):
    config = load(RunConfig, file, [ADAPTERS, "model.attention=xla"])
    _, workload = workload_of(config)
    # The program's count includes the adapters.
    assert step_flops(workload.job, "full") == pytest.approx(
        flops_per_step(config, DataSpec(512, 1024)), rel=0.03
    )
    assert str(plan(config, on="8xh100", top=1)).endswith("are not priced.")
    few = load(RunConfig, file, [ADAPTERS, "finetune.quantize=nf4", "precision=bf16_params"])
    # The embeddings are in bfloat16, and the scales of 64 weights each.
    assert 0.5 + 2 / 64 < workload_of(few)[1].job.param_bytes < 0.6


@pytest.mark.aot
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    "words", [("model.num_layers=16", "mesh=fsdp=16"), ("mesh=fsdp=16",), ("mesh=fsdp=4,tensor=4",)]
)
def test_memory_with_frozen_weights_is_that_of_the_program(words):
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    config = load(RunConfig, CONFIGS / "llama3_70b_lora.yaml", list(words))
    cluster = parse_cluster("v5p-32")
    _, workload = workload_of(config)
    planned = workload.memory(layout_of(config, cluster), choice_of(config), cluster).total
    report = explain_compiled(config, "v5p-32")
    assert planned == pytest.approx(report.memory.peak_bytes, rel=0.12)
    assert report.fits
    assert not report.findings
    # Kernels that the compiler names, as in rotations, belong to the loop that they are in.
    moved = {stage.stage: stage.memory_bytes for stage in report.roofline.stages}
    assert moved["optimizer"] < 1e-3 * sum(moved.values())


IMAGES = """
run_dir: unused
model: {name: resnet, depth: 18, num_classes: 10}
data: {kind: images, image_size: 32}
train: {steps: 20, global_batch: 64}
"""


@pytest.mark.mesh
def test_what_is_not_asked_about_images(tmp_path):
    path = tmp_path / "images.yaml"
    path.write_text(IMAGES)
    config = load(RunConfig, path)
    fault = r"(?s)global_batch_tokens .* resnet trains on images.*\nlength counts tokens.*  Leave"
    with pytest.raises(ConfigError, match=fault):
        plan(config, on="8xh100", global_batch_tokens="4M", length=64)
    found = plan(config, on="2xh100", global_batch=32, top=1)
    assert str(found).splitlines()[0] == "resnet on 2xh100 (2 H100 SXM), 32 images a step"


@pytest.mark.mesh
def test_what_the_config_says_is_what_is_priced(file):
    def job(*overrides):
        return workload_of(load(RunConfig, file, overrides))[1].job

    assert (job().moment_bytes, job().param_bytes, job().compute_bytes) == (8, 4, 2)
    assert job("optimizer.name=sgd").moment_bytes == 4
    assert job("optimizer.momentum_dtype=bfloat16").moment_bytes == 6
    assert job("optimizer.ema_decay=0.99").moment_bytes == 12
    assert job("precision=f32").compute_bytes == 4
    assert (job("precision=bf16_params").moment_bytes, job().precision) == (8, "bf16")
    assert job("train.offload_optimizer=true").moment_bytes == 8
    assert job("precision=fp8") == job("precision=bf16")
    for overrides, offloads in (
        ((), (False, True)),
        (("train.offload_optimizer=true",), (True,)),
        (("train.local_sgd={inner_steps: 4}",), (False,)),
    ):
        config = load(RunConfig, file, overrides)
        assert workload_of(config)[1].offload_optimizer == offloads, overrides
    experts = job(EXPERTS).model.experts
    assert (experts.number, experts.per_token, experts.mlp, experts.shared_mlp) == (8, 2, 1024, 0)
    model = job("model.tied_embeddings=true", "model.window=128").model
    assert (model.tied, model.window, model.windowed_layers) == (True, 128, 8)
    # The planner counts the parameters that the model has, but for norms.
    explained = run.explain(load(RunConfig, file, ["mesh=data=8"]), "cpu:8")
    assert job().model.num_params == explained.num_params() - (2 * 8 + 1) * 512


def test_a_model_whose_remat_is_its_own_is_priced_without(file):
    best = plan(load(RunConfig, file, [f"model.name={__name__}:OWN_REMAT"]), on="8xh100").best
    assert best.choice.remat == "none"


@pytest.mark.mesh
def test_rules_of_the_config_are_kept(file):
    own = "rules={preset: zero1, activations: {residual_length: context+tensor}}"
    found = plan(load(RunConfig, file, [own]), on="8xh100", top=100)
    assert "rules" not in found.settings()
    assert {p.layout.zero for p in found.found.plans if p.layout.fsdp > 1} == {1}
    groups = "train.reduction={dtype: bf16}"
    found = plan(load(RunConfig, file, [groups]), on="8xh100")
    assert "train.reduction.dtype" not in found.settings()
    assert found.notes[0].startswith("Planned as if gradients were summed")


def test_the_automatic_mesh_is_planned_where_it_is_clearly_faster(file):
    def auto(on, *overrides):
        return planned_mesh(load(RunConfig, file, ["mesh=auto", *overrides]), parse_cluster(on))

    mesh, reason = auto("v5e-16")
    assert str(mesh) == "fsdp=16"
    assert reason.startswith("planned: ")
    # 8 rows cannot be split over 16 devices.
    mesh, reason = auto("v5e-16", "train.global_batch=8")
    assert mesh.sizes.get("data", 1) * mesh.sizes.get("fsdp", 1) <= 8
    assert reason.endswith("fsdp=16 cannot be run")
    mesh, reason = auto("v5e-16", "train.local_sgd={inner_steps: 4}")
    assert (str(mesh), reason) == (
        "fsdp=16",
        "default; not planned because the config sets the groups along data",
    )
    assert auto("cpu:8") == (
        mesh.parse("fsdp=8"),
        "default; the planner does not know this device",
    )
    scope = make_scope(load(RunConfig, file, ["mesh=auto"]), parse_cluster("v5e-16"))
    assert mesh_sizes(scope.mesh) == {"fsdp": 16}


@pytest.mark.mesh
@pytest.mark.rest("soak", keep=3)
@pytest.mark.parametrize("on", ["v5e-16", "v5e-8", "8xh100"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_automatic_mesh_runs_with_the_rest_of_the_config(on, microbatches):
    """A model so small that stages would be fastest, with another schedule or microbatches."""
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    config = load(RunConfig, str(quickstart), [f"train.microbatches={microbatches}"])
    found = run.explain(config, on)
    mesh, reason = planned_mesh(config, parse_cluster(on))
    assert found.choices["auto mesh"] == f"{mesh}, {reason}"
    assert mesh.sizes.get("stage", 1) <= microbatches


@pytest.mark.mesh
def test_the_command(shardlib, file):
    words = ("--on", "8xh100", "--why-not", "fsdp=4,tensor=2", "--price", "2", "--top", "2")
    code, out, _ = shardlib("plan", file, "model.num_layers=4", *words)
    assert code == 0
    assert out.startswith("transformer (15.7M parameters) on 8xh100 (8 H100 SXM), 64 sequences = ")
    assert "\n  fsdp=4,tensor=2: " in out
    words = ("--tokens", "1T", "--days", "30", "--global-batch", "4M", "--json")
    code, out, _ = shardlib("plan", "--model", "llama3-8b", "--on", "v5p", *words)
    facts = json.loads(out)
    assert (code, facts["batch"]) == (0, 512)
    assert facts["run_seconds"] < 30 * 86400
    assert facts["cluster"].startswith("v5p-")


def test_what_the_command_refuses(shardlib, file):
    code, out, err = shardlib("plan", "--on", "8xh100")
    assert (code, out) == (2, "")
    assert "plan takes either a config or --model, but neither is given.\n  Write shardlib" in err
    code, out, err = shardlib("plan", "--model", "llama3-70b", "--on", "8xh100")
    assert (code, out) == (2, "")
    assert "MeshError: llama3-70b does not fit 8xh100: " in err
    with pytest.raises(MeshError, match="has no size"):
        plan(load(RunConfig, file), on="h100")
    with pytest.raises(ConfigError, match="no objective is called 'speed'"):
        plan(load(RunConfig, file), on="8xh100", objective="speed")
