"""Images with captions: glyphs and folders, held-out pairs, and faults."""

import json

import numpy as np
import pytest
from PIL import Image

from shardlib.data import CaptionedImageData, open_data
from shardlib.data.images.captions import _encoded
from shardlib.data.tokenizer import BytesTokenizer, train_bpe
from shardlib.errors import DataError
from shardlib.registry import DataSpec

COLORS = [(0, 20 * number, 40) for number in range(12)]


def open_split(config, split="train", *, seed=0, global_batch=8):
    return open_data(config, global_batch=global_batch, seed=seed, split=split)


def text_of(row_tokens, row_segments):
    ids = row_tokens[row_segments > 0]
    assert ids[-1] == 256
    return bytes(ids[:-1].tolist()).decode()


def test_glyphs_and_their_names():
    config = CaptionedImageData(sequence_length=96)
    train, held = (open_split(config, split) for split in ("train", "eval"))
    assert train.spec == held.spec == DataSpec(257, 96, image_shape=(32, 32, 1), end_token=256)
    assert train.num_steps is None
    assert 500 < held.num_examples < 600
    batch = train.read(3, 0, 8)
    assert batch["images"].shape == (8, 32, 32, 1)
    names = [text_of(*pair) for pair in zip(batch["tokens"], batch["segment_ids"], strict=True)]
    assert len(set(names)) == 8
    # White on black: something is drawn.
    assert (batch["images"].max(axis=(1, 2, 3)) > 0).all()
    again = open_split(config).read(3, 2, 5)
    for name, values in again.items():
        np.testing.assert_array_equal(values, batch[name][2:5])


@pytest.fixture
def folder(tmp_path):
    rows = []
    for number, color in enumerate(COLORS):
        Image.new("RGB", (10, 8), color).save(tmp_path / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": f"green {color[1]}"})
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def small(folder, **options):
    given = {"image_size": 8, "sequence_length": 16, "eval_fraction": 0.25} | options
    return CaptionedImageData(path=str(folder), **given)


def test_each_image_has_its_caption(folder, caplog):
    seen = set()
    for split in ("train", "eval"):
        source = open_split(small(folder), split, global_batch=3)
        for step in range(3 if split == "train" else source.num_steps):
            batch = source.read(step, 0, 3)
            for pixels, tokens, ids in zip(
                batch["images"], batch["tokens"], batch["segment_ids"], strict=True
            ):
                if not ids.any():
                    continue  # the last batch is filled up
                green = round(float(pixels[4, 4, 1] * 0.5 + 0.5) * 255)
                assert text_of(tokens, ids) == f"green {green}"
                seen.add((split, green))
    held = {green for split, green in seen if split == "eval"}
    assert len(held) == 3
    assert not held & {green for split, green in seen if split == "train"}
    open_split(small(folder, sequence_length=8))
    assert "11 of 12 captions are cut to 7 tokens" in caplog.text


def test_a_tokenizer_of_its_own(folder, tmp_path):
    file = tmp_path / "tokenizer.json"
    train_bpe(["green 20 40 60 80"], 280).save(file)
    source = open_split(small(folder, tokenizer=str(file)))
    assert source.spec.vocab_size == source.tokenizer.vocab_size
    assert source.read(0, 0, 8)["tokens"].max() < source.spec.vocab_size


@pytest.mark.parametrize("length", [16, 8])
def test_captions_are_framed_as_clip_frames_them(folder, length):
    transformers = pytest.importorskip("transformers")
    names = ["<|startoftext|>", "<|endoftext|>", *(c + e for e in ("", "</w>") for c in "gren0123")]
    pair = [("e", "n</w>"), ("g", "r")]
    vocabulary = {name: number for number, name in enumerate([*names, *map("".join, pair)])}
    theirs = transformers.CLIPTokenizer(vocabulary, pair)
    theirs.save_pretrained(folder)
    given = {"tokenizer": str(folder / "tokenizer.json"), "sequence_length": length}
    source = open_split(small(folder, eval_fraction=0.0, **given), global_batch=12)
    batch = source.read(0, 0, 12)
    ours = {tuple(r[i > 0]) for r, i in zip(batch["tokens"], batch["segment_ids"], strict=True)}
    texts = [f"green {color[1]}" for color in COLORS]
    ids = theirs(texts, truncation=True, max_length=length)["input_ids"]
    assert ours == set(map(tuple, ids))


@pytest.mark.parametrize(
    "tokenizer", [BytesTokenizer(), train_bpe(["green 20 40"], 280)], ids=["bytes", "bpe"]
)
def test_captions_are_encoded_part_by_part(tokenizer, monkeypatch):
    captions, sizes = [f"green {number}" for number in range(12)], []
    whole = _encoded(captions, tokenizer, 16)
    encode = type(tokenizer).encode_documents
    monkeypatch.setattr(
        type(tokenizer),
        "encode_documents",
        lambda self, texts: sizes.append(len(texts)) or encode(self, texts),
    )
    monkeypatch.setattr("shardlib.data.images.captions._PART", 5)
    np.testing.assert_array_equal(_encoded(captions, tokenizer, 16), whole)
    assert sizes == [5, 5, 2]


FAULTS = {
    "no table": (lambda place: (place / "metadata.jsonl").unlink(), "has no table of captions"),
    "no file": (lambda place: (place / "3.png").unlink(), r"metadata.jsonl:4: the file '3.png'"),
    "two tables": (
        lambda place: (place / "metadata.csv").write_text("file_name,text\n0.png,green\n"),
        "2 tables of captions: metadata.jsonl, metadata.csv",
    ),
    "empty": (lambda place: (place / "metadata.jsonl").write_text(""), "is empty"),
}


@pytest.mark.parametrize(("spoil", "message"), FAULTS.values(), ids=FAULTS)
def test_faults_of_a_folder(folder, spoil, message):
    spoil(folder)
    with pytest.raises(DataError, match=rf"{message}.*(\n .*)*\n  (Give|Add|Remove)"):
        open_split(small(folder))


def test_other_faults(folder):
    with pytest.raises(DataError, match=r"(?s)12 of 12 .*no field .caption.*caption_field"):
        open_split(small(folder, caption_field="caption"))
    with pytest.raises(DataError, match=r"mean has 3 numbers, but the images have 1 channels"):
        open_split(small(folder, channels=1, mean=(0.4, 0.5, 0.6)))
    with pytest.raises(DataError, match=r"'builtin:glyps'. Did you mean 'builtin:glyphs'"):
        open_split(CaptionedImageData(path="builtin:glyps"))
    with pytest.raises(ValueError, match="sequence_length must be at least 2"):
        small(folder, sequence_length=1)
