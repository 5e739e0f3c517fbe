"""`sl.plan`: a question about a model and a cluster, in the words of a user."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from shardlib.errors import ConfigError, MeshError, ModelError, ShardlibError
from shardlib.hardware import Cluster
from shardlib.mesh import MeshSpec
from shardlib.plan.answer import Plans, nothing_found
from shardlib.plan.named_models import named_model
from shardlib.plan.objective import Goal, Objective, best_found, clusters
from shardlib.plan.problem import Plan, Workload
from shardlib.plan.transformers import TransformerWorkload
from shardlib.plan.why_not import WhyNot, why_not
from shardlib.plan.workload import Experts, Job, Latent, Transformer
from shardlib.registry import DataSpec, family

TrainPrecision = Literal["f32", "bf16", "bf16_params"]
STATE_BYTES: dict[str, dict[str, Any]] = {
    "f32": {"precision": "f32", "compute_bytes": 4},
    "bf16": {"precision": "bf16"},
    "bf16_params": {"precision": "bf16", "param_bytes": 2, "moment_bytes": 4},
}
"""Widths of `Job` by the precision of a run; the moments are those of AdamW."""
_DEFAULT_TOKENS = 2.0**22
_BINARY = {"": 1.0, "k": 2.0**10, "m": 2.0**20, "g": 2.0**30}
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@dataclasses.dataclass(frozen=True)
class Question:
    """What a plan is wanted for, besides the model. See `plan` for the fields.

    Raises:
        ConfigError: If a number or the objective is wrong, or there are several faults.
        MeshError: If the cluster is unknown.
    """

    on: str | Cluster
    objective: Objective = "time"
    tokens: float | str | None = None
    days: float | None = None
    price: float | None = None
    global_batch: int | None = None
    global_batch_tokens: float | str | None = None
    length: int | None = None
    why_not: Sequence[MeshSpec] = ()
    top: int = 5

    def __post_init__(self) -> None:
        faults: list[ShardlibError] = []
        for check in (lambda: self.goal, lambda: self.batch_tokens, self._check_counts):
            try:
                check()
            except ShardlibError as error:
                faults.append(error)
        try:
            objective = "time" if faults else self.objective
            clusters(self.on, objective) if isinstance(self.on, str) else None
        except ShardlibError as error:
            faults.append(error)
        raise_all(faults)

    @functools.cached_property
    def goal(self) -> Goal:
        """What decides between plans."""
        return Goal(self.objective, tokens_of(self.tokens, _DECIMAL), self.days, self.price)

    @functools.cached_property
    def batch_tokens(self) -> float | None:
        """Tokens of a step, where they are given."""
        return tokens_of(self.global_batch_tokens, _BINARY)

    def clusters(self) -> list[Cluster]:
        """Returns the clusters to try, smallest first.

        Raises:
            MeshError: If a chip is named without a size, and nothing says how many are wanted.
        """
        if isinstance(self.on, Cluster):
            return [self.on]
        return clusters(self.on, self.objective, deadline=self.days is not None)

    def rows(self, length: int, default: int | None = None) -> int:
        """Returns the sequences of a step: as asked, or nearest to the tokens that were asked for.

        Args:
            length: Tokens of a sequence.
            default: What a config says, where nothing is asked.
        """
        if self.global_batch is not None:
            return self.global_batch
        if self.batch_tokens is None and default is not None:
            return default
        return max(1, round((self.batch_tokens or _DEFAULT_TOKENS) / length))

    def _check_counts(self) -> None:
        faults = [
            f"{name} is {value}, but must be at least 1.\n  Give another number."
            for name in ("global_batch", "length", "top")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.global_batch is not None and self.global_batch_tokens is not None:
            faults.append("global_batch and global_batch_tokens exclude each other.\n  Give one.")
        if faults:
            raise ConfigError("\n".join(faults))


def plan(
    model: Any,
    *,
    on: str | Cluster,
    global_batch: int | None = None,
    global_batch_tokens: float | str | None = None,
    length: int | None = None,
    objective: Objective = "time",
    tokens: float | str | None = None,
    days: float | None = None,
    price: float | None = None,
    precision: TrainPrecision = "bf16",
    why_not: Sequence[MeshSpec] = (),
    top: int = 5,
) -> Plans:
    """Returns the best plans for a model on a cluster, by the cost model.

    Args:
        model: A name such as `llama3-70b`, the config of a model or of a run, a
            `shardlib.plan.Transformer`, or any `shardlib.plan.Workload`.
        on: A cluster, such as `v5p-128` or `64x8xh100`; a chip alone (`v5p`) stands for clusters of
            every size, of which `objective`, or `tokens` and `days`, take one.
        global_batch: Sequences or images of a step. Default: that of a config of a run, else what
            `global_batch_tokens` gives.
        global_batch_tokens: Tokens of a step, as a number or as in `4M` (4 x 2**20). Default 4M.
        length: Tokens of a sequence. Default: that of a config of a run, of the named model, or the
            longest that a config of a model allows.
        objective: `time`, `cost` or `chips`; see `Goal`.
        tokens: Tokens of the whole run, as a number or as in `1T` (1e12).
        days: In how many days they are to be trained on.
        price: USD for an hour of one chip.
        precision: That of `shardlib.precision`; a config of a run has its own.
        why_not: Meshes to explain, such as `fsdp=8,tensor=8`.
        top: How many plans to return, of as many meshes.

    Raises:
        MeshError: If the cluster is unknown, or nothing fits it.
        ModelError: If the model is unknown.
        ConfigError: If the question is wrong, in one way or in several.
    """
    question = None
    faults: list[ShardlibError] = []
    try:
        question = Question(
            on,
            objective,
            tokens,
            days,
            price,
            global_batch,
            global_batch_tokens,
            length,
            tuple(why_not),
            top,
        )
    except ShardlibError as error:
        faults += error.faults if isinstance(error, _SeveralFaults) else [error]
    if hasattr(model, "planned"):
        raise_all(faults)
        return model.planned(question)
    name, workload = "", None
    try:
        name, workload = _workload(model, question, precision)
    except ShardlibError as error:
        faults.append(error)
    raise_all(faults)
    assert question is not None
    assert workload is not None
    return answer(name, workload, question)


def answer(
    name: str,
    workload: Workload,
    question: Question,
    *,
    tried: Sequence[Cluster] | None = None,
    notes: Sequence[str] = (),
    kept: frozenset[str] = frozenset(),
) -> Plans:
    """Returns the best plans of a workload.

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
    found = best_found(workload, tried, goal, workload.tokens, top=question.top)
    if found is None and workload.relaxed() is not workload:
        # Moments in bfloat16 change the numbers, so they are tried where nothing else will do.
        relaxed = workload.relaxed()
        found = best_found(relaxed, tried, goal, workload.tokens, top=question.top)
        if found is not None:
            workload = relaxed
            notes.append("Only with the optimizer's first moment in bfloat16 is there a plan.")
    if found is None:
        raise nothing_found(name, workload, tried, goal)
    best = found.plans[0]
    asked = _asked(workload, best.cluster, best, question.why_not)
    return Plans(name, workload, goal, found, asked, tuple(notes), kept)


