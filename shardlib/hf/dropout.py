"""Dropout that a config.json asks for and that training here lacks."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from shardlib.hf.description import Description

_LOG = logging.getLogger(__name__)

# Dropout of heads for classes, which models of language keep in their config.json, too.
_OF_CLASSES = ("classifier_dropout", "summary_first_dropout", "summary_last_dropout")


def lacking(found: Description, rate: float | None = None) -> dict[str, str]:
    """Returns the fields of dropout of a config.json that training does not follow, each with its
    value and that of training.

    Args:
        found: The folder.
        rate: The dropout of the model, if it is another one than the folder's: then it was chosen.
    """
    of_folder, described = found.fields.get("dropout", 0.0), found.architecture
    has_classes = "Classification" in described.name
    applied = {name for name, field in described.fields.items() if field.ours == "dropout"}
    applied |= {*_OF_CLASSES} if has_classes else set()
    told = {}
    for name, value in _numbers(found.source):
        if name in _OF_CLASSES and not has_classes:
            continue
        here = of_folder if name in applied else 0.0
        if value and name == described.attention_dropout:
            told[name] = f"{value} (here 0 for weights of attention)"
        elif value != here and (name not in applied or rate in (None, of_folder)):
            told[name] = f"{value} (here {here:g})"
    return told


def warn_of_lacking(found: Description, rate: float | None = None) -> None:
    """Logs the dropout that training lacks in one line; see `lacking`."""
    if told := lacking(found, rate):
        _LOG.warning(
            "training has other dropout than %s: %s. Inference has no dropout.",
            found.folder / "config.json",
            ", ".join(f"{name}={text}" for name, text in told.items()),
        )


def _numbers(fields: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of dropout, also of parts such as text_config."""
    for name, value in fields.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            yield from _numbers(value, f"{start}{name}.")
        # As in attn_pdrop, layerdrop and dropout_rate.
        elif "drop" in name and type(value) in (int, float):
            yield f"{start}{name}", value
