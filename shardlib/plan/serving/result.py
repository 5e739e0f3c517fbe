"""Answers about serving: the report, and the errors where nothing fits."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shardlib.cost.layout import Layout
from shardlib.errors import MeshError
from shardlib.hardware import Cluster
from shardlib.humanize import count, duration, gib, plural
from shardlib.plan.answer import beyond_default_share
from shardlib.plan.objective import next_larger, roomier
from shardlib.plan.search import capacity_bytes
from shardlib.plan.serving.question import ServingQuestion, Slo
from shardlib.plan.serving.search import (
    ALIKE,
    CHUNKS,
    Replica,
    ServingPlan,
    best_of,
    chunks_for,
    replicas_of,
)
from shardlib.plan.serving.served_model import ServedModel
from shardlib.tables import Report, Table

_ROOFLINE = (
    "Predicted steps read weights, keys and values once, at the bandwidth of the memory. The "
    "engine has no kernel of its own for keys and values yet, and takes longer."
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
        f"  first token after {duration(plan.first_token_seconds)}, then one each "
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
        raise _does_not_fit(model, question, replicas)
    best = [
        (one, plan)
        for one in replicas
        for engines in one.engines
        if (plan := best_of(one.plans(engines), question))
    ]
    if not best:
        raise _too_late(model, question, replicas)
    most = max(plan.tokens_per_second for _, plan in best)
    best.sort(key=lambda pair: _rank(pair[1], most))
    chosen, first = best[0]
    own = first.slots // first.copies
    shown = sorted({n for n in (*_SHOWN_SLOTS, own) if n * first.copies <= first.most_slots})
    by_slots = tuple(chosen.plan(slots, first.chunk, first.engines) for slots in shown)
    others = (plan for one, plan in best if one is chosen and plan is not first)
    shown_plans = tuple(plan for _, plan in best[:top])
    return ServingPlans(model, question, shown_plans, by_slots, next(others, None))


def one_engine(
    model: ServedModel,
    question: ServingQuestion,
    sizes: Mapping[str, int] | None,
    slots: int | None,
    chunk: int | None,
) -> tuple[Replica, ServingPlan]:
    """Returns the best plan with one engine on the whole cluster.

    Args:
        model, question: The model and the question.
        sizes: Sizes of its mesh axes; None for any.
        slots: Its slots, rounded up to what its copies divide; None for any number that fits.
        chunk: Tokens of prompts that a step of each copy reads; None for any number.

    Raises:
        MeshError: If the model does not fit, or the rules `serve` cannot place it on the mesh.
    """
    every = replicas_of(model, question)
    replicas = [one for one in every if sizes is None or _is_on(one.layout, sizes)]
    if every and not replicas:
        known = ", ".join(one.plan(1, CHUNKS[0], 1).mesh for one in every)
        raise MeshError(
            f"the rules serve cannot place {model.name} on this mesh of {question.cluster.name}.\n"
            f"  Choose one of: {known}."
        )
    found = []
    for one in replicas:
        plans = one.plans(1, chunk) if slots is None else _of_slots(one, slots, chunk)
        if best := best_of(plans, question):
            found.append((one, best))
    if not found:
        raise _does_not_fit(model, question, replicas)
    most = max(plan.tokens_per_second for _, plan in found)
    return min(found, key=lambda pair: _rank(pair[1], most))


def _is_on(layout: Layout, sizes: Mapping[str, int]) -> bool:
    """Returns whether a layout is that of a mesh; `data` and `fsdp` both divide slots."""
    cut = {axis: n for axis, n in sizes.items() if n > 1 and axis not in ("data", "fsdp")}
    return cut == {axis: n for axis in ("expert", "tensor") if (n := layout.size(axis)) > 1}


def _of_slots(replica: Replica, slots: int, chunk: int | None) -> Iterator[ServingPlan]:
    own = -(-slots // replica.layout.data)
    for one in chunks_for(replica.question) if chunk is None else [chunk]:
        yield replica.plan(own, one, 1)


def _rank(plan: ServingPlan, most: float) -> tuple[bool, float]:
    """Returns the rank of a plan where the best answers `most` tokens per second."""
    rate = plan.tokens_per_second
    return (False, plan.first_token_seconds) if rate >= ALIKE * most else (True, -rate)


def _does_not_fit(
    model: ServedModel, question: ServingQuestion, replicas: list[Replica]
) -> MeshError:
    cluster = question.cluster
    if not replicas:
        return MeshError(
            f"the rules serve cannot place {model.name} on {cluster.name}.\n"
            "  Name a cluster of another number of devices."
        )
    least = replicas[-1]
    held, mesh = least.memory(1, CHUNKS[0]), least.plan(1, CHUNKS[0], least.engines[0]).mesh
    lines = [
        f"{model.name} does not fit {cluster.name}: its leanest mesh ({mesh}) needs "
        f"{gib(held.total)} on a device for one sequence of {question.context:,} tokens, and "
        f"{gib(least.usable_bytes)} can be used: {gib(least.over(1, CHUNKS[0]))} are missing "
        f"(weights {gib(held.weights)}, cache {gib(held.cache)})."
    ]
    longest = least.longest_context(CHUNKS[0])
    if longest >= 2:
        lines.append(f"  Shorten the context to {longest:,} tokens.")

    def fits(other: Cluster) -> bool:
        found = replicas_of(model, dataclasses.replace(question, cluster=other))
        return any(one.over(1, CHUNKS[0]) <= 0 for one in found)

    lines += [f"  Take {other.name}." for other in _clusters(cluster, fits)]
    if len(lines) == 1:
        lines.append("  Choose a smaller model, or chips with more memory.")
    return MeshError("\n".join(lines))


def _clusters(cluster: Cluster, suits: Callable[[Cluster], bool]) -> list[Cluster]:
    """Returns the next larger cluster that suits, and the first of chips with more memory."""
    larger = next_larger(cluster)
    while larger is not None and not suits(larger):
        larger = next_larger(larger)
    roomy = next((other for other in roomier(cluster) if suits(other)), None)
    return [other for other in (larger, roomy) if other is not None]


def _too_late(model: ServedModel, question: ServingQuestion, replicas: list[Replica]) -> MeshError:
    """Returns the error for times that no plan keeps, with what it takes to keep the rest."""
    plans = [plan for one in replicas for plan in one.plans(one.engines[0])]
    slo, cluster = question.slo, question.cluster
    lines = [f"no plan of {model.name} on {cluster.name} keeps {_text(slo)}."]
    ways = (
        ("ttft", "first_token_seconds", "the soonest first token takes"),
        ("itl", "slowest_token_seconds", "the shortest time between tokens is"),
    )
    for name, key, what in ways:
        if getattr(slo, name) is None:
            continue
        others = dataclasses.replace(slo, **{name: None})
        asked = dataclasses.replace(question, slo=others)
        kept = [plan for plan in plans if not plan.late(asked)]
        best = min(kept or plans, key=lambda plan: getattr(plan, key))
        rest = f" with {_text(others)}" if kept and others != Slo() else ""
        lines.append(
            f"  Allow {name}={_time(getattr(best, key))}: {what} that{rest}, by mesh={best.mesh}, "
            f"{plural(best.slots, 'slot')}, chunk={best.chunk}."
        )

    def keeps(other: Cluster) -> bool:
        asked = dataclasses.replace(question, cluster=other)
        return any(best_of(one.plans(one.engines[0]), asked) for one in replicas_of(model, asked))

    shorter = dataclasses.replace(question, prompt=max(question.prompt // 4, 1))
    if any(best_of(one.plans(one.engines[0]), shorter) for one in replicas_of(model, shorter)):
        lines.append(f"  Prompts of {shorter.prompt:,} tokens keep it.")
    lines += [f"  Take {other.name}." for other in _clusters(cluster, keeps)]
    return MeshError("\n".join(lines))


def _text(slo: Slo) -> str:
    times = dataclasses.asdict(slo).items()
    return ",".join(f"{name}={_time(seconds)}" for name, seconds in times if seconds is not None)


def _time(seconds: float) -> str:
    """Returns a time as an argument: rounded up to three digits, without a space."""
    size = 10.0 ** (math.floor(math.log10(seconds)) - 2)
    seconds = math.ceil(seconds / size - 1e-9) * size
    return f"{seconds * 1e3:.3g}ms" if seconds < 1 else f"{seconds:.3g}s"
