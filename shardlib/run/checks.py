"""Validation of a run's config before its data is read or anything is allocated.

Every fault is reported at once.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import jax

from shardlib.errors import (
    ConfigError,
    DataError,
    MeshError,
    RuleError,
    ShardlibError,
    did_you_mean,
    require,
)
from shardlib.log.loggers import logger_class
from shardlib.mesh import MeshConfig, mesh_sizes
from shardlib.optim.build import build_schedule
from shardlib.registry import DataSpec, ModelFamily, family
from shardlib.rules import ANY, STANDARD_AXES, Choice, RulesConfig, Section, preset
from shardlib.run.config import DATA_CONFIGS, RunConfig
from shardlib.run.loss import check_loss
from shardlib.sharding.constrain import Scope
from shardlib.sharding.manual import NESTS_IN_MESH_ORDER_ONLY
from shardlib.sharding.partition import OVERRIDES, unmatched_patterns
from shardlib.train.pipeline.schedules import schedule_faults
from shardlib.train.reduce.reduction import ReductionConfig, plan_reduction
from shardlib.train.state import Definition


def check_config(
    config: RunConfig, make_scope: Callable[[], Scope], *, reads_data: bool = False
) -> Scope:
    """Returns the scope of a config, or raises every fault of it, alone and with its devices.

    `make_scope` returns the mesh and rules of the run, or raises their fault. If `reads_data`,
    missing data is reported with other faults. It alone is not: the data itself then tells more.

    Raises:
        ConfigError: If model, data and optimizer do not fit each other, a logger is not one, or
            there are several faults.
        MeshError: If the mesh does not fit the devices, or the batch does not fit the mesh.
        RuleError: If a rule names a mesh axis that does not exist.
        MissingExtraError: If a required package is not installed.
    """
    scopes: list[Scope] = []
    errors = list(_errors(config, lambda: scopes.append(make_scope()) or scopes[0]))
    if errors and reads_data:
        try:
            config.data.check_paths()
        except DataError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        lines = (str(error).replace("\n", "\n  ") for error in errors)
        raise ConfigError(f"the run has {len(errors)} faults:\n  " + "\n  ".join(lines))
    return scopes[0]


def _errors(config: RunConfig, make_scope: Callable[[], Scope]) -> Iterator[ShardlibError]:
    def check_scope() -> None:
        try:
            scope = make_scope()
        except MeshError as error:
            raise MeshError("\n  ".join([str(error), *_misspelt_axes(config)])) from None
        _check_idle(config, scope)
        _check_groups(config, scope)
        check_batch(config, scope)
        _check_stages(config, scope)

    checks = (_check_model, _check_optimizer, _check_extras)
    loggers = (lambda name=name: logger_class(name) for name in config.train.loggers)
    for check in (check_scope, *(lambda check=check: check(config) for check in checks), *loggers):
        try:
            check()
        except ShardlibError as error:
            yield error


def _misspelt_axes(config: RunConfig) -> list[str]:
    """Returns a line for each axis of the mesh whose name resembles an axis of the rules."""
    names = [name for name in MeshConfig.parse(config.mesh).names if name not in STANDARD_AXES]
    hints = {name: did_you_mean(name, STANDARD_AXES) for name in names}
    return [f"The rules name no axis {name!r}.{hint}" for name, hint in hints.items() if hint]


def expected_spec(config: RunConfig) -> DataSpec:
    """Returns the data spec that a config implies. If the config leaves the number of tokens or
    classes to the data, the spec takes the model's number."""
    spec, model = config.data.spec(), config.model
    return dataclasses.replace(
        spec,
        vocab_size=spec.vocab_size or getattr(model, "vocab_size", None),
        num_classes=spec.num_classes or getattr(model, "num_classes", None),
    )


def check_fit(config: RunConfig, chosen: ModelFamily, data: DataSpec) -> None:
    """Raises `ConfigError` with every reason why a model does not fit its data or its loss."""
    kind, gives, takes = config.data.kind, config.data.gives, chosen.inputs.name
    if gives != takes:
        given = repr(kind) if gives == kind else f"{kind!r}, which gives {gives}"
        fitting = [name for name, source in DATA_CONFIGS.items() if source.gives == takes]
        fix = f"={fitting[0]}" if fitting else f" to a source that gives {takes}"
        raise ConfigError(
            f"model {config.model.name!r} takes {takes}, but data.kind is {given}.\n"
            f"  Set data.kind{fix}, or choose another model."
        )
    if faults := config.model_faults(data):
        raise ConfigError("\n".join(f"model: {fault}" for fault in faults))
    if chosen.couples_rows:
        _check_whole_batches(config)
    check_loss(config)


