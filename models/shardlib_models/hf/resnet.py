"""ResNet 1.5 with its head for classes of images, and the running statistics of its norms."""

from collections.abc import Mapping
from typing import Any

from shardlib.hf import Architecture, Converter, Field, TensorRow, rows
from shardlib_models.hf.encoder_fields import CLASSES
from shardlib_models.resnet import DEPTHS, ResNetConfig


def _table(config: ResNetConfig) -> tuple[TensorRow, ...]:
    text = _conv_norm("stem", "resnet.embedder.embedder")
    places = [(stage, n) for stage, count in enumerate(DEPTHS[config.depth]) for n in range(count)]
    for block, (stage, number) in enumerate(places):
        ours, theirs = f"blocks/{block}", f"resnet.encoder.stages.{stage}.layers.{number}"
        text += _conv_norm(f"{ours}/shortcut", f"{theirs}.shortcut")
        for place in range(3):
            text += _conv_norm(f"{ours}/branch/{place}", f"{theirs}.layer.{place}")
    return rows(text + "head/kernel|bias  classifier.1.weight|bias  (classes) conv_in")


def _conv_norm(ours: str, theirs: str) -> str:
    norm = f"{theirs}.normalization"
    return f"""
{ours}/kernel  {theirs}.convolution.weight  conv_out conv_in kernel_h kernel_w
{ours}/norm/scale|bias|mean|var  {norm}.weight|bias|running_mean|running_var  (norm)
"""


def _read_depth(theirs: Mapping[str, Any]) -> dict[str, Any]:
    given, width = {"layer_type": "bottleneck", **theirs}, theirs["embedding_size"]
    known = {depth: _write_depth(ResNetConfig(depth=depth, width=width)) for depth in DEPTHS}
    for depth, sizes in known.items():
        if sizes.items() <= given.items():
            return {"depth": depth}
    named = ", ".join(f"{name}={given[name]!r}" for name in ("embedding_size", *known[50]))
    raise ValueError(f"{named} are not the sizes of ResNet {', '.join(map(str, known))}.")


def _write_depth(config: ResNetConfig) -> dict[str, Any]:
    kind, depths = "bottleneck" if config.expansion > 1 else "basic", DEPTHS[config.depth]
    return {"layer_type": kind, "depths": list(depths), "hidden_sizes": config.widths}


RESNET = Architecture(
    name="ResNetForImageClassification",
    model_type="resnet",
    fields={"num_channels": Field("channels", 3), "embedding_size": Field("width")},
    fixed={
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    },
    ours={"stem": "imagenet", "bn_eps": 1e-5},
    converters=(Converter(_read_depth, _write_depth), CLASSES),
    table=_table,
    inputs="images",
    # How many batches the running statistics have seen; nothing depends on it.
    ignored=("*.num_batches_tracked",),
)
