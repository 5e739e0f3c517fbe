"""Pure and cached resolution of the rules for one tensor."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from jax.sharding import PartitionSpec

from shardlib.errors import did_you_mean
from shardlib.mesh import STANDARD_AXES

Alternative = tuple[str, ...]
Table = tuple[tuple[str, tuple[Alternative, ...]], ...]
LogicalAxes = tuple[str | None, ...]
MeshSizes = tuple[tuple[str, int], ...]
Kind = Literal["params", "activations"]
Section = Literal["params", "gradients", "opt_state"]

STAGE = "stage"
"""The mesh axis of pipeline stages, which may cut a number of layers that it does not divide."""

ANY = "*"
"""The key of a rule for every logical axis that is not in its table."""


@dataclasses.dataclass(frozen=True)
class Auto:
    """The placement of parameters without logical axes.

    The largest dim that `mesh_axis` divides is sharded over it if the parameter has at least
    `min_elements` elements. Smaller parameters are replicated. A parameter without a divisible dim
    is replicated too, and `explain` reports it. `mesh_axis=None` replicates all of them.
    """

    mesh_axis: str | None = "fsdp"
    min_elements: int = 2**14


class Rules(Protocol):
    """The part of `AxisRules` that a resolution reads."""

    @property
    def auto(self) -> Auto | None:
        """The placement of parameters without logical axes."""

    def table(self, kind: Kind) -> Table:
        """Returns one table in normal form."""
        ...


class Refusal(NamedTuple):
    """A rejected alternative and the reason."""

    alternative: Alternative
    cause: Literal["used", "size_one", "indivisible"]
    reason: str


class Choice(NamedTuple):
    """The mesh axes of one dim of a tensor.

    `rule` is the key of the table that decided. It is `None` for a dim without a logical axis, and
    for a dim whose name has no rule and is a mesh axis: the dim goes to that axis. `moved_to` is
    the dim that `stage` shards in place of this one, whose layers it does not divide.
    """

    dim: int
    logical_axis: str | None
    rule: str | None
    mesh_axes: Alternative
    refused: tuple[Refusal, ...] = ()
    moved_to: int | None = None

    @property
    def fell_back(self) -> bool:
        """Whether the dim is less sharded than asked for because its size did not divide."""
        return any(r.cause == "indivisible" for r in self.refused)


class Resolution(NamedTuple):
    """The placement of one tensor by the rules; `spec` is valid only if `faults` is empty."""

    spec: PartitionSpec
    choices: tuple[Choice, ...]
    faults: tuple[str, ...] = ()


def mesh_axes_of(rules: Rules) -> set[str]:
    """Returns every mesh axis that a rule names, even if no mesh has it."""
    kinds: tuple[Kind, ...] = ("params", "activations")
    tables = [alternatives for kind in kinds for _, alternatives in rules.table(kind)]
    names = {name for alternatives in tables for one in alternatives for name in one}
    return names | ({rules.auto.mesh_axis} if rules.auto and rules.auto.mesh_axis else set())


@functools.lru_cache(maxsize=1024)
def unknown_mesh_axes(rules: Rules, mesh_axes: tuple[str, ...]) -> tuple[str, ...]:
    known = {*mesh_axes, *STANDARD_AXES}
    faults = []
    for kind in ("params", "activations"):
        for logical, alternatives in rules.table(kind):
            for name in dict.fromkeys(n for a in alternatives for n in a if n not in known):
                faults.append(
                    f"the rule {logical!r} -> {name!r} ({kind}) names a mesh axis that does not "
                    f"exist.{did_you_mean(name, known)}\n"
                    f"  Name an axis of the mesh ({', '.join(mesh_axes) or 'none'}), or a standard "
                    f"axis ({', '.join(STANDARD_AXES)}); the mesh may lack it."
                )
    name = rules.auto.mesh_axis if rules.auto else None
    if name is not None and name not in known:
        faults.append(
            f"auto placement over {name!r} names a mesh axis that does not exist."
            f"{did_you_mean(name, known)}"
        )
    return tuple(faults)


class _Candidate(NamedTuple):
    """An alternative on one mesh: its sharding axes, their product, or why it is impossible."""

    alternative: Alternative
    mesh_axes: Alternative
    size: int
    absent: Refusal | None


class _Rule(NamedTuple):
    """A rule on one mesh. `rank` is its position in the table. A rule from outside the table has no
    name and comes first, as it has no alternative."""

    name: str | None
    rank: int
    candidates: tuple[_Candidate, ...]


@functools.lru_cache(maxsize=256)
def _on_mesh(rules: Rules, kind: Kind, mesh: MeshSizes) -> dict[str, _Rule]:
    sizes = dict(mesh)
    return {
        name: _Rule(name, rank, tuple(_candidate(a, sizes) for a in alternatives))
        for rank, (name, alternatives) in enumerate(rules.table(kind))
    }


def _mesh_axis(name: str, sizes: Mapping[str, int]) -> _Rule | None:
    """Returns the rule for a name that is a mesh axis or a product of axes (`data+fsdp`)."""
    axes = tuple(name.split("+"))
    if not all(axis in sizes or axis in STANDARD_AXES for axis in axes):
        return None
    return _Rule(None, -1, (_candidate(axes, sizes),))


def _candidate(alternative: Alternative, sizes: Mapping[str, int]) -> _Candidate:
    axes = tuple(name for name in alternative if sizes.get(name, 1) > 1)
    absent = None
    if alternative and not axes:
        reason = f"{'+'.join(alternative)} has size 1 in this mesh"
        absent = Refusal(alternative, "size_one", reason)
    return _Candidate(alternative, axes, math.prod(sizes[name] for name in axes), absent)


def _choose(
    dim: int, logical: str, rule: _Rule, size: int, used: dict[str, int]
) -> tuple[Choice, bool]:
    """Takes the first alternative that fits; the flag says whether the rule could be met."""
    refused: list[Refusal] = []
    for candidate in rule.candidates:
        if candidate.absent is not None:
            refused.append(candidate.absent)
            continue
        refusal = _refusal(candidate, size, used)
        if refusal is None:
            for name in candidate.mesh_axes:
                used[name] = dim
            return Choice(dim, logical, rule.name, candidate.mesh_axes, tuple(refused)), True
        refused.append(refusal)
    # An axis of size 1 shards nothing and so fits, unless a rejected one should have sharded.
    met = all(r.cause == "size_one" for r in refused)
    return Choice(dim, logical, rule.name, (), tuple(refused)), met


def _refusal(candidate: _Candidate, size: int, used: Mapping[str, int]) -> Refusal | None:
    for name in candidate.mesh_axes:
        if name in used:
            reason = f"mesh axis {name!r} already shards dim {used[name]}"
            return Refusal(candidate.alternative, "used", reason)
    if size % candidate.size:
        text = "+".join(candidate.alternative)
        reason = f"{text}={candidate.size} does not divide {size}"
        return Refusal(candidate.alternative, "indivisible", reason)
    return None


@functools.lru_cache(maxsize=2**17)
def resolve(
    rules: Rules,
    kind: Kind,
    logical_axes: LogicalAxes,
    shape: tuple[int, ...],
    mesh: MeshSizes,
) -> Resolution:
    """Places one tensor; see `AxisRules.resolve`."""
    faults = list(unknown_mesh_axes(rules, tuple(name for name, _ in mesh)))
    if len(logical_axes) != len(shape):
        count = f"{len(logical_axes)} dim{'s' * (len(logical_axes) != 1)}"
        faults.append(
            f"logical axes {logical_axes} name {count}, but the shape {shape} has {len(shape)}.\n"
            "  Give one name, or None, for each dim."
        )
        return Resolution(PartitionSpec(), (), tuple(faults))
    table = _on_mesh(rules, kind, mesh)
    default, sizes = table.get(ANY), dict(mesh)
    named = [
        (table.get(name) or default or _mesh_axis(name, sizes)) if name else None
        for name in logical_axes
    ]
    # A dim without a name comes after all others, and gets nothing.
    ranks = [(rule.rank if rule else len(table)) for rule in named]
    choices: list[Choice | None] = [None] * len(shape)
    used: dict[str, int] = {}
    unmet: list[tuple[Choice, int]] = []
    for dim in sorted(range(len(shape)), key=ranks.__getitem__):
        logical, rule = logical_axes[dim], named[dim]
        if logical is None:
            choices[dim] = Choice(dim, None, None, ())
        elif rule is None:
            faults.append(_no_rule(dim, logical_axes, kind, [*table, *sizes]))
        else:
            choice, met = _choose(dim, logical, rule, shape[dim], used)
            choices[dim] = choice
            if not met:
                unmet.append((choice, len(faults)))
                faults.append(_not_met(choice, rule, logical_axes, shape, kind, mesh))
    for choice, fault in reversed(unmet):
        if kind == "params" and _move_stage(rules, choice, choices, shape, sizes):
            del faults[fault]
    entries = [_entry(choice.mesh_axes) if choice else None for choice in choices]
    return Resolution(PartitionSpec(*entries), tuple(c for c in choices if c), tuple(faults))


def _move_stage(
    rules: Rules,
    choice: Choice,
    choices: list[Choice | None],
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
) -> bool:
    """Places a parameter whose layers `stage` does not divide; see `shardlib.nn.stages`.

    `stage` then shards, within the shards of other mesh axes, the largest other dim that divides. A
    small parameter without such a dim is whole on every stage. Returns whether it could be placed.
    """
    stages, refusal = sizes.get(STAGE, 1), choice.refused[-1]
    if refusal[:2] != ((STAGE,), "indivisible") or shape[choice.dim] < stages:
        return False

    def shards(other: Choice) -> int:
        return math.prod(sizes[name] for name in other.mesh_axes)

    fitting = [
        c
        for c in choices
        if c is not None and c is not choice and shape[c.dim] % (shards(c) * stages) == 0
    ]
    if not fitting:
        least = (rules.auto or Auto()).min_elements
        return math.prod(shape) < least
    to = max(fitting, key=lambda c: shape[c.dim])
    choices[to.dim] = to._replace(mesh_axes=(*to.mesh_axes, STAGE))
    choices[choice.dim] = choice._replace(refused=choice.refused[:-1], moved_to=to.dim)
    return True


def _entry(mesh_axes: Alternative) -> Any:
    if not mesh_axes:
        return None
    return mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes


def _no_rule(dim: int, logical_axes: LogicalAxes, kind: Kind, known: Sequence[str]) -> str:
    logical = logical_axes[dim]
    return (
        f"logical axis {logical!r} (dim {dim} of {logical_axes}) has no rule among the "
        f"{kind}.{did_you_mean(str(logical), known)}\n"
        f"  Add one, for example {kind}={{{logical!r}: None}}, or use one of: {', '.join(known)}."
    )


def _not_met(
    choice: Choice,
    rule: _Rule,
    logical_axes: LogicalAxes,
    shape: tuple[int, ...],
    kind: Kind,
    mesh: MeshSizes,
) -> str:
    reasons = "; ".join(refusal.reason for refusal in choice.refused)
    sizes = ",".join(f"{name}={size}" for name, size in mesh)
    allowing = [*("+".join(c.alternative) for c in rule.candidates), None]
    return (
        f"logical axis {choice.logical_axis!r} (dim {choice.dim} of {logical_axes}, shape {shape}) "
        f"cannot be sharded: {reasons}.\n"
        f"  Change the dim or the mesh ({sizes}), or allow replication: "
        f"{kind}={{{choice.logical_axis!r}: {allowing}}}."
    )
