"""What is known of the data before it is read."""

from shardlib.data.config import ImageData, TextData
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
