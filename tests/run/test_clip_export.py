"""CLIP is fine-tuned from a folder of transformers, and transformers reads what a run exports."""

import json
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import numpy as np
import pytest
from PIL import Image

from shardlib import hf, run
from shardlib.config import load
from shardlib.data import open_data
from shardlib.data.tokenizer import train_bpe
from shardlib.errors import CheckpointError, ConfigError
from shardlib.hf.pixels import read_pixels, write_pixels
from shardlib.run import RunConfig, export

SIZE, LENGTH = 8, 16
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with images and captions, and one of a CLIP with its processor."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    place, random = tmp_path_factory.mktemp("clip"), np.random.default_rng(0)
    rows = []
    for number in range(16):
        pixels = random.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": f"green {number}"})
    (place / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = [*(c + e for e in ("", "</w>") for c in "gren0123456789"), "<|startoftext|>"]
    ids = {name: number for number, name in enumerate([*names, "<|endoftext|>"])}
    tokenizer = transformers.CLIPTokenizer(ids, [])
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    )
    processor = transformers.CLIPProcessor(image_processor=images, tokenizer=tokenizer)
    processor.save_pretrained(place / "base")
    end, start = ids["<|endoftext|>"], ids["<|startoftext|>"]
    text = {"vocab_size": len(ids), "max_position_embeddings": LENGTH, "num_attention_heads": 4}
    text |= {"eos_token_id": end, "bos_token_id": start, "pad_token_id": end}
    image = {"num_attention_heads": 4, "image_size": SIZE, "patch_size": 4}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config={**SIZES, **text}, vision_config={**SIZES, **image}, projection_dim=16
    )
    transformers.CLIPModel(config).save_pretrained(place / "base")
    return place


def config_of(place, run_dir, *words):
    data = (f"data.path={place}", "data.kind=captioned_images", f"data.image_size={SIZE}")
    most = (f"data.sequence_length={LENGTH}", "train.global_batch=8", "train.steps=1")
    quiet = ("train.cpu_devices=8", "data.eval_fraction=0", "eval.every_steps=0")
    return load(RunConfig, None, [f"run_dir={run_dir}", *data, *most, *quiet, *words])


def theirs_and_ours(place, folder, config, processor):
    """Features of all pairs, by transformers and by the data and the model of an export."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    rows = list(map(json.loads, (place / "metadata.jsonl").read_text().splitlines()))
    pictures = [Image.open(place / row["file_name"]) for row in rows]
    texts = [row["text"] for row in rows]
    inputs = processor(text=texts, images=pictures, padding=True, return_tensors="pt")
    with torch.no_grad():
        out = model(**inputs)
    theirs = np.stack([out.text_embeds.numpy(), out.image_embeds.numpy()], 1)
    batch = open_data(config.data, global_batch=16, seed=0, split="train").read(0, 0, 16)
    with jax.default_matmul_precision("highest"):
        ours = hf.load(folder).logits(inputs=batch["tokens"], images=batch["images"])
    # The data has another order: each of ours has its equal.
    distance = np.abs(np.asarray(ours)[:, None] - theirs[None]).max(axis=(2, 3))
    return distance.min(axis=1), sorted(distance.argmin(axis=1))


@pytest.mark.mesh
def test_transformers_reads_an_export_with_its_processor(place, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = config_of(place, tmp_path / "run", f"model.init_from={place / 'base'}")
    np.testing.assert_allclose((config.data.mean, config.data.std), (MEAN, STD), rtol=1e-6)
    run.train(config)
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    processor = transformers.CLIPProcessor.from_pretrained(tmp_path / "out")
    distance, order = theirs_and_ours(place, tmp_path / "out", config, processor)
    assert distance.max() < 1e-5
    assert order == list(range(16))


@pytest.mark.mesh
def test_an_export_of_a_new_clip_has_its_processor(place, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = train_bpe(["green 0 1 2 3 4 5 6 7 8 9"], 280)
    tokenizer.save(tmp_path / "tokenizer.json")
    layers = [
        f"model.{part}.{key}"
        for part in ("text", "image")
        for key in ("num_layers=1", "embed_dim=32", "num_heads=4")
    ]
    words = ["model.name=clip", "model.image.patch_size=4", "model.feature_dim=16", *layers]
    words += [f"data.tokenizer={tmp_path / 'tokenizer.json'}", "data.mean=[0.2,0.3,0.4]"]
    config = config_of(place, tmp_path / "run", *words, "data.std=[0.5]")
    run.train(config)
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["text_config"]["eos_token_id"] == tokenizer.eot
    scale = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert (scale["image_mean"], scale["image_std"]) == ([0.2, 0.3, 0.4], [0.5] * 3)
    images = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    picture = Image.open(place / "3.png")
    theirs = np.asarray(images(picture)["pixel_values"][0])
    ours = (np.asarray(picture, np.float32) / 255 - np.array([0.2, 0.3, 0.4])) / 0.5
    np.testing.assert_allclose(theirs.transpose(1, 2, 0), ours, atol=1e-5)


@pytest.mark.mesh
def test_pixels_of_a_folder(place, tmp_path):
    found = read_pixels(place / "base")
    assert found == (MEAN, STD)
    assert read_pixels(tmp_path) is None
    file = tmp_path / "preprocessor_config.json"
    for said, expected in (
        ({"do_normalize": False}, ((0.0,), (1.0,))),
        ({"image_mean": [0.5], "image_std": [0.25], "do_rescale": False}, (0.5 / 255, 0.25 / 255)),
        ({"size": 8}, None),
    ):
        file.write_text(json.dumps(said))
        found = read_pixels(tmp_path)
        assert (found is None) == (expected is None)
        if found is not None:
            np.testing.assert_allclose(np.ravel(found), np.ravel(expected))
    file.write_text('{"image_mean": [0.5, 0.5], "image_std": [0]}')
    with pytest.raises(CheckpointError, match=r"how pixels are scaled.*\n  Correct image_mean"):
        read_pixels(tmp_path)
    file.write_text("[")
    with pytest.raises(CheckpointError, match=r"preprocessor_config.json cannot be read"):
        write_pixels(tmp_path, mean=[0.5], std=[0.5], size=8, channels=3)


@pytest.mark.mesh
def test_given_scales_and_another_tokenizer(place, tmp_path):
    base = f"model.init_from={place / 'base'}"
    config = config_of(place, tmp_path / "run", base, "data.mean=[0.5]", "data.std=[0.5]")
    assert (config.data.mean, config.data.std) == ((0.5,), (0.5,))
    with pytest.raises(ConfigError, match=r"end texts with token 256, but text.end_token"):
        run.train(config_of(place, tmp_path / "run", base, "data.tokenizer=bytes"))
