"""Every fault of the data has one clear message, before anything is written."""

import json
import re
import sys

import pytest

from shardlib.data import ImageData, TextData, open_data
from shardlib.errors import DataError, MissingExtraError


def message(config, split="train"):
    """The error that opening a config raises."""
    with pytest.raises(DataError) as caught:
        open_data(config, global_batch=4, seed=0, split=split)
    return str(caught.value)


def text(path, **options):
    return TextData(path=path, **({"tokenizer": "bytes", "sequence_length": 16} | options))


def test_missing_paths_are_all_named(corpus, tmp_path, monkeypatch, cache):
    monkeypatch.chdir(tmp_path)
    assert message(text(("corpus", "corpuss", "far/away.txt", "*.tar", "builtin:pyhton"))) == (
        f"data.path: there is nothing at 'corpuss'. Did you mean 'corpus'?\n"
        f"  Correct the path; it is relative to {str(tmp_path)!r}.\n"
        f"data.path: there is nothing at 'far/away.txt'. The directory 'far' is missing too.\n"
        f"  Correct the path; it is relative to {str(tmp_path)!r}.\n"
        f"data.path: no file matches '*.tar'.\n"
        f"  Correct the pattern, or add files.\n"
        f"data.path: no embedded corpus is called 'builtin:pyhton'. "
        f"Did you mean 'builtin:python'?\n"
        f"  Choose builtin:python, or give the path of a file or directory."
    )
    assert message(text("corpus", eval_path="held.txt")).startswith(
        "data.eval_path: there is nothing at 'held.txt'.\n"
    )
    assert not cache.exists()


def test_images_are_not_text():
    assert message(text("builtin:digits")) == (
        "data.path: 'builtin:digits' is a set of images, not text.\n  Set data.kind to images."
    )


def test_directory_without_text(tmp_path):
    (tmp_path / "code").mkdir()
    place = str(tmp_path / "code")
    assert message(text(place)) == (
        f"data.path: the directory {place!r} holds no file, and none of .txt, .md, .jsonl, "
        f".txt.gz, .md.gz, .jsonl.gz.\n"
        f"  Name the files by a glob, such as '{place}/**/*.txt'."
    )
    (tmp_path / "code" / "a.rs").write_text("fn main() {}")
    assert message(text(place)) == (
        f"data.path: the directory {place!r} holds only .rs files, and none of .txt, .md, .jsonl, "
        f".txt.gz, .md.gz, .jsonl.gz.\n"
        f"  Name the files by a glob, such as '{place}/**/*.rs'."
    )


