"""ResNet 1.5 with its head for classes of images, and the running statistics of its norms."""

from collections.abc import Iterator, Mapping
from typing import Any

from shardlib.hf import Architecture, Converter, Field, TensorRow, rows
from shardlib_models.hf.encoder_fields import CLASSES
from shardlib_models.resnet import BOTTLENECK_FROM, DEPTHS, EXPANSION, ResNetConfig

_KINDS = {"basic": 1, "bottleneck": EXPANSION}
_HEAD = """
head/kernel|bias  classifier.1.weight|bias  (classes) conv_in
"""


def _table(config: ResNetConfig) -> tuple[TensorRow, ...]:
    return rows(
        "\n".join([_conv_norm("stem", "resnet.embedder.embedder"), *_blocks(config), _HEAD])
    )


def _blocks(config: ResNetConfig) -> Iterator[str]:
    block = 0
    for stage, count in enumerate(DEPTHS[config.depth]):
        for layer in range(count):
            ours, theirs = f"blocks/{block}", f"resnet.encoder.stages.{stage}.layers.{layer}"
            for place in range(3 if config.expansion > 1 else 2):
                yield _conv_norm(f"{ours}/branch/{place}", f"{theirs}.layer.{place}")
            yield _conv_norm(f"{ours}/shortcut", f"{theirs}.shortcut")
            block += 1


def _conv_norm(ours: str, theirs: str) -> str:
    norm = f"{theirs}.normalization"
    return f"""
{ours}/kernel  {theirs}.convolution.weight  conv_out conv_in kernel_h kernel_w
{ours}/norm/scale|bias|mean|var  {norm}.weight|bias|running_mean|running_var  (norm)
"""


def _read_sizes(theirs: Mapping[str, Any]) -> dict[str, Any]:
    kind, depths = theirs.get("layer_type", "bottleneck"), tuple(theirs["depths"])
    expansion, width = _KINDS.get(kind), theirs["embedding_size"]
    sizes = [width * 2**stage * (expansion or 1) for stage in range(4)]
    for depth, known in DEPTHS.items():
        if known == depths and expansion == (EXPANSION if depth >= BOTTLENECK_FROM else 1):
            if list(theirs["hidden_sizes"]) != sizes:
                raise ValueError(f"hidden_sizes is {theirs['hidden_sizes']}; supported: {sizes}.")
            return {"depth": depth, "width": width}
    raise ValueError(
        f"depths is {list(depths)} of {kind!r}; supported: ResNet {', '.join(map(str, DEPTHS))}."
    )


def _write_sizes(config: ResNetConfig) -> dict[str, Any]:
    return {
        "embedding_size": config.width,
        "hidden_sizes": [config.width * 2**stage * config.expansion for stage in range(4)],
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
