"""Planning of a run from its config, the mesh of `mesh: auto`, and fixes for a full memory."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp

from shardlib.cost.layout import SHARDLIB, Layout, Software
from shardlib.cost.traced.layout import nbytes
from shardlib.cost.transformer.flops import step_flops
from shardlib.cost.workload import Job, Transformer
from shardlib.data import batch_spec
from shardlib.errors import ConfigError, MeshError, ModelError, ShardlibError
from shardlib.functional import functional
from shardlib.functional.precision import precision
from shardlib.hardware import Cluster
from shardlib.humanize import duration
from shardlib.mesh import MeshConfig, auto_mesh
from shardlib.nn import remat
from shardlib.optim.build import build_optimizer
from shardlib.plan.api import STATE_BYTES, answer, of_dims
from shardlib.plan.fixes import Fix, cheapest_fixes
from shardlib.plan.mixed_result import MixedPlans, answer_mixed
from shardlib.plan.problem import Choice, Plan, Workload
from shardlib.plan.request import Question
from shardlib.plan.result import Plans
from shardlib.plan.search import search
from shardlib.plan.settings import mesh_text, schedule
from shardlib.plan.workloads.traced import TracedWorkload
from shardlib.plan.workloads.tracing import trace_workload
from shardlib.plan.workloads.transformer import POLICIES, TransformerWorkload
from shardlib.registry import DataSpec, family
from shardlib.rules import STANDARD, AxisRules, RulesConfig
from shardlib.run.checks import check_fit, expected_spec
from shardlib.run.config import AUTO, RunConfig
from shardlib.run.loss import loss_of
from shardlib.run.plans.calibrating import as_measured
from shardlib.run.setup import model_maker, trained
from shardlib.train.reduce.reduction import ReductionConfig

_MOMENTS = {"adamw": 2, "lamb": 2, "lion": 1, "sgd": 1, "lars": 1, "muon": 1, "adafactor": 0}
"""Numbers that an optimizer keeps per parameter. Muon's two for embeddings and adafactor's row and
column factors are few and not counted."""
_NEWTON_SCHULZ_STEPS = 5
"""Newton-Schulz steps of optax.contrib.muon."""
UNPLANNED = "default; the planner does not know this device"
_WORTH_CHANGING = 0.9
"""Fraction of the time of the default mesh that another mesh must beat for `mesh: auto` to take it.
The margin is the error of the predictions."""


def plan_run(config: RunConfig, question: Question) -> Plans | MixedPlans:
    """Returns the best plans for a run, and explains its own mesh.

    Args:
        config: The run. The plan chooses its mesh, rules (unless it has its own),
            rematerialisation, microbatches and schedule; all else is kept.
        question: The planning question. Batch, length and total tokens default to the run's.

    Raises:
        MeshError: If the cluster is unknown, or no plan fits it.
        ModelError: If the model cannot be planned.
        ConfigError: If model and data do not fit each other.
    """
    config = config.with_open_rules()
    name, workload = workload_of(config, question)
    if question.tokens is None:
        tokens = float(config.train.steps * workload.tokens)
        question = dataclasses.replace(question, tokens=tokens)
    if question.mixed is not None:
        return _plan_mixed(config, name, workload, question)
    tried = [as_measured(cluster) for cluster in question.clusters()]
    plans = answer(name, workload, question, tried=tried, notes=_notes(config), kept=_kept(config))
    own = tuple(
        dataclasses.replace(plans.why_not(mesh), of_config=True)
        for mesh in _own_mesh(config, plans.cluster)
    )
    return dataclasses.replace(plans, asked=own + plans.asked)


def _plan_mixed(config: RunConfig, name: str, workload: Workload, question: Question) -> MixedPlans:
    """Returns the plans of a run for a mixed cluster, which divide the batch among groups.

    Raises:
        ConfigError: If the config divides the batch in another way.
    """
    train, evaluated = config.train, config.eval
    shares = (
        ("train.local_sgd", train.local_sgd),
        (
            "train.reduction.group_seconds",
            train.reduction.group_seconds,
        ),
    )
    if faults := [key for key, value in shares if value is not None]:
        raise ConfigError(
            f"a plan for a mixed cluster sets train.reduction.group_microbatches, which allows "
            f"no {' and no '.join(faults)}.\n  Leave {' and '.join(faults)} out."
        )
    reduction = dataclasses.replace(train.reduction, group_microbatches=None)
    others = dataclasses.replace(config, train=dataclasses.replace(train, reduction=reduction))
    kept = _kept(others)
    if evaluated.global_batch is not None or evaluated.every_steps == 0:
        kept |= {"eval.global_batch"}
    return answer_mixed(name, workload, question, notes=_notes(others), kept=kept)


def served(config: RunConfig) -> tuple[str, Any, DataSpec]:
    """Returns the name of a run's model, its config and its data; see `sl.plan_serving`.

    Raises:
        ConfigError: If model and data do not fit each other.
    """
    spec = _spec(config)
    check_fit(config, family(config.model.name), spec)
    return config.model.name, config.model, spec


def workload_of(
    config: RunConfig, question: Question | None = None, *, platform: str | None = None
) -> tuple[str, Workload]:
    """Returns the name of a run's model and its workload, with all options that a plan may choose.
    A question's batch, length and platform replace the others.

    Raises:
        ConfigError: If model and data do not fit each other.
        ModelError: If the kind of model cannot be planned.
    """
    if question is not None:
        config, platform = _lengthened(config, question), question.platform
    spec = _spec(config)
    chosen = family(config.model.name)
    check_fit(config, chosen, spec)
    tokens, rows = spec.sequence_length, config.train.global_batch
    if question is not None:
        rows = question.rows(tokens or 1, rows)
    if chosen.dims is None or tokens is None:
        return config.model.name, cast(Workload, traced_workload(config, spec, rows, platform))
    dims = of_dims(chosen.dims(config.model, spec))
    job = Job(dims, tokens, rows, **(_bytes(config) | _adapters(config, spec, dims)))
    momentum = config.optimizer.momentum_dtype
    workload = TransformerWorkload(
        job,
        policies=policies_of(config, spec) or ("none",),
        moments=(momentum,),
        loss_chunks=(1, 8) if hasattr(config.model, "loss_chunks") else (1,),
        dropout=getattr(config.model, "dropout", 0.0) > 0,
        offload_optimizer=_offloads(config),
        software=_software(config),
        **_uses(config),
    )
    return config.model.name, workload


def _lengthened(config: RunConfig, question: Question) -> RunConfig:
    """Returns the config with the requested sequence length.

    Raises:
        ConfigError: If the config has no sequences.
    """
    if not hasattr(config.data, "sequence_length"):
        unit = family(config.model.name).inputs.unit
        question.check_without_tokens(config.model.name, unit)
        return config
    if question.length is None:
        return config
    data = dataclasses.replace(config.data, sequence_length=question.length)
    return dataclasses.replace(config, data=data)


def traced_workload(
    config: RunConfig, spec: DataSpec, batch: int, platform: str | None = None
) -> TracedWorkload:
    """Returns the workload of any other model than a transformer, from its program as traced for a
    platform. It keeps everything if its rematerialisation is yet to be chosen.

    Raises:
        ModelError: If the model cannot be made.
        RuleError: If the model names an axis that has no rule.
    """
    chosen, options = family(config.model.name), config.train
    optimizer = build_optimizer(config.optimizer, steps=options.steps, global_batch=batch)
    if config.remat == AUTO:
        config = config.with_remat("none")
    return trace_workload(
        model_maker(config, chosen, spec),
        optimizer.transform,
        loss_of(config, chosen, train=True),
        batch_spec(config.data, batch),
        wrt=trained(config),
        # The plan chooses among presets; custom rules are kept.
        rules=STANDARD if isinstance(config.rules, str) else config.axis_rules(),
        precision=config.precision,
        batch_axes=chosen.inputs.axes_for(spec),
        platform=platform,
        unit=chosen.inputs.unit,
    )


def flops_per_step(config: RunConfig, data: DataSpec) -> float | None:
    """Returns the model FLOPs of one optimizer step, or None if they cannot be counted.

    The count follows the formula of the model family, or that of its dims with half of all pairs of
    positions. With a loss of the config, with adapters, whose frozen weights have no gradient, or
    without both, it holds the matmuls and convolutions of the traced loss and its gradient.
    """
    chosen, batch = family(config.model.name), config.train.global_batch
    if config.train.loss is None and config.finetune is None:
        if chosen.flops_per_example is not None:
            return chosen.flops_per_example(config.model, data) * batch
        if chosen.dims is not None and data.sequence_length is not None:
            job = Job(of_dims(chosen.dims(config.model, data)), data.sequence_length, batch)
            return step_flops(job, "causal")
    try:
        return traced_workload(config, data, batch).flops
    except ShardlibError:
        return None


def planned_mesh(config: RunConfig, cluster: Cluster) -> tuple[MeshConfig, str]:
    """Returns the mesh of `mesh: auto` on a cluster, and the reason for it.

    The rest of the config stays fixed. Another mesh replaces the default (`fsdp` within a
    slice or host, `data` across) if it is clearly faster or the default does not fit.

    Raises:
        MeshError: If slices or hosts do not divide the devices.
    """
    groups = cluster.num_hosts if cluster.platform == "gpu" else cluster.num_slices
    plain = auto_mesh(cluster.num_devices, num_groups=groups)
    if cluster.chip is None:
        return plain, UNPLANNED
    try:
        workload = _as_it_is(config)
        cluster = as_measured(cluster)
        best = _best_as_it_is(config, workload, cluster, None)
    except ShardlibError as error:
        return plain, f"default; not planned because {str(error).splitlines()[0]}"
    if best is None:
        return plain, "default: by the cost model, no mesh fits without other changes"
    layout = Layout.of(plain.sizes, cluster.num_slices)
    usual = None
    if not workload.faults(layout):
        usual = _best_as_it_is(config, workload, cluster, layout)
    if usual is not None and best.seconds > _WORTH_CHANGING * usual.seconds:
        return plain, f"planned: {duration(usual.seconds)} a step"
    against = f"{plain} would take {duration(usual.seconds)}" if usual else f"{plain} cannot be run"
    reason = f"planned: {duration(best.seconds)} a step, and {against}"
    return MeshConfig.parse(mesh_text(best.layout)), reason


def _best_as_it_is(
    config: RunConfig, workload: TransformerWorkload, cluster: Cluster, keep: Layout | None
) -> Plan | None:
    """Returns the fastest plan with the microbatches, schedule and offloading of the config."""
    train, pipeline = config.train, config.train.pipeline

    def accepts(layout: Layout) -> bool:
        piped = layout.stage == 1 or (
            schedule(layout) == pipeline.schedule and layout.chunks == pipeline.chunks
        )
        counted = train.microbatches in (AUTO, layout.microbatches)
        return piped and counted and layout.offload_optimizer <= train.offload_optimizer

    outcome = search(workload, cluster, top=1, keep=keep, accepts=accepts)
    return outcome.plans[0] if outcome.plans else None


def _as_it_is(config: RunConfig) -> TransformerWorkload:
    """Returns the workload with only the mesh left to choose."""
    _, workload = workload_of(config)
    if not isinstance(workload, TransformerWorkload):
        raise ModelError(f"{config.model.name} is not a transformer")
    train = config.train
    if train.local_sgd is not None or train.reduction != ReductionConfig():
        raise ConfigError("the config sets the groups along data")
    if config.remat not in workload.policies:
        raise ConfigError(f"the planner does not know the remat policy {config.remat}")
    rules = config.axis_rules()
    return dataclasses.replace(
        workload,
        policies=(config.remat,),
        loss_chunks=(getattr(config.model, "loss_chunks", 1),),
        **read_rules(rules),
    )


def _spec(config: RunConfig) -> DataSpec:
    """Returns the data spec of the model without reading the data."""
    spec = expected_spec(config)
    if spec.vocab_size is not None:
        return spec
    tokenizer, data = config.data.find_tokenizer(), config.data
    size = data.vocabulary(tokenizer) if tokenizer else getattr(data, "vocab_size", None)
    return dataclasses.replace(spec, vocab_size=size)


def _bytes(config: RunConfig) -> dict[str, Any]:
    """Returns the bytes per value of the state, as arguments of `Job`."""
    sizes = dict(STATE_BYTES[config.precision])
    optimizer = config.optimizer
    # In any parameter dtype; see `optim.transforms.compute_in_float32` and `optim.ema`.
    moments = _moment_bytes(config)
    if optimizer.momentum_dtype == "bfloat16":
        moments -= 2
    if optimizer.ema_decay is not None:
        moments += 4
    if optimizer.name == "muon":
        sizes["newton_schulz_steps"] = _NEWTON_SCHULZ_STEPS
    return sizes | {"moment_bytes": moments}


def _adapters(config: RunConfig, data: DataSpec, dims: Transformer) -> dict[str, Any]:
    """Returns how a job with adapters differs from full training, as arguments of `Job`."""
    if config.finetune is None:
        return {}
    make = model_maker(config, family(config.model.name), data)
    module = functional(make, (), trained(config))
    params, held = module.shapes()
    count = sum(x.size for x in jax.tree.leaves(params))
    differs: dict[str, Any] = {"trained": count / dims.num_params, "newton_schulz_steps": 0}
    if config.finetune.quantize is not None:
        dtypes = precision(config.precision)
        held = jax.eval_shape(lambda x: dtypes.store(x, module.float32, only=module.frozen), held)
        differs["param_bytes"] = sum(map(nbytes, jax.tree.leaves(held))) / dims.num_params
    return differs


def _moment_bytes(config: RunConfig) -> float:
    """Returns the bytes per parameter of an optimizer's moments in float32."""
    optimizer = config.optimizer
    if optimizer.name in _MOMENTS:
        return 4 * _MOMENTS[optimizer.name]
    plain = dataclasses.replace(optimizer, ema_decay=None)
    rule = build_optimizer(plain, steps=config.train.steps, global_batch=config.train.global_batch)
    kernel = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    state = jax.eval_shape(rule.transform.init, {"kernel": kernel})
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in arrays) / kernel.size


