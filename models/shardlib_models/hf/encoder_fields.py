"""Fields and rows that the tables of encoders share."""

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

PIXELS = {
    "image_size": Field("image_size", 224),
    "patch_size": Field("patch_size", 16),
    "num_channels": Field("channels", 3),
}
"""The fields of encoders of images."""


def attention(ours: str, theirs: str, names: str) -> str:
    """Returns the rows of the projections of attention as text.

    Args:
        ours: The path of the attention.
        theirs: The start of the names of its tensors.
        names: The rest for query, key, value and output, separated by spaces.
    """
    query, key, value, out = (f"{theirs}.{name}" for name in names.split())
    return f"""
{ours}/query/kernel|bias  {query}.weight|bias  (heads*head_dim) embed
{ours}/key/kernel|bias  {key}.weight|bias  (kv_heads*head_dim) embed
{ours}/value/kernel|bias  {value}.weight|bias  (kv_heads*head_dim) embed
{ours}/out/kernel|bias  {out}.weight|bias  (embed) heads*head_dim
"""


def layers(ours: str, theirs: str, *, projections: str, mlp: str, norms: str) -> str:
    """Returns the rows of the layers of an encoder as text.

    Args:
        ours: The path of the layers.
        theirs: The start of the names of their tensors.
        projections: The rest for query, key, value and output of attention, separated by spaces.
        mlp: The rest for the two projections of the MLP.
        norms: The rest for the norms of attention and of the MLP.
    """
    up, down, *norm = (f"{theirs}.{name}" for name in [*mlp.split(), *norms.split()])
    return f"""
{attention(f"{ours}/attention", theirs, projections)}
{ours}/attention_norm/scale|bias  {norm[0]}.weight|bias  (norm)
{ours}/mlp/up/kernel|bias  {up}.weight|bias  (mlp) embed
{ours}/mlp/down/kernel|bias  {down}.weight|bias  (embed) mlp
{ours}/mlp_norm/scale|bias  {norm[1]}.weight|bias  (norm)
"""


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
