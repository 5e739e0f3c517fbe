"""Text from a trained run, and reports on what a run would place where."""

import dataclasses
import json
import math
import os

import jax
import pytest
from flax import nnx

import shardlib as sl
from shardlib import run
from shardlib.checkpoint import RunCheckpoints
from shardlib.config import load, to_yaml
from shardlib.data import ImageData, batch_spec, open_data
from shardlib.data.tokenizer import train_bpe
from shardlib.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MeshError,
    ModelError,
    RuleError,
)
from shardlib.mesh import make_mesh
from shardlib.run.sampling import Sampler
from shardlib.run.setup import make_scope, open_source, setup

# One program samples for all tests.
TEXT = {"prompt": "the ", "length": 12}


@pytest.mark.mesh
def test_text_comes_from_the_newest_checkpoint(finished, tmp_path):
    run_dir = finished.copy(tmp_path / "run")
    options = {**TEXT, "temperature": 0}
    text = run.generate(str(run_dir), **options)
    assert 0 < len(text) <= 12
    # Neither the text nor the place of the run is needed, and the mesh may be another one.
    assert run.generate(str(run_dir), **options, mesh="data=4,tensor=2") == text
    assert run.generate(str(run_dir), **TEXT, seed=1) != run.generate(str(run_dir), **TEXT)


@pytest.mark.mesh
def test_another_tokenizer_or_none_is_refused(finished, tmp_path):
    run_dir = finished.copy(tmp_path / "run")
    file = run_dir / "tokenizer.json"
    train_bpe(["the cat"], 257).save(file)
    with pytest.raises(DataError, match=r"not the tokenizer .* step 20 .*\n  Restore the file"):
        run.generate(str(run_dir))
    file.unlink()
    with pytest.raises(DataError, match=r"run/tokenizer.json is missing\.\n  Restore the file"):
        run.generate(str(run_dir))


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("option", ["local_sgd.inner_steps=2", "offload_optimizer=true"])
def test_text_comes_from_averages_and_from_groups_that_train_apart(lab, tmp_path, option):
    words = ("mesh=data=2,fsdp=4", "train.steps=3", "optimizer.ema_decay=0.9", "eval.every_steps=0")
    config = lab.config(tmp_path / "run", f"train.{option}", *words, "train.sample_length=0")
    result = run.train(config)
    source = open_source(config, "train")
    parts = setup(config, source.spec, make_scope(config, jax.devices()))
    assert source.tokenizer is not None
    how = {"length": 12, "temperature": 0.8, "seed": 3}
    expected = Sampler(parts, source.tokenizer)(result.state, "the ", **how)
    assert run.generate(config.run_dir, "the ", **how) == expected


@pytest.mark.mesh
def test_text_takes_nothing_but_the_parameters(finished, tmp_path):
    run_dir = finished.copy(tmp_path / "run")
    told = []
    state = dataclasses.replace(finished.result.state, opt_state=())
    with RunCheckpoints(run_dir / "checkpoints") as checkpoints:
        checkpoints.save(21, state, checkpoints.metadata(20), wait=True)
    how = {**TEXT, "notify": told.append}
    texts = {run.generate(str(run_dir), **how, step=step) for step in (20, 21, None)}
    assert (len(texts), told) == (1, [])
    # Whether spikes are looked for may have changed since the last save.
    file = run_dir / "config.yaml"
    file.write_text(to_yaml(load(run.RunConfig, file, ["train.guards.spike.warmup=8"])))
    assert run.generate(str(run_dir), **how) in texts
    assert told == []


@pytest.mark.mesh
def test_text_comes_from_the_newest_checkpoint_that_validates(finished, tmp_path):
    run_dir = finished.copy(tmp_path / "run")
    places = [run_dir / "checkpoints" / name for name in ("00000010", "00000020")]
    before = run.generate(str(run_dir), **TEXT, step=10)
    newest = run.generate(str(run_dir), **TEXT)
    assert run.generate(str(run_dir), **TEXT, step=20) == newest != before
    (places[1] / "state" / "manifest.ocdbt").write_bytes(b"")
    told = []
    assert run.generate(str(run_dir), **TEXT, notify=told.append) == before
    assert [line.partition(":")[0] for line in told] == ["step 20 does not validate and is skipped"]
    with pytest.raises(CheckpointError, match=r"\n  Restore another step \(10\)\.$"):
        run.generate(str(run_dir), step=20)
    with pytest.raises(CheckpointError, match="step 15 has no checkpoint in"):
        run.generate(str(run_dir), step=15)
    # Nothing is set aside.
    assert all(place.is_dir() for place in places)
    (places[0] / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"\(steps 10, 20\)\.\n  See what .* verify"):
        run.generate(str(run_dir))