def _offloads(config: RunConfig) -> tuple[bool, ...]:
    """Returns the allowed choices for offloading the optimizer state."""
    if config.train.offload_optimizer:
        return (True,)
    return (False, True) if config.train.local_sgd is None else (False,)


def policies_of(config: RunConfig, data: DataSpec) -> tuple[str, ...]:
    """Returns the policies of rematerialisation that a model takes, among those worth trying: from
    the least recomputation to the most. Its config and its `validate` may refuse some."""
    if not hasattr(config.model, "remat"):
        return ("none",)
    tags = getattr(config.model, "remat_tags", ())
    known = (policy for policy in POLICIES if not remat.check(policy, tags))
    return tuple(policy for policy in known if _takes(config, policy, data))


def _takes(config: RunConfig, policy: str, data: DataSpec) -> bool:
    try:
        return not config.with_remat(policy).model_faults(data)
    except ConfigError:
        return False


def _software(config: RunConfig) -> Software:
    unfused = getattr(config.model, "attention", "auto") == "xla"
    return dataclasses.replace(SHARDLIB, attention="unfused") if unfused else SHARDLIB


def _uses(config: RunConfig) -> dict[str, Any]:
    """Returns how the custom rules of a config use the axes; empty for a preset."""
    return read_rules(config.axis_rules()) if isinstance(config.rules, RulesConfig) else {}


