"""The loss of a run: the model family's, or one that the config names by import path."""

import functools
import inspect
from typing import Any

from shardlib.errors import ConfigError
from shardlib.registry import ModelFamily, family
from shardlib.run.config import RunConfig
from shardlib.train.config import OWN_LOSS


def loss_of(config: RunConfig, chosen: ModelFamily, *, train: bool) -> functools.partial[Any]:
    """Returns `loss(model, batch, rng)` of training or of evaluation.

    Label smoothing and z-loss belong to training, and are passed on only if they are set.
    """
    options = config.train
    loss = chosen.loss if options.loss is None else OWN_LOSS.load(options.loss)
    named = {"label_smoothing": options.label_smoothing, "z_loss": options.z_loss}
    given = {name: value for name, value in named.items() if value and train}
    return functools.partial(loss, train=train, **given)


def check_loss(config: RunConfig) -> None:
    """Raises `ConfigError` for a loss that does not take what a run passes to it."""
    loss = loss_of(config, family(config.model.name), train=True)
    try:
        inspect.signature(loss.func).bind(None, None, None, **loss.keywords)
    except TypeError as error:
        name = config.train.loss or f"the loss of model {config.model.name!r}"
        given = ", ".join(f"{key}={value}" for key, value in loss.keywords.items())
        raise ConfigError(
            f"{name} cannot be called as loss(model, batch, rng, {given}): {error}.\n"
            "  Let it take these arguments, and leave out the keys of train that it does not take."
        ) from None
