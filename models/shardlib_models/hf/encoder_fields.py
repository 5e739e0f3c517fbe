"""Fields that the tables of encoders share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardlib.hf import Converter, Field

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
"""Names of nonlinearities by ours."""

SIZES = {
    "num_hidden_layers": Field("num_layers"),
    "hidden_size": Field("embed_dim"),
    "intermediate_size": Field("mlp_dim", resolved="mlp_size"),
    "num_attention_heads": Field("num_heads"),
    "hidden_act": Field("activation", "gelu", ACTIVATIONS),
    "layer_norm_eps": Field("norm_eps", 1e-12),
    "initializer_range": Field("init_stddev", 0.02),
}
"""The fields of encoders as BERT and ViT name them."""


def part(
    ours: str, theirs: str, fields: Mapping[str, Field], defaults: Mapping[str, Any]
) -> dict[str, Field]:
    """Returns the fields of one part of a model, such as an encoder of two.

    Args:
        ours: The name of the part in our config.
        theirs: Its name in config.json.
        fields: The fields of the part alone.
        defaults: Values of fields that config.json may lack.
    """
    return {
        f"{theirs}.{name}": dataclasses.replace(
            field,
            ours=f"{ours}.{field.ours}",
            default=defaults.get(name, field.default),
            resolved=field.resolved and f"{ours}.{field.resolved}",
        )
        for name, field in fields.items()
    }


def _read_classes(theirs: Mapping[str, Any]) -> dict[str, Any]:
    # Two classes are written as nothing.
    names = theirs.get("id2label")
    return {"num_classes": theirs.get("num_labels", 2) if names is None else len(names)}


CLASSES = Converter(_read_classes, lambda config: {"num_labels": config.num_classes})
"""The number of classes, which config.json writes as a list of their names or a number."""
