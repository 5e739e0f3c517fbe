"""Every fault of the data has one clear message, before anything is written."""

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
    found = message(text(("corpus", "corpuss", "far/away.txt", "*.tar", "builtin:pyhton")))
    for part in (
        "data.path: there is nothing at 'corpuss'. Did you mean 'corpus'?\n  Correct the path",
        "data.path: there is nothing at 'far/away.txt'. The directory 'far' is missing too.\n",
        "data.path: no file matches '*.tar'.\n  Correct the pattern",
        "called 'builtin:pyhton'. Did you mean 'builtin:python'?\n  Choose builtin:python",
    ):
        assert part in found
    assert message(text("corpus", eval_path="held.txt")).startswith("data.eval_path: there is")
    assert not cache.exists()


def test_directory_without_text(tmp_path):
    (tmp_path / "code").mkdir()
    place = str(tmp_path / "code")
    assert f"{place!r} holds no file" in message(text(place))
    (tmp_path / "code" / "a.rs").write_text("fn main() {}")
    found = message(text(place))
    assert f"data.path: the directory {place!r} holds only .rs files" in found
    assert f"such as '{place}/**/*.rs'" in found


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
    fault, fix = message(text(str(tmp_path))).split("\n")
    assert "single document" in fault
    assert str(tmp_path) in fault
    assert all(key in fix for key in ("data.separator", "data.eval_path", "data.eval_fraction=0"))
    fault, fix = message(text(str(tmp_path), eval_fraction=0.0), "eval").split("\n")
    assert "data.eval_fraction is 0 and data.eval_path is not set" in fault
    assert "Set" in fix
    fault, fix = message(text(str(tmp_path), eval_path=str(tmp_path))).split("\n")
    assert f"all documents of {str(tmp_path)!r} are held out" in fault
    assert "data.eval_path" in fix


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"txt": "x", "id": 3}', "no field 'text'; its fields: 'txt', 'id'. Did you mean 'txt'?"),
        ("{oops", "not JSON: Expecting property name enclosed in double quotes"),
        ("[1]", "expected a JSON object, found list."),
        ("null", "expected a JSON object, found NoneType."),
        ('{"text": 3}', "the field 'text' holds int, not text."),
        ('{"text": "\\ud800"}', "the field 'text' holds half of a surrogate pair"),
    ],
    ids=["no field", "not JSON", "list", "null", "number", "surrogate"],
)
def test_malformed_lines_of_jsonl(tmp_path, line, fault):
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    assert message(text(str(file))).startswith(f"{file}:2: {fault}")


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes("café".encode("latin-1") + b" or not")
    found = message(text(str(tmp_path / "a.txt")))
    assert re.match(rf"{tmp_path}/a.txt is not UTF-8 text: .*0xe9.*\n  Convert it to UTF-8", found)


def test_missing_tokenizer(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    found = message(text("corpus", tokenizer="tokeniser.json"))
    assert "at 'tokeniser.json'. Did you mean 'tokenizer.json'?\n  Correct the path" in found
    found = message(text("corpus", tokenizer=str(tmp_path)))
    assert f"{tmp_path}/tokenizer.json" in found
    assert found.endswith("\n  Set data.tokenizer to bpe, bytes or the path of a tokenizer.json.")


def test_image_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message(ImageData(path="photos")).startswith("data.path: there is nothing at 'photos'.")
    assert "Did you mean 'builtin:digits'?" in message(ImageData(path="builtin:digit"))
    (tmp_path / "one.png").write_bytes(b"")
    assert message(ImageData(path="one.png")).startswith("data.path: 'one.png' is a file.\n")
    (tmp_path / "photos").mkdir()
    assert re.match(
        r"data\.path: 'photos' has no subdirectories\.\n  Give a directory with",
        message(ImageData(path="photos")),
    )
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir()
        (tmp_path / "photos" / name / "notes.txt").write_text("no image")
    assert message(ImageData(path="photos")).startswith(
        "data.path: no images in these subdirectories of 'photos': cat, dog.\n"
    )


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        MissingExtraError, match=r"data\.path builtin:digits needs 'sklearn', which is"
    ):
        open_data(ImageData(), global_batch=4, seed=0, split="train")


@pytest.mark.parametrize(
    ("config", "options"),
    [
        *((TextData, {"path": path}) for path in ((), ("a", ""))),
        *((TextData, {"weights": weights}) for weights in ((0.5, 0.5), (0.0,))),
        *((TextData, {"vocab_size": n, "tokenizer": x}) for n, x in ((256, "bpe"), (512, "bytes"))),
        *((TextData, {name: ""}) for name in ("eval_path", "separator")),
        *((TextData, {name: 0}) for name in ("sequence_length", "eval_steps")),
        (TextData, {"end_of_text": "</s>"}),
        (TextData, {"eval_fraction": 1.0}),
        *((ImageData, {name: 0}) for name in ("image_size", "threads", "center_crop")),
        (ImageData, {"path": ""}),
        (ImageData, {"mean": (0.1, 0.2)}),
        (ImageData, {"std": (0.0,)}),
    ],
)
def test_faults_of_a_config(config, options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))} (must|has|is for) "):
        config(**options)


def test_all_faults_of_a_config_are_reported():
    fault = "eval_steps must be at least 1, not 0; sequence_length must be at least 1, not -1"
    with pytest.raises(ValueError, match=f"^{fault}$"):
        TextData(eval_steps=0, sequence_length=-1)


def test_global_batch_must_be_positive(corpus):
    with pytest.raises(DataError, match=r"^global_batch must be at least 1, not 0\.\n  Give"):
        open_data(text(str(corpus)), global_batch=0, seed=0, split="train")
