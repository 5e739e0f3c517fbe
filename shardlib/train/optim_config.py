"""What an optimizer section of a config says, and which of its keys belong together."""

import dataclasses
from typing import Literal

from shardlib.config import configclass

OptimizerName = Literal["adamw", "lion", "adafactor", "sgd", "lars", "lamb", "muon"]
ScheduleName = Literal["constant", "cosine", "linear", "wsd", "step"]

# What None stands for, by optimizer: the values of the paper each optimizer's builder cites, but
# for adamw's and muon's second beta, which is 0.95 as in GPT-3 (Brown et al., arXiv:2005.14165).
BETAS = {"adamw": (0.9, 0.95), "lion": (0.9, 0.99), "lamb": (0.9, 0.999), "muon": (0.9, 0.95)}
EPS = {"adamw": 1e-8, "adafactor": 1e-30, "lars": 0.0, "lamb": 1e-6, "muon": 1e-8}
MOMENTUM = {"sgd": 0.9, "lars": 0.9, "muon": 0.95}
NESTEROV = {"sgd": False, "lars": False, "muon": True}

# Keys that only some optimizers or schedules read.
_OPTIMIZERS_OF = {
    "betas": tuple(BETAS),
    "eps": tuple(EPS),
    "momentum": tuple(MOMENTUM),
    "nesterov": tuple(NESTEROV),
    "momentum_dtype": ("adamw", "lion", "sgd", "lars", "lamb", "muon"),
    "trust_coefficient": ("lars",),
    "stacked": ("adafactor", "lars", "lamb", "muon"),
    "not_matrices": ("muon",),
    "one_input": ("muon",),
    "one_output": ("muon",),
    "many_matrices": ("muon",),
}
_SCHEDULES_OF = {
    "min_fraction": ("cosine", "linear", "wsd"),
    "wsd_decay_fraction": ("wsd",),
    "step_boundaries": ("step",),
    "step_factor": ("step",),
}


@configclass
class OptimizerConfig:
    """The optimizer, its learning-rate schedule and what it keeps beside the parameters."""

    name: OptimizerName = "adamw"
    """The update rule."""
    learning_rate: float = 3e-4
    """Peak learning rate, before the linear-scaling rule. For adafactor it is relative to the RMS
    of each parameter."""
    schedule: ScheduleName = "cosine"
    """What the learning rate does after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its peak."""
    min_fraction: float = 0.1
    """Fraction of the peak that cosine, linear and wsd end at."""
    wsd_decay_fraction: float = 0.2
    """Fraction of all steps over which wsd decays, at the end of the run."""
    step_boundaries: tuple[float, ...] = (1 / 3, 2 / 3, 8 / 9)
    """Where the step schedule drops, as fractions of all steps (default: epochs 30, 60, 80 of
    90)."""
    step_factor: float = 0.1
    """What each drop of the step schedule multiplies the learning rate by."""
    base_batch: int | None = None
    """Batch size that the learning rate was chosen for. When given, the peak is the learning rate
    x global batch / base batch, and the warm-up to a larger peak starts at the learning rate
    itself (the linear-scaling rule of Goyal et al. 2017)."""
    betas: tuple[float, float] | None = None
    """Decay rates of the moments. Null: (0.9, 0.95) for adamw and for muon's non-matrices,
    (0.9, 0.99) for lion, (0.9, 0.999) for lamb."""
    eps: float | None = None
    """Added to denominators. Null: 1e-8 for adamw and muon, 1e-6 for lamb, 0 for lars, 1e-30
    (added to squared gradients) for adafactor."""
    momentum: float | None = None
    """Momentum of sgd, lars and muon. Null: 0.9 for sgd and lars, 0.95 for muon."""
    nesterov: bool | None = None
    """Nesterov momentum for sgd, lars and muon. Null: true for muon alone."""
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    """How the first moment is stored. Every update is computed in float32."""
    trust_coefficient: float = 0.001
    """The trust coefficient of lars."""
    weight_decay: float = 0.0
    """Weight decay: added to the gradient for sgd and lars, otherwise decoupled, as learning rate
    x weight decay x parameter."""
    no_decay: tuple[str, ...] = ("**/bias", "**/scale")
    """Patterns of parameters without weight decay; lars and lamb leave their updates unscaled
    too."""
    stacked: tuple[str, ...] = ("layers/**",)
    """Patterns of parameters whose first dim stacks layers. adafactor, lars, lamb and muon treat
    each of these layers by itself. Paths with a numbered segment are never stacked."""
    not_matrices: tuple[str, ...] = (
        "**/*embed*",
        "**/*embed*/**",
        "**/lm_head/**",
        "**/head/**",
        "**/bias",
        "**/scale",
    )
    """Patterns of parameters that muon leaves to adamw although they have two dims: matrices of
    the first and the last layer, and biases of several dims."""
    one_input: tuple[str, ...] = ("**/query/kernel", "**/key/kernel", "**/value/kernel")
    """Patterns of kernels of more than two dims which muon reads as a matrix of their first dim
    by all others. What no pattern names goes to adamw."""
    one_output: tuple[str, ...] = ("**/out/kernel", "**/output/kernel")
    """Patterns of kernels of more than two dims which muon reads as a matrix of all other dims by
    their last."""
    many_matrices: tuple[str, ...] = ("**/experts/*",)
    """Patterns of kernels of three dims which muon reads as many matrices, one for each entry of
    the first dim: experts. Stacked layers are a dim before that."""
    router_bias_rate: float = 1e-3
    """Step of the biases that balance the load of experts (`model.moe.balance: bias`)."""
    clip_norm: float | None = None
    """Largest global norm of the gradients; larger ones are scaled down. Null: no clipping."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the parameters. Null: none is kept."""

    def __post_init__(self) -> None:
        faults = _range_faults(self) + _unused_faults(self)
        if faults:
            raise ValueError("\n".join(faults))


