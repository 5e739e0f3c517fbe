"""Images and labels: the embedded digits, or a directory with one subdirectory per class."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardlib.data.cache import cached, read_array, reading
from shardlib.data.corpus import BUILTIN
from shardlib.data.hashing import content_hash, derive_seed, digest, shuffled
from shardlib.data.images.augment import Transform
from shardlib.data.images.fields import ImageFields
from shardlib.data.loader import MapSource
from shardlib.data.missing import missing
from shardlib.data.split import held_out, is_in
from shardlib.errors import DataError, did_you_mean, require
from shardlib.registry import DataSpec

DIGITS = "builtin:digits"
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Only the formats of these suffixes are decoded: Pillow runs Ghostscript for some others.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_EXTRA = "images"
_EVAL_SEED = 1
# Increment it when the layout of the cached data changes.
_DIGITS_FORMAT = 1


@dataclass(frozen=True)
class ImageSet:
    """Labelled images in a fixed order."""

    classes: tuple[str, ...]
    labels: np.ndarray
    """`[n] int32`."""
    hashes: np.ndarray
    """`[n] uint64`: hashes of the pixels (digits) or of `class/file` (a directory)."""
    load: Callable[[int], Any]
    """Returns one image as a `PIL.Image.Image`."""

    def subset(self, chosen: np.ndarray) -> "ImageSet":
        """Returns the chosen images (`[n] bool`), with all classes."""
        places = np.flatnonzero(chosen)
        load = self.load
        return ImageSet(
            self.classes,
            self.labels[places],
            self.hashes[places],
            lambda index: load(int(places[index])),
        )


class TrainExamples:
    """An endless sequence of augmented images: each is a function of (seed, epoch, image)."""

    def __init__(self, images: ImageSet, transform: Transform, seed: int):
        import grain

        self._images, self._transform = images, transform
        self._seed = derive_seed(seed, "augment")
        # Grain reshuffles each epoch.
        order = grain.MapDataset.range(len(images.labels))
        self._order: Any = order.shuffle(seed=derive_seed(seed, "images"))

    def __getitem__(self, position: int) -> dict[str, np.ndarray]:
        epoch = position // len(self._images.labels)
        index = int(self._order[position] % len(self._images.labels))
        rng = np.random.default_rng((self._seed, epoch, index))
        pixels = self._transform.train(self._images.load(index), rng)
        return {"images": pixels, "labels": self._images.labels[index]}


class EvalExamples:
    """Unaugmented images, once each, in a fixed shuffled order."""

    def __init__(self, images: ImageSet, transform: Transform):
        self._images, self._transform = images, transform
        self._order = shuffled(len(images.labels), _EVAL_SEED)

    def __getitem__(self, position: int) -> dict[str, np.ndarray]:
        index = int(self._order[position])
        pixels = self._transform.eval(self._images.load(index))
        return {"images": pixels, "labels": self._images.labels[index]}


def open_images(
    config: ImageFields, *, global_batch: int, seed: int, split: Literal["train", "eval"]
) -> MapSource:
    """Returns the image source of a config; see `open_data`."""
    require("PIL", _EXTRA, "data.kind images")
    size, _, channels = shape = image_shape(config)
    transform = Transform(config, size, channels)
    train, evaluation = _sets(config)
    if split == "train":
        make_examples = functools.partial(TrainExamples, train, transform, seed)
    else:
        config.check_held_out()
        make_examples = functools.partial(EvalExamples, evaluation, transform)
    return MapSource(
        make_examples,
        spec=DataSpec(num_classes=len(train.classes), image_shape=shape),
        global_batch=global_batch,
        padding=no_image(shape),
        num_examples=None if split == "train" else len(evaluation.labels),
        max_steps=None if split == "train" else config.eval_steps,
        fingerprint=digest(
            (part.classes, part.hashes.tobytes(), part.labels.tobytes())
            for part in (train, evaluation)
        ),
        threads=config.threads,
    )


def no_image(shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Returns a padding example with the shape of an image."""
    return {"images": np.zeros(shape, np.float32), "labels": np.array(-1, np.int32)}


def image_shape(config: ImageFields) -> tuple[int, int, int]:
    """Returns the height, width and channels of the images of a config without reading them.

    Raises:
        DataError: If the length of `mean` or `std` does not match the channels.
    """
    size, channels = (8, 1) if config.path == DIGITS else (224, 3)
    size, channels = config.image_size or size, config.channels or channels
    for name, values in (("mean", config.mean), ("std", config.std)):
        if len(values) not in (1, channels):
            raise DataError(
                f"data.{name} holds {len(values)} numbers for images of {channels} channel.\n"
                f"  Give one number, or set data.channels to {len(values)}."
            )
    return size, size, channels


def _sets(config: ImageFields) -> tuple[ImageSet, ImageSet]:
    """Returns the training images and the held-out images."""
    images = _open(config.path, "data.path")
    if config.eval_path is not None:
        evaluation = _open(config.eval_path, "data.eval_path")
        return images, _relabelled(evaluation, images.classes, config)
    return held_apart(images, config)


