"""What is known of the data before it is read."""

import jax

from shardlib.data.config import ImageData, TextData
from shardlib.data.loader import batch_of
from shardlib.errors import DataError
from shardlib.registry import DataSpec


def known_spec(config: TextData | ImageData) -> DataSpec:
    """Returns what a config says of its data by itself; what only the data can tell is None.

    Raises:
        DataError: If the config contradicts itself.
    """
    if isinstance(config, TextData):
        from shardlib.data.tokenizer import BytesTokenizer

        vocab_size = BytesTokenizer.vocab_size if config.tokenizer == "bytes" else None
        return DataSpec(vocab_size=vocab_size, sequence_length=config.sequence_length)
    from shardlib.data.images import DIGITS, image_shape

    return DataSpec(
        num_classes=10 if config.path == DIGITS else None, image_shape=image_shape(config)
    )


def batch_spec(config: TextData | ImageData, global_batch: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each array of a batch, as `open_data` will give it.

    Raises:
        DataError: If the config contradicts itself.
    """
    if isinstance(config, TextData):
        from shardlib.data.packing import empty_row

        # Which token fills a row takes no part in its shape.
        return batch_of(empty_row(config.sequence_length, eot=0), global_batch)
    from shardlib.data.images import image_shape, no_image

    return batch_of(no_image(image_shape(config)), global_batch)


def check_held_out(config: TextData | ImageData) -> None:
    """Raises `DataError` for a config that holds nothing out to evaluate on."""
    if config.eval_path is None and config.eval_fraction == 0:
        what = "is no held-out text" if isinstance(config, TextData) else "are no held-out images"
        raise DataError(
            f"there {what}: data.eval_fraction is 0 and data.eval_path is not set.\n"
            "  Set one of them, or do not evaluate."
        )