def test_files_without_text(tmp_path):
    (tmp_path / "a.txt").write_text("")
    assert message(text(str(tmp_path / "a.txt"))) == (
        f"data.path: '{tmp_path}/a.txt' holds no text (1 files, all empty).\n"
        f"  Give a path that holds text."
    )


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_fewer_tokens_than_a_row(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    found = message(text(str(tmp_path), tokenizer=tokenizer, eval_fraction=0.0))
    assert found == (
        f"data.path: {str(tmp_path)!r} has 4 tokens to train on, fewer than one row of 16.\n"
        f"  Give more text, or set data.sequence_length to 4 or less."
    )


def test_nothing_to_hold_out(tmp_path):
    (tmp_path / "a.txt").write_text("abc " * 100)
    assert message(text(str(tmp_path))) == (
        f"data.path holds a single document, so none can be held out for evaluation: {tmp_path}.\n"
        f"  Set data.separator to the text between its documents, data.eval_path to other "
        f"text, or data.eval_fraction=0."
    )
    assert message(text(str(tmp_path), eval_fraction=0.0), "eval") == (
        "the data has no held-out text: data.eval_fraction is 0 and data.eval_path is not set.\n"
        "  Set one of them, or do not evaluate."
    )
    assert message(text(str(tmp_path), eval_path=str(tmp_path))) == (
        f"data.path: all documents of {str(tmp_path)!r} are held out, and none is left to train "
        f"on.\n  Give more text, or text that is not in data.eval_path."
    )


def test_malformed_lines_of_jsonl(tmp_path):
    file = tmp_path / "a.jsonl"
    good = json.dumps({"text": "fine"})

    def fault(line):
        file.write_text(f"{good}\n{line}\n")
        return message(text(str(file)))

    assert fault('{"txt": "x", "id": 3}') == (
        f"{file}:2: no field 'text'; its fields: 'txt', 'id'. Did you mean 'txt'?\n"
        f"  Set data.text_field to the field that holds the text."
    )
    assert fault("{oops") == (
        f"{file}:2: not JSON: Expecting property name enclosed in double quotes: "
        f"line 1 column 2 (char 1).\n"
        f"  A .jsonl file holds one JSON object a line; repair or remove this one."
    )
    assert fault("[1]") == (
        f'{file}:2: expected a JSON object, found list.\n  Write the line as {{"text": "..."}}.'
    )
    assert fault('{"text": 3}') == (
        f"{file}:2: the field 'text' holds int, not text.\n"
        f"  Set data.text_field to a field of text."
    )
    assert fault('{"text": "\\ud800"}') == (
        f"{file}:2: the field 'text' holds half of a surrogate pair, which is not valid Unicode.\n"
        f"  Repair or remove the line."
    )


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes("café".encode("latin-1") + b" or not")
    assert message(text(str(tmp_path / "a.txt"))) == (
        f"{tmp_path}/a.txt is not UTF-8 text: invalid continuation byte (byte 0xe9).\n"
        f"  Convert it to UTF-8, or leave it out of data.path."
    )


def test_missing_tokenizer(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert message(text("corpus", tokenizer="tokeniser.json")) == (
        f"data.tokenizer: there is nothing at 'tokeniser.json'. Did you mean 'tokenizer.json'?\n"
        f"  Correct the path; it is relative to {str(tmp_path)!r}."
    )


def test_image_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message(ImageData(path="photos")) == (
        f"data.path: there is nothing at 'photos'.\n"
        f"  Correct the path; it is relative to {str(tmp_path)!r}."
    )
    assert message(ImageData(path="builtin:digit")) == (
        "data.path: no embedded set of images is called 'builtin:digit'. "
        "Did you mean 'builtin:digits'?\n"
        "  Choose builtin:digits, or give the path of a directory."
    )
    (tmp_path / "one.png").write_bytes(b"")
    assert message(ImageData(path="one.png")) == (
        "data.path: 'one.png' is a file.\n"
        "  Give a directory with one subdirectory of images per class."
    )
    assert message(ImageData(path=str(tmp_path / "cache"))).startswith("data.path: there is")
    (tmp_path / "photos").mkdir()
    assert message(ImageData(path="photos")) == (
        "data.path: 'photos' has no subdirectories.\n"
        "  Give a directory with one subdirectory of images per class."
    )
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir()
        (tmp_path / "photos" / name / "notes.txt").write_text("no image")
    assert message(ImageData(path="photos")) == (
        "data.path: no images in these subdirectories of 'photos': cat, dog.\n"
        "  Each is a class and must hold images (.bmp, .gif, .jpeg, .jpg, .pgm, .png, .ppm, .tif, "
        ".tiff, .webp)."
    )


def test_constants_of_normalisation_fit_the_channels():
    assert message(ImageData(mean=(0.4, 0.5, 0.6))) == (
        "data.mean holds 3 numbers for images of 1 channel.\n"
        "  Give one number, or set data.channels to 3."
    )


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError) as caught:
        open_data(ImageData(), global_batch=4, seed=0, split="train")
    assert str(caught.value) == (
        "data.path builtin:digits needs 'sklearn', which is not installed: "
        "pip install 'shardlib[images]'"
    )


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"path": ()}, "path must name at least one place"),
        ({"path": ("a", "")}, "path must name at least one place"),
        ({"eval_path": ""}, "eval_path must name at least one place"),
        ({"weights": (0.5, 0.5)}, "weights has 2 entries but path has 1"),
        ({"weights": (0.0,)}, "weights must all be positive numbers, not (0.0,)"),
        ({"sequence_length": 0}, "sequence_length must be at least 1, not 0"),
        (
            {"vocab_size": 256},
            "vocab_size must be at least 257 (256 byte values and the end-of-text token), not 256",
        ),
        (
            {"tokenizer": "bytes", "vocab_size": 512},
            "vocab_size is for tokenizer 'bpe'; tokenizer 'bytes' has its own",
        ),
        ({"end_of_text": "</s>"}, "end_of_text is for a tokenizer.json, not for 'bpe'"),
        ({"separator": ""}, "separator must not be empty"),
        ({"eval_fraction": 1.0}, "eval_fraction must lie in [0, 1), not 1.0"),
        (
            {"eval_steps": 0, "sequence_length": -1},
            "eval_steps must be at least 1, not 0; sequence_length must be at least 1, not -1",
        ),
    ],
)
def test_faults_of_a_text_config(options, fault):
    with pytest.raises(ValueError, match=f"^{re.escape(fault)}$"):
        TextData(**options)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"path": ""}, "path must name at least one place"),
        ({"image_size": 0}, "image_size must be at least 1, not 0"),
        ({"center_crop": 1.5}, "center_crop must lie in (0, 1], not 1.5"),
        ({"threads": 0}, "threads must be at least 1, not 0"),
        ({"mean": (0.1, 0.2)}, "mean must hold 1 or 3 numbers, not 2"),
        ({"std": (0.0,)}, "std must be positive, not (0.0,)"),
    ],
)
def test_faults_of_an_image_config(options, fault):
    with pytest.raises(ValueError, match=f"^{re.escape(fault)}$"):
        ImageData(**options)


def test_global_batch_must_be_positive(corpus):
    with pytest.raises(ValueError, match=r"^global_batch must be at least 1, not 0$"):
        open_data(text(str(corpus)), global_batch=0, seed=0, split="train")
