"""Published weights become runs, and runs begin from them, on the meshes of the configs."""

import json
import re
import shutil

import numpy as np
import pytest
from flax import nnx

from shardlib import hf, run
from shardlib.checkpoint import SavedCheckpoints
from shardlib.config import load
from shardlib.data import read_tokenizer
from shardlib.data.tokenizer import train_bpe
from shardlib.errors import ConfigError
from shardlib.hf.safetensors import DIFFUSERS
from shardlib.paths import named_leaves
from shardlib.registry import DataSpec
from shardlib.run import RunConfig
from shardlib_models import resnet, unet, unet_config, vit
from shardlib_models.transformer import make
from shardlib_models.transformer_config import TransformerConfig

pytestmark = pytest.mark.mesh

MODEL = TransformerConfig(
    num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, vocab_size=320, max_positions=256
)
TEXT = "\n".join(f"the {i} quick brown foxes jump over {i * i} lazy dogs" for i in range(400))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder with a tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    hf.save(make(MODEL, DataSpec(), nnx.Rngs(7)), folder, architecture="LlamaForCausalLM")
    train_bpe([TEXT], 300).save(folder / "tokenizer.json")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 3}))
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.rest("soak")
@pytest.mark.parametrize("mesh", ["fsdp=4,tensor=2", "fsdp=8"])
def test_an_imported_run_is_listed_resharded_and_exported(shardlib, folder, tmp_path, mesh):
    out, copy = tmp_path / "run", tmp_path / "copy"
    assert shardlib("import", folder, "--out", out, f"mesh={mesh}") == (
        0,
        f"imported {folder} to {out}\n",
        "",
    )
    assert SavedCheckpoints(out / "checkpoints").candidates() == [0]
    saved = sum(path.stat().st_size for path in (out / "checkpoints").rglob("*") if path.is_file())
    # Two moments would triple it. Indices and manifests take up to 0.15 MB of a small model's.
    assert saved < 2 * (folder / "model.safetensors").stat().st_size
    assert read_tokenizer(out / "tokenizer.json").vocab_size == 300
    code, _, err = shardlib("checkpoint", "reshard", out, "--mesh", "data=2,fsdp=4", "--to", copy)
    assert (code, err) == (0, "")
    for number, one in enumerate((out, copy)):
        place = tmp_path / f"out{number}"
        assert shardlib("export", one, "--out", place)[0] == 0
        exported = (place / "model.safetensors").read_bytes()
        assert exported == (folder / "model.safetensors").read_bytes()
        configs = (json.loads((one / "config.json").read_text()) for one in (place, folder))
        assert next(configs) == next(configs)
    assert shardlib("generate", out, "--prompt", "the", "--length", 4)[0] == 0


def test_an_export_of_chats_has_the_template_of_the_run(shardlib, folder, tmp_path):
    base, out = shutil.copytree(folder, tmp_path / "base"), tmp_path / "run"
    (base / "chat_template.jinja").write_text("{{ messages }}")
    source = "CHAT{% for m in messages %} {{ m.content }}{% endfor %}"
    words = ("mesh=fsdp=8", "data.kind=chat", f"data.template={source}")
    assert shardlib("import", base, "--out", out, *words)[0] == 0
    assert shardlib("export", out, "--out", tmp_path / "same")[0] == 0
    shutil.rmtree(base)  # Then the export has nothing of the folder.
    assert shardlib("export", out, "--out", tmp_path / "gone")[0] == 0
    for name in ("same", "gone"):
        assert (tmp_path / name / "chat_template.jinja").read_text() == source


def test_an_export_has_the_dtype_of_the_folder_or_a_given_one(shardlib, folder, tmp_path):
    narrow, out = tmp_path / "narrow", tmp_path / "run"
    hf.save(hf.load(folder), narrow, dtype="bfloat16")
    shutil.copy(folder / "tokenizer.json", narrow)
    assert shardlib("import", narrow, "--out", out, "mesh=fsdp=8")[0] == 0
    for words, dtype in (((), "bfloat16"), (("--dtype", "float32"), "float32")):
        place = tmp_path / dtype
        told = f"exported step 0 of {out} to {place} in {dtype}\n"
        assert shardlib("export", out, "--out", place, *words)[:2] == (0, told)
        assert json.loads((place / "config.json").read_text())["torch_dtype"] == dtype
    weights, wide = (tmp_path / name / "model.safetensors" for name in ("bfloat16", "float32"))
    assert weights.read_bytes() == (narrow / "model.safetensors").read_bytes()
    assert wide.stat().st_size > 1.9 * weights.stat().st_size
    code, _, err = shardlib("export", out, "--out", tmp_path / "other", "--dtype", "int8")
    assert (code, "Choose float32, bfloat16, float16" in err) == (2, True)


