"""Settings that a config leaves open (`auto`, or no number of groups): each is decided here, once.

Every job resolves its config before it builds anything. What it builds never meets "auto".
"""

import dataclasses
import math
import sys
from collections.abc import Mapping

import jax
from jaxtyping import PyTree

from shardlib.data import MapSource
from shardlib.errors import MeshError
from shardlib.hardware import Cluster, cluster_of
from shardlib.mesh import MeshConfig, abstract_mesh, describe, make_mesh, mesh_sizes
from shardlib.registry import DataSpec
from shardlib.rules.resolve import STAGE
from shardlib.run.checks import idle_axes
from shardlib.run.config import AUTO, RunConfig
from shardlib.run.plans.finding import with_found_rules
from shardlib.run.plans.planning import UNPLANNED, planned_mesh
from shardlib.run.setup import Devices, Setup, setup
from shardlib.sharding.constrain import Scope
from shardlib.train.config import TrainConfig
from shardlib.train.fit_microbatches import counts, fit_microbatches
from shardlib.train.step import TrainStep


@dataclasses.dataclass(frozen=True)
class ResolvedConfig:
    """A config in which every setting has a value."""

    config: RunConfig
    recorded: RunConfig
    """The config for the run's directory: its mesh may be `auto`, to be decided anew by a run that
    resumes on other devices."""
    choices: Mapping[str, str]
    """Each decided value and the reason for it, by the name of the setting."""
    leaves_microbatches: bool
    """Whether the number of microbatches is a placeholder until the memory of the step is known."""

    def build(self, data: DataSpec, scope: Scope) -> Setup:
        """Returns the parts of the run; see `setup`."""
        parts = setup(self.config, data, scope)
        return dataclasses.replace(parts, recorded=self.recorded, decided=self.choices)


def resolve(
    config: RunConfig, devices: Devices, *, began: RunConfig | None = None
) -> ResolvedConfig:
    """Returns a config with every open setting decided, but for microbatches that depend on the
    memory of the compiled step. A run that resumes keeps the open settings of the config `began`,
    with which it began. Rules that were found for another mesh are open.

    Raises:
        MeshError: If no mesh can be made of the devices.
        ShardlibError: The errors of `find_rules`, for found rules.
    """
    given, config = config, as_recorded(config, began)
    config, choices = _with_mesh_and_rules(config, devices, began)
    leaves_microbatches = config.train.microbatches == AUTO
    if given.train.microbatches == AUTO and not leaves_microbatches:
        choices["microbatches"] = f"{config.train.microbatches}: as the run began"
    train, sizes = config.train, _sizes(config, devices)
    if leaves_microbatches:
        train = dataclasses.replace(train, microbatches=_fewest(train, sizes))
    if train.local_sgd and train.local_sgd.groups is None:
        local_sgd = dataclasses.replace(train.local_sgd, groups=sizes.get("data", 1))
        train = dataclasses.replace(train, local_sgd=local_sgd)
    config = dataclasses.replace(config, train=train)
    choices |= _warned_of_idle_axes(config, devices)
    recorded = dataclasses.replace(config, mesh=given.mesh)
    return ResolvedConfig(config, recorded, choices, leaves_microbatches)


def as_recorded(config: RunConfig, began: RunConfig | None) -> RunConfig:
    """Returns a config whose open settings have the values of the run that it continues."""
    if began is None:
        return config
    train, before = config.train, began.train
    # A different batch may need more microbatches, or not divide into as many; so may more stages.
    is_same = train.global_batch == before.global_batch
    is_enough = before.microbatches == AUTO or before.num_microbatches >= _stages_of(config)
    if train.microbatches == AUTO and is_same and is_enough:
        train = dataclasses.replace(train, microbatches=before.microbatches)
    if train.local_sgd and before.local_sgd and train.local_sgd.groups is None:
        local_sgd = dataclasses.replace(train.local_sgd, groups=before.local_sgd.groups)
        train = dataclasses.replace(train, local_sgd=local_sgd)
    return dataclasses.replace(config, train=train)


def _stages_of(config: RunConfig) -> int:
    return 1 if config.mesh == AUTO else MeshConfig.parse(config.mesh).sizes.get(STAGE, 1)


