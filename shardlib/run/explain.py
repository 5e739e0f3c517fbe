"""What a config would place where, on devices that need not be there."""

import jax

from shardlib.data import TextData
from shardlib.explain import ParamsReport
from shardlib.explain import explain as explain_state
from shardlib.hardware import parse_cluster
from shardlib.registry import DataSpec
from shardlib.run.config import RunConfig
from shardlib.run.devices import start_devices
from shardlib.run.setup import open_source, setup


def explain(config: RunConfig, on: str | None = None) -> ParamsReport:
    """Returns the report on the state of a run; allocates nothing.

    Args:
        config: The config.
        on: A cluster, such as `v5p-128` or `8xh100`; the devices at hand when left out.

    Raises:
        ConfigError: If model and data do not fit each other.
        MeshError: If the cluster is unknown, or mesh, devices and batch do not fit each other.
        RuleError: If tensors cannot be placed.
    """
    if on is not None:
        parts = setup(config, data_spec(config), parse_cluster(on).num_devices)
    else:
        start_devices(config)
        parts = setup(config, data_spec(config), jax.devices())
    return explain_state(parts.abstract)


def data_spec(config: RunConfig) -> DataSpec:
    """Returns what the model must know of the data, from the config alone where it says so."""
    vocab_size = getattr(config.model, "vocab_size", None)
    if isinstance(config.data, TextData) and vocab_size is not None:
        return DataSpec(vocab_size=vocab_size, sequence_length=config.data.sequence_length)
    return open_source(config, "train").spec