def test_a_model_of_fewer_positions_than_texts_to_train_on(shardlib, folder, tmp_path):
    short = shutil.copytree(folder, tmp_path / "short")
    config = (short / "config.json").read_text()
    told = '"max_position_embeddings": 256'
    assert told in config
    (short / "config.json").write_text(config.replace(told, told.replace("256", "64")))
    assert shardlib("import", short, "--out", tmp_path / "run") == (
        0,
        f"imported {short} to {tmp_path / 'run'}\n",
        "",
    )
    assert shardlib("export", tmp_path / "run", "--out", tmp_path / "out")[0] == 0
    exported = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert exported == (folder / "model.safetensors").read_bytes()


def image_model(name):
    if name == "resnet":
        config = resnet.ResNetConfig(depth=18, width=8, channels=3, num_classes=3)
        return resnet.make(config, DataSpec(), nnx.Rngs(0))
    sizes = {"num_layers": 2, "embed_dim": 32, "patch_size": 8, "num_classes": 3}
    return vit.make(vit.VitConfig(**sizes), DataSpec(image_shape=(16, 16, 3)), nnx.Rngs(0))


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_a_model_of_images_is_imported_without_images(shardlib, tmp_path, name):
    source, out = tmp_path / "source", tmp_path / "run"
    hf.save(image_model(name), source)
    config = load(RunConfig, None, [f"model.init_from={source}"])
    assert (config.data.kind, config.data.channels) == ("images", 3)
    assert shardlib("import", source, "--out", out, "mesh=fsdp=8")[::2] == (0, "")
    assert shardlib("export", out, "--out", tmp_path / "out")[::2] == (0, "")
    exported = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert exported == (source / "model.safetensors").read_bytes()


def test_a_unet_keeps_its_bits_in_the_format_of_diffusers(shardlib, tmp_path):
    source, out = tmp_path / "source", tmp_path / "run"
    sizes = {"width": 8, "num_resnets": 1, "norm_groups": 4, "transformer_depths": (0, 1)}
    config = unet_config.UNetConfig(**sizes, channels=4, context_dim=768)
    hf.save(unet.make(config, DataSpec(), nnx.Rngs(0)), source)
    told = shardlib("import", source, "--out", out, "mesh=fsdp=8")
    assert told[::2] == (0, "")
    told = shardlib("export", out, "--out", tmp_path / "out")
    assert told == (0, f"exported step 0 of {out} to {tmp_path / 'out'}\n", "")
    exported = (tmp_path / "out" / DIFFUSERS).read_bytes()
    assert exported == (source / DIFFUSERS).read_bytes()


def test_a_head_of_other_classes_is_drawn_at_random(shardlib, tmp_path, caplog):
    source, out = tmp_path / "source", tmp_path / "out"
    sizes = {"num_layers": 2, "embed_dim": 32, "patch_size": 2, "num_classes": 3}
    hf.save(vit.make(vit.VitConfig(**sizes), DataSpec(image_shape=(8, 8, 1)), nnx.Rngs(0)), source)
    path = source / "config.json"
    added = {"id2label": dict.fromkeys("012"), "attention_probs_dropout_prob": 0.2}
    path.write_text(json.dumps(json.loads(path.read_text()) | added))
    words = [
        *(f"run_dir={tmp_path / 'run'}", f"model.init_from={source}", "data.path=builtin:digits"),
        *("train.global_batch=8", "train.steps=1", "eval.every_steps=0", "mesh=fsdp=8"),
        *("optimizer.learning_rate=1e-30", "optimizer.weight_decay=0"),
    ]
    with pytest.raises(ConfigError, match=r"10 classes, but num_classes=3; set it to 10"):
        run.train(load(RunConfig, None, words))
    params = named_leaves(run.train(load(RunConfig, None, [*words, "model.num_classes=10"])).state)
    assert "head/bias, head/kernel are drawn at random" in caplog.text
    assert "classifier.weight, classifier.bias are not read" in caplog.text
    loaded = named_leaves(nnx.to_pure_dict(nnx.state(hf.load(source).model, nnx.Param)))
    for name, leaf in loaded.items():
        if not name.startswith("head"):
            np.testing.assert_allclose(params[f"params/{name}"], leaf, rtol=0, atol=1e-29)
    assert shardlib("export", tmp_path / "run", "--out", out)[0] == 0
    config = json.loads((out / "config.json").read_text())
    assert config["id2label"] == {name: name for name in "0123456789"}  # the digits
    assert (config["num_labels"], config["label2id"]["7"]) == (10, 7)
    assert hf.load(out).config.num_classes == 10
    assert caplog.text.count("attention_probs_dropout_prob=0.2 (here 0)") == 1  # by the run alone


