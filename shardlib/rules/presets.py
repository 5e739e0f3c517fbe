"""Named presets of rules."""

import dataclasses
from collections.abc import Mapping

from shardlib.errors import RuleError, did_you_mean
from shardlib.rules.resolve import ANY
from shardlib.rules.table import Auto, AxisRules

_ACTIVATIONS = {
    "batch": "data+fsdp+expert",
    "length": "context",
    # The residual stream and its norms, which work on each position of a sequence alone.
    "residual_length": "context",
    "vocab": "tensor",
    "heads": "tensor",
    # Grouped-query attention may have fewer key-value heads than the tensor axis has devices.
    "kv_heads": ["tensor", None],
    "mlp": "tensor",
    "expert": "expert",
    "embed": None,
    "latent": None,
    "lora_rank": None,
    "token_dim": None,
    "shared_gate": None,
    "head_dim": None,
    "positions": None,
    "types": None,
    "buckets": None,
    "features": None,
    "channels": None,
    "height": None,
    "width": None,
    "classes": None,
    # Of a kernel that is whole while it multiplies, as that of patches.
    "kernel_h": None,
    "kernel_w": None,
    "conv_in": None,
}

_REPLICATED = (
    "norm",
    "head_dim",
    "positions",
    "types",
    "buckets",
    "features",
    "kernel_h",
    "kernel_w",
    "conv_in",
    "classes",
    "channels",
    "token_dim",
    "shared_gate",
    "dense_layers",
    "encoder_layers",
    "block_layers",
)

DATA = AxisRules(
    params={ANY: None},
    activations={"batch": "data", ANY: None},
    auto=Auto(None),
)
"""Parameters replicated, the batch over `data`."""

FSDP = AxisRules(
    params={
        "embed": "fsdp",
        # Of a projection from the latent vector; in one to it, embed takes the axis.
        "latent": ["fsdp", None],
        # The factor of an adapter that has no embed.
        "lora_rank": ["fsdp", None],
        "conv_out": "fsdp",
        **dict.fromkeys(
            ("vocab", "mlp", "heads", "kv_heads", "expert", "layers", *_REPLICATED), None
        ),
    },
    activations={"batch": "data+fsdp", ANY: None},
    auto=Auto("fsdp"),
)
"""Parameters, gradients and optimizer state over `fsdp`, the batch over `data` and `fsdp`.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", stage 3; Zhao et al. 2023, "PyTorch FSDP".
"""

STANDARD = AxisRules(
    params={
        "expert": "expert",
        "layers": "stage",
        "vocab": "tensor",
        "heads": "tensor",
        "kv_heads": ["tensor", None],
        "mlp": "tensor",
        "embed": "fsdp",
        # Of a projection from the latent vector; in one to it, embed takes the axis.
        "latent": ["fsdp", None],
        # The factor of an adapter that has no embed.
        "lora_rank": ["fsdp", None],
        "conv_out": "fsdp",
        **dict.fromkeys(_REPLICATED, None),
    },
    activations=_ACTIVATIONS,
    auto=Auto("fsdp"),
)
"""Every standard mesh axis: `data`, `fsdp`, `tensor`, `context`, `expert` and `stage`.

Where `stage` does not divide the number of layers, it shards another dim of their parameters.

Source: Shoeybi et al. 2019, "Megatron-LM", for `tensor`; `FSDP` for `fsdp`.
"""

SEQUENCE = STANDARD.override(activations={"residual_length": "context+tensor"})
"""`STANDARD` with sequence parallelism: norms and residual stream are split along the length over
`tensor` too, instead of being replicated.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".
"""

_UNSPLIT = STANDARD.override(embed=None, latent=None, lora_rank=None, conv_out=None)
_WHOLE = dataclasses.replace(_UNSPLIT, auto=Auto(None))

ZERO1 = dataclasses.replace(_WHOLE, opt_state=STANDARD)
"""`STANDARD`, with only the optimizer state split over `fsdp`.

Source: Rajbhandari et al. 2020, "ZeRO", stage 1.
"""

ZERO2 = dataclasses.replace(_WHOLE, gradients=STANDARD, opt_state=STANDARD)
"""`STANDARD`, with only gradients and optimizer state split over `fsdp`.

Source: Rajbhandari et al. 2020, "ZeRO", stage 2.
"""

SERVE = _WHOLE.override(layers=None, activations={"batch": "data+fsdp"})
"""For inference: parameters split over `tensor` and `expert` only, keys and values by heads over
`tensor`, and rows of a batch over `data` and `fsdp`. No step gathers a parameter.

Source: Pope et al. 2022, "Efficiently Scaling Transformer Inference", section 3.2.1, "1D weight
stationary".
"""

PRESETS: Mapping[str, AxisRules] = {
    "data": DATA,
    "fsdp": FSDP,
    "standard": STANDARD,
    "sequence": SEQUENCE,
    "zero1": ZERO1,
    "zero2": ZERO2,
    "serve": SERVE,
}
"""The presets by name."""


def preset(name: str) -> AxisRules:
    """Returns the preset of that name, ignoring case.

    Raises:
        RuleError: If the name is unknown.
    """
    try:
        return PRESETS[name.lower()]
    except KeyError:
        raise RuleError(
            f"no rules are called {name!r}.{did_you_mean(name.lower(), PRESETS)}\n"
            f"  Presets: {', '.join(PRESETS)}."
        ) from None
