"""Arrays of latents and embeddings: mapped from folders of `.npy` files, or the embedded digits."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardlib.data.corpus import BUILTIN
from shardlib.data.hashing import content_hash, derive_seed, digest, mix, shuffled
from shardlib.data.images.folders import DIGITS, digits
from shardlib.data.missing import missing
from shardlib.data.split import held_out, is_in
from shardlib.errors import DataError, did_you_mean

_EVAL_SEED = 1
_GREY_LEVELS = 255
_DIGIT_DIMS = 16
"""Dims of the embedding of a class: more than the classes, so that a mesh can divide them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """Some rows of the arrays of several folders."""

    parts: Sequence[Mapping[str, np.ndarray]]
    """The arrays of each folder by name, [images, ...]."""
    rows: np.ndarray
    """[n, 2] int64: the number of the part, and of the image in it."""
    hashes: np.ndarray
    """[n] uint64: hashes of the name of the folder and the number of the image."""
    fingerprint: str
    """A digest of the names, the shapes and the first and last latents of all folders."""

    def subset(self, chosen: np.ndarray) -> "Arrays":
        """Returns the chosen rows, [n] bool."""
        return dataclasses.replace(self, rows=self.rows[chosen], hashes=self.hashes[chosen])


class LatentExamples:
    """An endless sequence of images, shuffled in each pass; without a seed once, in a fixed order.

    Args:
        arrays: The images.
        like: An array of the dtype of each array of an example.
        seed: The seed of the order; None for the order of evaluations.
    """

    def __init__(self, arrays: Arrays, like: Mapping[str, np.ndarray], seed: int | None):
        self._arrays, self._like = arrays, like
        count = len(arrays.rows)
        self._order: Any = shuffled(count, _EVAL_SEED)
        if seed is not None:
            import grain

            # Grain reshuffles each epoch.
            self._order = grain.MapDataset.range(count).shuffle(seed=derive_seed(seed, "latents"))

    def __getitem__(self, position: int) -> dict[str, np.ndarray]:
        arrays = self._arrays
        part, image = arrays.rows[int(self._order[position] % len(arrays.rows))]
        held = arrays.parts[part]
        example = {name: held[name][image].astype(one.dtype) for name, one in self._like.items()}
        return example | {"weights": np.ones((), np.float32)}


def open_arrays(paths: Sequence[str], like: Mapping[str, np.ndarray], key: str) -> Arrays:
    """Returns all images of some folders.

    Args:
        paths: The folders, or `builtin:digits`.
        like: An array of the shape and the kind of dtype of each array of an example.
        key: The key of the config that names the paths, for messages.

    Raises:
        DataError: If folders or files are missing, or arrays have other shapes or dtypes. The
            message lists all of them.
    """
    parts, faults = [], []
    for path in paths:
        try:
            parts.append(_digits() if path == DIGITS else _folder(path, like))
        except DataError as error:
            faults.append(str(error))
            continue
        faults += _faults(path, parts[-1], like)
    if faults:
        raise DataError(f"{key}: " + "\n".join(faults))
    counts = [len(part["latents"]) for part in parts]
    rows = [np.stack([np.full(n, at), np.arange(n)], axis=1) for at, n in enumerate(counts)]
    names = [Path(path).name for path in paths]
    hashes = [
        mix(np.arange(n, dtype=np.uint64), content_hash(name.encode()))
        for name, n in zip(names, counts, strict=True)
    ]
    told = [
        (name, array.shape, str(array.dtype), _ends(array) if name == "latents" else None)
        for part in parts
        for name, array in sorted(part.items())
    ]
    return Arrays(parts, np.concatenate(rows), np.concatenate(hashes), digest([names, told]))


def held_apart(arrays: Arrays, fraction: float) -> tuple[Arrays, Arrays]:
    """Returns the images to train on and the held-out ones, chosen by hash.

    Raises:
        DataError: If some are to be held out, and there is one image alone.
    """
    held = held_out(arrays.hashes, np.ones(len(arrays.hashes), np.int64), fraction)
    chosen = is_in(arrays.hashes, held)
    if fraction and not len(held):
        raise DataError(
            "data.path holds a single image, so none can be held out for evaluation.\n"
            "  Give more images, data.eval_path, or data.eval_fraction=0."
        )
    return arrays.subset(~chosen), arrays.subset(chosen)


def _ends(array: np.ndarray) -> int:
    return content_hash(np.ascontiguousarray(array[[0, -1]]).tobytes())


def _digits() -> dict[str, np.ndarray]:
    """Returns grey levels in [-1, 1], and the class of each image as a text of one token."""
    images = digits()
    pixels = np.stack([np.asarray(images.load(at)) for at in range(len(images.labels))])
    grey = pixels.astype(np.float32) / (_GREY_LEVELS / 2) - 1
    texts = np.eye(_DIGIT_DIMS, dtype=np.float32)[images.labels]
    return {"latents": grey[..., None], "context": texts[:, None]}


def _folder(path: str, names: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    if path.startswith(BUILTIN):
        raise DataError(
            f"no embedded set of latents is called {path!r}.{did_you_mean(path, [DIGITS])}\n"
            f"  Choose {DIGITS}, or give a folder."
        )
    place = Path(path).expanduser()
    if not place.is_dir():
        raise missing(path) if not place.exists() else DataError(f"{path!r} is a file.\n{_FIX}")
    absent = [f"{name}.npy" for name in names if not (place / f"{name}.npy").is_file()]
    if absent:
        raise DataError(f"{path!r} has no {', '.join(absent)}.\n{_FIX}")
    return {name: _mapped(place / f"{name}.npy") for name in names}


_FIX = (
    "  Give a folder with latents.npy and context.npy, and if data.pooled_dim is set, pooled.npy "
    "and sizes.npy."
)


def _mapped(file: Path) -> np.ndarray:
    try:
        return np.lib.format.open_memmap(file, mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}.\n  Write it with numpy.save.") from None


def _faults(
    path: str, arrays: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]
) -> list[str]:
    """Returns the faults of the shapes and dtypes of a folder, each with its fix."""
    count, faults = len(arrays["latents"]) if arrays["latents"].ndim else 0, []
    if not count:
        return [f"{path!r} holds no image.\n{_FIX}"]
    for name, one in like.items():
        if name not in arrays:
            faults.append(f"{path!r} has no {name}.\n{_FIX}")
            continue
        array, expected = arrays[name], (count, *one.shape)
        kind = np.integer if np.issubdtype(one.dtype, np.integer) else np.floating
        if array.shape != expected or not np.issubdtype(array.dtype, kind):
            wanted = "integers" if kind is np.integer else "floating-point numbers"
            faults.append(
                f"{name} of {path!r} are {array.dtype}{list(array.shape)}, expected {wanted} "
                f"{list(expected)}.\n  Set data.{_KEYS[name]} to what the files hold, or write "
                "them again."
            )
    return faults


_KEYS = {
    "latents": "latent_shape",
    "context": "sequence_length and data.context_dim",
    "pooled": "pooled_dim",
    "sizes": "pooled_dim",
}