def test_an_end_of_text_that_the_folder_does_not_name(shardlib, folder, tmp_path):
    copy, out = shutil.copytree(folder, tmp_path / "copy"), tmp_path / "out"
    text = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<stop>"))
    words = ("--out", tmp_path / "run", "data.end_of_text='<stop>'")
    assert shardlib("import", copy, *words)[0] == 0
    assert shardlib("export", tmp_path / "run", "--out", out)[::2] == (0, "")
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "<stop>"


def test_a_run_begins_from_a_folder_and_resumes_without_its_weights(folder, text, tmp_path):
    words = [
        f"run_dir={tmp_path / 'run'}",
        f"model.init_from={folder}",
        f"data.path={text}",
        "data.separator='\n'",
        *("data.sequence_length=16", "train.global_batch=8", "train.steps=1", "eval.every_steps=0"),
        *("optimizer.learning_rate=1e-30", "optimizer.weight_decay=0", "mesh=fsdp=4,tensor=2"),
    ]
    config = load(RunConfig, None, words)
    assert config.data.tokenizer == str(folder / "tokenizer.json")
    first = run.train(config).state
    loaded = named_leaves(nnx.to_pure_dict(nnx.state(hf.load(folder).model, nnx.Param)))
    for path, leaf in named_leaves(first.params).items():
        np.testing.assert_array_equal(leaf, loaded[path])
    (folder / "model.safetensors").rename(tmp_path / "weights")
    try:
        again = run.train(load(RunConfig, None, [*words, "train.steps=2"]))
    finally:
        (tmp_path / "weights").rename(folder / "model.safetensors")
    assert again.step == 2


def test_an_import_with_data_is_trained(shardlib, folder, text, tmp_path):
    out = tmp_path / "run"
    words = [f"data.path={text}", "data.separator='\n'", "data.sequence_length=16"]
    words += ["train.global_batch=8", "train.steps=2", "eval.every_steps=0", "mesh=fsdp=8"]
    assert shardlib("import", folder, "--out", out, *words)[0] == 0
    code, _, err = shardlib("train", out)
    assert code == 0
    assert "training from the start" not in err
    assert SavedCheckpoints(out / "checkpoints").candidates()[-1] == 2


WRONG = {
    "an existing run": (["--out", "HERE"], r"exists already"),
    "no folder": (["--out", "RUN"], r"config.json does not exist"),
    "no weights": (["--out", "RUN"], r"has neither model.safetensors nor"),
    "no tokenizer": (["--out", "RUN"], r"has no tokenizer.json.*\n *Add data.tokenizer"),
    "a mesh of other devices": (["--out", "RUN", "mesh=fsdp=3"], r"fsdp"),
    "no such data": (["--out", "RUN", "data.path=absent.txt"], r"absent.txt"),
    "another size": (["--out", "RUN", "model.num_layers=3"], r"num_layers is 3, there 2"),
    "a larger vocabulary": (
        ["--out", "RUN", "data.tokenizer=TOKENIZER"],
        r"the data have 400 tokens, but vocab_size=320",
    ),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_a_refused_import_leaves_nothing(
    shardlib, folder, tmp_path, words, message, request, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "copy"
    case = request.node.callspec.id
    if case != "no folder":
        shutil.copytree(folder, copy)
    if case == "no weights":
        (copy / "model.safetensors").unlink()
    if case == "no tokenizer":
        (copy / "tokenizer.json").unlink()
    if "TOKENIZER" in " ".join(words):
        train_bpe([TEXT + " ".join(map(chr, range(0x100, 0x300)))], 400).save("larger.json")
    (tmp_path / "here").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    names = {"HERE": "here", "RUN": "run", "TOKENIZER": "larger.json"}
    told = [re.sub("|".join(names), lambda name: names[name[0]], word) for word in words]
    code, _, err = shardlib("import", "copy", *told)
    assert code in (1, 2)
    assert re.search(message, err), err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_import_of_bin_files_is_allowed_by_name(shardlib, folder, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    copy = shutil.copytree(folder, tmp_path / "copy")
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    code, _, err = shardlib("import", copy, "--out", tmp_path / "run")
    assert (code, "or allow .bin files" in err) == (1, True)
    assert shardlib("import", copy, "--out", tmp_path / "run", "--allow-bin")[0] == 0
