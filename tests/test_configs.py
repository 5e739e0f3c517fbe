"""The configs that come with the project: each loads, and explains itself with nothing at hand."""

import dataclasses
import pathlib

import numpy as np
import pytest
import yaml

from shardlib import run
from shardlib.config import load
from shardlib.optim.build import build_optimizer
from shardlib.run.reports.explaining import explain_compiled
from shardlib.run.setup import open_source
from shardlib_models.transformer_config import llama3_8b

CONFIGS = sorted((pathlib.Path(__file__).parents[1] / "configs").glob("*.yaml"))
PATHS = {path.stem: path for path in CONFIGS}
SMALL = (
    "clip",
    "digits",
    "finetune_chat",
    "finetune_lora",
    "quickstart",
    "stable_diffusion",
    "t5",
    "vit",
)
CLUSTERS = dict.fromkeys(SMALL, "cpu:8") | {"gptj_6b": "v5e-16", "llama3_70b_lora": "v5p-32"}
CLUSTERS |= {"bert_classify": "v5e-8", "bert_squad": "v5e-8"}
PUBLISHED = {
    "bert_classify": 109_484_547,
    "bert_squad": 108_893_186,
    "llama3_8b": 8_030_261_248,
    "resnet50_imagenet": 25_557_032,
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Relative paths, those of the data among them, lead to nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path.with_name("cache")))


@pytest.mark.mesh
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_explains_without_data_or_devices(path, tmp_path):
    config = load(run.RunConfig, path)
    report = run.explain(config, CLUSTERS.get(path.stem, "v5p-128"))
    # Norms of deep models are replicated; all else is divided.
    replicated = sum(fault.bytes_per_device for fault in report.faults())
    assert replicated < 0.01 * report.bytes_per_device()
    assert report.num_params() == PUBLISHED.get(path.stem, report.num_params())
    assert report.bytes_per_device() <= report.total_bytes()
    assert not list(tmp_path.iterdir()), "explain wrote something"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_header_tells_the_command(path):
    header = path.read_text().split("\nrun_dir:")[0]
    assert f"configs/{path.name}" in header
    assert "Cost" in header
    assert yaml.safe_load(path.read_text())["run_dir"] == f"runs/{path.stem}"


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("name", ["quickstart", "finetune_chat"])
def test_reads_its_embedded_text(name):
    config = load(run.RunConfig, PATHS[name], ["data.tokenizer=bytes"])
    rows = open_source(config, "train").read(0, 0, 2)
    assert rows["tokens"].shape == (2, config.data.sequence_length)
    assert len(np.unique(rows["tokens"])) > 20


def config_named(name):
    return load(run.RunConfig, PATHS[name])


@pytest.mark.mesh
def test_llama_shards_its_state_over_the_fast_network():
    report = run.explain(config_named("llama3_8b"), "64xh100")
    assert dict(report.mesh) == {"data": 8, "fsdp": 8}
    sharded = sum(r.bytes_per_device for r in report.rows if r.copies == 8)
    assert sharded > 0.999 * report.bytes_per_device()
    # Parameters and the two moments of Adam, float32, over 8 devices.
    assert report.bytes_per_device() == pytest.approx(8_030_261_248 * 12 / 8, rel=1e-3)


def test_llama_config_is_the_published_model():
    assert config_named("llama3_8b").model == llama3_8b(remat="full")


@pytest.mark.parametrize(
    ("batch", "steps", "warmup"), [(256, 450_410, 25_023), (8192, 14_075, 782)]
)
def test_resnet_schedule_is_that_of_the_paper(batch, steps, warmup):
    """The steps that the header gives for other batches are 90 and 5 epochs of ImageNet."""
    config = config_named("resnet50_imagenet")
    text = f"train.global_batch={batch}".ljust(26) + f"train.steps={steps}".ljust(20)
    assert text.strip() in PATHS["resnet50_imagenet"].read_text()
    images = 1_281_167
    assert steps == pytest.approx(90 * images / batch, abs=1)
    assert warmup == pytest.approx(5 * images / batch, abs=1)
    optimizer = dataclasses.replace(config.optimizer, warmup_steps=warmup)
    schedule = build_optimizer(optimizer, steps=steps, global_batch=batch).schedule
    epoch = images / batch
    rates = [float(schedule(int(e * epoch) + 1)) for e in (6, 29, 31, 59, 61, 79, 81)]
    peak = 0.1 * batch / 256
    assert rates == pytest.approx([peak * f for f in (1, 1, 0.1, 0.1, 0.01, 0.01, 0.001)], rel=1e-5)


FINE_TUNED = [
    ("llama3_70b_lora", "v5p-32", ()),
    ("gptj_6b", "v5e-16", ()),
    ("opt_66b", "v5p-128", ()),
    (
        "llama3_70b_lora",
        "v5p-512",
        (
            "model.size=deepseek-v3",
            "finetune.targets=['**/attention/*']",
            # So that fsdp divides the factors that have no embed.
            "finetune.rank=32",
            "mesh=fsdp=32,expert=8",
            "train.global_batch=256",
            "train.microbatches=1",
        ),
    ),
    (
        "gptj_6b",
        "v5p-128",
        (
            "model.size=mixtral-8x7b",
            "mesh=fsdp=8,expert=8",
            "train.global_batch=128",
        ),
    ),
]


def fits(name, cluster, words):
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    report = explain_compiled(load(run.RunConfig, PATHS[name], list(words)), cluster)
    assert report.fits
    assert not report.findings


# Llama is in `run/test_planning.py`.
@pytest.mark.aot
@pytest.mark.parametrize(
    ("name", "cluster", "words"),
    [FINE_TUNED[1], pytest.param(*FINE_TUNED[-1], marks=pytest.mark.soak)],
)
def test_a_shallow_fine_tuning_step_fits_its_cluster(name, cluster, words):
    fits(name, cluster, (*words, "model.num_layers=4"))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "cluster", "words"), FINE_TUNED)
def test_a_whole_fine_tuning_step_fits_its_cluster(name, cluster, words):
    fits(name, cluster, words)
