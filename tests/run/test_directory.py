"""What lies where in the directory of a run, and who the run is."""

import re

import pytest

from shardlib.data.tokenizer import JsonTokenizer, train_bpe
from shardlib.errors import DataError
from shardlib.run.directory import RunDirectory


def test_a_run_has_one_identity_from_its_first_config_on(lab, tmp_path):
    directories = [RunDirectory(tmp_path / name) for name in ("run", "other")]
    assert [directory.identity for directory in directories] == [None, None]
    for directory in directories:
        directory.write(lab.config(directory.path), None)
    first, other = [directory.identity for directory in directories]
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert first != other
    directories[0].write(lab.config(tmp_path / "run"), None)
    assert RunDirectory(tmp_path / "run").identity == first
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"run_id", "config.yaml"}


def test_a_tokenizer_keeps_the_end_of_text_that_it_was_trained_with(lab, tmp_path):
    text = train_bpe(["some text"] * 9, 300).to_json()
    tokenizer = JsonTokenizer(text, "e")
    directory, config = RunDirectory(tmp_path), lab.config(tmp_path)
    directory.write(config, tokenizer)
    assert directory.read_tokenizer(config).fingerprint == tokenizer.fingerprint
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "t"}}')
    assert directory.read_tokenizer(config).end_of_text == "t"
    (tmp_path / "tokenizer_config.json").unlink()
    assert directory.read_tokenizer(config).end_of_text == "<|endoftext|>"


def test_a_damaged_tokenizer_of_a_run_is_to_be_restored(lab, tmp_path):
    directory, config = RunDirectory(tmp_path), lab.config(tmp_path)
    directory.tokenizer_file.write_text("{}garbage")
    with pytest.raises(DataError, match=r"tokenizer.json' cannot be read: .*\n  Restore the file"):
        directory.read_tokenizer(config)


MALFORMED = {
    "empty": b"",
    "33 digits": b"0" * 33,
    "not text": b"\xff" * 32,
    "two lines": b"0" * 32 + b"\n\n",
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_identity_is_none_and_replaced(lab, tmp_path, content):
    directory = RunDirectory(tmp_path)
    directory.identity_file.write_bytes(content)
    assert directory.identity is None
    directory.write(lab.config(tmp_path), None)
    assert directory.identity is not None


def test_a_file_in_place_of_a_run_has_no_identity(tmp_path):
    (tmp_path / "run").write_text("")
    assert RunDirectory(tmp_path / "run").identity is None
