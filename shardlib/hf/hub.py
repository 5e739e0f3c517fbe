"""Folders by their path, or by their name on the hub of Hugging Face."""

import re
from pathlib import Path

from shardlib.errors import CheckpointError, without_credentials

# The tensors are safetensors only: other files of weights can run code.
TEXTS = (
    "*.jinja",
    "*Pooling/config.json",
    "added_tokens.json",
    "config.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "merges.txt",
    "modules.json",
    "preprocessor_config.json",
    "processor_config.json",
    "sentence_*_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
TENSORS = ("model*.safetensors", "model.safetensors.index.json")

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def folder_of(name: str | Path, *, weights: bool) -> Path:
    """Returns a folder by its path, or downloads it by its name on the hub, such as `org/name`.

    Args:
        name: The path or the name. An existing path comes first.
        weights: Whether tensors are downloaded too.

    Raises:
        CheckpointError: If there is no such path, and the name cannot be downloaded.
    """
    path = Path(name)
    if path.exists() or not _HUB_NAME.fullmatch(str(name)):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        fix = "Correct the path, or install huggingface_hub."
        raise _refused(path, "the package huggingface_hub is not installed", fix) from None
    try:
        patterns = [*TEXTS, *(TENSORS if weights else ())]
        return Path(snapshot_download(str(name), allow_patterns=patterns))
    # The hub raises errors of its own, of requests or httpx, and of the file system.
    except Exception as error:
        lines = without_credentials(str(error)).strip().splitlines()
        why = (lines[0] if lines else type(error).__name__).removesuffix(".")
        fix = "Correct the path, or give the name of a model on the hub and go online."
        raise _refused(path, why, fix) from None


def _refused(path: Path, why: str, fix: str) -> CheckpointError:
    return CheckpointError(
        f"there is no folder {path}, and no model of this name can be downloaded from the hub: "
        f"{why}.\n  {fix}"
    )
