"""The scale of pixels in a Hugging Face folder: its preprocessor_config.json, or the part of its
processor_config.json that newer versions write."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlib.errors import CheckpointError

OWN, SHARED, PART = "preprocessor_config.json", "processor_config.json", "image_processor"
_BILINEAR = 2  # The number in PIL.Image.Resampling.


def read_pixels(folder: str | Path) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Returns the mean and the standard deviation of pixels in [0, 1], of each channel.

    Args:
        folder: A local folder.

    Returns:
        None if the folder does not say them.

    Raises:
        CheckpointError: If its file is malformed.
    """
    for name in (SHARED, OWN):
        file = Path(folder) / name
        said = _read(file)
        if name == SHARED:
            said = said.get(PART) or {}
        if not said:
            continue
        try:
            return _scales(said)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"{file} does not say how pixels are scaled: {error}.\n"
                "  Correct image_mean, image_std and rescale_factor."
            ) from None
    return None


def _scales(said: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    factor = float(said.get("rescale_factor", 1 / 255)) if said.get("do_rescale", True) else 1.0
    unit = 255 * factor  # What a white pixel is before its mean is subtracted.
    if not said.get("do_normalize", True):
        return (0.0,), (1 / unit,)
    if "image_mean" not in said or "image_std" not in said:
        return None
    mean, std = ([float(x) for x in said[key]] for key in ("image_mean", "image_std"))
    if len(mean) != len(std) or len(mean) not in (1, 3) or min(std) <= 0:
        raise ValueError(f"image_mean is {mean} and image_std is {std}")
    if abs(unit - 1) < 1e-6:
        unit = 1.0  # 1/255 in another precision.
    return tuple(x / unit for x in mean), tuple(x / unit for x in std)


def write_pixels(
    folder: str | Path,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    size: int,
    channels: int,
    crop: float = 1.0,
) -> None:
    """Writes how pixels are scaled into a folder, and keeps what its files say of resizing.

    Args:
        folder: A local folder.
        mean: Mean of pixels in [0, 1]: one number, or one per channel.
        std: Their standard deviation, likewise.
        size: Height and width of images, in pixels.
        channels: Their channels.
        crop: Side of the center crop as a fraction of the shorter side.

    Raises:
        CheckpointError: If a file there is malformed.
    """
    own, shared = Path(folder) / OWN, Path(folder) / SHARED
    whole = _read(shared)
    found = whole.get(PART) or _read(own) or _resizing(size, channels, crop)
    scales = {"image_mean": _by_channel(mean, channels), "image_std": _by_channel(std, channels)}
    always = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    said = {**found, **always, **scales}
    if whole.get(PART):
        shared.write_text(json.dumps({**whole, PART: said}, indent=2) + "\n")
    if own.is_file() or not whole.get(PART):
        own.write_text(json.dumps(said, indent=2) + "\n")


def _resizing(size: int, channels: int, crop: float) -> dict[str, Any]:
    """Returns the resizing of `shardlib.data`, in the terms of CLIP's processor."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": round(size / crop)},
        "resample": _BILINEAR,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
    }


def _by_channel(values: Sequence[float], channels: int) -> list[float]:
    return list(values) * channels if len(values) == 1 else list(values)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.\n  Download it again.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} does not hold an object.\n  Download it again.")
    return found
