"""The pooling of an encoder's output into one vector, as the folder of a model says.

Source: the package sentence-transformers, whose modules.json lists the parts of a model. The part
`Pooling` has a config.json of its own; the part `Transformer` has `sentence_bert_config.json`, or
another file of `_TRANSFORMER`.
"""

import dataclasses
import json
import reprlib
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
_TRANSFORMER = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_xlm-roberta_config.json",
)
_OF_MODEL = "config_sentence_transformers.json"
_KINDS = {
    bool: "true or false",
    int: "an integer",
    str: "a text",
    list: "a list",
    dict: "an object",
}


@dataclasses.dataclass(frozen=True)
class TextPooling:
    """What the folder of a model for embeddings says about them."""

    kind: Pooling | None
    """None if it does not say how outputs are pooled, or pools them in a way that shardlib
    lacks."""
    max_length: int | None
    """The most tokens of a text; None if it does not say."""
    lowers: bool = False
    """Whether texts become lower case before they are tokenized."""
    unknown: str | None = None
    """A sentence about how it pools outputs, if shardlib lacks that way."""


def text_pooling(folder: Path) -> TextPooling:
    """Returns what a folder says about embeddings.

    Raises:
        CheckpointError: If files are malformed; the message lists all faults.
        ModelError: If the model has parts, or a prompt before texts, that shardlib lacks.
    """
    reader = _FolderFiles(folder)
    parts = _parts(reader)
    of_pooling = f"{parts.get('Pooling') or '1_Pooling'}/config.json"
    if "Pooling" in parts and not (folder / of_pooling).is_file():
        reader.faults.append(f"{folder / of_pooling} does not exist, but modules.json has the part")
    kind, unknown = _kind(reader, of_pooling)
    there = (name for name in _TRANSFORMER if (folder / name).is_file())
    of_texts = next(there, _TRANSFORMER[0])
    texts = reader.read(of_texts, dict)
    longest = reader.field(texts, of_texts, "max_seq_length", int)
    if longest is not None and longest < 1:
        reader.faults.append(
            f"{folder / of_texts}: max_seq_length is {longest}, expected 1 or more"
        )
    lowers = reader.field(texts, of_texts, "do_lower_case", bool)
    of_model = reader.read(_OF_MODEL, dict)
    prompt = reader.field(of_model, _OF_MODEL, "default_prompt_name", str)
    prompts = reader.field(of_model, _OF_MODEL, "prompts", dict) or {}
    if reader.faults:
        faults = ".\n".join(reader.faults)
        raise CheckpointError(f"{faults}.\n  Download the files again, or correct them.")
    if others := [one for one in parts if one not in _PARTS]:
        raise ModelError(
            f"{folder / 'modules.json'} has the parts {', '.join(others)}, but embeddings are made "
            f"of {', '.join(_PARTS)} alone.\n  Choose a model without them."
        )
    if prompt and prompts.get(prompt) != "":
        raise ModelError(
            f"{folder / _OF_MODEL} puts the prompt {prompt!r} before each text "
            "(default_prompt_name), but texts are embedded as they are given.\n"
            "  Set it to null, and give texts with their prompt."
        )
    return TextPooling(kind, longest, bool(lowers), unknown)


class _FolderFiles:
    """Reads files of a folder, and collects what is malformed."""

    def __init__(self, folder: Path):
        self.folder, self.faults = folder, list[str]()

    def read(self, name: str, kind: type) -> Any:
        """Returns the contents of a file; nothing if it does not exist or is malformed."""
        path = self.folder / name
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else kind()
        except (OSError, ValueError, RecursionError) as error:
            self.faults.append(f"{path} cannot be read: {error}")
            return kind()
        return self.checked(found, str(path), kind) or kind()

    def field(self, values: dict[str, Any], name: str, key: str, kind: type) -> Any:
        """Returns the value of a key in the contents of a file; None without one."""
        value = values.get(key)
        return None if value is None else self.checked(value, f"{self.folder / name}: {key}", kind)

    def checked(self, value: Any, what: str, kind: type) -> Any:
        """Returns a value of the expected type; None for others, which are faults."""
        if type(value) is kind:
            return value
        shown = reprlib.repr(value)
        self.faults.append(f"{what} is {shown}, expected {_KINDS[kind]}")
        return None


def _parts(reader: _FolderFiles) -> dict[str, str]:
    """Returns the folder of each part of a model by the kind of the part."""
    parts = {}
    for number, part in enumerate(reader.read("modules.json", list)):
        where = f"modules.json: part {number}"
        fields = reader.checked(part, f"{reader.folder / where}", dict)
        if fields is None:
            continue
        if fields.get("type") is None:
            reader.faults.append(f"{reader.folder / where} has no type")
        kind = reader.field(fields, where, "type", str)
        path = reader.field(fields, where, "path", str)
        if kind is not None:
            parts[kind.rpartition(".")[2]] = path or ""
    return parts


def _kind(reader: _FolderFiles, name: str) -> tuple[Pooling | None, str | None]:
    """Returns how outputs are pooled, and a sentence about it if shardlib lacks that."""
    path = reader.folder / name
    if not path.is_file():
        return None, None
    said = reader.read(name, dict)
    # Newer versions write one name.
    named = reader.field(said, name, "pooling_mode", str)
    keys = [key for key in said if key.startswith("pooling_mode_")]
    names = [key for key in keys if reader.field(said, name, key, bool)]
    if named:
        names = [f"pooling_mode_{named}_tokens", f"pooling_mode_{named}_token"]
    modes: list[Pooling] = [_MODES[one] for one in names if one in _MODES]
    if len(modes) != 1 or (not named and len(names) != 1):
        shown = named or ", ".join(names) or "nothing"
        return None, f"{path} pools by {shown}, but one of {', '.join(_MODES)} is known."
    if reader.field(said, name, "include_prompt", bool) is False:
        return None, (
            f"{path} leaves the tokens of prompts out (include_prompt is false), but it is not "
            "known which tokens of a text are its prompt."
        )
    return modes[0], None
