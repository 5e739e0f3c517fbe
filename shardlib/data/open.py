"""The entry point from a data config to its batches and their shapes."""

from typing import Literal

import jax

from shardlib.data.config import DataConfig
from shardlib.data.loader import MapSource, batch_of
from shardlib.errors import DataError


def open_data(
    config: DataConfig, *, global_batch: int, seed: int, split: Literal["train", "eval"]
) -> MapSource:
    """Returns the batches of a data config.

    Text: `tokens`, `targets`, `segment_ids`, `positions`: `[global_batch, sequence_length] int32`,
    and `num_bytes: [global_batch] int32`; see `packing.PackedRows`. Chats and instructions:
    in place of `num_bytes`, `loss_mask: [global_batch, sequence_length] int32`, 1 where the loss
    counts the target. Labelled texts and questions: `tokens`, `types`, `segment_ids`:
    `[global_batch, sequence_length] int32`, and `labels`, or `starts` and `ends`: `[global_batch]
    int32`. Images: `images: [global_batch, height, width, channels] float32`, `labels:
    [global_batch] int32`. Latents: as `shardlib.registry.LATENTS` says, in float32.

    The training stream is endless, with a new order in each pass. Evaluation is one pass over the
    held-out data, the same for all seeds. Its last batch is padded: rows with segment ids of all 0,
    or with targets of -1 or weights of 0, are padding.

    Args:
        config: The data config.
        global_batch: Rows in a batch, over all processes.
        seed: Sets the order of training.
        split: `train` or `eval`.

    Raises:
        DataError: If the split is unknown, `global_batch` is less than 1, the data is missing,
            empty, malformed or too small, or nothing is held out.
        MissingExtraError: If the config is for images and the extra `images` is not installed.
    """
    if split not in ("train", "eval"):
        raise DataError(f"no split is called {split!r}.\n  Choose 'train' or 'eval'.")
    return config.open(global_batch=global_batch, seed=seed, split=split)


def batch_spec(config: DataConfig, global_batch: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each array of a batch from `open_data`.

    Raises:
        DataError: If the config contradicts itself.
    """
    return batch_of(config.padding(), global_batch)
