"""The pooling of an encoder's output into one vector, as the folder of a model says.

Source: the files of the package sentence-transformers: modules.json lists the parts of a model, and
the part `Pooling` has a config.json of its own.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from shardlib.errors import CheckpointError, ModelError

Pooling = Literal["cls", "mean", "max"]
"""The embedding of a text: the output at its first token, the mean of all, or their maxima."""

_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    # The same direction, and embeddings have length 1.
    "pooling_mode_mean_sqrt_len_tokens": "mean",
}
_PARTS = ("Transformer", "Pooling", "Normalize")
"""Parts of a model whose embeddings, scaled to length 1, are the pooled outputs."""


@dataclasses.dataclass(frozen=True)
class TextPooling:
    """What the folder of a model for embeddings says about them."""

    kind: Pooling | None
    """None if it does not say how outputs are pooled."""
    max_length: int | None
    """The most tokens of a text; None if it does not say."""


def text_pooling(folder: Path) -> TextPooling:
    """Returns what a folder says about embeddings.

    Raises:
        CheckpointError: If a file is malformed.
        ModelError: If the model has parts or a way of pooling that shardlib lacks.
    """
    parts = _read(folder / "modules.json") or []
    kinds = {str(part["type"]).rpartition(".")[2]: part.get("path", "") for part in parts}
    if others := [kind for kind in kinds if kind not in _PARTS]:
        raise ModelError(
            f"{folder / 'modules.json'} has the parts {', '.join(others)}, but embeddings are made "
            f"of {', '.join(_PARTS)} alone.\n  Choose a model without them."
        )
    path = folder / kinds.get("Pooling", "1_Pooling") / "config.json"
    said = _read(path)
    longest = (_read(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
    return TextPooling(None if said is None else _kind(said, path), longest)


def _kind(said: dict[str, Any], path: Path) -> Pooling:
    # Newer versions write one name.
    named = said.get("pooling_mode")
    names = [key for key, value in said.items() if key.startswith("pooling_mode_") and value]
    names = [f"pooling_mode_{named}_tokens", f"pooling_mode_{named}_token"] if named else names
    modes: list[Pooling] = [_MODES[name] for name in names if name in _MODES]
    if len(modes) != 1 or (named is None and len(names) != 1):
        shown = named or ", ".join(names) or "nothing"
        raise ModelError(
            f"{path} pools by {shown}, but one of {', '.join(_MODES)} is known.\n"
            "  Choose another model, or give the engine its pooling: pooling='mean'."
        )
    return modes[0]


def _read(path: Path) -> Any:
    """Returns the contents of a file; None if it does not exist."""
    try:
        return json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.\n  Download it again.") from None