def read_rules(rules: AxisRules) -> dict[str, Any]:
    """Returns how rules use the axes, as values for a workload's fields."""
    residual = dict(rules.activations).get("residual_length", ())
    cut = any("fsdp" in axes for axes in dict(rules.params).get("embed", ()))
    whole = 1 if rules.gradients is None else 2
    return {
        "sequence_parallel": any("tensor" in axes for axes in residual),
        "zero": (3 if cut else whole,),
    }


def _kept(config: RunConfig) -> frozenset[str]:
    kept = {"rules"} if isinstance(config.rules, RulesConfig) else set()
    if config.train.local_sgd is not None or config.train.reduction != ReductionConfig():
        kept.add("train.reduction.dtype")
    kept |= {f"model.{key}" for key in ("remat", "loss_chunks") if not hasattr(config.model, key)}
    if config.optimizer.name == "adafactor" or config.optimizer.name not in _MOMENTS:
        kept.add("optimizer.momentum_dtype")
    return frozenset(kept)


def _own_mesh(config: RunConfig, cluster: Cluster) -> list[str]:
    """Returns the mesh of the config, if it fills the cluster."""
    if config.mesh == AUTO:
        return []
    try:
        return [str(MeshConfig.parse(config.mesh).resolve(cluster.num_devices))]
    except MeshError:
        return []


