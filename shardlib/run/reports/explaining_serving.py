"""The report on how an engine serves a decoder: its memory, what fits, and the times of its steps.

Bytes and seconds come from the cost model of `shardlib plan --serve`; compiled steps check the
bytes.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from shardlib.engine.abstract import abstract_step
from shardlib.engine.sizes import check_sizes, engine_sizes
from shardlib.explain.aot.compile import compile_step
from shardlib.explain.aot.topology import devices_of
from shardlib.functional.quantized import Bits
from shardlib.humanize import count, duration, gib
from shardlib.mesh import abstract_mesh, make_mesh, mesh_sizes
from shardlib.plan.search import capacity_bytes
from shardlib.plan.serving.one_engine import one_engine
from shardlib.plan.serving.question import ServePrecision, ServingQuestion, serving_question
from shardlib.plan.serving.search import Replica, ServingPlan
from shardlib.plan.serving.served_model import ServedModel, described, served_family, served_model
from shardlib.rules import SERVE
from shardlib.sharding.constrain import Scope
from shardlib.tables import Report, Table


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """Bytes of a compiled step on one device."""

    weights: float
    """Bytes of the weights on a device, without the padding of their layout."""
    cache: float
    temporaries: float
    """Buffers, results that reuse no argument, the program, and padding of arguments."""


@dataclasses.dataclass(frozen=True)
class ServingReport(Report):
    """How one engine serves a model; `str()` gives the report."""

    model: ServedModel
    question: ServingQuestion
    replica: Replica
    plan: ServingPlan
    compiled: Mapping[str, CompiledMemory]
    """Memory of the steps `decoding` and `reading`; empty if nothing was compiled."""

    @property
    def fits(self) -> bool:
        """Whether the predicted memory fits a device."""
        return self.plan.fits

    def parts(self) -> Iterable[Any]:
        """Yields the parts of the report."""
        plan, question, cluster = self.plan, self.question, self.question.cluster
        yield (
            f"{self.model.name} ({count(self.model.num_params)} parameters, {question.kinds}) on "
            f"{cluster.name}: an engine of mesh={plan.mesh}, rules serve, slots={plan.slots}, "
            f"context={question.context}, chunk={plan.chunk}"
        )
        yield Table(
            "Memory of a device",
            ("part", "predicted>", *(f"{name}>" for name in self.compiled)),
            list(self._memory_rows()),
        )
        fit = "fits" if self.fits else "does not fit"
        yield (
            f"it {fit}: {gib(plan.memory.total)} of {gib(self.replica.usable_bytes)} that "
            f"programs can use\n"
            f"{_counted(plan.most_slots, 'sequence')} of {question.context:,} tokens fit, or one "
            f"of {plan.longest_context:,}"
        )
        yield Table(
            "Time of a step",
            ("part", "decoding>", "reading>"),
            list(self._time_rows()),
            notes=[
                "Each part is limited by compute or memory bandwidth. Decoding: "
                f"{_counted(plan.slots // plan.copies, 'row')} a device. Reading: those rows and "
                f"{_counted(plan.chunk, 'prompt token')}."
            ],
        )
        yield (
            f"prompts of {question.prompt:,} tokens: first token after "
            f"{duration(plan.first_token_seconds)} with all slots taken, then one every "
            f"{duration(plan.token_seconds)} ({duration(plan.slowest_token_seconds)} while a "
            f"prompt is read)\n"
            f"{count(plan.tokens_per_second)} tokens/s in all; {plan.reading_share:.0%} of the "
            f"steps read a prompt"
        )

    def _memory_rows(self) -> Iterable[tuple[str, ...]]:
        memory = vars(self.plan.memory)
        for part, predicted in memory.items():
            found = (getattr(one, part, None) for one in self.compiled.values())
            yield part, gib(predicted), *("" if one is None else gib(one) for one in found)
        total = (sum(vars(one).values()) for one in self.compiled.values())
        without = sum(memory.values()) - memory["runtime"]
        yield "total without runtime", gib(without), *map(gib, total)

    def _time_rows(self) -> Iterable[tuple[str, ...]]:
        decode, mixed = self.plan.decode, self.plan.mixed
        for part, seconds in mixed.parts.items():
            if seconds > 0:
                yield part, duration(decode.parts[part]), duration(seconds)
        yield "total", duration(decode.total), duration(mixed.total)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, in seconds and bytes."""
        plan, question = self.plan, self.question
        return {
            "model": self.model.name,
            "parameters": self.model.num_params,
            "cluster": question.cluster.name,
            "mesh": plan.mesh,
            "slots": plan.slots,
            "chunk": plan.chunk,
            "context": question.context,
            "prompt": question.prompt,
            "precision": question.precision,
            "weights": question.weights,
            "cache": question.cache,
            "fits": self.fits,
            "most_slots": plan.most_slots,
            "longest_context": plan.longest_context,
            "capacity": capacity_bytes(question.cluster),
            "memory": vars(plan.memory) | {"total": plan.memory.total},
            "compiled": {name: vars(one) for name, one in self.compiled.items()},
            "first_token_seconds": plan.first_token_seconds,
            "token_seconds": plan.token_seconds,
            "slowest_token_seconds": plan.slowest_token_seconds,
            "tokens_per_second": plan.tokens_per_second,
            "decode": {name: s for name, s in plan.decode.parts.items() if s > 0},
            "mixed": {name: s for name, s in plan.mixed.parts.items() if s > 0},
        }


