"""The data config of images."""

from typing import TYPE_CHECKING, Literal

from shardlib.batch_kinds import DataSpec
from shardlib.config import configclass
from shardlib.data.images.fields import ImageFields

if TYPE_CHECKING:
    import numpy as np

    from shardlib.data.loader import MapSource


@configclass
class ImageData(ImageFields):
    """Images and their labels for training a classifier."""

    def spec(self) -> DataSpec:
        from shardlib.data.images.folders import DIGITS, image_shape

        num_classes = 10 if self.path == DIGITS else None
        return DataSpec(num_classes=num_classes, image_shape=image_shape(self))

    def padding(self) -> "dict[str, np.ndarray]":
        from shardlib.data.images.folders import image_shape, no_image

        return no_image(image_shape(self))

    def check_paths(self) -> None:
        from shardlib.data.text.sources import check_exist

        check_exist(self.path, self.eval_path)

    def open(self, *, global_batch: int, seed: int, split: Literal["train", "eval"]) -> "MapSource":
        from shardlib.data.images.folders import open_images

        return open_images(self, global_batch=global_batch, seed=seed, split=split)
