"""A report on a compiled step as plain data."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shardlib.explain.analysis import timing
from shardlib.explain.analysis.roofline import Roofline, StageCost
from shardlib.explain.analysis.timing import Flow
from shardlib.explain.report.facts import StepFacts

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def facts(report: StepFacts) -> dict[str, Any]:
    """Returns the data that `StepReport.to_dict` documents."""
    memory, program = report.memory, report.program
    data = {
        "cluster": report.step.cluster.name if report.step.cluster else None,
        "compiled_for": report.step.compiled_for,
        "mesh": report.step.mesh_sizes,
        "fits": report.fits,
        "compiler_options": report.step.options,
        "scheduled": report.step.scheduled,
        "peak_bytes": memory.peak_bytes,
        "capacity_bytes": memory.capacity_bytes,
        "live_bytes": memory.live_bytes,
        "peak_at": memory.at,
        "memory_bytes": memory.categories,
        "largest_buffers": memory.largest,
        "timeline": memory.timeline,
        "collectives": [_flow(flow) for flow in report.flows or timing.untimed(program)],
        "unattributed_bytes": program.unattributed_bytes,
        "unread": program.unread,
        "unread_bytes": program.unread_bytes,
        "roofline": _roofline(report.roofline) if report.roofline else None,
        "findings": [finding.to_dict() for finding in report.findings],
        "accepted": [finding.to_dict() for finding in report.accepted],
        "fixes": report.fixes,
        "choices": report.choices,
        "params": report.params.to_dict() if report.params else None,
    }
    return plain(data)


def _flow(flow: Flow) -> dict[str, Any]:
    sent = {
        "sent_bytes": flow.collective.sent_bytes,
        "hidden_seconds": flow.hidden_seconds,
    }
    timed = _fields(flow)
    return {**_fields(timed.pop("collective")), **sent, **timed}


def _roofline(roofline: Roofline) -> dict[str, Any]:
    names = ("memory_bytes", "intensity", "redundancy", "seconds", "step_seconds", "binding")
    flops = roofline.flops
    return {
        **_fields(roofline),
        **{name: getattr(roofline, name) for name in names},
        "flops": {
            **_fields(flops),
            "total_model": flops.total_model,
            "total_hardware": flops.total_hardware,
        },
        "stages": [_stage(stage) for stage in roofline.stages],
    }


def _stage(stage: StageCost) -> dict[str, Any]:
    return {**_fields(stage), "intensity": stage.intensity, "binding": stage.binding}


def _fields(value: "DataclassInstance") -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def plain(value: object) -> Any:
    """Returns dataclasses and containers as JSON types.

    A number that is not finite becomes None, because JSON cannot express it.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(_fields(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
