"""Checks for state that a step holds twice, old and new (SL301, SL302)."""

import collections
from collections.abc import Iterator
from typing import Any

from shardlib import humanize
from shardlib.explain.lint.arguments import Argument
from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.subject import Subject, array_text
from shardlib.explain.lint.updates import own_updates, updates

_RETURNED = 0.9
"""Minimal share of an argument's bytes that a step returns if it updates the argument."""


def not_reused(subject: Subject) -> Iterator[Finding]:
    """Yields SL301: donated arrays whose buffer no result reuses."""
    reused = {number for _, number, _ in subject.module.donations()}
    for leaf in subject.leaves:
        held = leaf.num_bytes / leaf.shards(subject.mesh)
        large = held >= subject.limits.donated_bytes
        if leaf.donated and large and leaf.number is not None and leaf.number not in reused:
            yield Finding(
                "SL301",
                leaf.path,
                f"{leaf.path} {array_text(leaf)} is donated, but no result has its shape, dtype "
                f"and sharding: {humanize.size(held)} on each device are held in addition to the "
                "new value.",
                "Return the new value in the dtype and with the sharding of the old one (cast it, "
                "and pin it with out_shardings), or do not donate it.",
                subject.step_source,
                bytes=held,
            )


def not_donated(subject: Subject) -> Iterator[Finding]:
    """Yields SL302: arguments that the step updates and does not donate."""
    if subject.donated is None or subject.jaxpr is None:
        return
    updated = _updated(subject)
    owners: dict[str, list[Argument]] = collections.defaultdict(list)
    for leaf in subject.leaves:
        if leaf.is_state:
            owners[leaf.owner].append(leaf)
    for owner, leaves in owners.items():
        held = {leaf.path: leaf.num_bytes / leaf.shards(subject.mesh) for leaf in leaves}
        returned = [size for path, size in held.items() if path in updated]
        enough = max(subject.limits.donated_bytes, _RETURNED * sum(held.values()))
        if sum(returned) < enough or any(leaf.donated for leaf in leaves):
            continue
        yield Finding(
            "SL302",
            owner,
            f"the step returns a new value of {owner}, {len(returned)} arrays of "
            f"{humanize.size(sum(returned))} on each device, and does not donate it: old and new "
            "are held at once.",
            f"Donate it: jax.jit(step, {_by_name(owner)}).",
            subject.step_source,
            bytes=sum(returned),
        )


def _by_name(owner: str) -> str:
    # An element of *args has no name of its own.
    return "donate_argnums=..." if "/" in owner else f"donate_argnames={owner!r}"


def _updated(subject: Subject) -> set[str]:
    """Returns the paths of the arrays that the step updates."""
    # Scalars may be Python numbers, and are too small to matter.
    leaves = [leaf for leaf in subject.leaves if leaf.shape]
    variables = [(n, v) for n, v in enumerate(subject.jaxpr.jaxpr.invars) if v.aval.shape]
    kinds = {number: _kind(variable.aval) for number, variable in variables}
    if list(map(_kind, leaves)) != list(kinds.values()):
        return set()
    of_number = {number: leaf for (number, _), leaf in zip(variables, leaves, strict=True)}
    donated = frozenset(number for number, leaf in of_number.items() if leaf.donated)
    wanted = {n: kind for n, kind in kinds.items() if of_number[n].is_state}
    found = [(_kind(aval), inputs) for aval, inputs in updates(subject.jaxpr)]
    return {of_number[number].path for number in own_updates(wanted, found, donated)}


def _kind(array: Any) -> tuple[tuple[int, ...], str]:
    return tuple(array.shape), str(array.dtype)
