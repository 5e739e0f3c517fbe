"""Images: digits and directories, and augmentation that depends on (seed, epoch, image) alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shardlib.data import ImageData, LabeledTextData, open_data
from shardlib.data.images.augment import center_box, random_box
from shardlib.errors import DataError
from shardlib.registry import DataSpec


def open_split(config, split="train", *, seed=0, global_batch=16):
    return open_data(config, global_batch=global_batch, seed=seed, split=split)


@pytest.fixture
def folder(tmp_path):
    """Two classes of 12 images of one colour each; their red channel tells which image it is."""
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(12):
            color = (label * 100 + number * 5, 40, 60)
            Image.new("RGB", (20 + number, 14), color).save(
                tmp_path / "photos" / name / f"{number:02}.png"
            )
    return tmp_path / "photos"


def small(folder, **options):
    return ImageData(path=str(folder), **({"image_size": 8, "eval_fraction": 0.25} | options))


def reds(images):
    """The red channel of images of one colour, 0 to 255."""
    return np.rint((images[:, 4, 4, 0] * 0.5 + 0.5) * 255).astype(int)


def test_digits():
    config = ImageData()
    train, evaluation = (open_split(config, split, global_batch=100) for split in ("train", "eval"))
    assert train.spec == evaluation.spec == DataSpec(num_classes=10, image_shape=(8, 8, 1))
    assert train.num_steps is None
    # 10% of 1,797 images.
    assert evaluation.num_examples == 179
    assert evaluation.num_steps == 2
    batches = [evaluation.read(step, 0, 100) for step in range(2)]
    labels = np.concatenate([batch["labels"] for batch in batches])
    assert (labels[:179] >= 0).all()
    assert (labels[179:] == -1).all()
    assert set(labels[:179].tolist()) == set(range(10))
    batch = train.read(0, 0, 100)
    assert batch["images"].shape == (100, 8, 8, 1)
    assert batch["images"].dtype == np.float32
    assert batch["labels"].dtype == np.int32
    assert batch["images"].min() == -1
    assert batch["images"].max() == 1
    spec = train.element_spec()
    assert {name: (value.shape, value.dtype) for name, value in spec.items()} == {
        name: (value.shape, value.dtype) for name, value in batch.items()
    }


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    digits = load_digits()
    source = open_split(ImageData(eval_fraction=0.0), global_batch=1797)
    batch = source.read(0, 0, 1797)
    # 17 levels of grey: the rounding of 0..16 to 0..255 is undone exactly.
    levels = np.rint((batch["images"][..., 0] * 0.5 + 0.5) * 16)
    found = sorted((int(y), x.tobytes()) for x, y in zip(levels, batch["labels"], strict=True))
    expected = sorted(
        (int(y), x.astype(np.float32).tobytes())
        for x, y in zip(digits.images, digits.target, strict=True)
    )
    assert found == expected


def test_folder(folder):
    source = open_split(small(folder))
    assert source.spec == DataSpec(num_classes=2, image_shape=(8, 8, 3))
    evaluation = open_split(small(folder), "eval", global_batch=6)
    held = evaluation.read(0, 0, 6)
    assert evaluation.num_steps == 1
    train = [source.read(step, 0, 16) for step in range(10)]
    train_reds = np.concatenate([reds(batch["images"]) for batch in train])
    labels = np.concatenate([batch["labels"] for batch in train])
    np.testing.assert_array_equal(labels, train_reds // 100)
    np.testing.assert_array_equal(held["labels"], reds(held["images"]) // 100)
    held_reds = set(reds(held["images"]).tolist())
    assert held_reds.isdisjoint(train_reds.tolist())
    everything = {label * 100 + number * 5 for label in range(2) for number in range(12)}
    assert held_reds | set(train_reds.tolist()) == everything


def test_names_of_classes(folder):
    assert small(folder).class_names() == ("cat", "dog")
    (folder / "onnx").mkdir()  # no folder of classes: one holds no images
    assert small(folder).class_names() == small(folder / "cat").class_names() == ()
    assert small(folder / "gone").class_names() == ()
    assert LabeledTextData(classes=("no", "yes"), path="a.jsonl").class_names() == ("no", "yes")


def test_eval_path_takes_the_classes_of_path(folder, tmp_path):
    (tmp_path / "held").mkdir()
    (folder / "dog").rename(tmp_path / "held" / "dog")
    (folder / "dog").mkdir()
    Image.new("RGB", (9, 9)).save(folder / "dog" / "x.PNG")
    config = small(folder, eval_path=str(tmp_path / "held"))
    evaluation = open_split(config, "eval", global_batch=12)
    assert evaluation.read(0, 0, 12)["labels"].tolist() == [1] * 12
    (tmp_path / "held" / "dog").rename(tmp_path / "held" / "doge")
    with pytest.raises(DataError) as caught:
        open_split(config)
    assert str(caught.value) == (
        f"data.eval_path: '{tmp_path}/held' has classes that data.path '{folder}' lacks: "
        f"'doge'. Did you mean 'dog'?\n"
        f"  Use the same subdirectory names in both."
    )


@pytest.mark.mesh
def test_augmentation_differs_between_epochs(tmp_path):
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "set" / name / "x.png")
    config = ImageData(
        path=str(tmp_path / "set"), image_size=8, channels=1, eval_fraction=0.0, flip=True
    )
    source = open_split(config, global_batch=2)
    images = [source.read(step, 0, 2)["images"][0, :, :, 0] for step in range(64)]
    plain = (pixels / 255 - 0.5) / 0.5
    mirrored = [np.allclose(image, plain[:, ::-1], atol=1e-6) for image in images]
    for image, is_mirrored in zip(images, mirrored, strict=True):
        assert is_mirrored or np.allclose(image, plain, atol=1e-6)
    # 64 fair coins: outside of [12, 52] with probability below 1e-6.
    assert 12 <= sum(mirrored) <= 52


def test_normalisation_and_center_crop(tmp_path):
    pixels = np.zeros((6, 10, 3), np.uint8)
    pixels[1:5, 3:7] = (255, 51, 102)
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "set" / name / "x.png")
    config = ImageData(
        path=str(tmp_path / "set"),
        image_size=4,
        center_crop=4 / 6,
        mean=(0.5, 0.2, 0.1),
        std=(0.25, 1.0, 0.1),
        eval_fraction=0.0,
    )
    images = open_split(config, global_batch=2).read(0, 0, 2)["images"]
    # The centre crop of the white rectangle alone.
    np.testing.assert_allclose(
        images, np.broadcast_to(np.array([2.0, 0.0, 3.0]), (2, 4, 4, 3)), atol=1e-6
    )


def test_images_that_cannot_be_read(folder):
    for file in folder.rglob("*.png"):
        file.write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"\.png cannot be decoded: cannot identify image file"):
        open_split(small(folder)).read(0, 0, 1)
    for file in folder.rglob("*.png"):
        Image.fromarray(np.zeros((4, 4), np.uint16)).save(file)
    with pytest.raises(DataError, match=r"\.png: pixels of mode 'I;16' have more than 8 bits\.\n"):
        open_split(small(folder)).read(0, 0, 1)


@given(
    width=st.integers(1, 500),
    height=st.integers(1, 500),
    seed=st.integers(0, 2**32),
    fraction=st.floats(0.1, 1),
)
def test_boxes_lie_within_the_image(width, height, seed, fraction):
    center = center_box((width, height), fraction)
    box = random_box((width, height), np.random.default_rng(seed))
    for left, upper, right, lower in filter(None, (center, box)):
        # Halving and adding back rounds by at most one unit in the last place of 500.
        assert -1e-12 <= left < right <= width + 1e-12
        assert -1e-12 <= upper < lower <= height + 1e-12
    if box:
        area = (box[2] - box[0]) * (box[3] - box[1]) / (width * height)
        aspect = (box[2] - box[0]) / (box[3] - box[1])
        assert 0.08 * (1 - 1e-9) <= area <= 1 + 1e-9
        assert 3 / 4 * (1 - 1e-9) <= aspect <= 4 / 3 * (1 + 1e-9)


def test_images_of_any_mode_become_grey_or_colour(tmp_path):
    for mode in ("L", "RGB", "RGBA", "P", "1", "CMYK"):
        (tmp_path / "set" / mode).mkdir(parents=True)
        Image.new(mode, (5, 5)).save(
            tmp_path / "set" / mode / ("x.tif" if mode == "CMYK" else "x.png")
        )
    for channels in (1, 3):
        config = ImageData(
            path=str(tmp_path / "set"), image_size=8, channels=channels, eval_fraction=0.0
        )
        assert open_split(config).read(0, 0, 16)["images"].shape == (16, 8, 8, channels)