def _notes(config: RunConfig) -> list[str]:
    train, notes = config.train, []
    if precision(config.precision).dot_general is not None:
        notes.append(
            "Planned with products in bfloat16: the 8 bits of "
            f"precision={config.precision} are not priced."
        )
    if config.finetune is not None:
        notes.append("Planned with frozen weights: the matmuls of adapters are not priced.")
    if train.loss is not None and family(config.model.name).dims is not None:
        notes.append(f"Planned with the loss of the model: train.loss={train.loss} is not priced.")
    if train.local_sgd is not None or train.reduction != ReductionConfig():
        notes.append(
            "Planned as if gradients were summed over data in float32: train.local_sgd and "
            "train.reduction are not priced."
        )
    return notes


def fixes_of(
    config: RunConfig, cluster: Cluster, peak_bytes: float, *, count: int = 3
) -> list[Fix]:
    """Returns at most `count` changes that make a run fit by the cost model and cost the least
    time. The cost model is assumed to have the same error after a change as for `peak_bytes`, the
    peak of the compiled step.

    Raises:
        ModelError: If the model, its rematerialisation or its axes cannot be planned.
    """
    _, workload = workload_of(config, platform=cluster.platform)
    cluster = as_measured(cluster)
    layout, choice = layout_of(config, cluster), choice_of(config)
    predicted = workload.memory(layout, choice, cluster).total
    over = peak_bytes - predicted
    return cheapest_fixes(workload, layout, choice, cluster, count=count, over_bytes=over)


