"""`sl.plan`: the best plans for a model on a cluster, from user-facing arguments."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import PyTree

from shardlib.config import from_dict
from shardlib.cost.machine.fabric import remarks
from shardlib.cost.workload import Experts, Job, Latent, Transformer
from shardlib.errors import ConfigError, ModelError, ShardlibError
from shardlib.hardware import Cluster, MixedCluster
from shardlib.mesh import MeshSpec
from shardlib.plan.answer import beyond_default_share, explained, relaxing
from shardlib.plan.mixed_result import MixedPlans, answer_mixed
from shardlib.plan.objective import Objective, best_found
from shardlib.plan.problem import Workload
from shardlib.plan.request import Question, TrainPrecision, raise_all
from shardlib.plan.result import Plans, nothing_found
from shardlib.plan.why_not import why_not
from shardlib.plan.workloads.module import NOT_OF_MODULES, of_module
from shardlib.plan.workloads.named_models import NAMED, canonical, named_model
from shardlib.plan.workloads.transformer import TransformerWorkload
from shardlib.registry import DataSpec, family, sizes
from shardlib.rules import AxisRules

if TYPE_CHECKING:
    import optax

STATE_BYTES: dict[str, dict[str, Any]] = {
    "f32": {"precision": "f32", "compute_bytes": 4},
    "bf16": {"precision": "bf16"},
    "bf16_params": {"precision": "bf16", "param_bytes": 2},
    # Products in 8 bits are priced as those in bfloat16.
    "fp8": {"precision": "bf16"},
    "int8": {"precision": "bf16"},
}
"""Widths of `Job` by the precision of a run. Moments follow AdamW: float32, whatever the dtype of
the parameters."""
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
    optimizer: "optax.GradientTransformation | None" = None,
    loss: Callable[..., Any] | None = None,
    batch: PyTree = None,
    rules: AxisRules | None = None,
    inputs: PyTree = None,
) -> Plans | MixedPlans:
    """Returns the best plans for a model on a cluster, ranked by the cost model.

    Any Flax module is planned from its traced step; nothing is allocated or compiled:

    ```python
    batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((4096, 64), jnp.float32))
    print(sl.plan(Model, optimizer=optax.adam(1e-3), loss=loss_fn, batch=batch, on="8xh100"))
    ```

    Args:
        model: A name such as `llama3-70b`, the config of a model or of a run, `make(rngs) ->
            module`, a linen module, or a `Transformer` or any `Workload` of `shardlib.plan`. Its
            `trace_workload` has more options for modules.
        on: A cluster, such as `v5p-128` or `64x8xh100`; a chip alone (`v5p`) for clusters of every
            size, of which `objective`, or `tokens` and `days`, select one; or `8xh100+16xa100-80`
            for GPUs of several kinds, which take unequal shares of a batch.
        global_batch, global_batch_tokens: Sequences or images per step, or tokens, as a number or
            as in `4M` (4 x 2**20). Default: the value in the config of a run, or else 4M tokens.
        length: Tokens per sequence. Default: that of the run or of the named model, or the longest
            that the config of a model allows.
        objective, precision: `time`, `cost` or `chips`, see `Goal`; and by default `bf16`, where
            the model does not say.
        tokens, days, price: Tokens of the whole run, also as in `1T`, its days, USD per chip-hour.
        why_not, top: A mesh to explain (`fsdp=8,tensor=8`), or several; the number of plans.
        optimizer, loss, batch, rules, inputs: For modules: any optax transformation, the loss of
            `make_train_step`, the arrays or `ShapeDtypeStruct`s of a whole step, rules other than
            `sl.rules.STANDARD` and its ZeRO variants, and for linen arguments of `__call__`.

    Raises:
        MeshError: If the cluster is unknown, or nothing fits it.
        ModelError: If the model is unknown, or has state and the cluster is mixed.
        ConfigError: If arguments are wrong.
    """
    question = Question(
        on=on, objective=objective, tokens=tokens, days=days, price=price, length=length,
        global_batch=global_batch, global_batch_tokens=global_batch_tokens, precision=precision,
        why_not=why_not, top=top, of_run=hasattr(model, "planned"),
    )  # fmt: skip
    parts = {"optimizer": optimizer, "loss": loss, "batch": batch, "rules": rules, "inputs": inputs}
    return _answered(model, question, parts)


def _answered(model: Any, question: Question, parts: Mapping[str, Any]) -> Plans | MixedPlans:
    """Returns the answer to a question about a model or a module with `parts`, after validation."""
    faults, named_workload = question.faults(), None
    try:
        # Faults of the model are reported together with faults of the question.
        named_workload = _workload(model, Question(on=question.on) if faults else question, parts)
    except ShardlibError as error:
        faults.append(error)
    raise_all(faults)
    if named_workload is None:
        return model.planned(question)
    name, workload = named_workload
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
    """Returns the best plans of a workload on clusters of one kind. `tried` are clusters, smallest
    first; by default the clusters of the question. `notes` are appended to the report, and no plan
    sets the keys that are `kept`.

    Raises:
        MeshError: If nothing fits, or a mesh to explain is malformed.
    """
    goal = question.goal
    clusters = question.clusters() if tried is None else tried
    found, workload, relaxed = relaxing(
        workload, lambda work: best_found(work, clusters, goal, top=question.top)
    )
    if found is None:
        raise nothing_found(name, workload, clusters, goal)
    best = found.plans[0]
    asked = explained(question.meshes, lambda mesh: why_not(workload, best.cluster, best, mesh))
    default_share = beyond_default_share([(p.cluster, p.memory.total)] for p in found.plans)
    notes = (*notes, *relaxed, *remarks(best.cluster, best.layout), *default_share)
    return Plans(name, workload, goal, found, asked, notes, kept)


def of_dims(dims: Mapping[str, Any]) -> Transformer:
    """Returns a transformer from the result of `ModelFamily.dims`."""
    parts = dict(dims)
    if parts.get("experts"):
        parts["experts"] = Experts(**parts["experts"])
    if parts.get("latent"):
        parts["latent"] = Latent(**parts["latent"])
    return Transformer(**parts)


def _workload(
    model: Any, question: Question, parts: Mapping[str, Any]
) -> tuple[str, Workload] | None:
    """Returns the name and the workload of a model argument; None for the config of a run."""
    if hasattr(model, "bound") and question.precision is not None:
        raise ConfigError(
            f"precision is {question.precision}, but {_name_of(model)} is a workload with its own."
            "\n  Leave it out, or trace the model with another."
        )
    precision = question.precision or _DEFAULT_PRECISION
    model = of_module(model, **parts, precision=precision, platform=question.platform)
    if hasattr(model, "planned"):
        return None
    if hasattr(model, "bound"):
        return _name_of(model), _resized(model, question)
    name, dims, length, causal = _of_dims(model, question.length)
    if length is None:
        raise ConfigError(f"the sequence length of {name} is not known.\n  Give length, in tokens.")
    widths = STATE_BYTES[precision]
    job = Job(dims, length, question.rows(length), causal=causal, **widths)
    return name, TransformerWorkload(job)


def _name_of(workload: object) -> str:
    return getattr(workload, "name", type(workload).__name__)


def _resized(workload: Workload, question: Question) -> Workload:
    """Returns a workload with the requested batch."""
    name = _name_of(workload)
    if workload.unit != "tokens":
        question.check_without_tokens(name, workload.unit)
    elif question.length is not None:
        raise ConfigError(
            f"length is {question.length}, but {name} was traced with a batch of its own.\n"
            "  Leave it out, or give a batch of that length."
        )
    return workload.with_batch(question.rows(workload.tokens // workload.batch, workload.batch))


def _of_dims(model: object, length: int | None) -> tuple[str, Transformer, int | None, bool]:
    """Returns the name, the dims and the length of a model that has dims, and whether it is
    causal."""
    if isinstance(model, Transformer):
        return "the transformer", model, length, True
    if not isinstance(model, str):
        return *_of_config(model, length), True
    if model.endswith((".yaml", ".yml")):
        raise ModelError(
            f"{model!r} is a file, not the name of a model.\n"
            f"  Give shardlib.config.load(shardlib.run.RunConfig, {model!r}), or write "
            f"shardlib plan {model} --on ..."
        )
    key = canonical(model)
    if key not in NAMED and key in (known := sizes()):
        name, fields = known[key]
        if family(name).dims is None:
            raise ModelError(
                f"{key} is planned from its traced step, which needs the config of a run.\n"
                f"  Write one with model: {key}, and shardlib plan CONFIG --on CLUSTER."
            )
        config = from_dict(family(name).config, fields, key)
        return model, *_of_config(config, length)[1:], True
    named = named_model(model, sizes())
    return model, named.model, length or named.length, named.causal


def _of_config(config: object, length: int | None) -> tuple[str, Transformer, int | None]:
    name = getattr(config, "name", None)
    if not isinstance(name, str):
        raise ModelError(
            f"{type(config).__name__} cannot be planned.\n"
            "  Give the name of a model, a config, a shardlib.plan.Transformer, a Workload or, "
            "with optimizer, loss and batch, a module factory: lambda rngs: Model(rngs=rngs)."
        )
    model_family = family(name)
    length = length or getattr(config, "max_positions", None)
    vocab = getattr(config, "vocab_size", None)
    if model_family.dims is None:
        raise ModelError(
            f"the family {name!r} does not give its dims as a transformer.\n"
            "  Plan its run config, which is traced: shardlib plan CONFIG --on ..."
        )
    if vocab is None:
        raise ConfigError(f"the config of {name!r} has no vocab_size.\n  Set it.")
    dims = model_family.dims(config, DataSpec(vocab_size=vocab, sequence_length=length))
    return name, of_dims(dims), length
