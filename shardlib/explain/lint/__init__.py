"""Checks of a compiled step. Each fault is a finding with a code, a place and a fix."""

import dataclasses
from collections.abc import Callable, Iterator

from shardlib.explain.hlo.provenance import Where, where_of
from shardlib.explain.lint import communication, memory, precision, sharding, structure
from shardlib.explain.lint.findings import CODES as CODES
from shardlib.explain.lint.findings import Finding as Finding
from shardlib.explain.lint.findings import Limits as Limits
from shardlib.explain.lint.subject import Subject as Subject

CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    sharding.replicated_leaves,
    sharding.whole_batch,
    sharding.gathered_activations,
    sharding.rematerialized,
    sharding.padded,
    communication.resharded,
    communication.repeated,
    communication.unattributed,
    communication.slow_axes,
    communication.miscompiled,
    memory.not_reused,
    memory.not_donated,
    precision.wide_traffic,
    precision.wide_matmuls,
    structure.host_calls,
    structure.unrolled,
    structure.uncounted,
)


def lint(subject: Subject) -> tuple[Finding, ...]:
    """Returns the faults of a compiled step, sorted by code and then by bytes, largest first.

    A check that needs a jaxpr or a cluster finds nothing in a subject without one.
    """
    findings = [finding for check in CHECKS for finding in check(subject)]
    findings = _with_parts(subject, findings) if findings else []
    return tuple(sorted(findings, key=lambda each: (each.code, -each.bytes, each.place)))


def _with_parts(subject: Subject, findings: list[Finding]) -> list[Finding]:
    """Returns findings with the part of the model and the pass of their operations."""
    origins = {
        (where.name, where.source): where
        for instructions in subject.module.computations.values()
        for instruction in instructions
        if (where := where_of(subject.module, instruction)).source
    }
    nowhere = Where()
    return [
        dataclasses.replace(finding, model_path=where.model_path, phase=where.phase)
        for finding in findings
        for where in (origins.get((finding.op_name, finding.source), nowhere),)
    ]