def layout_of(config: RunConfig, cluster: Cluster) -> Layout:
    """Returns the layout of a run over a cluster.

    Raises:
        ModelError: If the run has a mesh axis that the planner does not know.
    """
    sizes: dict[str, Any] = dict(MeshConfig.parse(config.mesh).resolve(cluster.num_devices).sizes)
    train = config.train
    fields = Layout.__dataclass_fields__
    if unknown := [name for name in sizes if name not in fields]:
        raise ModelError(f"the planner does not know the mesh axis {', '.join(unknown)}")
    rules = read_rules(config.axis_rules())
    return Layout(
        **sizes,
        slices=cluster.num_slices,
        microbatches=train.num_microbatches,
        chunks=train.pipeline.chunks if train.pipeline.schedule == "interleaved" else 1,
        sequence_parallel=rules["sequence_parallel"],
        zero=rules["zero"][0],
        offload_optimizer=train.offload_optimizer and cluster.chip is not None,
    )


def choice_of(config: RunConfig) -> Choice:
    """Returns the choices of a run other than its mesh.

    Raises:
        ModelError: If no plan has the ranges of its rematerialisation. A plan applies a policy to
            the same number of layers in each stage, and none to the others.
    """
    policy = config.remat
    chunks = getattr(config.model, "loss_chunks", 1)
    moments = config.optimizer.momentum_dtype
    if not policy[0].isdecimal():
        return Choice(policy, moments=moments, loss_chunks=chunks)
    num_layers = config.model.num_layers
    runs = remat.runs(policy, num_layers, length=num_layers)
    pieces = max(len(runs) // 2, 1)
    if len(runs) > 1 and (runs != runs[:2] * pieces or runs[1].policy != "none"):
        raise ModelError(f"the planner does not know the rematerialisation {policy!r}")
    return Choice(runs[0].policy, runs[0].num_layers, moments, chunks, pieces)
