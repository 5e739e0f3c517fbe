"""ResNet 1.5 with its head for classes of images, and the running statistics of its norms."""

from collections.abc import Iterator, Mapping
from typing import Any

from shardlib.hf import Architecture, Converter, Field, TensorRow, rows
from shardlib_models.hf.encoder_fields import CLASSES
from shardlib_models.resnet import DEPTHS, ResNetConfig


def _table(config: ResNetConfig) -> tuple[TensorRow, ...]:
    stem = _conv_norm("stem", "resnet.embedder.embedder")
    head = "head/kernel|bias  classifier.1.weight|bias  (classes) conv_in"
    return rows("\n".join([stem, *_blocks(config), head]))


def _blocks(config: ResNetConfig) -> Iterator[str]:
    stages = enumerate(DEPTHS[config.depth])
    places = [(stage, layer) for stage, count in stages for layer in range(count)]
    for block, (stage, layer) in enumerate(places):
        ours, theirs = f"blocks/{block}", f"resnet.encoder.stages.{stage}.layers.{layer}"
        for place in range(3):
            yield _conv_norm(f"{ours}/branch/{place}", f"{theirs}.layer.{place}")
        yield _conv_norm(f"{ours}/shortcut", f"{theirs}.shortcut")


def _conv_norm(ours: str, theirs: str) -> str:
    norm = f"{theirs}.normalization"
    return f"""
{ours}/kernel  {theirs}.convolution.weight  conv_out conv_in kernel_h kernel_w
{ours}/norm/scale|bias|mean|var  {norm}.weight|bias|running_mean|running_var  (norm)
"""


def _read_sizes(theirs: Mapping[str, Any]) -> dict[str, Any]:
    width, depths = theirs["embedding_size"], list(theirs["depths"])
    kind = theirs.get("layer_type", "bottleneck")
    for depth in DEPTHS:
        sizes = _write_sizes(ResNetConfig(depth=depth, width=width))
        if (kind, depths) == (sizes["layer_type"], sizes["depths"]):
            given, supported = list(theirs["hidden_sizes"]), sizes["hidden_sizes"]
            if given != supported:
                raise ValueError(f"hidden_sizes is {given}; supported: {supported}.")
            return {"depth": depth, "width": width}
    known = ", ".join(map(str, DEPTHS))
    raise ValueError(f"depths is {depths} of {kind!r}; supported: ResNet {known}.")


def _write_sizes(config: ResNetConfig) -> dict[str, Any]:
    return {
        "embedding_size": config.width,
        "hidden_sizes": config.widths,
        "depths": list(DEPTHS[config.depth]),
        "layer_type": "bottleneck" if config.expansion > 1 else "basic",
    }


RESNET = Architecture(
    name="ResNetForImageClassification",
    model_type="resnet",
    fields={"num_channels": Field("channels", 3)},
    fixed={
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    },
    ours={"stem": "imagenet", "bn_eps": 1e-5},
    converters=(Converter(_read_sizes, _write_sizes), CLASSES),
    table=_table,
    inputs="images",
    # How many batches the running statistics have seen; nothing depends on it.
    ignored=("*.num_batches_tracked",),
)
