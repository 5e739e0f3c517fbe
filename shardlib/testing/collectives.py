"""A test that a compiled step sends exactly what its strategy implies."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from shardlib.errors import ModelError
from shardlib.explain.analysis.collectives import (
    KINDS,
    Collective,
    ProgramReport,
    axes_text,
    read_program,
)
from shardlib.explain.hlo.allreduce_uses import Fate
from shardlib.explain.hlo.text import array_bytes
from shardlib.train.state import TrainState
from shardlib.train.step import TrainStep

_SINGLE_NUMBER = re.compile(r"\w+\[\]")
Kind = tuple[str, str]


class Sent(NamedTuple):
    """The amount that one device sends in one step; None for an amount that does not matter."""

    count: int | None = None
    """Executions, including loop trips."""
    bytes: int | None = None
    """Bytes of the whole buffers of all executions."""


Wanted: TypeAlias = Iterable[Kind] | Mapping[Kind, int | Sent]


def assert_collectives(
    step_or_compiled: TrainStep | jax.stages.Compiled,
    expected: Wanted,
    *,
    state: TrainState | None = None,
    batch: PyTree = None,
    mesh: Mesh | Mapping[str, int] | None = None,
    at_least_bytes: int = 0,
) -> ProgramReport:
    """Asserts that a compiled step holds these collectives and no others.

    Collectives of single numbers (losses, norms, counts) are left out.

    A gradient that is reduced and cut is a reduce-scatter on GPU and TPU. XLA for CPU lacks it and
    emits an all-reduce of which each device uses only its part. On a CPU mesh such an all-reduce
    counts as a reduce-scatter of the same buffer if one is expected, so that one expectation
    serves all platforms: `{("reduce-scatter", "fsdp"), ("all-gather", "fsdp")}`.

    Args:
        step_or_compiled: A train step with `state` and `batch` (which may be abstract), or a
            `jax.stages.Compiled` with `mesh`.
        expected: Pairs of a kind (see `shardlib.explain.analysis.collectives.KINDS`) and the mesh
            axes it runs over, such as `("all-reduce", "data+fsdp")`. A mapping also gives the
            number of runs per step (an int), or `Sent(count, bytes)`.
        state: The training state of the step.
        batch: A batch of the step.
        mesh: The mesh of a compiled program.
        at_least_bytes: Collectives of fewer bytes are left out.

    Returns:
        A report of all collectives of the program.

    Raises:
        AssertionError: With all missing and all unexpected collectives, their bytes and source
            lines.
        ModelError: If the arguments do not fit each other, or a kind or an axis is unknown.
    """
    report = _report(step_or_compiled, state, batch, mesh)
    wanted = _wanted(expected, report.mesh)
    mesh = mesh if state is None else state.definition.scope.mesh
    scattered: set[str] = set()
    if isinstance(mesh, Mesh) and all(d.platform == "cpu" for d in mesh.devices.flat):
        scattered = {axes for kind, axes in wanted if kind == "reduce-scatter"}
    sent: dict[Kind, list[Collective]] = {}
    for collective in report.collectives:
        for part in _parts(collective, scattered):
            if part.mesh_axes != () and part.bytes >= at_least_bytes:
                sent.setdefault((part.kind, axes_text(part.mesh_axes)), []).append(part)
    faults = [f"missing: {kind} over {axes}" for kind, axes in wanted if (kind, axes) not in sent]
    for key, members in sent.items():
        if key not in wanted:
            faults.append(f"unexpected: {_description(key, members)}")
        else:
            faults += _amount_faults(key, members, wanted[key])
    if faults:
        raise AssertionError(
            f"the step on mesh {_mesh_text(report.mesh)} does not send what was expected:\n  "
            + "\n  ".join(faults)
        )
    return report


def _report(
    step_or_compiled: TrainStep | jax.stages.Compiled,
    state: TrainState | None,
    batch: PyTree,
    mesh: Mesh | Mapping[str, int] | None,
) -> ProgramReport:
    if not isinstance(step_or_compiled, jax.stages.Compiled):
        if state is None or batch is None:
            raise ModelError(
                "a step is compiled for a state and a batch, which may be abstract.\n"
                "  Pass state= and batch=."
            )
        compiled = step_or_compiled.lower(state, batch).compile()
        return read_program(compiled, state.definition.scope.mesh)
    if mesh is None:
        raise ModelError("the mesh of a compiled program is unknown.\n  Pass mesh=.")
    return read_program(step_or_compiled, mesh)


def _wanted(expected: Wanted, sizes: Mapping[str, int]) -> dict[Kind, Sent]:
    amounts = expected if isinstance(expected, Mapping) else dict.fromkeys(expected, Sent())
    if not all(isinstance(key, tuple) and len(key) == 2 for key in amounts):
        raise ModelError(
            f"the expected collectives, {list(amounts)}, are not pairs of a kind and mesh axes.\n"
            '  Write it as {("all-gather", "fsdp"), ("all-reduce", "data+fsdp")}.'
        )
    wanted, faults = {}, []
    for (kind, axes), amount in amounts.items():
        names = axes.split("+")
        if kind not in KINDS:
            faults.append(f"{kind!r} is not a kind of collective: {', '.join(KINDS)}.")
        absent = [name for name in names if name not in sizes]
        if absent:
            faults.append(f"{', '.join(absent)} is not an axis of mesh {_mesh_text(sizes)}.")
        ordered = "+".join(name for name in sizes if name in names)
        wanted[kind, ordered] = Sent(amount) if isinstance(amount, int) else amount
    if faults:
        raise ModelError("\n".join(faults) + "\n  Correct the expected collectives.")
    return wanted


def _parts(collective: Collective, scattered: set[str]) -> Iterator[Collective]:
    """Yields a collective without the single numbers that the compiler merged into it.

    Arrays of an all-reduce of which each device uses its part are a reduce-scatter of their own, if
    one is expected over these axes. An all-reduce over an axis in `scattered` stands for a
    reduce-scatter.
    """
    is_split = bool(collective.fates) and axes_text(collective.mesh_axes) in scattered
    arrays: dict[str, list[tuple[str, Fate | None]]] = {}
    fates = collective.fates or (None,) * len(collective.shapes)
    num_bytes = collective.bytes
    for shape, fate in zip(collective.shapes, fates, strict=True):
        if _SINGLE_NUMBER.fullmatch(shape):
            num_bytes -= array_bytes(shape)
        else:
            kind = "reduce-scatter" if is_split and fate == "sliced" else collective.kind
            arrays.setdefault(kind, []).append((shape, fate))
    for kind, part in arrays.items():
        shapes = tuple(shape for shape, _ in part)
        kept = tuple(fate for _, fate in part if fate is not None)
        size = sum(map(array_bytes, shapes)) if is_split else num_bytes
        yield dataclasses.replace(collective, kind=kind, shapes=shapes, fates=kept, bytes=size)


def _amount_faults(key: Kind, members: list[Collective], wanted: Sent) -> list[str]:
    count, size = sum(c.count for c in members), sum(c.total_bytes for c in members)
    wrong = []
    if wanted.count is not None and wanted.count != count:
        wrong.append(f"{count} times instead of {wanted.count}")
    if wanted.bytes is not None and wanted.bytes != size:
        wrong.append(f"{size} bytes instead of {wanted.bytes}")
    return [f"{' and '.join(wrong)}: {_description(key, members)}"] if wrong else []


def _description(key: Kind, members: list[Collective]) -> str:
    kind, axes = key
    lines = [f"{kind} over {axes}, {sum(c.total_bytes for c in members)} bytes"]
    for member in sorted(members, key=lambda c: -c.total_bytes):
        where = member.source or member.op_name or member.name
        lines.append(f"{member.count} x {' '.join(member.shapes)} at {where}")
    return "\n      ".join(lines)


def _mesh_text(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())