def _check_whole_batches(config: RunConfig) -> None:
    """Raises `ConfigError` for settings that split a batch whose rows depend on each other."""
    train = config.train
    split = {
        "train.microbatches": train.microbatches != 1,
        "train.reduction": config.reduction() != ReductionConfig(),
        "train.local_sgd": train.local_sgd is not None,
    }
    if keys := [key for key, is_split in split.items() if is_split]:
        raise ConfigError(
            f"the loss of model {config.model.name!r} compares all rows of a batch, which "
            f"{', '.join(keys)} would split.\n  Leave {', '.join(keys)} out."
        )


def _check_model(config: RunConfig) -> None:
    data = expected_spec(config)
    # The data decides; a vocabulary of one token is smaller than any real one.
    least = {name: getattr(data, name) or 1 for name in config.data.decides}
    check_fit(config, family(config.model.name), dataclasses.replace(data, **least))


def _check_optimizer(config: RunConfig) -> None:
    build_schedule(
        config.optimizer, steps=config.train.steps, global_batch=config.train.global_batch
    )


def _check_extras(config: RunConfig) -> None:
    if config.train.tensorboard:
        require("tensorboardX", "tensorboard", "train.tensorboard=true")


_BY_COMPILER = (ReductionConfig(), ReductionConfig(dtype="compiler"))


def idle_axes(config: RunConfig, scope: Scope) -> dict[str, int]:
    """Returns the mesh axes that only replicate the work of the others, with their sizes."""
    train = config.train
    # Axes that split layers or rows themselves, independently of the rules.
    by_hand = {"stage"}
    if train.local_sgd is not None or train.reduction not in _BY_COMPILER:
        by_hand.add("data")
    idle = scope.rules.idle(scope.mesh)
    return {name: size for name, size in idle.items() if name not in by_hand}


def _check_idle(config: RunConfig, scope: Scope) -> None:
    """Raises `RuleError` for idle axes under rules that were written by hand: a search may find
    that idle devices are quicker than what a small model would send."""
    if config.found_for is not None:
        return
    fix = "Choose a mesh of axes that the rules name, or rules that name this axis."
    if scope.rules.names is not None:
        fix = "Choose a mesh of axes that the rules name, or mesh=auto together with rules=auto."
    faults = [
        f"no rule names the mesh axis {name!r}: its {size} devices would all hold and compute the "
        f"same.{'' if name in STANDARD_AXES else did_you_mean(name, STANDARD_AXES)}\n  {fix}"
        for name, size in idle_axes(config, scope).items()
    ]
    if faults:
        raise RuleError("\n".join(faults))


def _check_groups(config: RunConfig, scope: Scope) -> None:
    """Raises `ConfigError` or `MeshError` when the mesh cannot form the requested `data` groups."""
    train = config.train
    plan_reduction(config.reduction(), scope.mesh, microbatches=train.num_microbatches)
    if train.local_sgd is not None:
        is_group = jax.distributed.is_initialized() and jax.process_count() > 1
        if train.guards.nonfinite == "stop" and is_group:
            raise ConfigError(
                "train.guards.nonfinite=stop does not work with train.local_sgd in several "
                "processes: each sees only the metrics of its own groups, and would stop alone.\n"
                "  Set train.guards.nonfinite to skip or off."
            )
        sizes = mesh_sizes(scope.mesh)
        train.local_sgd.count(sizes.get("data", 1))
        if min(sizes.get("data", 1), sizes.get("stage", 1)) > 1 and NESTS_IN_MESH_ORDER_ONLY:
            raise ConfigError(
                "train.local_sgd cannot have groups that split layers over stage: the compiler of "
                f"jax {jax.__version__} does not nest the regions.\n"
                "  Use a mesh without stage, or train.reduction in place of local_sgd."
            )


def _check_stages(config: RunConfig, scope: Scope) -> None:
    """Raises `ConfigError` when a pipeline does not fit the layers or the microbatches."""
    stages, train = mesh_sizes(scope.mesh).get("stage", 1), config.train
    if stages == 1:
        return
    reduction = train.reduction
    # The reduction plan already rejects unequal groups with stages.
    counts = reduction.group_microbatches or (train.num_microbatches,)
    faults = schedule_faults(
        train.pipeline.schedule,
        stages=stages,
        microbatches=counts[0],
        chunks=train.pipeline.chunks,
        num_layers=config.staged_layers,
    )
    if faults:
        raise ConfigError("\n".join(faults))


