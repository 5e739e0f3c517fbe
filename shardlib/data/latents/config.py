"""The data config of latents."""

from typing import TYPE_CHECKING, ClassVar, Literal

from shardlib.batch_kinds import NUM_SIZES, DataSpec
from shardlib.config import configclass
from shardlib.data.config import DataConfig, as_paths, eval_faults, path_faults

if TYPE_CHECKING:
    import numpy as np

    from shardlib.data.loader import MapSource

DIGITS = "builtin:digits"
LATENT_SIZE, LATENT_CHANNELS = (64, 64), 4
"""Height and width, and channels, of the latents of images of 512x512 pixels.

Source: Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models".
"""


@configclass
class LatentData(DataConfig):
    """Latents of images and embeddings of their texts, for training a diffusion model."""

    gives: ClassVar[str] = "latents"

    kind: Literal["latents"] = "latents"
    """Latents that an autoencoder has computed, and embeddings that encoders of text have."""
    path: str | tuple[str, ...] = DIGITS
    """A folder, or several, with one array in each file: `latents.npy` [images, height, width,
    channels], `context.npy` [images, sequence_length, context_dim], and with `pooled_dim` also
    `pooled.npy` [images, pooled_dim] and `sizes.npy` [images, 6]. Or `builtin:digits`: images of
    8x8 grey levels in place of latents, and the class as a text of one token."""
    latent_shape: tuple[int, int, int] | None = None
    """Height, width and channels of the latents. Unset: [8, 8, 1] for the digits, [64, 64, 4] for a
    folder."""
    sequence_length: int | None = None
    """Tokens of a text. Unset: 1 for the digits, 77 for a folder."""
    context_dim: int | None = None
    """Dims of the embedding of a token. Unset: 16 for the digits, 768 for a folder."""
    pooled_dim: int | None = None
    """Dims of the embedding of a whole text, which comes with six sizes of the image; null if the
    folders have neither."""
    eval_fraction: float = 0.1
    """Share of the images held out from training. Unused if `eval_path` is set."""
    eval_path: str | tuple[str, ...] | None = None
    """A folder, or several, of held-out images."""
    eval_steps: int | None = None
    """Maximum batches in one evaluation. Unset: all held-out images."""
    threads: int = 8
    """Number of images read in parallel."""

    def __post_init__(self) -> None:
        faults = path_faults(self.path, self.eval_path) + eval_faults(self)
        if min(self.shape) < 1:
            faults.append(f"latent_shape must hold sizes of at least 1, not {list(self.shape)}")
        for name in ("sequence_length", "context_dim", "pooled_dim", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                faults.append(f"{name} must be at least 1, not {value}")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def shape(self) -> tuple[int, int, int]:
        """The height, width and channels of the latents."""
        of_folder = (*LATENT_SIZE, LATENT_CHANNELS)
        return self.latent_shape or ((8, 8, 1) if self.path == DIGITS else of_folder)

    def spec(self) -> DataSpec:
        length, dim = (1, 16) if self.path == DIGITS else (77, 768)
        return DataSpec(
            sequence_length=self.sequence_length or length,
            image_shape=self.shape,
            context_dim=self.context_dim or dim,
            pooled_dim=self.pooled_dim,
        )

    def padding(self) -> "dict[str, np.ndarray]":
        import numpy as np

        spec = self.spec()
        assert spec.sequence_length is not None
        assert spec.context_dim is not None
        example = {
            "latents": np.zeros(self.shape, np.float32),
            "context": np.zeros((spec.sequence_length, spec.context_dim), np.float32),
            "weights": np.zeros((), np.float32),
        }
        if self.pooled_dim is not None:
            example["pooled"] = np.zeros(self.pooled_dim, np.float32)
            example["sizes"] = np.zeros(NUM_SIZES, np.int32)
        return example

    def check_paths(self) -> None:
        from shardlib.data.text.sources import check_exist

        check_exist(self.path, self.eval_path)

    def open(self, *, global_batch: int, seed: int, split: Literal["train", "eval"]) -> "MapSource":
        from shardlib.data.latents.arrays import LatentExamples, held_apart, open_arrays
        from shardlib.data.loader import MapSource

        padding = self.padding()
        like = {name: array for name, array in padding.items() if name != "weights"}
        parts = (open_arrays(as_paths(self.path), like, "data.path"),)
        if self.eval_path is None:
            parts = held_apart(parts[0], self.eval_fraction)
        elif split == "eval":
            parts += (open_arrays(as_paths(self.eval_path), like, "data.eval_path"),)
        if split == "eval":
            self.check_held_out()
        chosen = parts[split == "eval"]
        return MapSource(
            lambda: LatentExamples(chosen, like, seed if split == "train" else None),
            spec=self.spec(),
            global_batch=global_batch,
            padding=padding,
            num_examples=None if split == "train" else len(chosen.rows),
            max_steps=None if split == "train" else self.eval_steps,
            fingerprint=parts[0].fingerprint,
            threads=self.threads,
        )
