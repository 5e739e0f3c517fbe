"""The rules of `rules: auto`: found once for a run, and kept when it resumes."""

import dataclasses
import json
import math
from collections.abc import Callable

from shardlib.checkpoint.consensus import Peers
from shardlib.config import from_dict, to_dict
from shardlib.data import batch_spec
from shardlib.errors import ConfigError, MeshError, RuleError, ShardlibError
from shardlib.find import FoundRules, find_rules
from shardlib.hardware import CHIPS, Cluster, cluster_of
from shardlib.humanize import duration
from shardlib.mesh import MeshConfig
from shardlib.nn.remat import OFFLOAD
from shardlib.optim.build import build_optimizer
from shardlib.plan.result import Plans
from shardlib.registry import DataSpec, family
from shardlib.rules import AxisRules, RulesConfig
from shardlib.rules.resolve import STAGE
from shardlib.run.checks import check_fit
from shardlib.run.config import AUTO, RunConfig
from shardlib.run.loss import loss_of
from shardlib.run.plans.planning import policies_of
from shardlib.run.setup import Devices, data_of, model_maker, trained
from shardlib.train.reduce.reduction import ReductionConfig

Notify = Callable[[str], None]


def with_found_rules(
    config: RunConfig, devices: Devices, began: RunConfig | None, notify: Notify
) -> tuple[RunConfig, dict[str, str]]:
    """Returns a config with the rules of `rules: auto`, and its mesh and the rematerialisation of
    its model if they are `auto`. Rules that were found for another mesh or rematerialisation count
    as `auto`.

    A run that resumes on the same mesh keeps them. Otherwise the first process finds them, and
    the others get them: a search that its time limit ends may have another result elsewhere.

    Returns:
        The config, and each decision with its reason.

    Raises:
        ShardlibError: The errors of `find_rules`. Other processes than the first raise a
            `RuleError`.
    """
    if (kept := _kept(config, devices, began)) is not None:
        is_as_began = began is not None and began.rules == kept.rules
        reason = "as the run began" if is_as_began else f"found for {kept.found_for}"
        return kept, {"rules": reason}
    config = dataclasses.replace(config, rules=AUTO)
    failed: list[ShardlibError] = []

    def search(_: list[str]) -> str:
        try:
            found = find_for_run(config, devices, notify)
        except ShardlibError as error:
            failed.append(error)
            return json.dumps({"error": str(error)})
        table = section_of(found.rules, found.mesh_text)
        why = _why(found, devices)
        told = {"rules": to_dict(table), "remat": found.remat, "why": why}
        # The fewest microbatches that fit would leave stages idle for longest.
        parts = found.microbatches if found.sizes[STAGE] > 1 else None
        return json.dumps(told | {"microbatches": parts})

    told = json.loads(Peers().decide("rules", "", search))
    if failed:
        raise failed[0]
    if "error" in told:
        raise RuleError(told["error"])
    rules = from_dict(RulesConfig, told["rules"], "the found rules")
    mesh = rules.found_for if config.mesh == AUTO else config.mesh
    if told["remat"] is not None:
        config = config.with_remat(told["remat"])
    if told["microbatches"] is not None:
        train = dataclasses.replace(config.train, microbatches=told["microbatches"])
        config = dataclasses.replace(config, train=train)
    return dataclasses.replace(config, rules=rules, mesh=mesh), {"auto rules": told["why"]}


def section_of(rules: AxisRules, mesh: str) -> RulesConfig:
    """Returns the section `rules` of a config for rules that were found for a mesh."""
    return dataclasses.replace(RulesConfig.of(rules), found_for=mesh)


def find_for_run(
    config: RunConfig, devices: Devices, notify: Notify, *, any_policy: bool = False
) -> FoundRules:
    """Returns the rules for a run on its mesh, or on the best one if its mesh is `auto`.

    With `train.microbatches=auto` they are for the number with which a step fits and is quickest,
    and with `model.remat=auto` or `any_policy` for the policy.

    Raises:
        ShardlibError: The errors of `find_rules`.
    """
    spec, _ = data_of(config)
    chosen, rows = family(config.model.name), config.train.global_batch
    check_fit(config, chosen, spec)
    optimizer = build_optimizer(config.optimizer, steps=config.train.steps, global_batch=rows)
    cluster = _priced(devices)
    mesh = None if config.mesh == AUTO else MeshConfig.parse(config.mesh)
    schedule = config.train.pipeline.schedule
    if mesh is not None and mesh.sizes.get(STAGE, 1) != 1 and schedule != "1f1b":
        raise ConfigError(
            f"train.pipeline.schedule is {schedule}, but rules=auto prices 1f1b.\n"
            "  Set train.pipeline.schedule=1f1b, or give rules."
        )
    on = "all meshes" if mesh is None else str(mesh)
    notify(f"finding rules for {on} of {cluster.name}")
    counted = config.train.microbatches
    policies = _searched(config, spec) if any_policy or config.remat == AUTO else ()
    makes = {p: model_maker(config.with_remat(p), chosen, spec) for p in policies}
    return find_rules(
        makes or model_maker(config, chosen, spec),
        loss=loss_of(config, chosen, train=True),
        batch=batch_spec(config.data, rows),
        optimizer=optimizer.transform,
        on=cluster,
        mesh=mesh,
        precision=config.precision,
        wrt=trained(config),
        microbatches=None if counted == AUTO else counted,  # type: ignore[arg-type]
        stages=schedule == "1f1b",
        notify=notify if mesh is None else lambda text: None,
    )


