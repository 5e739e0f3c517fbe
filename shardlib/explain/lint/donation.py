"""Memory of a state that a step holds twice: old and new."""

import collections
from collections.abc import Iterator
from typing import Any

from shardlib.explain.lint.findings import Finding
from shardlib.explain.lint.subject import Subject, array_text
from shardlib.explain.params import bytes_text

_RETURNED = 0.9
"""Share of an argument's bytes that a step returns in equal shapes when it updates it."""


def not_reused(subject: Subject) -> Iterator[Finding]:
    """SL301: donated arrays whose memory no result takes."""
    reused = {number for _, number, _ in subject.module.donations()}
    for leaf in subject.leaves:
        held = leaf.num_bytes / leaf.shards(subject.mesh)
        large = held >= subject.limits.donated_bytes
        if leaf.donated and large and leaf.number is not None and leaf.number not in reused:
            yield Finding(
                "SL301",
                leaf.path,
                f"{leaf.path} {array_text(leaf)} is donated, but no result has its shape, dtype "
                f"and sharding: {bytes_text(held)} on each device are held beside the new one.",
                "Return the new value in the dtype and with the sharding of the old one (cast it, "
                "and pin it with out_shardings), or do not donate it.",
                subject.step_source,
                bytes=held,
            )


def not_donated(subject: Subject) -> Iterator[Finding]:
    """SL302: a state that the step takes and returns, and of which nothing is donated."""
    state = [leaf for leaf in subject.leaves if leaf.is_state]
    if subject.donated is None or any(leaf.donated for leaf in state) or subject.jaxpr is None:
        return
    results = collections.Counter(_kind(aval) for aval in subject.jaxpr.out_avals)
    returned = total = 0.0
    for leaf in state:
        held = leaf.num_bytes / leaf.shards(subject.mesh)
        total += held
        if results[_kind(leaf)]:
            results[_kind(leaf)] -= 1
            returned += held
    if returned < max(subject.limits.donated_bytes, _RETURNED * total):
        return
    yield Finding(
        "SL302",
        "argument 0",
        f"the step returns what it takes, {len(state)} arrays of {bytes_text(returned)} on each "
        "device, and none is donated: old and new are held at once.",
        "Donate the state: jax.jit(step, donate_argnums=0).",
        subject.step_source,
        bytes=returned,
    )


def _kind(array: Any) -> tuple[tuple[int, ...], str]:
    return tuple(array.shape), str(array.dtype)
