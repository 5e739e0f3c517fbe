"""The data config of images."""

from typing import TYPE_CHECKING, ClassVar, Literal

from shardlib.batch_kinds import DataSpec
from shardlib.config import configclass
from shardlib.data.config import DataConfig, eval_faults, path_faults

if TYPE_CHECKING:
    import numpy as np

    from shardlib.data.loader import MapSource


@configclass
class ImageData(DataConfig):
    """Images and their labels for training a classifier."""

    gives: ClassVar[str] = "images"
    decides: ClassVar[tuple[str, ...]] = ("num_classes",)

    kind: Literal["images"] = "images"
    """Images with one label each."""
    path: str = "builtin:digits"
    """A directory with one subdirectory of images per class, or `builtin:digits`, the 1,797 images
    of 8x8 pixels that come with scikit-learn."""
    image_size: int | None = None
    """Height and width in pixels. Unset: 8 for the digits, 224 for a directory."""
    channels: Literal[1, 3] | None = None
    """1 for grey, 3 for RGB. Unset: 1 for the digits, 3 for a directory."""
    augment: Literal["none", "shift", "resized_crop"] = "none"
    """Geometric augmentation of training images: `none`, `shift` (padding by an eighth on each
    side, then a random crop) or `resized_crop` (a random crop of 8% to 100% of the area, then a
    resize)."""
    flip: bool = False
    """Whether training images are flipped left to right with probability one half."""
    center_crop: float = 1.0
    """Side of the center crop as a fraction of the shorter side, used without a random crop."""
    mean: tuple[float, ...] = (0.5,)
    """Subtracted from pixels in [0, 1]: one number, or one per channel."""
    std: tuple[float, ...] = (0.5,)
    """Divisor of the result: one number, or one per channel."""
    eval_fraction: float = 0.1
    """Share of the images held out from training. Unused if `eval_path` is set."""
    eval_path: str | None = None
    """A directory of held-out images of the same classes."""
    eval_steps: int | None = None
    """Maximum batches in one evaluation, drawn from all classes. Unset: all held-out images."""
    threads: int = 8
    """Number of images decoded in parallel."""

    def __post_init__(self) -> None:
        faults = path_faults(self.path, self.eval_path) + eval_faults(self)
        if self.image_size is not None and self.image_size < 1:
            faults.append(f"image_size must be at least 1, not {self.image_size}")
        if not 0 < self.center_crop <= 1:
            faults.append(f"center_crop must lie in (0, 1], not {self.center_crop}")
        if self.threads < 1:
            faults.append(f"threads must be at least 1, not {self.threads}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, 3):
                faults.append(f"{name} must hold 1 or 3 numbers, not {len(values)}")
        if not all(value > 0 for value in self.std):
            faults.append(f"std must be positive, not {self.std}")
        if faults:
            raise ValueError("; ".join(faults))

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
