"""Text from a trained run, and reports on what a run would place where."""

import dataclasses
import json
import os

import pytest

from shardlib import run
from shardlib.errors import CheckpointError, MeshError, ModelError


def test_text_comes_from_the_newest_checkpoint(finished, tmp_path):
    run_dir = finished.copy(tmp_path / "run")
    options = {"prompt": "the ", "length": 12, "temperature": 0}
    text = run.generate(str(run_dir), **options)
    assert 0 < len(text) <= 12
    # Neither the text nor the place of the run is needed, and the mesh may be another one.
    assert run.generate(str(run_dir), **options, mesh="data=4,tensor=2") == text
    assert run.generate(str(run_dir), length=12, seed=1) != run.generate(str(run_dir), length=12)


def test_rows_of_the_model_that_stand_for_no_token_are_left_out(finished):
    # At such a temperature all 264 rows are about as likely, and there are 257 tokens.
    assert run.generate(str(finished.run_dir), length=300, temperature=1e6, seed=3)


def test_text_comes_from_other_devices(finished, lab):
    words = ("generate", finished.run_dir, "--prompt", "the ", "--length", "12")
    words = (*words, "--temperature", "0", "--mesh", "auto")
    done = lab.shardlib(*words, env={**os.environ, "JAX_NUM_CPU_DEVICES": "2"})
    assert (done.returncode, done.stderr) == (0, "")
    expected = run.generate(str(finished.run_dir), prompt="the ", length=12, temperature=0)
    assert done.stdout == "the " + expected + "\n"


def test_a_directory_without_a_run_or_a_checkpoint_generates_nothing(finished, tmp_path):
    with pytest.raises(CheckpointError) as refused:
        run.generate(str(tmp_path))
    assert str(refused.value) == (
        f"{tmp_path} holds no run: there is no config.yaml.\n"
        "  Name the run_dir of a `shardlib train`."
    )
    (tmp_path / "config.yaml").write_text((finished.run_dir / "config.yaml").read_text())
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        run.generate(str(tmp_path))


def test_text_and_mesh_that_do_not_fit_are_refused(finished, tmp_path, lab):
    with pytest.raises(MeshError, match="mesh fsdp=3 needs 3 devices but 8 are available"):
        run.generate(str(finished.run_dir), mesh="fsdp=3")
    with pytest.raises(MeshError, match="cannot be read"):
        run.generate(str(finished.run_dir), mesh="fsdp8")
    run_dir = finished.copy(tmp_path / "run")
    (run_dir / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="was not trained on text"):
        run.generate(str(run_dir))


def test_explain_assumes_the_slices_and_hosts_of_a_cluster(lab):
    config = lab.config("unused", "mesh=auto", "train.global_batch=64", "model.embed_dim=64")
    for cluster, mesh in {
        "cpu:4": {"fsdp": 4},
        "v5e-16": {"fsdp": 16},
        "2xv5e-16": {"data": 2, "fsdp": 16},
        "4x8xh100": {"data": 4, "fsdp": 8},
        "8xh100": {"fsdp": 8},
    }.items():
        assert run.explain(config, cluster).mesh == mesh
    report = run.explain(dataclasses.replace(config, mesh="data=4x2,fsdp=4"), "4x8xh100")
    assert report.mesh == {"data": 8, "fsdp": 4}
    assert not (lab.root / "unused").exists()


def test_explain_reads_no_data_where_the_config_says_enough(lab, tmp_path):
    config = lab.config("unused", f"data.path={tmp_path}/nowhere", "data.tokenizer=bpe")
    assert run.explain(config).num_params() == run.explain(lab.config("unused")).num_params()
    images = tmp_path / "images.yaml"
    images.write_text(
        "model: {name: resnet, depth: 18, num_classes: 1000}\n"
        f"data: {{kind: images, path: {tmp_path}/nowhere}}\n"
        "train: {global_batch: 64}\n"
    )
    report = run.explain(lab.load(images), "v5e-16")
    # He et al. 2016 count 11.7 M parameters of ResNet-18.
    assert report.num_params() == 11_689_512
    assert report.mesh == {"fsdp": 16}


def test_explain_refuses_what_train_would(lab):
    with pytest.raises(MeshError) as refused:
        run.explain(lab.config("unused", "mesh=auto"), "v5e-16")
    assert str(refused.value) == (
        "train.global_batch=8 cannot be shared out: data+fsdp+expert=16 does not divide 8.\n"
        "  Choose a multiple of 16, or another mesh."
    )


def test_explain_prints_json(finished, lab):
    # The directory of a run stands for its config.
    done = lab.shardlib("explain", finished.run_dir, "--json", "--on", "v5e-8")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert facts["mesh"] == {"fsdp": 8}
    assert facts["num_params"] == 37_536
    kernel = next(row for row in facts["rows"] if row["path"] == "head/kernel")
    assert kernel["logical_axes"] == ["embed", "vocab"]
    assert kernel["spec"] == ["fsdp", None]
