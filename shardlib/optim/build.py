"""Optimizers by name, with learning-rate schedule, clipping, decay masks and averaging."""

import dataclasses

import optax
from jaxtyping import PyTree

from shardlib.errors import ConfigError, did_you_mean
from shardlib.import_paths import is_import_path
from shardlib.nn.moe import balance_biases
from shardlib.optim import schedules, transforms
from shardlib.optim.config import EARLIER, OWN_RULE
from shardlib.optim.config import OptimizerConfig as OptimizerConfig
from shardlib.optim.ema import average_params
from shardlib.optim.ema import ema_params as ema_params
from shardlib.optim.update_rules import RULES, Rule
from shardlib.paths import matches, named_leaves


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optax transformation and its learning-rate schedule."""

    transform: optax.GradientTransformation
    """The whole update. `update(gradients, state, params)` needs the parameters."""
    schedule: schedules.Schedule
    """The learning rate by step, float32."""


def build_optimizer(config: OptimizerConfig, *, steps: int, global_batch: int) -> Optimizer:
    """Returns the optimizer of a run.

    The chain is: clipping by global norm, update rule, weight decay, learning rate, average of the
    parameters. It computes in float32 and returns updates in the dtype of the parameters. The
    expert load-balancing biases take signed steps instead and use only the averaging. Each array of
    the state that belongs to a parameter has a tree path that ends with the parameter's path.

    Raises:
        ConfigError: If the schedule does not fit into `steps`, or an optimizer named by import path
            does not return a transformation. `transform.init` raises it if a given pattern matches
            no parameter.

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural
    networks", arXiv:1211.5063 (clipping); Goyal et al., "Accurate, Large Minibatch SGD",
    arXiv:1706.02677, sections 2.1 and 2.2 (linear scaling and its warm-up).
    """
    schedule = build_schedule(config, steps=steps, global_batch=global_batch)
    rule = _rule(config, schedule)
    clip = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    average = [] if config.ema_decay is None else [average_params(config.ema_decay)]
    update = transforms.compute_in_float32(optax.chain(*clip, *rule))
    update = balance_biases(update, config.router_bias_rate)
    checked = _check_patterns(config, optax.chain(update, *average))
    return Optimizer(checked, schedule)


def _rule(config: OptimizerConfig, schedule: schedules.Schedule) -> Rule:
    if not is_import_path(config.name):
        return RULES[config.name](config, schedule)
    made = OWN_RULE.load(config.name)(schedule)
    if not (callable(getattr(made, "init", None)) and callable(getattr(made, "update", None))):
        raise ConfigError(
            f"optimizer.name: {config.name} returned a {type(made).__name__}, not an optax "
            "transformation.\n  Return one that applies the schedule, as in optax.adamw(schedule)."
        )
    return [made]


def build_schedule(config: OptimizerConfig, *, steps: int, global_batch: int) -> schedules.Schedule:
    """Returns the learning rate as a function of the step; see `build_optimizer`."""
    scale = 1.0 if config.base_batch is None else global_batch / config.base_batch
    start = config.learning_rate if scale > 1 else 0.0
    return schedules.warmup(
        _decay(config, steps),
        peak=config.learning_rate * scale,
        warmup_steps=config.warmup_steps,
        start=start,
    )


def _decay(config: OptimizerConfig, steps: int) -> schedules.Decay:
    after = steps - config.warmup_steps
    if after < 1:
        raise ConfigError(
            f"optimizer.warmup_steps is {config.warmup_steps} but the run has {steps} steps.\n"
            f"  Set optimizer.warmup_steps below {steps}, or train for more steps."
        )
    if config.schedule == "wsd":
        decay_steps = max(1, round(config.wsd_decay_fraction * steps))
        if decay_steps > after:
            raise ConfigError(
                f"the wsd schedule has {config.warmup_steps} steps of warm-up and {decay_steps} "
                f"of decay (wsd_decay_fraction={config.wsd_decay_fraction}) but the run has "
                f"{steps} steps.\n"
                f"  Shorten optimizer.warmup_steps or optimizer.wsd_decay_fraction."
            )
        return schedules.warmup_stable_decay(after - decay_steps, decay_steps, config.min_fraction)
    if config.schedule == "step":
        at = [round(boundary * steps) - config.warmup_steps for boundary in config.step_boundaries]
        if at[0] < 0:
            raise ConfigError(
                f"optimizer.step_boundaries starts at {config.step_boundaries[0]} of {steps} "
                f"steps, inside the warm-up of {config.warmup_steps} steps.\n"
                "  Move the boundary behind the warm-up, or shorten optimizer.warmup_steps."
            )
        return schedules.step_decay(at, config.step_factor)
    if config.schedule == "constant":
        return schedules.constant()
    shape = {"cosine": schedules.cosine, "linear": schedules.linear}[config.schedule]
    return shape(after, config.min_fraction)


def _check_patterns(
    config: OptimizerConfig, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns `inner`, whose `init` raises for given patterns that match no parameter."""
    keys = ("no_decay", "stacked", "not_matrices", "one_input", "one_output", "many_matrices")
    defaults = OptimizerConfig()
    usual = {
        key: {one for each in (getattr(defaults, key), *EARLIER.get(key, ())) for one in each}
        for key in keys
    }

    def init(params: PyTree) -> PyTree:
        paths = list(named_leaves(params))
        faults = [
            f"optimizer.{key}: {pattern!r} names no parameter.{did_you_mean(pattern, paths)}"
            for key in keys
            for pattern in getattr(config, key)
            if pattern not in usual[key] and not any(matches(pattern, path) for path in paths)
        ]
        if faults:
            shown = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
            raise ConfigError("\n".join([*faults, f"  Remove it or correct it; found: {shown}."]))
        return inner.init(params)

    return optax.GradientTransformation(init, inner.update)
