"""Properties of the data that are known before it is read."""

import jax

from shardlib.data.config import ImageData, TextData
from shardlib.data.loader import batch_of
from shardlib.registry import DataSpec


def known_spec(config: TextData | ImageData) -> DataSpec:
    """Returns the data spec that the config alone determines; unknown fields are None.

    Raises:
        DataError: If the config contradicts itself.
    """
    if isinstance(config, TextData):
        from shardlib.data.tokenizer import BytesTokenizer

        vocab_size = BytesTokenizer.vocab_size if config.tokenizer == "bytes" else None
        return DataSpec(vocab_size=vocab_size, sequence_length=config.sequence_length)
    from shardlib.data.images.folders import DIGITS, image_shape

    return DataSpec(
        num_classes=10 if config.path == DIGITS else None, image_shape=image_shape(config)
    )


def batch_spec(config: TextData | ImageData, global_batch: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each array of a batch from `open_data`.

    Raises:
        DataError: If the config contradicts itself.
    """
    if isinstance(config, TextData):
        from shardlib.data.text.packing import empty_row

        # The shape of a row does not depend on its padding token.
        return batch_of(empty_row(config.sequence_length, eot=0), global_batch)
    from shardlib.data.images.folders import image_shape, no_image

    return batch_of(no_image(image_shape(config)), global_batch)
