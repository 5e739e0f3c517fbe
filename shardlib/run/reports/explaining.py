"""Placement reports of a config, for available devices or a cluster that need not be present."""

import dataclasses
import math
from collections.abc import Callable

import jax
from jaxtyping import PyTree

from shardlib.config import from_dict, to_dict
from shardlib.data import batch_spec
from shardlib.errors import DoesNotFitError, ShardlibError
from shardlib.explain import ParamsReport, StepReport
from shardlib.explain import explain as explain_state
from shardlib.explain.aot.compile import compile_step
from shardlib.explain.aot.topology import devices_of
from shardlib.explain.lint import Limits
from shardlib.explain.report.report import report_on
from shardlib.hardware import Cluster, parse_cluster
from shardlib.mesh import mesh_sizes
from shardlib.plan.settings import Settings
from shardlib.run.checks import check_config, check_is_config
from shardlib.run.config import RunConfig
from shardlib.run.devices import start_devices
from shardlib.run.plans.planning import fixes_of
from shardlib.run.resolve_auto import resolve, smallest
from shardlib.run.setup import Devices, Setup, data_of, make_scope, setup
from shardlib.run.trace_programs import traced
from shardlib.train.local_sgd.outer import LocalSGD
from shardlib.train.step import TrainStep

_MOST_COMPILED = 6
"""Changes that are compiled to find those that fit."""


def explain(config: RunConfig, on: str | None = None) -> ParamsReport:
    """Returns the report on the state of a run; allocates and compiles nothing.

    The programs of the run are traced, so that `explain` raises the same errors as `train`, except
    for errors in the data. The data is read only if the config leaves the number of tokens or
    classes to it. Sampling is traced if the data or the config gives a tokenizer.

    Args:
        config: The config.
        on: A cluster, such as `v5p-128` or `8xh100`; default: the available devices.

    Raises:
        ConfigError: If model and data do not fit each other.
        DataError: If data that has to be read is missing or malformed, or the config holds out no
            data for the evaluation.
        MeshError: If the cluster is unknown, or mesh, devices and batch do not fit each other.
        RuleError: If tensors cannot be placed.
        ModelError: If the model cannot be computed, evaluated or sampled as configured.
    """
    check_is_config(config)
    devices: Devices
    if on is None:
        start_devices(config)
        devices = jax.devices()
    else:
        devices = parse_cluster(on)
    parts = _traced(config, devices)
    return _params_report(parts, parts.choices())


def explain_compiled(
    config: RunConfig,
    on: str,
    *,
    optimize: bool = False,
    limits: Limits | None = None,
    most_fixes: int = 3,
    notify: Callable[[str], None] | None = None,
) -> StepReport:
    """Returns the report on the training step of a run, compiled for a cluster that need not be
    present. It raises the errors of `explain` before anything is compiled.

    If the step does not fit, changes that the cost model proposes are compiled, too, and the
    report names those with which it fits.

    Args:
        config: The config.
        on: The cluster, such as `v5p-128` or `8xh100`.
        optimize: Whether a TPU program is optimized as fully as for a run.
        limits: Size from which a fault is reported.
        most_fixes: Changes to name for a step that does not fit; 0 compiles none.
        notify: Called with each change before it is compiled.

    Raises:
        MissingExtraError: If the compiler of the cluster's platform is not installed.
        DoesNotFitError: If the step exceeds TPU memory by so much that it cannot be compiled.
    """
    cluster = parse_cluster(on)
    if cluster.chip is None:
        # Tracing starts JAX, which fixes the number of CPU devices.
        devices_of(cluster)
    abstract = _traced(config, cluster)
    config = abstract.config

    def fixes(peak_bytes: int) -> tuple[str, ...]:
        if not most_fixes:
            return ()
        given = most_fixes, optimize, notify or (lambda text: None)
        return _fixes(config, cluster, peak_bytes, *given)

    try:
        report = _report(abstract, cluster, optimize, limits)
    except DoesNotFitError as error:
        lines = "\n  ".join([str(error).splitlines()[0], *fixes(error.needed_bytes)])
        raise DoesNotFitError(lines, error.needed_bytes) from None
    if report.fits:
        return report
    return dataclasses.replace(report, fixes=fixes(report.memory.peak_bytes))


