"""`sl.plan`: a question about a model and a cluster, in the words of a user."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from shardlib.errors import ConfigError, MeshError, ModelError, ShardlibError
from shardlib.hardware import Cluster, MixedCluster
from shardlib.mesh import MeshSpec
from shardlib.plan.answer import Plans, nothing_found
from shardlib.plan.describe import beyond_default_share
from shardlib.plan.fabric import remarks
from shardlib.plan.mixed_answer import MixedPlans, answer_mixed
from shardlib.plan.named_models import named_model
from shardlib.plan.objective import Objective, best_found
from shardlib.plan.own_model import NOT_OF_MODULES, of_module
from shardlib.plan.problem import Plan, Workload
from shardlib.plan.question import Question, TrainPrecision, raise_all
from shardlib.plan.transformers import TransformerWorkload
from shardlib.plan.why_not import WhyNot, why_not
from shardlib.plan.workload import Experts, Job, Latent, Transformer
from shardlib.registry import DataSpec, family
from shardlib.rules import AxisRules

STATE_BYTES: dict[str, dict[str, Any]] = {
    "f32": {"precision": "f32", "compute_bytes": 4},
    "bf16": {"precision": "bf16"},
    "bf16_params": {"precision": "bf16", "param_bytes": 2},
}
"""Widths of `Job` by the precision of a run. Moments are those of AdamW, in float32 whatever the
parameters are in."""
_DEFAULT_PRECISION: TrainPrecision = "bf16"


def plan(
    model: Any,
    *,
    on: str | Cluster | MixedCluster,
    global_batch: int | None = None,
    global_batch_tokens: float | str | None = None,
    length: int | None = None,
    objective: Objective = "time",
    tokens: float | str | None = None,
    days: float | None = None,
    price: float | None = None,
    precision: TrainPrecision | None = None,
    why_not: "MeshSpec | Sequence[MeshSpec]" = (),
    top: int = 5,
    optimizer: Any = None,
    loss: Any = None,
    batch: Any = None,
    rules: AxisRules | None = None,
    inputs: Any = None,
) -> Plans | MixedPlans:
    """Returns the best plans for a model on a cluster, by the cost model.

    A Flax module of any kind is planned by its traced step; nothing is allocated or compiled:

    ```python
    plans = sl.plan(
        lambda rngs: Model(rngs=rngs),
        optimizer=optax.adam(1e-3),
        loss=lambda model, batch, rng: jnp.mean(jnp.square(model(batch["x"]) - batch["y"])),
        batch=dict.fromkeys("xy", jax.ShapeDtypeStruct((4096, 64), jnp.float32)),
        on="8xh100",
    )
    print(plans)
    ```

    Args:
        model: A name such as `llama3-70b`, the config of a model or of a run, a
            `shardlib.plan.Transformer`, any `shardlib.plan.Workload`, or what makes a module:
            `make(rngs) -> module`, or a linen module. `shardlib.plan.trace_workload` has more
            options for one (logical axes of the batch); what it returns is a model here.
        on: A cluster, such as `v5p-128` or `64x8xh100`; a chip alone (`v5p`) stands for clusters of
            every size, of which `objective`, or `tokens` and `days`, take one; `8xh100+16xa100-80`
            for GPUs of several kinds, whose shares of a batch are unequal.
        global_batch: Sequences or images of a step. Default: that of a config of a run, else what
            `global_batch_tokens` gives.
        global_batch_tokens: Tokens of a step, as a number or as in `4M` (4 x 2**20). Default 4M.
        length: Tokens of a sequence. Default: that of a config of a run, of the named model, or the
            longest that a config of a model allows.
        objective: `time`, `cost` or `chips`; see `Goal`.
        tokens: Tokens of the whole run, as a number or as in `1T` (1e12).
        days: In how many days they are to be trained on.
        price: USD for an hour of one chip, to tell what `tokens` cost.
        precision: That of `shardlib.precision`, by default `bf16`; a config of a run and a workload
            have their own.
        why_not: A mesh to explain, such as `fsdp=8,tensor=8`, or several.
        top: How many plans to return, of as many meshes.
        optimizer: Of a module: any optax transformation.
        loss: Of a module, as for `make_train_step`: `loss(model, batch, rng)`.
        batch: Of a module: a batch of a whole step, as arrays or `ShapeDtypeStruct`s.
        rules: Of a module, where they are not to be `sl.rules.STANDARD` or its ZeRO variants.
        inputs: Of a linen module: example arguments of its `__call__`, as for `init_state`.

    Raises:
        MeshError: If the cluster is unknown, or nothing fits it.
        ModelError: If the model is unknown, or keeps state of its own and the cluster is mixed.
        ConfigError: If the question is wrong, in one way or in several.
    """
    question = Question(
        on=on, objective=objective, tokens=tokens, days=days, price=price,
        global_batch=global_batch, global_batch_tokens=global_batch_tokens, length=length,
        precision=precision, why_not=why_not, top=top, of_run=hasattr(model, "planned"),
    )  # fmt: skip
    parts = {"optimizer": optimizer, "loss": loss, "batch": batch, "rules": rules, "inputs": inputs}
    return _answered(model, question, parts)


def _answered(model: Any, question: Question, parts: Mapping[str, Any]) -> Plans | MixedPlans:
    """The answer to a question that may be wrong, about a module of such parts or another model."""
    faults, found = question.faults(), None
    try:
        # What is wrong with the model is told beside what is wrong with the question.
        found = _workload(model, Question(on=question.on) if faults else question, parts)
    except ShardlibError as error:
        faults.append(error)
    raise_all(faults)
    if found is None:
        return model.planned(question)
    name, workload = found
    has_config = isinstance(workload, TransformerWorkload)
    kept = frozenset[str]() if has_config else NOT_OF_MODULES
    if question.mixed is not None:
        return answer_mixed(name, workload, question, kept=kept)
    plans = answer(name, workload, question, kept=kept)
    return dataclasses.replace(plans, in_code=not has_config)


def answer(
    name: str,
    workload: Workload,
    question: Question,
    *,
    tried: Sequence[Cluster] | None = None,
    notes: Sequence[str] = (),
    kept: frozenset[str] = frozenset(),
) -> Plans:
    """Returns the best plans of a workload on clusters of one kind.

    Args:
        name: Of the model, for people.
        workload: What is trained.
        question: What is wanted.
        tried: Clusters, smallest first; those of the question by default.
        notes: Sentences for the end of the report.
        kept: Keys of the config that no plan may set.

    Raises:
        MeshError: If nothing fits, or a mesh to explain is malformed.
    """
    goal, notes = question.goal, list(notes)
    tried = question.clusters() if tried is None else tried
    found = best_found(workload, tried, goal, top=question.top)
    if found is None and workload.relaxed() is not workload:
        # Moments in bfloat16 change the numbers, so they are tried where nothing else will do.
        relaxed = workload.relaxed()
        found = best_found(relaxed, tried, goal, top=question.top)
        if found is not None:
            workload = relaxed
            notes.append("Only with the optimizer's first moment in bfloat16 is there a plan.")
    if found is None:
        raise nothing_found(name, workload, tried, goal)
    best = found.plans[0]
    notes += remarks(best.cluster, best.layout)
    notes += beyond_default_share([(p.cluster, p.memory.total)] for p in found.plans)
    asked = _asked(workload, best.cluster, best, question.meshes)
    return Plans(name, workload, goal, found, asked, tuple(notes), kept)


def of_dims(dims: Mapping[str, Any]) -> Transformer:
    """Returns a transformer from what `ModelFamily.dims` returns."""
    parts = dict(dims)
    if parts.get("experts"):
        parts["experts"] = Experts(**parts["experts"])
    if parts.get("latent"):
        parts["latent"] = Latent(**parts["latent"])
    return Transformer(**parts)


def _asked(
    workload: Workload, cluster: Cluster, best: Plan, meshes: Sequence[MeshSpec]
) -> tuple[WhyNot, ...]:
    found, faults = [], []
    for mesh in meshes:
        try:
            found.append(why_not(workload, cluster, best, mesh))
        except MeshError as error:
            faults.append(str(error))
    if faults:
        raise MeshError("\n".join(faults))
    return tuple(found)


def _workload(
    model: Any, question: Question, parts: Mapping[str, Any]
) -> tuple[str, Workload] | None:
    """The name and the workload behind whatever was given as a model; None for a run's config."""
    if hasattr(model, "bound") and question.precision is not None:
        raise ConfigError(
            f"precision is {question.precision}, but {_name_of(model)} is a workload with its own."
            "\n  Leave it out, or trace the model with another."
        )
    precision = question.precision or _DEFAULT_PRECISION
    model = of_module(model, **parts, precision=precision)
    if hasattr(model, "planned"):
        return None
    if hasattr(model, "bound"):
        return _name_of(model), _resized(model, question)
    name, dims, length = _of_dims(model, question.length)
    if length is None:
        raise ConfigError(
            f"nothing says how long the sequences of {name} are.\n  Give length, in tokens."
        )
    job = Job(dims, length, question.rows(length), **STATE_BYTES[precision])
    return name, TransformerWorkload(job)


