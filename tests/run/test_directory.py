"""What lies where in the directory of a run, and who the run is."""

import re

import pytest

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