def held_apart(images: ImageSet, config: ImageFields) -> tuple[ImageSet, ImageSet]:
    """Returns the images to train on and the held-out ones, a share of the distinct hashes.

    Raises:
        DataError: If some are to be held out, and all images are the same.
    """
    ones = np.ones(len(images.hashes), np.int64)
    held = held_out(images.hashes, ones, config.eval_fraction)
    chosen = is_in(images.hashes, held)
    if config.eval_fraction and not len(held):
        raise DataError(
            f"data.path: {config.path!r} holds a single image, so none can be held out for "
            f"evaluation.\n  Give more images, data.eval_path, or data.eval_fraction=0."
        )
    return images.subset(~chosen), images.subset(chosen)


def _relabelled(evaluation: ImageSet, classes: tuple[str, ...], config: ImageFields) -> ImageSet:
    unknown = [name for name in evaluation.classes if name not in classes]
    if unknown:
        raise DataError(
            f"data.eval_path: {config.eval_path!r} has classes that data.path {config.path!r} "
            f"lacks: {', '.join(map(repr, unknown))}.{did_you_mean(unknown[0], classes)}\n"
            f"  Use the same subdirectory names in both."
        )
    numbers = np.array([classes.index(name) for name in evaluation.classes], np.int32)
    return ImageSet(classes, numbers[evaluation.labels], evaluation.hashes, evaluation.load)


def _open(path: str, key: str) -> ImageSet:
    if path == DIGITS:
        return digits()
    if path.startswith(BUILTIN):
        hint = did_you_mean(path, [DIGITS])
        raise DataError(
            f"{key}: no embedded set of images is called {path!r}.{hint}\n"
            f"  Choose {DIGITS}, or give the path of a directory."
        )
    place = Path(path).expanduser()
    if not place.exists():
        raise DataError(f"{key}: {missing(path)}")
    if not place.is_dir():
        raise DataError(
            f"{key}: {path!r} is a file.\n"
            f"  Give a directory with one subdirectory of images per class."
        )
    return _folder(place, key)


def digits() -> ImageSet:
    """Returns scikit-learn's digits from the cache, because importing scikit-learn takes a second.

    Source: Alpaydin and Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning
    Repository, 1998 (its test set).
    """

    def build(directory: Path) -> None:
        datasets = require("sklearn.datasets", _EXTRA, f"data.path {DIGITS}")
        loaded = datasets.load_digits()
        # Grey levels of 0 to 16 are scaled to 0 to 255.
        np.save(directory / "pixels.npy", np.rint(loaded.images * (255 / 16)).astype(np.uint8))
        np.save(directory / "labels.npy", loaded.target.astype(np.int32))

    directory = cached(
        "images", digest(["digits", _DIGITS_FORMAT]), build, task=f"caching {DIGITS}"
    )
    with reading(directory):
        pixels = read_array(directory / "pixels.npy")
        labels = read_array(directory / "labels.npy")
    hashes = np.array([content_hash(image.tobytes()) for image in pixels], np.uint64)

    def load(index: int) -> Any:
        from PIL import Image

        return Image.fromarray(pixels[index])

    return ImageSet(class_names(DIGITS), labels, hashes, load)


def class_names(path: str) -> tuple[str, ...]:
    """Returns the names of the classes of images; () if no directory with a subdirectory of images
    for each is there."""
    if path == DIGITS:
        return tuple("0123456789")
    place = Path(path).expanduser()
    folders = _class_folders(place) if place.is_dir() else []
    return tuple(folder.name for folder in folders) if all(map(_image_names, folders)) else ()


def _class_folders(place: Path) -> list[Path]:
    return sorted(
        entry for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )


def _folder(place: Path, key: str) -> ImageSet:
    folders = _class_folders(place)
    if not folders:
        raise DataError(
            f"{key}: {str(place)!r} has no subdirectories.\n"
            f"  Give a directory with one subdirectory of images per class."
        )
    names_of = [_image_names(folder) for folder in folders]
    empty = [folder.name for folder, names in zip(folders, names_of, strict=True) if not names]
    if empty:
        raise DataError(
            f"{key}: no images in these subdirectories of {str(place)!r}: {', '.join(empty)}.\n"
            f"  Each is a class and must hold images ({', '.join(IMAGE_SUFFIXES)})."
        )
    pairs = zip(folders, names_of, strict=True)
    files = [f"{folder.name}/{name}" for folder, names in pairs for name in names]
    labels = np.repeat(np.arange(len(folders), dtype=np.int32), [len(names) for names in names_of])
    hashes = np.array([content_hash(name.encode()) for name in files], np.uint64)
    classes = tuple(folder.name for folder in folders)
    return ImageSet(classes, labels, hashes, lambda index: decode(place / files[index]))


def _image_names(folder: Path) -> list[str]:
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.suffix.lower() in IMAGE_SUFFIXES and not entry.name.startswith(".")
    )


def decode(file: Path) -> Any:
    """Returns the image of a file, as a `PIL.Image.Image`.

    Raises:
        DataError: If it cannot be decoded, or has more than 8 bits a pixel.
    """
    from PIL import Image

    try:
        # Pillow checks the declared size of a file before it allocates memory.
        with Image.open(file, formats=_FORMATS) as image:
            image.load()
            if image.mode.startswith(("I", "F")):
                raise DataError(
                    f"{file}: pixels of mode {image.mode!r} have more than 8 bits.\n"
                    f"  Convert the image to 8 bits per channel."
                )
            return image.copy()
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise many types of errors for damaged files.
        raise DataError(
            f"{file} cannot be decoded: {str(error).rstrip('.')}.\n  Repair or remove the file."
        ) from error