def _name_of(workload: Any) -> str:
    return getattr(workload, "name", type(workload).__name__)


def _resized(workload: Workload, question: Question) -> Workload:
    """A workload with the batch that is asked for."""
    name = _name_of(workload)
    if workload.unit != "tokens":
        question.check_without_tokens(name, workload.unit)
    elif question.length is not None:
        raise ConfigError(
            f"length is {question.length}, but {name} was traced with a batch of its own.\n"
            "  Leave it out, or give a batch of that length."
        )
    return workload.with_batch(question.rows(workload.tokens // workload.batch, workload.batch))


def _of_dims(model: Any, length: int | None) -> tuple[str, Transformer, int | None]:
    """The name, the dims and the length of whatever has dims."""
    if isinstance(model, Transformer):
        return "the transformer", model, length
    if not isinstance(model, str):
        return _of_config(model, length)
    if model.endswith((".yaml", ".yml")):
        raise ModelError(
            f"{model!r} is a file and no name of a model.\n"
            f"  Give shardlib.config.load(shardlib.run.RunConfig, {model!r}), or write "
            f"shardlib plan {model} --on ..."
        )
    named = named_model(model)
    return model, named.model, length or named.length


def _of_config(config: Any, length: int | None) -> tuple[str, Transformer, int | None]:
    name = getattr(config, "name", None)
    if not isinstance(name, str):
        raise ModelError(
            f"{type(config).__name__} cannot be planned.\n"
            "  Give the name of a model, a config, a shardlib.plan.Transformer, a Workload or, "
            "with optimizer, loss and batch, what makes a module: lambda rngs: Model(rngs=rngs)."
        )
    found = family(name)
    length = length or getattr(config, "max_positions", None)
    vocab = getattr(config, "vocab_size", None)
    if found.dims is None:
        raise ModelError(
            f"the family {name!r} does not say its dims as a transformer.\n"
            "  Plan its config of a run, which is traced: shardlib plan CONFIG --on ..."
        )
    if vocab is None:
        raise ConfigError(f"the config of {name!r} has no vocab_size.\n  Set it.")
    dims = found.dims(config, DataSpec(vocab_size=vocab, sequence_length=length))
    return name, of_dims(dims), length