def _range_faults(config: OptimizerConfig) -> list[str]:
    betas = config.betas or ()
    bounds = config.step_boundaries
    checks = {
        "learning_rate": (config.learning_rate > 0, "positive"),
        "warmup_steps": (config.warmup_steps >= 0, "0 or more"),
        "min_fraction": (0 <= config.min_fraction <= 1, "in [0, 1]"),
        "wsd_decay_fraction": (0 < config.wsd_decay_fraction <= 1, "in (0, 1]"),
        "step_boundaries": (
            bounds == tuple(sorted(set(bounds))) and all(0 < b < 1 for b in bounds) and bounds,
            "increasing fractions in (0, 1)",
        ),
        "step_factor": (0 < config.step_factor < 1, "in (0, 1)"),
        "base_batch": (config.base_batch is None or config.base_batch >= 1, "1 or more"),
        "betas": (all(0 <= beta < 1 for beta in betas), "in [0, 1)"),
        "eps": (config.eps is None or 0 <= config.eps < 1, "in [0, 1)"),
        "momentum": (config.momentum is None or 0 <= config.momentum < 1, "in [0, 1)"),
        "trust_coefficient": (config.trust_coefficient > 0, "positive"),
        "weight_decay": (config.weight_decay >= 0, "0 or more"),
        "clip_norm": (config.clip_norm is None or config.clip_norm > 0, "positive or null"),
        "ema_decay": (
            config.ema_decay is None or 0 < config.ema_decay < 1,
            "in (0, 1) or null",
        ),
    }
    return [
        f"{key} is {getattr(config, key)!r} but must be {expected}."
        for key, (good, expected) in checks.items()
        if not good
    ]


def _unused_faults(config: OptimizerConfig) -> list[str]:
    """Returns a fault for each key that was given and that nothing reads."""
    defaults = {field.name: field.default for field in dataclasses.fields(OptimizerConfig)}
    given = {key for key, default in defaults.items() if getattr(config, key) != default}
    faults = []
    for chooser, table in (("name", _OPTIMIZERS_OF), ("schedule", _SCHEDULES_OF)):
        choice = getattr(config, chooser)
        for key, readers in table.items():
            if key in given and choice not in readers:
                faults.append(
                    f"{key} does nothing with {chooser}={choice}: it belongs to "
                    f"{', '.join(readers)}. Remove it."
                )
    if config.nesterov and config.momentum == 0:
        faults.append("nesterov does nothing with momentum=0. Remove one of them.")
    if "no_decay" in given and config.weight_decay == 0 and config.name not in ("lars", "lamb"):
        faults.append("no_decay does nothing with weight_decay=0. Remove it or set weight_decay.")
    return faults