def check_batch(config: RunConfig, scope: Scope) -> None:
    """Raises `MeshError` when a batch does not divide evenly over its devices."""
    sizes = mesh_sizes(scope.mesh)
    share = _train_share(config, sizes)
    checks = [share]
    if config.eval.global_batch is not None:
        checks.append(("eval.global_batch", config.eval.global_batch, 1, "batch", sizes))
    elif config.eval.every_steps != 0 and share[-1] != sizes:
        # Each group takes its own rows of a training batch, but every row of an evaluation batch.
        key = "eval.global_batch=null, train.global_batch"
        checks.append((key, config.train.global_batch, 1, "batch", sizes))
    length = getattr(config.data, "sequence_length", None)
    if length is not None:
        names = ("length", "residual_length") if scope.rules.names is None else ()
        checks += [("data.sequence_length", length, 1, name, sizes) for name in names]
    faults: dict[str, None] = {}
    for key, size, parts, axis, sizes in checks:
        resolution = scope.rules.resolve((axis,), (size // parts,), sizes, "activations")
        if resolution.faults:
            share = f" in {parts} microbatches of {size // parts}" if parts > 1 else ""
            reason, multiple = _indivisible(resolution.choices[0], sizes)
            fault = f"{key}={size}{share} cannot be split evenly: {reason}.\n"
            faults[f"{fault}  Choose a multiple of {multiple * parts}, or another mesh."] = None
    if faults:
        raise MeshError("\n".join(faults))


def _train_share(config: RunConfig, sizes: dict[str, int]) -> tuple[str, int, int, str, Any]:
    """Returns the size that must divide over the devices: a microbatch of each group."""
    train, groups = config.train, sizes.get("data", 1)
    parts = train.num_microbatches
    if train.local_sgd is not None:
        parts, sizes = (train.local_sgd.groups or groups) * parts, {**sizes, "data": 1}
    elif train.reduction.group_seconds is not None:
        parts, sizes = groups * parts, {**sizes, "data": 1}
    elif train.reduction.group_microbatches is not None:
        parts, sizes = sum(train.reduction.group_microbatches), {**sizes, "data": 1}
    if train.global_batch % parts:
        raise MeshError(
            f"train.global_batch={train.global_batch} does not divide into {parts} microbatches "
            f"over all groups.\n  Choose a multiple of {parts}."
        )
    return "train.global_batch", train.global_batch, parts, "batch", sizes


def _indivisible(choice: Choice, sizes: dict[str, int]) -> tuple[str, int]:
    """Returns why a dim cannot be sharded, and the divisor that it would need."""
    refusal = choice.refused[0]
    multiple = 1
    for name in refusal.alternative:
        multiple *= sizes.get(name, 1)
    return "; ".join(r.reason for r in choice.refused), multiple


def check_is_config(config: object) -> None:
    """Raises `ConfigError` for anything else than a `RunConfig`, such as the path of a config."""
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"the config is {config!r}, not a RunConfig.\n"
            "  Read one: shardlib.config.load(RunConfig, 'run.yaml')."
        )


def check_activation_rules(config: RunConfig, met: set[str]) -> None:
    """Raises `RuleError` for rules of the config that match no activation."""
    if isinstance(config.rules, RulesConfig) and config.rules.names is not None:
        return  # Operations give the activations their names.
    if faults := _unused_rules(config, "activations", "activation", met):
        raise RuleError("\n".join(faults))


def _unused_rules(
    config: RunConfig, section: Section | Literal["activations"], noun: str, met: set[str]
) -> list[str]:
    """Returns the fault of each rule of the config whose logical axis no tensor has."""
    if isinstance(config.rules, str):
        return []
    start, kind = config.rules.preset, "activations" if section == "activations" else "params"
    known = {name for name, _ in preset(start).table(kind)} if start else set()
    known |= met | {ANY}
    return [
        f"rules.{section}.{name}: no {noun} has the logical axis {name!r}."
        f"{did_you_mean(name, known)}\n  The model has: {', '.join(sorted(met))}."
        for name in getattr(config.rules, section) or ()
        if name not in known
    ]


def check_rules_used(config: RunConfig, definition: Definition) -> None:
    """Raises `RuleError` for rules of the config that match no parameter."""
    if isinstance(config.rules, str):
        return
    placements = [*definition.params.values(), *definition.model_state.values()]
    met = {axis for p in placements for axis in p.logical_axes or () if axis is not None}
    sections = get_args(Section)
    faults = [fault for s in sections for fault in _unused_rules(config, s, "parameter", met)]
    origins = {placement.origin.partition(OVERRIDES)[0] for placement in placements}
    unmatched = unmatched_patterns(definition.scope.rules, placements)
    for pattern in config.rules.paths:
        if pattern in unmatched:
            fault = f"matches no parameter.{unmatched[pattern]}\n  Correct it or remove it."
        elif f"path {pattern}" not in origins:
            fault = "matches only what earlier patterns match.\n  Move it first, or remove it."
        else:
            continue
        faults.append(f"rules.paths: {pattern!r} {fault}")
    if faults:
        raise RuleError("\n".join(faults))
