"""Errors of serving where nothing fits or keeps the times, with the changes that help."""

import dataclasses
import math
from collections.abc import Callable

from shardlib.errors import MeshError, ModelError
from shardlib.hardware import Cluster
from shardlib.humanize import gib, plural
from shardlib.plan.objective import next_larger, roomier
from shardlib.plan.serving.question import ServingQuestion, Slo
from shardlib.plan.serving.search import CHUNKS, Replica, best_of, replicas_of
from shardlib.plan.serving.served_model import ServedModel


def does_not_fit(
    model: ServedModel, question: ServingQuestion, replicas: list[Replica], chunk: int = CHUNKS[0]
) -> MeshError:
    """Returns the error for a model that fits no mesh with a chunk."""
    cluster = question.cluster
    if not replicas:
        return MeshError(
            f"the rules serve cannot place {model.name} on {cluster.name}.\n"
            "  Name a cluster of another number of devices."
        )
    least = _leanest(replicas, chunk)
    mesh = f"its leanest mesh ({least.plan(1, chunk, 1).mesh})"
    lines = [f"{model.name} does not fit {cluster.name}: {_missing(mesh, least, chunk)}"]
    lines += _shorter(least, chunk) + _in_int8(least, chunk)

    def fits(other: Cluster) -> bool:
        found = replicas_of(model, dataclasses.replace(question, cluster=other))
        return any(one.over(1, chunk) <= 0 for one in found)

    lines += [f"  Take {other.name}." for other in _clusters(cluster, fits)]
    if len(lines) == 1:
        lines.append("  Choose a smaller model, or chips with more memory.")
    return MeshError("\n".join(lines))


def choice_does_not_fit(
    asked: list[Replica], others: list[Replica], chunk: int | None
) -> MeshError:
    """Returns the error for an asked mesh or chunk that does not fit, where another one does.

    Args:
        asked: The mesh that is asked for, or every mesh.
        others: Every other mesh.
        chunk: The chunk that is asked for; None for any.
    """
    read = CHUNKS[0] if chunk is None else chunk
    least = _leanest(asked, read)
    model, cluster = least.model.name, least.question.cluster.name
    mesh = least.plan(1, read, 1).mesh
    if others and chunk is not None:
        choice = f"mesh={mesh}, chunk={chunk}"
    else:
        choice = f"mesh={mesh}" if others else f"chunk={chunk}"
    on = "a device" if others else f"the leanest mesh ({mesh})"
    lines = [f"{choice} does not fit {model} on {cluster}: {_missing(on, least, read)}"]
    roomy = [one for one in others if one.over(1, read) <= 0]
    if roomy:
        lines.append(f"  Leave --mesh out, or use {_leanest(roomy, read).plan(1, read, 1).mesh}.")
    longest = max(one.longest_chunk() for one in asked)
    if chunk is not None and longest:
        lines.append(f"  Give a chunk of at most {longest} tokens.")
    if len(lines) == 1 and chunk is not None:
        lines.append("  Leave --mesh and --chunk out.")
    return MeshError("\n".join(lines + _shorter(least, read) + _in_int8(least, read)))


def _leanest(replicas: list[Replica], chunk: int) -> Replica:
    return min(replicas, key=lambda one: one.over(1, chunk))


def _missing(holder: str, replica: Replica, chunk: int) -> str:
    """Returns the sentence on the memory that one sequence and a chunk need."""
    held = replica.memory(1, chunk)
    return (
        f"{holder} needs {gib(held.total)}{' on a device' if holder != 'a device' else ''} for one "
        f"sequence of {replica.question.context:,} tokens, and {gib(replica.usable_bytes)} can be "
        f"used: {gib(replica.over(1, chunk))} are missing (weights {gib(held.weights)}, cache "
        f"{gib(held.cache)}, temporaries {gib(held.temporaries)})."
    )


def _shorter(replica: Replica, chunk: int) -> list[str]:
    longest = replica.longest_context(chunk)
    if 2 <= longest < replica.question.context:
        return [f"  Shorten the context to {longest:,} tokens."]
    return []


def _in_int8(replica: Replica, chunk: int) -> list[str]:
    """Returns lines on what fits in 8 bits: the weights or the cache, or else both."""
    left = [name for name in ("weights", "cache") if getattr(replica.question, name) is None]
    alone = [f"  Add --{name} int8." for name in left if _fits_in_int8(replica, chunk, name)]
    if alone or len(left) < 2 or not _fits_in_int8(replica, chunk, *left):
        return alone
    return ["  Add --weights int8 --cache int8."]


def _fits_in_int8(replica: Replica, chunk: int, *parts: str) -> bool:
    question = dataclasses.replace(replica.question, **dict.fromkeys(parts, "int8"))
    try:
        model = replica.model.with_bits(question.weights, question.cache)
    except ModelError:  # The model has no weights in 8 bits.
        return False
    layout = replica.layout
    weights, page = model.weight_bytes(layout), model.page_bytes(layout, question.page_size)
    return Replica(model, question, layout, weights, page).over(1, chunk) <= 0


def _clusters(cluster: Cluster, suits: Callable[[Cluster], bool]) -> list[Cluster]:
    """Returns the next larger cluster that suits, and the first of chips with more memory."""
    larger = next_larger(cluster)
    while larger is not None and not suits(larger):
        larger = next_larger(larger)
    roomy = next((other for other in roomier(cluster) if suits(other)), None)
    return [other for other in (larger, roomy) if other is not None]


def too_late(model: ServedModel, question: ServingQuestion, replicas: list[Replica]) -> MeshError:
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
    milliseconds = seconds * 1e3
    return f"{milliseconds:.3g}ms" if seconds < 1 else f"{seconds:.3g}s"
