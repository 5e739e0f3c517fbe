"""Latents and embeddings: folders of arrays, digits in their place, and files that do not fit."""

import numpy as np
import pytest

from shardlib.config import from_dict
from shardlib.data import LatentData, batch_spec, open_data
from shardlib.errors import ConfigError, DataError
from shardlib.registry import DataSpec

SHAPES = {"latent_shape": (4, 6, 3), "sequence_length": 5, "context_dim": 7}


def write(folder, count=10, first=0, dtype=np.float16, **changes):
    """Writes arrays whose numbers tell which image they are of."""
    number = np.arange(first, first + count).reshape(count, 1, 1, 1)
    arrays = {
        "latents": (number + np.zeros((count, 4, 6, 3))).astype(dtype),
        "context": (number[..., 0] + np.zeros((count, 5, 7))).astype(dtype),
        "pooled": (number[..., 0, 0] + np.zeros((count, 2))).astype(dtype),
        "sizes": (number[..., 0, 0] + np.zeros((count, 6))).astype(np.int64),
    }
    folder.mkdir()
    for name, array in (arrays | changes).items():
        if array is not None:
            np.save(folder / f"{name}.npy", array)
    return str(folder)


def open_split(config, split="train", *, seed=0, global_batch=4):
    return open_data(config, global_batch=global_batch, seed=seed, split=split)


def read(source, steps):
    batches = [source.read(step, 0, source.global_batch) for step in range(steps)]
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


def test_rows_of_several_folders(tmp_path):
    paths = write(tmp_path / "a"), write(tmp_path / "b", count=6, first=10, dtype=np.float32)
    config = LatentData(path=paths, pooled_dim=2, eval_fraction=0.25, **SHAPES)
    train, held = open_split(config), open_split(config, "eval")
    assert (
        train.spec
        == held.spec
        == DataSpec(sequence_length=5, image_shape=(4, 6, 3), context_dim=7, pooled_dim=2)
    )
    assert (train.num_steps, held.num_examples) == (None, 4)
    found = read(train, 6)
    # Each image twice in two passes, in another order, and all arrays are of one image.
    numbers = found["latents"][:, 0, 0, 0]
    for name in ("latents", "context", "pooled", "sizes"):
        array = found[name].reshape(24, -1)
        np.testing.assert_array_equal(array, np.broadcast_to(numbers[:, None], array.shape))
    first, second = numbers[:12], numbers[12:]
    assert len({*first}) == 12
    assert sorted(first) == sorted(second)
    assert list(first) != list(second)
    others = read(held, 1)["latents"][:, 0, 0, 0]
    assert {*first} | {*others} == {*range(16)}
    spec = batch_spec(config, 4)
    assert {name: (x.shape[1:], x.dtype) for name, x in found.items()} == {
        name: (x.shape[1:], x.dtype) for name, x in spec.items()
    }
    np.testing.assert_array_equal(found["weights"], 1)


def test_the_last_batch_of_an_evaluation_is_padded(tmp_path):
    config = LatentData(path="nowhere", eval_path=write(tmp_path / "a"), **SHAPES)
    with pytest.raises(DataError, match="nowhere"):
        open_split(config)
    config = LatentData(path=config.eval_path, eval_path=config.eval_path, **SHAPES)
    held = open_split(config, "eval")
    assert (held.num_steps, held.num_examples) == (3, 10)
    found = read(held, 3)
    np.testing.assert_array_equal(found["weights"], [1] * 10 + [0] * 2)
    assert {*found["latents"][:10, 0, 0, 0]} == {*range(10)}
    assert "pooled" not in found


def test_other_data_has_another_fingerprint(tmp_path):
    def fingerprint(place, **changes):
        (tmp_path / place).mkdir()
        config = LatentData(path=write(tmp_path / place / "x", **changes), **SHAPES)
        return open_split(config).fingerprint

    assert fingerprint("a") == fingerprint("b")
    assert len({fingerprint("c"), fingerprint("d", count=11), fingerprint("e", first=1)}) == 3


def test_digits_stand_for_latents():
    config = LatentData()
    train, held = open_split(config), open_split(config, "eval", global_batch=100)
    assert train.spec == DataSpec(sequence_length=1, image_shape=(8, 8, 1), context_dim=16)
    assert held.num_examples == 179
    found = read(held, 2)
    seen = found["weights"] == 1
    assert (found["latents"][seen].min(), found["latents"][seen].max()) == (-1, 1)
    np.testing.assert_array_equal(found["context"][seen].sum((1, 2)), 1)
    assert (found["context"][seen].sum((0, 1)) > 5).sum() == 10


WRONG = {
    "shape": ({"latents": np.zeros((10, 4, 4, 3), "f4")}, r"float32\[10, 4, 4, 3\].*latent_shape"),
    "count": ({"context": np.zeros((9, 5, 7), "f4")}, r"\[9, 5, 7\], expected .*\[10, 5, 7\]"),
    "kind": (
        {"sizes": np.zeros((10, 6), "f4")},
        r"sizes of .* float32\[10, 6\], expected integers",
    ),
    "absent": ({"pooled": None, "context": None}, "has no context.npy, pooled.npy"),
    "none": ({"latents": np.zeros((0, 4, 6, 3), "f4")}, "holds no image"),
    "objects": ({"context": np.array([None] * 10)}, "cannot be read.*Write it with numpy.save"),
}


@pytest.mark.parametrize(("changes", "fault"), WRONG.values(), ids=WRONG)
def test_files_that_do_not_fit_are_named(changes, fault, tmp_path):
    path = write(tmp_path / "a", **changes)
    with pytest.raises(DataError, match=f"(?s)data.path: .*{fault}"):
        open_split(LatentData(path=path, pooled_dim=2, **SHAPES))


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("builtin:digts", "Did you mean 'builtin:digits'"),
        ("a/latents.npy", "is a file"),
        ("b", "there is nothing at 'b'"),
    ],
)
def test_paths_that_are_no_folder(path, fault, tmp_path, monkeypatch):
    write(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=fault):
        open_split(LatentData(path=path, **SHAPES))


def test_a_single_image_cannot_be_held_out(tmp_path):
    path = write(tmp_path / "a", count=1)
    with pytest.raises(DataError, match="a single image"):
        open_split(LatentData(path=path, **SHAPES))


def test_faults_of_keys_are_reported_at_once():
    with pytest.raises(ConfigError, match=r"latent_shape .*\[0, 8, 1\]; context_dim .* not 0"):
        from_dict(LatentData, {"latent_shape": [0, 8, 1], "context_dim": 0}, "data")
