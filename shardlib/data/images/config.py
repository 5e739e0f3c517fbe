"""The data config of images."""

import dataclasses
from typing import TYPE_CHECKING, Literal

from shardlib.batch_kinds import DataSpec
from shardlib.config import configclass
from shardlib.data.images.fields import CaptionFields, ImageFields

if TYPE_CHECKING:
    import numpy as np

    from shardlib.data.loader import MapSource
    from shardlib.data.tokenizer import Tokenizer


@configclass
class ImageData(ImageFields):
    """Images and their labels for training a classifier."""

    def spec(self) -> DataSpec:
        from shardlib.data.images.folders import DIGITS, image_shape

        num_classes = 10 if self.path == DIGITS else None
        return DataSpec(num_classes=num_classes, image_shape=image_shape(self))

    def class_names(self) -> tuple[str, ...]:
        from shardlib.data.images.folders import class_names

        return class_names(self.path)

    def padding(self) -> "dict[str, np.ndarray]":
        from shardlib.data.images.folders import image_shape, no_image

        return no_image(image_shape(self))

    def check_paths(self) -> None:
        from shardlib.data.text.sources import check_exist

        check_exist(self.path, self.eval_path)

    def open(self, *, global_batch: int, seed: int, split: Literal["train", "eval"]) -> "MapSource":
        from shardlib.data.images.folders import open_images

        return open_images(self, global_batch=global_batch, seed=seed, split=split)


@configclass
class CaptionedImageData(CaptionFields):
    """Images and captions for training an encoder of both, such as CLIP."""

    def spec(self) -> DataSpec:
        from shardlib.data.images.captions import caption_shape
        from shardlib.data.tokenizer import BytesTokenizer

        spec = DataSpec(sequence_length=self.sequence_length, image_shape=caption_shape(self))
        return self.with_tokenizer(spec, BytesTokenizer()) if self.tokenizer == "bytes" else spec

    def with_tokenizer(self, spec: DataSpec, tokenizer: "Tokenizer") -> DataSpec:
        return dataclasses.replace(spec, vocab_size=tokenizer.vocab_size, end_token=tokenizer.eot)

    def padding(self) -> "dict[str, np.ndarray]":
        from shardlib.data.images.captions import no_pair

        return no_pair(self)

    def check_paths(self) -> None:
        from shardlib.data.text.sources import check_exist

        check_exist(self.path, self.eval_path)

    def open(self, *, global_batch: int, seed: int, split: Literal["train", "eval"]) -> "MapSource":
        from shardlib.data.images.captions import open_captions

        return open_captions(self, global_batch=global_batch, seed=seed, split=split)

    def find_tokenizer(self, *, read: bool = False) -> "Tokenizer | None":
        from shardlib.data.images.captions import find_tokenizer

        return find_tokenizer(self)