def _report(
    abstract: Setup, cluster: Cluster, optimize: bool, limits: Limits | None = None
) -> StepReport:
    """Returns the report on a step that is compiled for a cluster; raises `DoesNotFitError`."""
    config = abstract.config
    parts = setup(config, abstract.data, make_scope(config, devices_of(cluster)))
    batch = parts.arranged(batch_spec(config.data, config.train.global_batch))
    step, state = parts.train_step(), parts.saved_state()
    compiled = compile_step(step, (state, batch), on=cluster, optimize=optimize)
    params = _params_report(parts, abstract.choices())
    return report_on(compiled, params, limits)


def _params_report(parts: Setup, choices: dict[str, str]) -> ParamsReport:
    """Returns the report on the state of a run, with its choices and the chunks of its stages."""
    report = explain_state(parts.abstract)
    cut = report.stage_cut
    if cut is not None:
        cut = dataclasses.replace(cut, chunks=parts.config.train.pipeline.chunks)
    return dataclasses.replace(report, choices=choices, stage_cut=cut)


def _fixes(
    config: RunConfig,
    cluster: Cluster,
    peak_bytes: int,
    most: int,
    optimize: bool,
    notify: Callable[[str], None],
) -> tuple[str, ...]:
    """Returns changes with which the compiled step fits, cheapest first."""
    try:
        fixes = fixes_of(config, cluster, peak_bytes, count=_MOST_COMPILED)
    except ShardlibError as error:
        return (f"no fix can be suggested: {str(error).splitlines()[0]}",)
    lines: list[str] = []
    for fix in sorted(fixes, key=lambda fix: fix.on is not None):
        if len(lines) == most:
            break
        notify(f"compiling with {fix.change}")
        try:
            changed = _traced(with_settings(config, fix.settings), fix.plan.cluster)
            report = _report(changed, fix.plan.cluster, optimize)
        except ShardlibError:  # It does not fit by far, or the mesh cannot run.
            continue
        if report.fits:
            lines.append(f"fits with {fix.change}: {fix.cost(report.memory.peak_bytes)}")
    if lines:
        return tuple(lines)
    tried = f"{len(fixes)} changes were compiled and do not fit" if fixes else "no change helps"
    return (f"{tried}: use more devices, or larger ones",)


def with_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """Returns a config with other values of keys."""
    tree = to_dict(config)
    for key, value in settings.items():
        *sections, name = key.split(".")
        section = tree
        for each in sections:
            section = section[each]
        section[name] = value
    return from_dict(RunConfig, tree, "the changed config")


def _traced(config: RunConfig, devices: Devices) -> Setup:
    """Returns the parts of a run after tracing its programs."""
    run = resolve(config, devices)
    scope = check_config(run.config, lambda: make_scope(run.config, devices))
    spec, tokenizer = data_of(config)
    batch = batch_spec(config.data, config.train.global_batch)
    parts = run.build(spec, scope)
    if run.leaves_microbatches:
        parts = smallest(parts, batch)
    held_out = None
    if config.eval.every_steps != 0:
        config.data.check_held_out()
        rows = config.eval.global_batch or config.train.global_batch
        held_out = batch_spec(config.data, rows)
    step = traced(parts, batch, held_out, tokenizer).train
    return dataclasses.replace(parts, decided={**parts.decided, **_decided(parts, step, batch)})


def _decided(parts: Setup, step: TrainStep | LocalSGD, batch: PyTree) -> dict[str, str]:
    """Returns who partitions the loss, what every device computes whole, where gradients are
    summed, and why, as entries of `Setup.decided`. Empty on one device and for local SGD, whose
    groups train separately."""
    sizes = mesh_sizes(parts.scope.mesh)
    if not isinstance(step, TrainStep) or math.prod(sizes.values()) == 1:
        return {}
    batch = parts.arranged(batch)
    partition = step.partition(parts.abstract, batch)
    decided = {"partition": f"{partition.by}: {partition.why.rstrip('.')}"}
    if partition.whole:
        decided["whole on every device"] = "; ".join(partition.whole)
    if sizes.get("data", 1) > 1:
        decided["gradients"] = str(step.gradient_sums(parts.abstract, batch))
    return decided
