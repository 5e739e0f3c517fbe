"""Answers about serving: the best plans, and their report."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from shardlib.humanize import count, duration, gib, plural
from shardlib.plan.answer import beyond_default_share
from shardlib.plan.search import capacity_bytes
from shardlib.plan.serving.question import ServingQuestion
from shardlib.plan.serving.refusals import does_not_fit, too_late
from shardlib.plan.serving.search import CHUNKS, ServingPlan, best_of, rank, replicas_of
from shardlib.plan.serving.served_model import ServedModel
from shardlib.tables import Report, Table

_ROOFLINE = (
    "Predicted steps read weights, keys and values once, at the bandwidth of the memory. Where XLA "
    "reads keys and values, as on GPUs, and on TPUs for most heads without 128 dims, it takes "
    "longer."
)
_ON_GPUS = (
    "Compiled for GPUs, a step copies the kernels of each layer before it multiplies, and widens "
    "int8 there. This is not predicted."
)
_ENGINES = (
    "Each engine is a server of its own; spread requests over them. One engine along data steps "
    "all copies together: a prompt that one of them reads slows the tokens of all."
)
_SHOWN_SLOTS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class ServingPlans(Report):
    """The best plans to serve a model, one for each mesh; `str()` gives the report."""

    model: ServedModel
    question: ServingQuestion
    plans: tuple[ServingPlan, ...]
    """Best first: of plans that answer as many tokens per second, that with the soonest first
    token."""
    by_slots: tuple[ServingPlan, ...]
    """The mesh and chunk of the best plan with other numbers of slots, whether or not they keep the
    times."""
    other: ServingPlan | None
    """The best plan with the same copies and another number of engines."""

    @property
    def best(self) -> ServingPlan:
        """The best plan."""
        return self.plans[0]

    @functools.cached_property
    def notes(self) -> list[str]:
        """What the prediction assumes, and what the user must set."""
        cluster, found = self.question.cluster, [_ROOFLINE]
        if cluster.platform == "gpu":
            found.append(_ON_GPUS)
        if any(plan.engines > 1 for plan in self.plans):
            found.append(_ENGINES)
        return [*found, *beyond_default_share([(cluster, p.memory.total)] for p in self.plans)]

    def parts(self) -> Iterable[Any]:
        """Yields the parts of the report."""
        question, best, cluster = self.question, self.best, self.question.cluster
        yield (
            f"{self.model.name} ({count(self.model.num_params)} parameters, {question.kinds}) on "
            f"{cluster.name}: prompts of {question.prompt:,} tokens, answers of "
            f"{question.answer:,}"
        )
        yield (
            f"{_summary(best, question)}\n"
            f"  a device holds {gib(best.memory.total)} of {gib(capacity_bytes(cluster))}: weights "
            f"{gib(best.memory.weights)}, cache {gib(best.memory.cache)}, temporaries "
            f"{gib(best.memory.temporaries)}, runtime {gib(best.memory.runtime)}\n"
            f"  a step that decodes is {_largest(best)}"
        )
        if self.other is not None:
            yield f"With another number of engines: {_summary(self.other, question)}"
        yield Table(
            "Meshes of an engine",
            ("mesh", "engines>", "slots>", "fit>", "longest>", "chunk>", "first token>",
             "token>", "reading>", "tokens/s>", "weights>", "cache>"),
            [_row(plan) for plan in self.plans],
        )  # fmt: skip
        yield Table(
            f"Slots of mesh={best.mesh}, chunk={best.chunk}",
            ("slots>", "first token>", "token>", "reading>", "tokens/s>", "cache>", "keeps"),
            [self._slots_row(plan) for plan in self.by_slots],
            notes=self.notes,
        )

    def _slots_row(self, plan: ServingPlan) -> tuple[str, ...]:
        return (
            str(plan.slots),
            duration(plan.first_token_seconds),
            duration(plan.token_seconds),
            duration(plan.slowest_token_seconds),
            count(plan.tokens_per_second),
            gib(plan.memory.cache),
            "no" if plan.late(self.question) else "yes",
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer as plain data, in seconds and bytes."""
        question = self.question
        return {
            "model": self.model.name,
            "parameters": self.model.num_params,
            "cluster": question.cluster.name,
            "context": question.context,
            "prompt": question.prompt,
            "precision": question.precision,
            "weights": question.weights,
            "cache": question.cache,
            "slo": dataclasses.asdict(question.slo),
            "capacity": capacity_bytes(question.cluster),
            "plans": [_facts(plan) for plan in self.plans],
            "by_slots": [_facts(plan) for plan in self.by_slots],
            "other": None if self.other is None else _facts(self.other),
            "notes": self.notes,
        }


