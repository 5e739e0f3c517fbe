"""Dropout that a config.json asks for and that training here lacks."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from shardlib.hf.description import Description

_LOG = logging.getLogger(__name__)

# Dropout of heads for classes, which models of language keep in their config.json, too.
_OF_CLASSES = ("classifier_dropout", "summary_first_dropout", "summary_last_dropout")


def lacking(found: Description) -> dict[str, float]:
    """Returns the fields of dropout of a config.json, not 0, that the model does not apply: those
    without a field of ours, and those whose field of ours got another value from another one."""
    fields, ours = found.architecture.fields, found.fields
    has_classes = "Classification" in found.architecture.name
    applied: dict[str, Any] = {
        name: ours.get(field.ours) for name, field in fields.items() if "." not in field.ours
    }
    if has_classes:
        applied |= dict.fromkeys(_OF_CLASSES, ours.get("dropout"))
    return {
        name: value
        for name, value in _numbers(found.source)
        if value != applied.get(name, 0.0) and (has_classes or name not in _OF_CLASSES)
    }


def warn_of_lacking(found: Description) -> None:
    """Logs the dropout that training lacks in one line; inference has no dropout."""
    if fields := lacking(found):
        _LOG.warning(
            "%s asks for %s, which shardlib does not apply: training runs without it. "
            "Inference is the same.",
            found.folder / "config.json",
            ", ".join(f"{name}={value}" for name, value in fields.items()),
        )


def _numbers(fields: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of dropout, also of parts such as text_config."""
    for name, value in fields.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            yield from _numbers(value, f"{start}{name}.")
        # As in attn_pdrop, layerdrop and dropout_rate.
        elif "drop" in name and type(value) in (int, float):
            yield f"{start}{name}", value
