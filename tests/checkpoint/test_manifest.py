"""The document of a checkpoint: what it says, that any change is told, and what is refused."""

import dataclasses
import functools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.checkpoint import manifest as manifests
from shardlib.checkpoint.checksums import FileRecord
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.tree import LeafSpec
from shardlib.errors import CheckpointError

MANIFEST = Manifest(
    step=7,
    leaves={"a/w": LeafSpec((2, 3), "float32"), "rng": LeafSpec((), "key<fry>")},
    run={"config": {"seed": 0, "names": ["ä", "b"]}, "data": {"samples_seen": 56}},
    libraries={"jax": "0.10"},
    saved_at="2026-01-31T12:00:00+00:00",
    processes=1,
    devices=8,
    metrics={"loss": 1.5},
    fingerprints={"a/w": "0123abcd", "rng": "00000000"},
    files={"state/d/0": FileRecord(24, "89abcdef")},
)


def written(directory, text):
    (directory / "manifest.json").write_text(text, encoding="utf-8")
    return directory


def changed(directory, **fields):
    """Writes a document with other fields, and the digest that belongs to it."""
    document = json.loads(MANIFEST.to_json()) | fields
    return written(directory, json.dumps(document | {"digest": manifests.digest(document)}))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_flipped_bit_is_told_or_harmless(tmp_path_factory, data):
    directory = tmp_path_factory.getbasetemp() / "flipped"
    directory.mkdir(exist_ok=True)
    content = bytearray(MANIFEST.to_json().encode())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (directory / "manifest.json").write_bytes(content)
    try:
        found = manifests.read(directory)
    except CheckpointError:
        return
    assert found == MANIFEST


def leaf(**fields):
    return {"leaves": {"x": {"shape": [1], "dtype": "int8", "fingerprint": "0" * 8} | fields}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"schema": 0}, "schema is '0'"),
        ({"step": True}, "step is 'True'"),
        ({"run": []}, "run is '[]'"),
        ({"devices": 0}, "devices is '0'"),
        ({"libraries": {"jax": 1}}, "libraries is \"{'jax': 1}\""),
        ({"leaves": {}}, "leaves is '{}'"),
        ({"leaves": {"../x": {}}}, "the name of a leaf is '../x'"),
        ({"leaves": {"x": {}}}, "KeyError: 'shape'"),
        (leaf(shape=[-1]), "shape of x is '[-1]'"),
        (leaf(dtype="object"), "dtype of x is 'object'"),
        (leaf(fingerprint="z"), "fingerprint of x is 'z'"),
        ({"metrics": {"x": 10**400}}, "metrics is \"{'x': 1000"),
        ({"files": {"../x": {}}}, "the name of a file is '../x'"),
        ({"files": {"/etc/passwd": {}}}, "the name of a file is '/etc/passwd'"),
        ({"files": {"a/./b": {}}}, "the name of a file is 'a/./b'"),
        ({"files": {"a": {"bytes": 1.5}}}, "bytes of a is '1.5'"),
        ({"files": {"a": {"bytes": 1, "crc32": "0"}}}, "crc32 of a is '0'"),
    ],
)
def test_faulty_fields_are_named(fields, reason, tmp_path):
    text = rf"(?s)manifest\.json is damaged: .*{re.escape(reason)}.*Restore another step;"
    with pytest.raises(CheckpointError, match=text):
        manifests.read(changed(tmp_path, **fields))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "ValueError: the document is '[]'"),
        ('{"schema": NaN}', "ValueError: NaN is not JSON"),
        ('{"schema": 2}', "KeyError: 'digest'"),
        ('{"schema": 1}', "KeyError: 'step'"),
        (MANIFEST.to_json().replace("56", "57"), "ValueError: digest mismatch"),
    ],
)
def test_damaged_documents(text, reason, tmp_path):
    with pytest.raises(CheckpointError, match=f"is damaged: {re.escape(reason)}"):
        manifests.read(written(tmp_path, text))


def test_depth_and_size_are_bounded(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="is damaged: RecursionError: "):
        manifests.read(written(tmp_path, "[" * 100_000))
    monkeypatch.setattr(manifests, "MAX_BYTES", 100)
    with pytest.raises(CheckpointError, match="is damaged: ValueError: more than 100 bytes"):
        manifests.read(written(tmp_path, MANIFEST.to_json()))


def test_what_the_run_says_may_be_nested_so_deep(tmp_path):
    def nested(depth):
        return functools.reduce(lambda inner, _: [inner], range(depth - 1), {"x": 1})

    fitting, too_deep = {"a": nested(63)}, {"a": nested(64)}
    assert manifests.read(changed(tmp_path, run=fitting)).run == fitting
    with pytest.raises(CheckpointError, match="ValueError: run is nested more than 64 deep"):
        manifests.read(changed(tmp_path, run=too_deep))
    assert dataclasses.replace(MANIFEST, run=fitting).to_json()
    endless = {}
    endless["a"] = endless
    for run in (too_deep, {"a": nested(100_000)}, endless):
        with pytest.raises(CheckpointError, match=r"^the metadata of step 7 is not JSON: "):
            dataclasses.replace(MANIFEST, run=run).to_json()
