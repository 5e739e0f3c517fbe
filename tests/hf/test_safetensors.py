"""Files of safetensors: equal to those of the library of that name, and hostile ones refused."""

import json
import os

import ml_dtypes
import numpy as np
import pytest

from shardlib.errors import CheckpointError
from shardlib.hf.safetensors import SINGLE, Tensors, index_of, write

library = pytest.importorskip("safetensors.numpy")

ARRAYS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5).astype(ml_dtypes.bfloat16),
    "c": np.float16(3),
    "d": np.zeros((0, 2), np.float32),
    "e": np.arange(7, dtype=np.int8),
}


def specs(arrays):
    return {name: (x.shape, x.dtype) for name, x in arrays.items()}


def write_all(folder, arrays=ARRAYS, **options):
    write(folder, specs(arrays), [(name, np.asarray(x)) for name, x in arrays.items()], **options)


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_their_files_are_read(tmp_path):
    library.save_file({n: np.asarray(x) for n, x in ARRAYS.items()}, tmp_path / SINGLE)
    tensors = Tensors(tmp_path)
    assert_same(tensors, ARRAYS)
    tensors.drop("a")
    np.testing.assert_array_equal(tensors["a"], ARRAYS["a"])
    with pytest.raises(ValueError, match="read-only"):
        tensors["a"][0] = 1


def test_our_files_are_read_by_the_library(tmp_path):
    write_all(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert_same(library.load_file(tmp_path / SINGLE), ARRAYS)


def test_several_files_and_their_index(tmp_path):
    write_all(tmp_path, max_file_bytes=50)
    index = json.loads((tmp_path / index_of(SINGLE)).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-0000{len(files)}.safetensors"
    assert len(files) == 2
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in ARRAYS.values())
    assert_same(Tensors(tmp_path), ARRAYS)
    for file in files:
        held = [name for name, where in index["weight_map"].items() if where == file]
        assert_same(library.load_file(tmp_path / file), {name: ARRAYS[name] for name in held})
    os.unlink(tmp_path / files[1])
    with pytest.raises(CheckpointError, match=rf"{files[1]} is missing.*\n  Download"):
        Tensors(tmp_path)


def raw(header, data=b"\0" * 16, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(start=0, end=16, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


HOSTILE = {
    "empty": b"",
    "a length beyond the file": raw({"a": tensor()}, length=10**6),
    "a huge length": raw({"a": tensor()}, length=2**63),
    "not JSON": raw(b"{"),
    "deep JSON": raw(b"[" * 100_000),
    "not an object": raw([1]),
    "cut off": raw({"a": tensor()}, data=b"\0" * 8),
    "longer than its tensors": raw({"a": tensor()}, data=b"\0" * 17),
    "another size than its shape": raw({"a": tensor(shape=(3,))}),
    "a negative offset": raw({"a": tensor(-16, 0)}),
    "a negative size": raw({"a": tensor(shape=(-2, -2))}),
    "a size that is no integer": raw({"a": tensor(shape=(4.0,))}),
    "a size that overflows 64 bits": raw({"a": tensor(shape=(2**62, 2**62))}),
    "tensors that overlap": raw({"a": tensor(), "b": tensor()}),
    "a gap": raw({"a": tensor(0, 4, (1,)), "b": tensor(12, 16, (1,))}),
    "an unknown dtype": raw({"a": tensor(dtype="F33")}),
    "a dtype that is no text": raw({"a": tensor(dtype=["F32"])}),
    "a name that occurs twice": raw(b'{"a": 0, "a": %s}' % json.dumps(tensor()).encode()),
    "no offsets": raw({"a": {"dtype": "F32", "shape": [4]}}),
    "a tensor that is a list": raw({"a": [1]}),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_malformed_files_are_refused(tmp_path, content):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors: .*\n  Download it again"):
        Tensors(tmp_path)


def test_an_index_that_leads_out_of_the_folder(tmp_path):
    (tmp_path / index_of(SINGLE)).write_text(
        json.dumps({"weight_map": {"a": "../other.safetensors"}})
    )
    with pytest.raises(CheckpointError, match=r"'../other.safetensors' is outside"):
        Tensors(tmp_path)
    for malformed in ("{}", "[" * 100_000):
        (tmp_path / index_of(SINGLE)).write_text(malformed)
        with pytest.raises(CheckpointError, match=r"malformed.*\n  Download"):
            Tensors(tmp_path)


def test_an_index_that_names_tensors_in_other_files(tmp_path):
    write_all(tmp_path, max_file_bytes=50)
    index = json.loads((tmp_path / index_of(SINGLE)).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    changed = {"weight_map": index["weight_map"] | {"a": second, "z": first}}
    (tmp_path / index_of(SINGLE)).write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=rf"(?s)z: not in {first}, .*a: not in {second}, "):
        Tensors(tmp_path)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin may hold code.*\n  Convert"):
        Tensors(tmp_path)
