"""The keys of image data."""

from typing import ClassVar, Literal

from shardlib.config import configclass
from shardlib.data.config import DataConfig, eval_faults, path_faults


@configclass
class ImageFields(DataConfig):
    """The fields of `ImageData`, which the reading of images takes."""

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
    """Subtracted from pixels in [0, 1]: one number, or one per channel. Unset: what the folder of
    `model.init_from` says, or else 0.5."""
    std: tuple[float, ...] = (0.5,)
    """Divisor of the pixels after `mean` is subtracted: one number, or one per channel. Unset: as
    for `mean`."""
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


@configclass
class CaptionFields(ImageFields):
    """The fields of `CaptionedImageData`, which the reading of images and captions takes."""

    gives: ClassVar[str] = "image_text"
    decides: ClassVar[tuple[str, ...]] = ("vocab_size",)

    kind: Literal["captioned_images"] = "captioned_images"  # type: ignore[assignment]
    """Images with one caption each."""
    path: str = "builtin:glyphs"
    """A folder with images and metadata.jsonl, metadata.csv or metadata.parquet, whose fields are
    `file_name` and the caption, or `builtin:glyphs`: the characters of the font DejaVu Sans, 32x32
    pixels each, with their Unicode names."""
    caption_field: str = "text"
    """Field of the caption."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a `tokenizer.json` or of the folder that holds it."""
    sequence_length: int = 64
    """Tokens of a caption with the token that ends it. Longer ones are cut, and counted in the
    log."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length must be at least 2, not {self.sequence_length}")
