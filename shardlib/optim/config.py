"""Optimizer config, with checks of which keys go together."""

import dataclasses
from typing import Annotated, Literal

from shardlib.config import ImportPath, configclass
from shardlib.import_paths import is_import_path

OptimizerName = Literal["adamw", "lion", "adafactor", "sgd", "lars", "lamb", "muon"]
OWN_RULE = ImportPath("a function of the schedule that returns an optax transformation")
"""Marks the import path of an update rule: `make(schedule) -> optax.GradientTransformation`. The
schedule maps the step to the learning rate, which the transformation applies, as in
`optax.adamw(schedule)`."""
ScheduleName = Literal["constant", "cosine", "linear", "wsd", "step"]

# Defaults by optimizer, used for None. They come from the paper cited by each update rule, except
# the second beta of adamw and muon: 0.95 as in GPT-3 (Brown et al., arXiv:2005.14165).
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
    """The optimizer, its learning-rate schedule and its state."""

    name: OptimizerName | Annotated[str, OWN_RULE] = "adamw"
    """The update rule. One of your own, `mypackage.mine:make`, is a function of the schedule that
    returns an optax transformation; the keys of the schedule, clip_norm and ema_decay apply to it
    too."""
    learning_rate: float = 3e-4
    """Peak learning rate, before the linear-scaling rule. For adafactor it is relative to the RMS
    of each parameter."""
    schedule: ScheduleName = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its peak."""
    min_fraction: float = 0.1
    """Fraction of the peak at which cosine, linear and wsd end."""
    wsd_decay_fraction: float = 0.2
    """Fraction of all steps, at the end of the run, over which wsd decays."""
    step_boundaries: tuple[float, ...] = (1 / 3, 2 / 3, 8 / 9)
    """Drops of the step schedule, as fractions of all steps (default: epochs 30, 60, 80 of 90)."""
    step_factor: float = 0.1
    """Factor applied to the learning rate at each drop of the step schedule."""
    base_batch: int | None = None
    """Batch size for which the learning rate was chosen. If set, the peak is the learning rate
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
    """Nesterov momentum for sgd, lars and muon. Null: true for muon, false for the others."""
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage dtype of the first moment. Every update is computed in float32."""
    trust_coefficient: float = 0.001
    """The trust coefficient of lars."""
    weight_decay: float = 0.0
    """Weight decay. sgd and lars add it to the gradient; the others decouple it, as learning rate
    x weight decay x parameter."""
    no_decay: tuple[str, ...] = (
        "**/*bias",
        "**/bias/**",
        "**/scale",
        "**/sinks",
        "**/log_scale",
    )
    """Patterns of parameters without weight decay. lars and lamb also do not scale their updates
    by the trust ratio."""
    stacked: tuple[str, ...] = ("**layers/**",)
    """Patterns of parameters whose first dim stacks layers, in each stack of the model, such as an
    encoder and a decoder. adafactor, lars, lamb and muon treat each layer separately. Paths with a
    numbered segment are never stacked."""
    not_matrices: tuple[str, ...] = (
        "**/*embed*",
        "**/*embed*/**",
        "**/positions",
        "**/lm_head/**",
        "**/head/**",
        "*/projection/kernel",
        "**/*bias",
        "**/bias/**",
        "**/scale",
    )
    """Patterns of parameters with two dims that muon leaves to adamw: matrices of the first and
    the last layer, and biases with several dims."""
    one_input: tuple[str, ...] = ("**/query/kernel", "**/key/kernel", "**/value/kernel")
    """Patterns of kernels with more than two dims that muon reshapes to a matrix of the first dim
    by all others. Kernels that match no pattern go to adamw."""
    one_output: tuple[str, ...] = ("**/out/kernel", "**/output/kernel")
    """Patterns of kernels with more than two dims that muon reshapes to a matrix of all other dims
    by the last."""
    many_matrices: tuple[str, ...] = ("**/experts/*",)
    """Patterns of kernels with three dims that muon reads as a batch of matrices, one per entry of
    the first dim, such as experts. The dim of stacked layers comes before these three."""
    router_bias_rate: float = 1e-3
    """Step size of the expert load-balancing biases (`model.moe.balance: bias`)."""
    clip_norm: float | None = None
    """Largest global gradient norm; larger gradients are scaled down. Null: no clipping."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the parameters. Null: no average."""

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


EARLIER: dict[str, tuple[tuple[str, ...], ...]] = {
    "no_decay": (("**/bias", "**/scale"), ("**/*bias", "**/scale", "**/sinks")),
    "stacked": (("layers/**",),),
    "not_matrices": tuple(
        ("**/*embed*", "**/*embed*/**", "**/lm_head/**", "**/head/**", bias, "**/scale")
        for bias in ("**/bias", "**/*bias")
    ),
}
"""Other defaults that the configs of runs may hold, which record all keys."""


def _unused_faults(config: OptimizerConfig) -> list[str]:
    """Returns a fault for each key that was set but is not used."""
    defaults = {field.name: field.default for field in dataclasses.fields(OptimizerConfig)}
    given = {
        key
        for key, default in defaults.items()
        if getattr(config, key) not in (default, *EARLIER.get(key, ()))
    }
    faults = []
    if is_import_path(config.name):
        faults += [
            f"{key} does nothing with name={config.name}: an optimizer of your own has its own. "
            "Remove it."
            for key in ("weight_decay", "no_decay", *_OPTIMIZERS_OF)
            if key in given
        ]
        given -= {"no_decay", *_OPTIMIZERS_OF}
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