def _searched(config: RunConfig, spec: DataSpec) -> list[str]:
    """Returns the policies to choose among. The cost model of traced programs does not count what
    moves to the host."""
    return [policy for policy in policies_of(config, spec) if not policy.startswith(OFFLOAD)]


def rules_for_plan(config: RunConfig, plans: Plans, notify: Notify) -> FoundRules:
    """Returns the rules for a planned run, on the best mesh of the cluster of its plans, with the
    number of microbatches with which a step fits and is quickest, and with the policy if the config
    of the model has `remat_tags`. Without them, a field `remat` may hold other values than policies
    of `shardlib.nn.remat`.

    Raises:
        ShardlibError: The errors of `find_for_run`.
    """
    train = config.train
    groups = {
        "train.local_sgd.groups": train.local_sgd and train.local_sgd.groups,
        "train.reduction.group_microbatches": train.reduction.group_microbatches,
        "train.reduction.group_seconds": train.reduction.group_seconds,
    }
    if faults := [key for key, value in groups.items() if value is not None]:
        raise ConfigError(
            f"{' and '.join(faults)} divide the batch among groups of one mesh, and rules=auto "
            "chooses the mesh of a plan.\n"
            f"  Leave {' and '.join(faults)} out, or --rules."
        )
    is_split = train.local_sgd is not None or train.reduction != ReductionConfig()
    is_whole = family(config.model.name).couples_rows
    counted = {} if is_split or is_whole else {"microbatches": AUTO}
    train = dataclasses.replace(train, global_batch=plans.workload.batch, **counted)
    config = dataclasses.replace(config, train=train, mesh=AUTO, rules=AUTO)
    any_policy = hasattr(config.model, "remat_tags")
    return find_for_run(config, plans.cluster, notify, any_policy=any_policy)


def knows(devices: Devices) -> bool:
    """Returns whether the speed of devices is known."""
    return _known(devices) is not None


def _known(devices: Devices) -> Cluster | None:
    cluster = devices if isinstance(devices, Cluster) else cluster_of(devices)
    return None if cluster is None or cluster.chip is None else cluster


def _priced(devices: Devices) -> Cluster:
    """Returns the cluster whose costs decide: GPUs of one host in place of unknown devices."""
    if (cluster := _known(devices)) is not None:
        return cluster
    count = _count(devices)
    return Cluster(f"{count}x{_STAND_IN}", CHIPS[_STAND_IN], 1, count)


_STAND_IN = "h100"


def _count(devices: Devices) -> int:
    return devices.num_devices if isinstance(devices, Cluster) else len(devices)


def _kept(config: RunConfig, devices: Devices, began: RunConfig | None) -> RunConfig | None:
    """Returns the config with the found rules that it has or that the run began with, if they are
    for its mesh and its rematerialisation, which is also kept if it is `auto` and the batch is the
    same."""
    if began is None or config.rules not in (AUTO, began.rules):
        began = config
    if began.found_for is None:
        return None
    mesh, before = config.mesh, MeshConfig.parse(began.found_for)
    if mesh == AUTO:
        is_full = math.prod(before.sizes.values()) == _count(devices)
        mesh, same = str(before), is_full and began.mesh == AUTO
    else:
        now = MeshConfig.parse(mesh)
        if -1 in now.sizes.values():
            try:
                now = now.resolve(_count(devices))
            except MeshError:  # It is reported with the other faults of the config.
                return dataclasses.replace(config, rules=began.rules)
        same = _cutting(now) == _cutting(before)
    if config.remat == AUTO and config.train.global_batch == began.train.global_batch:
        config = config.with_remat(began.remat)
    if not same or config.remat != began.remat:
        return None
    if config.train.microbatches == AUTO and before.sizes.get(STAGE, 1) > 1:
        train = dataclasses.replace(config.train, microbatches=began.train.microbatches)
        config = dataclasses.replace(config, train=train)
    return dataclasses.replace(config, rules=began.rules, mesh=mesh)


def _cutting(mesh: MeshConfig) -> dict[str, int]:
    return {name: size for name, size in mesh.sizes.items() if size > 1}


def _why(found: FoundRules, devices: Devices) -> str:
    seconds = duration(found.prices[0].seconds)
    parts = f", {found.microbatches} microbatches" if found.microbatches > 1 else ""
    parts += "" if found.remat is None else f", remat {found.remat}"
    text = f"found for {found.mesh_text}{parts}: {seconds} a step on {found.cluster}"
    return text if knows(devices) else f"{text}, which stands for devices of unknown speed"
