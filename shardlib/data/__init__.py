"""Text and image sources, whose batches depend only on config, seed and position.

Names are imported on first use, so reading a config imports neither JAX nor a tokenizer.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlib.data.arranged import ArrangedSource as ArrangedSource
    from shardlib.data.config import DataConfig as DataConfig
    from shardlib.data.encoder_tasks.config import LabeledTextData as LabeledTextData
    from shardlib.data.encoder_tasks.config import QuestionData as QuestionData
    from shardlib.data.images.config import CaptionedImageData as CaptionedImageData
    from shardlib.data.images.config import ImageData as ImageData
    from shardlib.data.instruct.config import ChatData as ChatData
    from shardlib.data.instruct.config import InstructionData as InstructionData
    from shardlib.data.instruct.config import PairData as PairData
    from shardlib.data.latents.config import LatentData as LatentData
    from shardlib.data.loader import MapSource as MapSource
    from shardlib.data.loader import Source as Source
    from shardlib.data.loader import StreamPosition as StreamPosition
    from shardlib.data.open import batch_spec as batch_spec
    from shardlib.data.open import open_data as open_data
    from shardlib.data.prefetch import Prefetcher as Prefetcher
    from shardlib.data.text.config import SpanData as SpanData
    from shardlib.data.text.config import TextData as TextData
    from shardlib.data.text.rows import load_tokenizer as load_tokenizer
    from shardlib.data.tokenizer import Tokenizer as Tokenizer
    from shardlib.data.tokenizer import read_tokenizer as read_tokenizer

_MODULES = {
    "ArrangedSource": "arranged",
    "ChatData": "instruct.config",
    "DataConfig": "config",
    "CaptionedImageData": "images.config",
    "ImageData": "images.config",
    "InstructionData": "instruct.config",
    "LabeledTextData": "encoder_tasks.config",
    "LatentData": "latents.config",
    "MapSource": "loader",
    "PairData": "instruct.config",
    "Prefetcher": "prefetch",
    "QuestionData": "encoder_tasks.config",
    "Source": "loader",
    "SpanData": "text.config",
    "StreamPosition": "loader",
    "TextData": "text.config",
    "Tokenizer": "tokenizer",
    "batch_spec": "open",
    "load_tokenizer": "text.rows",
    "open_data": "open",
    "read_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_MODULES)
