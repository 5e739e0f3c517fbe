"""The configs that come with the project: each loads, and explains itself with nothing at hand."""

import dataclasses
import pathlib

import pytest
import yaml

from shardlib import run
from shardlib.config import load
from shardlib.optim.build import build_optimizer
from shardlib_models.transformer_config import llama3_8b

CONFIGS = sorted((pathlib.Path(__file__).parents[1] / "configs").glob("*.yaml"))
CLUSTERS = {"digits": "cpu:8", "finetune_chat": "cpu:8", "quickstart": "cpu:8", "vit": "cpu:8"}
PUBLISHED = {"llama3_8b": 8_030_261_248, "resnet50_imagenet": 25_557_032}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Relative paths, those of the data among them, lead to nothing."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.mesh
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_explains_without_data_or_devices(path, tmp_path):
    config = load(run.RunConfig, path)
    report = run.explain(config, CLUSTERS.get(path.stem, "v5p-128"))
    assert report.faults() == []
    assert report.num_params() == PUBLISHED.get(path.stem, report.num_params())
    assert report.bytes_per_device() <= report.total_bytes()
    assert not list(tmp_path.iterdir()), "explain wrote something"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_header_tells_the_command(path):
    header = path.read_text().split("\nrun_dir:")[0]
    assert f"configs/{path.name}" in header
    assert "Cost" in header
    assert yaml.safe_load(path.read_text())["run_dir"] == f"runs/{path.stem}"


def config_named(name):
    return load(run.RunConfig, next(p for p in CONFIGS if p.stem == name))


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
    assert text.strip() in next(p for p in CONFIGS if p.stem == "resnet50_imagenet").read_text()
    images = 1_281_167
    assert steps == pytest.approx(90 * images / batch, abs=1)
    assert warmup == pytest.approx(5 * images / batch, abs=1)
    optimizer = dataclasses.replace(config.optimizer, warmup_steps=warmup)
    schedule = build_optimizer(optimizer, steps=steps, global_batch=batch).schedule
    epoch = images / batch
    rates = [float(schedule(int(e * epoch) + 1)) for e in (6, 29, 31, 59, 61, 79, 81)]
    peak = 0.1 * batch / 256
    assert rates == pytest.approx([peak * f for f in (1, 1, 0.1, 0.1, 0.01, 0.01, 0.001)], rel=1e-5)
