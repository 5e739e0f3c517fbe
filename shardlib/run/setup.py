"""From a config to the parts of a run: everything is checked, nothing is allocated or written."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from shardlib.constrain import Scope
from shardlib.data import MapSource, TextData, open_data
from shardlib.errors import ConfigError, MeshError, RuleError
from shardlib.mesh import abstract_mesh, auto_mesh, make_mesh, mesh_sizes
from shardlib.placement import count_groups
from shardlib.registry import DataSpec, ModelFamily, family
from shardlib.run.config import AUTO, RunConfig
from shardlib.train.ema import ema_params
from shardlib.train.optim import Optimizer, build_optimizer
from shardlib.train.state import TrainState, abstract_state
from shardlib.train.step import BatchAxes, batch_shardings

TEXT_AXES: BatchAxes = dict.fromkeys(
    ("tokens", "targets", "segment_ids", "positions"), ("batch", "length")
)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The parts of a run. `abstract` is its state as shapes with shardings."""

    config: RunConfig
    family: ModelFamily
    scope: Scope
    data: DataSpec
    optimizer: Optimizer
    abstract: TrainState

    @property
    def batch_axes(self) -> BatchAxes:
        """The logical axes of a batch's leaves."""
        return TEXT_AXES if self.family.inputs == "text" else {}

    def loss(self, *, train: bool) -> Callable[[Any, Any, jax.Array], Any]:
        """Returns the loss function of training, or of evaluation: with neither dropout nor what
        only helps training."""
        options = self.config.train
        return functools.partial(
            self.family.loss,
            train=train,
            label_smoothing=options.label_smoothing if train else 0.0,
            z_loss=options.z_loss if train else 0.0,
        )

    def flops_per_step(self) -> float:
        """Returns the model FLOPs of one optimizer step, by the convention of the family."""
        per_example = self.family.flops_per_example(self.config.model, self.data)
        return per_example * self.config.train.global_batch

    def best_params(self, state: TrainState) -> Any:
        """Returns the parameters to evaluate: their moving average where one is kept."""
        averaged = ema_params(state.opt_state)
        return state.params if averaged is None else averaged

    def unit(self) -> str:
        """Returns what a step is counted in: `tokens` or `images`."""
        return "tokens" if self.family.inputs == "text" else "images"

    def units_per_step(self) -> int:
        """Returns the tokens or images of one optimizer step."""
        per_example = self.data.sequence_length if self.family.inputs == "text" else 1
        return self.config.train.global_batch * (per_example or 1)

    def shardings(self, source: MapSource) -> dict[str, NamedSharding]:
        """Returns the sharding of each array of a batch."""
        return batch_shardings(source.element_spec(), self.scope, self.batch_axes)


def open_source(config: RunConfig, split: Any) -> MapSource:
    """Opens the training data, or what is held out.

    Raises:
        DataError: If it is missing, empty or malformed.
    """
    batch = config.train.global_batch
    if split == "eval":
        batch = config.eval.global_batch or batch
    return open_data(config.data, global_batch=batch, seed=config.seed, split=split)


def setup(
    config: RunConfig, data: DataSpec, devices: Sequence[Any] | int, *, check_batch: bool = True
) -> Setup:
    """Checks a config against its data and devices and returns the parts of the run.

    Args:
        config: The config.
        data: What the model must know of the data.
        devices: The devices; or their number, for a setup that is only to be looked at.
        check_batch: Whether batches of the config are to be shared out over the mesh.

    Raises:
        ConfigError: If model and data do not fit each other.
        MeshError: If the mesh does not fit the devices, or the batch does not fit the mesh.
        RuleError: If a rule or a tensor cannot be placed; all such tensors are named.
    """
    chosen = family(config.model.name)
    _check_inputs(config, chosen)
    faults = chosen.validate(config.model, data)
    if faults:
        raise ConfigError("\n".join(f"model: {fault}" for fault in faults))
    scope = Scope(_mesh(config, devices), config.axis_rules())
    scope.rules.check(scope.mesh)
    if check_batch:
        _check_batch(config, scope)
    optimizer = build_optimizer(
        config.optimizer, steps=config.train.steps, global_batch=config.train.global_batch
    )
    abstract = abstract_state(
        model_maker(config, chosen, data),
        optimizer.transform,
        precision=config.precision,
        mesh=scope.mesh,
        rules=scope.rules,
    )
    return Setup(config, chosen, scope, data, optimizer, abstract)


def model_maker(config: RunConfig, family: ModelFamily, data: DataSpec) -> Callable[..., Any]:
    """Returns `make(rngs)` for the model of a config."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return family.make(config.model, data, rngs)

    return make


def _mesh(config: RunConfig, devices: Sequence[Any] | int) -> Any:
    if isinstance(devices, int):
        spec = auto_mesh(devices) if config.mesh == AUTO else config.mesh
        return abstract_mesh(spec, devices)
    if config.mesh == AUTO:
        return make_mesh(auto_mesh(len(devices), num_groups=count_groups(devices)), devices=devices)
    return make_mesh(config.mesh, devices=devices)


def _check_inputs(config: RunConfig, family: ModelFamily) -> None:
    kind = "text" if isinstance(config.data, TextData) else "images"
    if kind != family.inputs:
        raise ConfigError(
            f"model {config.model.name!r} takes {family.inputs}, but data.kind is {kind!r}.\n"
            f"  Set data.kind={family.inputs}, or choose another model."
        )


def _check_batch(config: RunConfig, scope: Scope) -> None:
    """Every microbatch must fall evenly on the devices that share the batch out."""
    checks = [("train.global_batch", config.train.global_batch, config.train.microbatches)]
    if config.eval.global_batch is not None:
        checks.append(("eval.global_batch", config.eval.global_batch, 1))
    faults = []
    for name, size, parts in checks:
        try:
            scope.rules.spec(("batch",), (size // parts,), scope.mesh, "activations")
        except RuleError as error:
            share = f" in {parts} microbatches of {size // parts}" if parts > 1 else ""
            reason = str(error).split("cannot be sharded: ")[-1].split(".\n")[0]
            faults.append(f"{name}={size}{share} cannot be shared out: {reason}.")
    if faults:
        sizes = mesh_sizes(scope.mesh)
        raise MeshError(
            "\n".join(faults) + f"\n  Choose a multiple of {math.prod(sizes.values())} "
            "(times the number of microbatches), or a smaller mesh."
        )


def check_run_dir(path: pathlib.Path) -> None:
    """Raises `ConfigError` when a run cannot be written to a directory."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(
            f"run_dir {path} cannot be made: {existing} is a file.\n  Set run_dir to a directory."
        )
    probe = existing / f".shardlib-{path.name}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"run_dir {path} cannot be written: {error.strerror}.\n"
            "  Set run_dir to a directory that this user may write."
        ) from None
