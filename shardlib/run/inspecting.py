"""What a config would place where, on devices that need not be there."""

import dataclasses

import jax

from shardlib.data import TextData, load_tokenizer
from shardlib.explain import ParamsReport
from shardlib.explain import explain as explain_state
from shardlib.hardware import parse_cluster
from shardlib.registry import DataSpec, family
from shardlib.run.checks import check_config, expected_spec
from shardlib.run.config import RunConfig
from shardlib.run.devices import start_devices
from shardlib.run.setup import Devices, make_scope, open_source, setup


def explain(config: RunConfig, on: str | None = None) -> ParamsReport:
    """Returns the report on the state of a run; allocates nothing.

    The data is read only as far as the config leaves the number of tokens or classes to it.

    Args:
        config: The config.
        on: A cluster, such as `v5p-128` or `8xh100`; the devices at hand when left out.

    Raises:
        ConfigError: If model and data do not fit each other.
        DataError: If data that has to be read is missing or malformed.
        MeshError: If the cluster is unknown, or mesh, devices and batch do not fit each other.
        RuleError: If tensors cannot be placed.
    """
    devices: Devices
    if on is None:
        start_devices(config)
        devices = jax.devices()
    else:
        devices = parse_cluster(on)
    check_config(config, lambda: make_scope(config, devices))
    return explain_state(setup(config, _data_spec(config), make_scope(config, devices)).abstract)


def _data_spec(config: RunConfig) -> DataSpec:
    spec = expected_spec(config)
    if not family(config.model.name).validate(config.model, spec):
        return spec
    if isinstance(config.data, TextData):
        return dataclasses.replace(spec, vocab_size=load_tokenizer(config.data).vocab_size)
    return open_source(config, "train").spec