def tokens_of(given: float | str | None, units: Mapping[str, float]) -> float | None:
    """Returns a number of tokens, of which `4M` and the like are read by `units`.

    Raises:
        ConfigError: If it is no positive number.
    """
    if given is None:
        return None
    match = re.fullmatch(r"\s*([\d_.]+(?:e\+?\d+)?)\s*([a-z]?)\s*", str(given).lower())
    try:
        assert match is not None
        number = float(match[1].replace("_", "")) * units[match[2]]
        assert number > 0
    except (AssertionError, KeyError, ValueError):
        raise ConfigError(
            f"{given!r} is no number of tokens.\n"
            f"  Write one as in 4M, with {', '.join(u.upper() for u in units if u)} or none."
        ) from None
    return number


def raise_all(faults: Sequence[ShardlibError]) -> None:
    """Raises what is in `faults`: one as it is, several as one `ConfigError`."""
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise _SeveralFaults(faults)


class _SeveralFaults(ConfigError):
    """All that is wrong with a question."""

    def __init__(self, faults: Sequence[ShardlibError]):
        lines = (str(fault).replace("\n", "\n  ") for fault in faults)
        super().__init__(f"the question has {len(faults)} faults:\n  " + "\n  ".join(lines))
        self.faults = tuple(faults)


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
    model: Any, question: Question | None, precision: TrainPrecision
) -> tuple[str, Workload]:
    """The name and the workload behind whatever was given as a model."""
    length = question.length if question else 1
    if hasattr(model, "bound"):
        found = cast(Workload, model)
        batch = question.global_batch if question else None
        return type(model).__name__, found if batch is None else found.with_batch(batch)
    if isinstance(model, str):
        named = named_model(model)
        name, dims, length = model, named.model, length or named.length
    elif isinstance(model, Transformer):
        name, dims = "the transformer", model
    else:
        name, dims, length = _of_config(model, length)
    if length is None:
        raise ConfigError(
            f"nothing says how long the sequences of {name} are.\n  Give length, in tokens."
        )
    if precision not in STATE_BYTES:
        raise ConfigError(
            f"no precision is called {precision!r}.\n  Choose one of: {', '.join(STATE_BYTES)}."
        )
    rows = question.rows(length) if question else 1
    return name, TransformerWorkload(Job(dims, length, rows, **STATE_BYTES[precision]))


def _of_config(config: Any, length: int | None) -> tuple[str, Transformer, int | None]:
    name = getattr(config, "name", None)
    if not isinstance(name, str):
        raise ModelError(
            f"{type(config).__name__} cannot be planned.\n"
            "  Give the name of a model, a config, a shardlib.plan.Transformer or a Workload."
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
