"""Preprocessing of images into pixels: crop, resize, flip, normalise."""

import math
from typing import Any

import numpy as np

from shardlib.data.images.fields import ImageFields
from shardlib.errors import DataError

# Szegedy et al., "Going deeper with convolutions", 2015, section 6; as in Goyal et al., 2017.
_AREA = (0.08, 1.0)
_ASPECT = (3 / 4, 4 / 3)
_TRIES = 10

Box = tuple[float, float, float, float]
"""Left, upper, right, lower, in pixels."""


class Transform:
    """Converts a `PIL.Image.Image` to `[size, size, channels] float32` pixels. `size` is the height
    and width; `channels` is 1 (grey) or 3 (RGB).

    Raises:
        DataError: If the constants are for another number of channels.
    """

    def __init__(self, config: ImageFields, size: int, channels: int):
        if wrong := [
            f"{name} has {len(values)} numbers"
            for name, values in (("mean", config.mean), ("std", config.std))
            if len(values) not in (1, channels)
        ]:
            raise DataError(
                f"data: {' and '.join(wrong)}, but the images have {channels} channels.\n"
                "  Give one number, or one per channel; or set data.channels."
            )
        self._config = config
        self._size = size
        self._mode = "L" if channels == 1 else "RGB"
        self._mean = np.array(config.mean, np.float32)
        self._std = np.array(config.std, np.float32)

    def train(self, image: Any, rng: np.random.Generator) -> np.ndarray:
        """Returns the pixels of an image with random augmentations from `rng`."""
        box = center_box(image.size, self._config.center_crop)
        if self._config.augment == "resized_crop":
            box = random_box(image.size, rng) or box
        pixels = self._resize(image, box)
        if self._config.augment == "shift":
            pixels = shift(pixels, self._size // 8, rng)
        if self._config.flip and rng.random() < 0.5:
            pixels = pixels[:, ::-1]
        return self._normalise(pixels)

    def eval(self, image: Any) -> np.ndarray:
        """Returns the pixels of the center crop of an image."""
        return self._normalise(
            self._resize(image, center_box(image.size, self._config.center_crop))
        )

    def _resize(self, image: Any, box: Box) -> np.ndarray:
        from PIL import Image

        image = image.convert(self._mode)
        size = (self._size, self._size)
        if image.size != size or box != (0, 0, *size):
            image = image.resize(size, Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
        return np.asarray(image).reshape(self._size, self._size, -1)

    def _normalise(self, pixels: np.ndarray) -> np.ndarray:
        return (pixels.astype(np.float32) / np.float32(255) - self._mean) / self._std


def center_box(size: tuple[int, int], fraction: float) -> Box:
    """Returns the central square whose side is a fraction of the shorter side.

    `size` is (width, height), as in Pillow.
    """
    width, height = size
    side = min(width, height) * fraction
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def random_box(size: tuple[int, int], rng: np.random.Generator) -> Box | None:
    """Returns a random crop box of an image: 8% to 100% of its area, aspect ratio 3/4 to 4/3.

    It is None if ten tries give no box inside the image. `size` is (width, height).
    """
    width, height = size
    for _ in range(_TRIES):
        area = width * height * (_AREA[0] + (_AREA[1] - _AREA[0]) * rng.random())
        low, high = map(math.log, _ASPECT)
        aspect = math.exp(low + (high - low) * rng.random())
        box_width, box_height = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if box_width <= width and box_height <= height:
            left = (width - box_width) * rng.random()
            upper = (height - box_height) * rng.random()
            # Rounding may move the far edges slightly outside of the image.
            return left, upper, min(left + box_width, width), min(upper + box_height, height)
    return None


def shift(pixels: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Returns an image shifted by up to `most` pixels in each direction, padded with black.

    Source: He et al., "Deep residual learning for image recognition", 2016, section 4.2 (4 pixels
    for images of 32 pixels).
    """
    height, width, _ = pixels.shape
    padded = np.pad(pixels, ((most, most), (most, most), (0, 0)))
    upper, left = (int((2 * most + 1) * rng.random()) for _ in range(2))
    return padded[upper : upper + height, left : left + width]