def _row(plan: ServingPlan) -> tuple[str, ...]:
    return (
        plan.mesh,
        str(plan.engines),
        str(plan.slots),
        str(plan.most_slots),
        f"{plan.longest_context:,}",
        str(plan.chunk),
        duration(plan.first_token_seconds),
        duration(plan.token_seconds),
        duration(plan.slowest_token_seconds),
        count(plan.tokens_per_second),
        gib(plan.memory.weights),
        gib(plan.memory.cache),
    )


def _summary(plan: ServingPlan, question: ServingQuestion) -> str:
    """Returns the sizes and times of a plan in two lines."""
    return (
        f"{plural(plan.engines, 'engine')} of mesh={plan.mesh}, rules serve: "
        f"slots={plan.slots}, context={question.context}, chunk={plan.chunk}\n"
        f"  first token after {duration(plan.first_token_seconds)}, then one every "
        f"{duration(plan.token_seconds)} ({duration(plan.slowest_token_seconds)} while a "
        f"prompt is read); {count(plan.tokens_per_second)} tokens/s in all"
    )


def _largest(plan: ServingPlan) -> str:
    """Returns the three largest parts of a step."""
    parts = sorted(plan.decode.parts.items(), key=lambda part: -part[1])[:3]
    total = plan.decode.total
    return ", ".join(f"{seconds / total:.0%} {name}" for name, seconds in parts if seconds > 0)


def _facts(plan: ServingPlan) -> dict[str, Any]:
    return {
        "mesh": plan.mesh,
        "engines": plan.engines,
        "slots": plan.slots,
        "chunk": plan.chunk,
        "most_slots": plan.most_slots,
        "longest_context": plan.longest_context,
        "first_token_seconds": plan.first_token_seconds,
        "token_seconds": plan.token_seconds,
        "slowest_token_seconds": plan.slowest_token_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "memory": vars(plan.memory) | {"total": plan.memory.total},
        "decode": {name: s for name, s in plan.decode.parts.items() if s > 0},
        "mixed": {name: s for name, s in plan.mixed.parts.items() if s > 0},
    }


def answer(model: ServedModel, question: ServingQuestion, top: int) -> ServingPlans:
    """Returns the best plans.

    Raises:
        MeshError: If the model does not fit the cluster, or no plan keeps the times.
    """
    replicas = replicas_of(model, question)
    if not replicas or all(one.over(1, CHUNKS[0]) > 0 for one in replicas):
        raise does_not_fit(model, question, replicas)
    best = [
        (one, plan)
        for one in replicas
        for engines in one.engines
        if (plan := best_of(one.plans(engines), question))
    ]
    if not best:
        raise too_late(model, question, replicas)
    most = max(plan.tokens_per_second for _, plan in best)
    best.sort(key=lambda pair: rank(pair[1], most))
    chosen, first = best[0]
    own = first.slots // first.copies
    shown = sorted({n for n in (*_SHOWN_SLOTS, own) if n * first.copies <= first.most_slots})
    by_slots = tuple(chosen.plan(slots, first.chunk, first.engines) for slots in shown)
    others = (plan for one, plan in best if one is chosen and plan is not first)
    shown_plans = tuple(plan for _, plan in best[:top])
    return ServingPlans(model, question, shown_plans, by_slots, next(others, None))