@pytest.mark.mesh
def test_rows_of_the_model_that_stand_for_no_token_are_left_out(finished):
    # At such a temperature all 264 rows are about as likely, and there are 257 tokens.
    assert run.generate(str(finished.run_dir), length=300, temperature=1e6, seed=3)


@pytest.mark.mesh
def test_text_comes_from_other_devices(finished, lab):
    words = ("generate", finished.run_dir, "--prompt", "the ", "--length", "12")
    words = (*words, "--temperature", "0", "--mesh", "auto")
    done = lab.shardlib(*words, env={**os.environ, "JAX_NUM_CPU_DEVICES": "2"})
    assert (done.returncode, done.stderr) == (0, "")
    expected = run.generate(str(finished.run_dir), **TEXT, temperature=0)
    assert done.stdout == "the " + expected + "\n"


def test_a_directory_without_a_run_or_a_checkpoint_generates_nothing(finished, tmp_path):
    with pytest.raises(ConfigError, match=r"config.yaml is missing.\n  Pass a run directory"):
        run.generate(str(tmp_path))
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
    with pytest.raises(DataError, match=r"run/tokenizer.json is missing\.\n  Restore the file"):
        run.generate(str(run_dir))


@pytest.mark.mesh
def test_explain_assumes_the_slices_and_hosts_of_a_cluster(lab):
    config = lab.config("unused", "mesh=auto", "train.global_batch=64", "model.embed_dim=64")
    assert run.explain(config, "2xv5e-16").mesh == {"data": 2, "fsdp": 16}
    report = run.explain(dataclasses.replace(config, mesh="data=4x2,fsdp=4"), "4x8xh100")
    assert report.mesh == {"data": 8, "fsdp": 4}


@pytest.mark.mesh
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


DIGITS = ("model={name: resnet, depth: 18, stem: small, width: 8}", "data={kind: images}")
REFUSED = {
    "heads that ulysses cannot divide": (
        ModelError,
        ("mesh=context=8", "model.context=ulysses"),
        "attention by ulysses over context=8 cannot work: 4 heads cannot be divided over 8 "
        "devices.\n"
        "  Use context 'ring' or 'gather', or a smaller context axis.",
    ),
    "a ring within stages": (
        ModelError,
        ("mesh=stage=2,context=2,data=2", "model.context=ring", "train.microbatches=4"),
        "the mesh has stage=2",
    ),
    "a ring of a kernel for whole rows": (
        ModelError,
        ("mesh=context=4,data=2", "model.context=ring", "model.attention=splash"),
        "the backend splash needs whole rows",
    ),
    "layers that differ between stages": (
        ConfigError,
        ("mesh=stage=2,data=4", "train.microbatches=2", "model.num_layers=4",
         "model.remat=0-0:full,1-:dots"),
        "gives layer 0 'full' and layer 2 'dots'",
    ),
    "groups apart with state in host memory": (
        RuleError,
        ("mesh=data=2,fsdp=4", "train.local_sgd.inner_steps=2", "train.offload_optimizer=true"),
        "Leave train.offload_optimizer out",
    ),
    "microbatches said twice": (
        ConfigError,
        ("mesh=data=2,fsdp=4", "train.global_batch=16", "train.microbatches=2",
         "train.reduction.group_microbatches=[3,1]"),
        "microbatches=2 conflicts with reduction.group_microbatches",
    ),
    "stages that no microbatches fill": (
        MeshError,
        ("mesh=stage=2,data=4", "train.microbatches=auto", "train.global_batch=4"),
        "train.global_batch=4 in 2 microbatches of 2 cannot be split evenly",
    ),
    "a rule that no activation meets": (
        RuleError,
        ("rules.activations.hats=fsdp",),
        "no activation has the logical axis 'hats'. Did you mean 'heads'?",
    ),
    "an evaluation of nothing": (DataError, ("data.eval_fraction=0",), "no held-out text"),
    # 4 tokens of the prompt and one before it.
    "a sample longer than the positions": (
        ModelError,
        ("model.max_positions=16", "train.sample_length=20"),
        "a sequence of 25 tokens is longer than max_positions=16",
    ),
    "stages of a model with statistics": (
        ModelError,
        (*DIGITS, "mesh=stage=2,data=4", "train.microbatches=2"),
        "keep no order of updates",
    ),
    "groups of a model with statistics": (
        ModelError,
        (*DIGITS, "mesh=data=8", "train.reduction.dtype=bf16"),
        "which would be different in every group",
    ),
}  # fmt: skip


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("case", REFUSED)
def test_explain_refuses_as_train_does(lab, tmp_path, case):
    kind, overrides, part = REFUSED[case]
    config = lab.config(tmp_path / "run", *overrides)
    for job in (run.train, run.explain, lambda config: run.explain(config, "cpu:8")):
        with pytest.raises(kind) as refused:
            job(config)
        assert part in str(refused.value)
        assert "\n  " in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.mesh