def explain_serving(
    model: Any,
    *,
    on: str,
    mesh: str | None = None,
    slots: int | None = None,
    chunk: int | None = None,
    context: int | str = "8k",
    prompt: int | str | None = None,
    precision: ServePrecision = "bf16",
    weights: Bits | None = None,
    cache: Bits | None = None,
    compiles: bool = True,
) -> ServingReport:
    """Returns the report on an engine for a cluster that need not be present.

    Args:
        model, on, context, prompt, precision, weights, cache: As in `plan_serving`.
        mesh: The mesh of the engine; None for the best one.
        slots: Sequences of the engine; None for the best number.
        chunk: Tokens of prompts that a step of each copy reads; None for the best number.
        compiles: Whether the steps are compiled ahead of time.

    Raises:
        ConfigError: If arguments are wrong.
        MeshError: If the cluster is unknown, the mesh does not fit it, or the rules `serve` cannot
            place the model on it.
        ModelError: If the model is unknown, is not a decoder that the engine runs, has fewer
            positions than the context, or sizes are wrong.
        MissingExtraError: If the compiler of the cluster's platform is not installed.
    """
    question = serving_question(on, context, prompt, None, precision, weights, cache)
    lane = question.lane
    check_sizes(
        slots=1 if slots is None else slots, chunk=lane if chunk is None else chunk, lane=lane
    )
    served = served_model(model, question.dtype, weights=weights, cache=cache)
    served.check_context(question.context)
    # An axis cannot be found wrong after minutes of compilation.
    sizes = mesh and mesh_sizes(abstract_mesh(mesh, question.cluster.num_devices))
    replica, plan = one_engine(served, question, sizes or None, slots, chunk)
    compiled = _compiled(model, question, plan, mesh or plan.mesh) if compiles else {}
    return ServingReport(served, question, replica, plan, compiled)


def _compiled(
    model: Any, question: ServingQuestion, plan: ServingPlan, mesh: str
) -> dict[str, CompiledMemory]:
    """Returns the memory of the two kinds of steps of an engine."""
    name, config, spec = described(model)
    family = served_family(name, config)
    assert family.decoding is not None
    scope = Scope(make_mesh(mesh, devices=devices_of(question.cluster)), SERVE)
    sizes = engine_sizes(
        groups=plan.copies,
        slots=plan.slots,
        context=question.context,
        pages=None,
        page_size=question.page_size,
        chunk=plan.chunk,
        lane=question.lane,
        max_length=family.decoding.max_length(config),
        deterministic=False,
        cache=question.cache,
    )
    found = {}
    for kind, lanes in (("decoding", 0), ("reading", plan.chunk // question.lane)):
        step = abstract_step(
            family, config, scope, sizes, num_lanes=lanes, dtype=question.dtype,
            weights=question.weights, spec=spec,
        )  # fmt: skip
        arguments = step.params, step.state, step.arrays
        made = compile_step(step.programs.program(), arguments, on=question.cluster)
        weights, cache = _held(step.params), _held(step.state.pages)
        memory = made.memory
        total = memory["argument"] + memory["temp"] + memory["output"] - memory["alias"]
        total += memory["generated_code"]
        found[kind] = CompiledMemory(weights, cache, total - weights - cache)
    return found


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _held(tree: Any) -> int:
    """Returns the bytes of arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