def _with_mesh_and_rules(
    config: RunConfig, devices: Devices, began: RunConfig | None
) -> tuple[RunConfig, dict[str, str]]:
    """Returns the config with a mesh and rules, and the reasons for those that were `auto`. The
    search for rules compares meshes, too."""
    if config.rules == AUTO or config.found_for is not None:
        return with_found_rules(config, devices, began, _say)
    mesh, choices = _mesh(config, devices)
    return dataclasses.replace(config, mesh=mesh), choices


def _warned_of_idle_axes(config: RunConfig, devices: Devices) -> dict[str, str]:
    """Warns of mesh axes that found rules leave idle, and returns them as an entry of choices."""
    if config.found_for is None:
        return {}
    try:
        mesh = abstract_mesh(config.mesh, _count(devices))
    except MeshError:
        return {}  # Reported with the other faults of the config.
    idle = idle_axes(config, Scope(mesh, config.axis_rules()))  # type: ignore[arg-type]
    if not idle:
        return {}
    names, count = " and ".join(map(repr, idle)), math.prod(idle.values())
    which = "axis" if len(idle) == 1 else "axes"
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        _say(
            f"warning: the rules found for {config.found_for} leave the mesh {which} {names} idle: "
            f"groups of {count} devices hold and compute the same.\n"
            f"  Name a mesh without {'it' if len(idle) == 1 else 'them'}, or set mesh=auto."
        )
    return {"idle": f"mesh {which} {names}: groups of {count} devices compute the same"}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _mesh(config: RunConfig, devices: Devices) -> tuple[str | dict[str, int | str], dict[str, str]]:
    """Returns the mesh, and the reason for it if it was `auto`."""
    if config.mesh != AUTO:
        return config.mesh, {}
    cluster = devices if isinstance(devices, Cluster) else cluster_of(devices)
    if cluster is None:
        text, why = describe(make_mesh(AUTO, devices=devices)), UNPLANNED  # type: ignore[arg-type]
    else:
        mesh, why = planned_mesh(config, cluster)
        text = str(mesh)
    return text, {"auto mesh": f"{text}, {why}"}


def _sizes(config: RunConfig, devices: Devices) -> dict[str, int]:
    mesh = MeshConfig.parse(config.mesh)
    if -1 not in mesh.sizes.values():
        return mesh.sizes
    try:
        return mesh.resolve(_count(devices)).sizes
    except MeshError:
        return {}  # Reported with the other faults of the config.


def _count(devices: Devices) -> int:
    return devices.num_devices if isinstance(devices, Cluster) else len(devices)


def _fewest(train: TrainConfig, sizes: dict[str, int]) -> int:
    stages = sizes.get("stage", 1)
    if train.global_batch % stages:
        raise MeshError(
            f"train.microbatches=auto: {stages} stages need a multiple of {stages} microbatches, "
            f"which does not divide train.global_batch={train.global_batch}.\n"
            "  Choose another batch or mesh."
        )
    return stages


def fitted(parts: Setup, source: MapSource) -> Setup:
    """Returns the parts with the smallest number of microbatches whose compiled step fits into
    memory.

    Raises:
        MeshError: If the step does not fit with any number.
    """
    batch = parts.rows(source).element_spec()
    fit = fit_microbatches(
        lambda number: _step(parts, number), parts.abstract, batch, multiple_of=_stages(parts)
    )
    return _with_microbatches(parts, fit.microbatches, str(fit))


def smallest(parts: Setup, batch: PyTree) -> Setup:
    """Returns the parts with the first number of microbatches that `fitted` would try."""
    stages = _stages(parts)
    number = counts(_step(parts, stages), parts.abstract, batch, multiple_of=stages)[0]
    reason = f"{number} or more: a run takes the fewest whose step fits into memory"
    return _with_microbatches(parts, number, reason)


def _stages(parts: Setup) -> int:
    return mesh_sizes(parts.scope.mesh).get("stage", 1)


def _step(parts: Setup, microbatches: int) -> TrainStep:
    step = parts.train_step(microbatches)
    assert isinstance(step, TrainStep)  # Local SGD takes no `auto`.
    return step


def _with_microbatches(parts: Setup, number: int, reason: str) -> Setup:
    def changed(config: RunConfig) -> RunConfig:
        train = dataclasses.replace(config.train, microbatches=number)
        return dataclasses.replace(config, train=train)

    return dataclasses.replace(
        parts,
        config=changed(parts.config),
        recorded=changed(parts.recorded),
        decided={**parts.decided, "microbatches": reason},
    )
