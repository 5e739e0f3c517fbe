"""Update rules by name, each a chain of optax transformations between clipping and averaging.

Every rule follows the paper that its function cites, and the tests check it against the paper.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from shardlib.optim import transforms
from shardlib.optim.config import BETAS, EPS, MOMENTUM, NESTEROV, OptimizerConfig
from shardlib.optim.schedules import Schedule

Rule = list[optax.GradientTransformation]


def _adamw(config: OptimizerConfig, schedule: Schedule) -> Rule:
    """Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101."""
    return [_adam(config), *_decoupled_decay(config), _learning_rate(schedule)]


def _lion(config: OptimizerConfig, schedule: Schedule) -> Rule:
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675."""
    b1, b2 = config.betas or BETAS["lion"]
    sign = _momentum_in(config, optax.scale_by_lion(b1, b2), "mu")
    return [sign, *_decoupled_decay(config), _learning_rate(schedule)]


def _adafactor(config: OptimizerConfig, schedule: Schedule) -> Rule:
    """Shazeer and Stern, "Adafactor", arXiv:1804.04235, algorithm 4 (d=1, epsilon_2=1e-3).

    Second moments are factored over the two largest dims of a parameter if both have at least 128
    entries. The optional first moment is left out.
    """
    return [
        optax.scale_by_factored_rms(epsilon=_value(config.eps, EPS["adafactor"])),
        transforms.scale_by_layer_rms(
            threshold=1.0, min_scale=1e-3, stacked=transforms.is_stacked(config.stacked)
        ),
        *_decoupled_decay(config),
        _learning_rate(schedule),
    ]


def _sgd(config: OptimizerConfig, schedule: Schedule) -> Rule:
    """Goyal et al., arXiv:1706.02677, equation 9: the learning rate is outside the momentum."""
    return [*_decoupled_decay(config), *_trace(config), _learning_rate(schedule)]


def _lars(config: OptimizerConfig, schedule: Schedule) -> Rule:
    """You, Gitman and Ginsburg, arXiv:1708.03888: the learning rate is inside the momentum."""
    trust = _trust_ratio(config, config.trust_coefficient, _value(config.eps, EPS["lars"]))
    return [*_decoupled_decay(config), trust, _learning_rate(schedule), *_trace(config)]


def _lamb(config: OptimizerConfig, schedule: Schedule) -> Rule:
    """You et al., "Large Batch Optimization for Deep Learning", arXiv:1904.00962."""
    trust = _trust_ratio(config, 1.0, 0.0)
    return [_adam(config), *_decoupled_decay(config), trust, _learning_rate(schedule)]


def _muon(config: OptimizerConfig, schedule: Schedule) -> Rule:
    """Jordan et al., "Muon", 2024, https://kellerjordan.github.io/posts/muon/.

    Updates of hidden matrices have RMS 0.2 like AdamW updates, so one learning rate and one weight
    decay fit all parameters (Liu et al., arXiv:2502.16982, section 2.2).
    """
    matrices = hidden_matrices(config)
    orthogonal = optax.contrib.scale_by_muon(
        beta=_value(config.momentum, MOMENTUM["muon"]),
        eps=_value(config.eps, EPS["muon"]),
        nesterov=_value(config.nesterov, NESTEROV["muon"]),
        weight_dimension_numbers=matrices.tree,
    )
    matrix_rule = optax.chain(
        _momentum_in(config, orthogonal, "mu"), transforms.scale_by_matrix_shape(matrices, 0.2)
    )
    by_label = optax.partition({"muon": matrix_rule, "adamw": _adam(config)}, matrices.labels)
    return [by_label, *_decoupled_decay(config), _learning_rate(schedule)]


RULES: dict[str, Callable[[OptimizerConfig, Schedule], Rule]] = {
    "adamw": _adamw,
    "lion": _lion,
    "adafactor": _adafactor,
    "sgd": _sgd,
    "lars": _lars,
    "lamb": _lamb,
    "muon": _muon,
}


def hidden_matrices(config: OptimizerConfig) -> transforms.HiddenMatrices:
    """Returns the parameters that muon treats as matrices; the others go to adamw."""
    return transforms.HiddenMatrices(
        excluded=transforms.matches_any(config.not_matrices),
        stacked=transforms.is_stacked(config.stacked),
        one_input=transforms.matches_any(config.one_input),
        one_output=transforms.matches_any(config.one_output),
        many=transforms.matches_any(config.many_matrices),
    )


def _value(given: Any, default: Any) -> Any:
    return default if given is None else given


def _learning_rate(schedule: Schedule) -> optax.GradientTransformation:
    return optax.scale_by_learning_rate(schedule)


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    b1, b2 = config.betas or BETAS[config.name]
    return _momentum_in(
        config, optax.scale_by_adam(b1, b2, _value(config.eps, EPS[config.name])), "mu"
    )


def _trace(config: OptimizerConfig) -> Rule:
    momentum = _value(config.momentum, MOMENTUM[config.name])
    nesterov = _value(config.nesterov, NESTEROV[config.name])
    if momentum == 0:
        return []
    return [_momentum_in(config, optax.trace(momentum, nesterov), "trace")]


def _momentum_in(
    config: OptimizerConfig, inner: optax.GradientTransformation, field: str
) -> optax.GradientTransformation:
    if config.momentum_dtype == "float32":
        return inner
    return transforms.store_as(inner, jnp.dtype(config.momentum_dtype), field)


def _decoupled_decay(config: OptimizerConfig) -> Rule:
    if config.weight_decay == 0:
        return []
    excluded = transforms.matches_any(config.no_decay)
    mask = transforms.path_mask(lambda path: not excluded(path))
    return [optax.add_decayed_weights(config.weight_decay, mask)]


def _trust_ratio(
    config: OptimizerConfig, coefficient: float, eps: float
) -> optax.GradientTransformation:
    return transforms.scale_by_layer_trust_ratio(
        coefficient=coefficient,
        eps=eps,
        excluded=transforms.matches_any(config.no_decay),
        stacked=transforms.is_stacked(config.stacked),
    )
