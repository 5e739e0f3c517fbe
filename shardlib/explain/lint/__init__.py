"""Checks of a compiled step. Each fault is a finding with a code, a place and a fix."""

from collections.abc import Callable, Iterator

from shardlib.explain.lint import (
    activations,
    domain,
    donation,
    dtypes,
    loops,
    miscompiled,
    padding,
    resharding,
    sharding,
    structure,
)
from shardlib.explain.lint.findings import CODES as CODES
from shardlib.explain.lint.findings import Finding as Finding
from shardlib.explain.lint.findings import Limits as Limits
from shardlib.explain.lint.subject import Subject as Subject

CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    sharding.replicated_leaves,
    sharding.whole_batch,
    activations.gathered_activations,
    sharding.rematerialized,
    padding.padded,
    resharding.resharded,
    loops.repeated,
    resharding.unattributed,
    domain.slow_axes,
    miscompiled.miscompiled,
    donation.not_reused,
    donation.not_donated,
    dtypes.wide_traffic,
    dtypes.wide_matmuls,
    structure.host_calls,
    structure.unrolled,
    loops.uncounted,
)


def lint(subject: Subject) -> tuple[Finding, ...]:
    """Returns the faults of a compiled step, sorted by code and then by bytes, largest first.

    A check that needs a jaxpr or a cluster finds nothing in a subject without one.
    """
    found = [finding for check in CHECKS for finding in check(subject)]
    return tuple(sorted(found, key=lambda finding: (finding.code, -finding.bytes, finding.place)))