@pytest.mark.rest("soak", keep=2)
@pytest.mark.parametrize(
    "overrides",
    [
        ("mesh=stage=2,fsdp=4", "train.microbatches=auto"),
        ("mesh=expert=4,data=2", "model.moe.num_experts=4"),
        ("mesh=data=8",),
        ("mesh=fsdp=4,tensor=2", "train.offload_optimizer=true"),
        ("mesh=context=4,data=2", "model.dropout=0"),
        ("mesh=data=8", "train.local_sgd.inner_steps=2"),
        ("mesh=data=2,fsdp=4", "train.reduction.group_microbatches=[3,1]", "train.global_batch=16"),
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_explain_passes_what_can_run_on_every_axis(lab, overrides):
    config = lab.config("unused", *overrides)
    here = run.explain(config)
    assert dict(here.mesh) == dict(make_mesh(config.mesh).shape)
    assert run.explain(config, "cpu:8") == here
    if "train.microbatches=auto" in overrides:
        assert here.choices["pipeline"] == "1f1b, 2 microbatches over 2 stages: 33% idle"
        assert here.choices["microbatches"].startswith("2 or more: ")
    assert not (lab.root / "unused").exists()


def test_the_shapes_of_a_batch_are_known_before_the_data_is_read(lab):
    for data in (lab.config("unused").data, ImageData()):
        source = open_data(data, global_batch=6, seed=0, split="train")
        assert batch_spec(data, 6) == source.element_spec()


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(
    ("cluster", "attention"),
    [
        ("8xh100", "cudnn: an NVIDIA GPU in 16 bits"),
        ("v5p-16", "splash: a TPU, and a length in whole blocks"),
        ("cpu:8", "xla: the platform is cpu"),
    ],
)
def test_explain_chooses_for_the_platform_of_the_cluster(lab, cluster, attention):
    words = ("precision=bf16", "data.sequence_length=128", "train.sample_length=0")
    config = lab.config("unused", *words)
    assert run.explain(config, cluster).choices["attention"] == attention
    kernel = attention.partition(":")[0]
    asked = lab.config("unused", *words, f"model.attention={kernel}")
    assert run.explain(asked, cluster).choices["attention"] == f"{kernel}: asked for"


def test_a_kernel_for_other_devices_is_refused(lab):
    with pytest.raises(ModelError, match=r"splash cannot run here: the platform is gpu.*\n  Use"):
        run.explain(lab.config("unused", "model.attention=splash"), "8xh100")


def test_compression_between_slices_is_refused_where_it_is_known_that_there_is_one(lab, tmp_path):
    config = lab.config(tmp_path / "run", "mesh=data=8", "train.reduction.compress_dcn=true")
    for job in (run.train, run.explain):
        with pytest.raises(ConfigError, match=r"crosses no slices or hosts.\n  Set red"):
            job(config)
    assert run.explain(config, "cpu:8").mesh == {"data": 8}


def test_explain_refuses_a_batch_for_other_devices(lab):
    with pytest.raises(MeshError, match=r"=8 cannot be split .*=16 .*\n  Choose a multiple of 16"):
        run.explain(lab.config("unused", "mesh=fsdp=16"), "v5e-16")
    # Left to the planner, some devices share rows.
    mesh = run.explain(lab.config("unused", "mesh=auto"), "v5e-16").mesh
    assert math.prod(mesh.values()) == 16
    assert math.prod(mesh.get(axis, 1) for axis in ("data", "fsdp")) <= 8


@pytest.mark.mesh
def test_explain_starts_the_cpu_devices_that_it_compiles_for(lab, tmp_path):
    words = ("explain", lab.config_file, "--on", "cpu:8", "--json", "run_dir=unused")
    clean = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    done = lab.shardlib(*words, env={**clean, "SHARDLIB_CACHE": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert (facts["cluster"], facts["mesh"]) == ("cpu:8", {"fsdp": 8})


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(
    ("overrides", "partition"),
    [
        (("mesh=fsdp=8",), "XLA: the constraints of the model decide where each product lies"),
        (("mesh=fsdp=8", "train.constrain=user"), "XLA: constrain is 'user'"),
        (("mesh=data=8", "train.reduction.dtype=bf16"), "XLA: nothing is left to cut here"),
    ],
)
def test_explain_says_who_partitions_the_loss(lab, overrides, partition):
    assert run.explain(lab.config("unused", *overrides)).choices["partition"] == partition


@pytest.mark.mesh
def test_the_engine_continues_a_run_as_generate_does(finished, lab):
    engine = sl.Engine(sl.load_run(str(finished.run_dir)), context=32)
    prompt, words = "the quick ", {"length": 12, "temperature": 0.0}
    (answer,) = engine.generate([prompt], max_tokens=12)
    assert answer.text == run.generate(str(finished.run_dir), prompt, **words)
    assert "".join(engine.stream(prompt, max_tokens=12)) == answer.text


@pytest.mark.mesh
def test_a_batch_is_answered_by_a_run_and_its_adapters(finished, lab, tmp_path):
    loaded = sl.load_run(str(finished.run_dir))
    model = sl.finetune.lora(loaded.model, rngs=nnx.Rngs(0))
    for _, factor in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        factor[...] = 0.5 * jax.random.normal(jax.random.key(0), factor.shape)
    sl.finetune.save_adapter(model, tmp_path / "adapter")
    merged = dataclasses.replace(loaded, model=sl.finetune.merge(model))
    (expected,) = sl.Engine(merged, context=32).generate([list(b"the quick ")], max_tokens=8)
    # Token ids are taken as they are; before a text comes the end of another, as in training.
    body = {"prompt": list(b"the quick "), "max_tokens": 8, "temperature": 0.0}
    bodies = {"a": body, "b": body, "c": body | {"model": "own"}}
    rows = [{"custom_id": x, "url": "/v1/completions", "body": y} for x, y in bodies.items()]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["batch", source, "--model", finished.run_dir, "--out", out, "--context", "32"]
    words += ["--adapter", f"own={tmp_path / 'adapter'}"]
    done = lab.shardlib(*words)
    assert done.returncode == 0, done.stderr
    assert "answer tokens" in done.stdout
    bodies = [json.loads(line)["response"]["body"] for line in out.read_text().splitlines()]
    (own,) = [one for one in bodies if one["model"] == "own"]
    assert own["choices"][0]["text"] == expected.text
    bodies.remove(own)
    assert len(bodies) == 2
    text = run.generate(str(finished.run_dir), "the quick ", length=8, temperature=0.0)
    for one in bodies:
        assert one["model"] == finished.run_dir.name
        assert one["choices"][0]["text"] == text != expected.text
    assert lab.call(*words, "--json").returncode == 0
    assert len(out.read_text().splitlines()) == 3
    nameless = lab.call(*words[:-1], str(tmp_path / "adapter"))
    assert (nameless.returncode, "Write NAME=FOLDER" in nameless.stderr) == (2, True)
