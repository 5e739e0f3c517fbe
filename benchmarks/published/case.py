"""Published runs as cases of the cost model: the fields of a record, and defaults for missing
fields.

A record is a JSON object with the known fields among `hardware`, `chips`, `slices`, `model`,
`dims`, `seq_len`, `global_batch_seqs`, `micro_batch`, `mesh`, `remat`, `precision`, `framework`,
and one of `step_time_s`, `tokens_per_s_per_chip`, `seqs_per_s`, `tflops_per_chip` or `mfu`. The
assumptions are the same for all records; `Case.assumed` lists them.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from published.mesh import layout_of
from published.model import Unusable, model_of
from published.software import bytes_of, software_of
from shardlib.cost.layout import Layout, Software
from shardlib.cost.transformer.flops import Convention, step_flops
from shardlib.cost.workload import Job, Precision
from shardlib.hardware import Cluster
from shardlib.hardware.chips import CHIPS, Chip

_CHIPS = (
    (r"pcie|nvl\b|gh200|a10g", None),
    (r"gb200", "gb200"),
    (r"gb300", "gb300"),
    (r"b300", "b300"),
    (r"tpu ?v3", "v3"),
    (r"h800", "h800"),
    (r"h20\b", "h20"),
    (r"v5litepod|v5 ?lite|v5e", "v5e"),
    (r"v5p", "v5p"),
    (r"v6e|trillium", "v6e"),
    (r"tpu ?7x|tpu ?v7|ironwood", "tpu7x"),
    (r"tpu ?v4(?!i)", "v4"),
    (r"a100.*40|40.*a100", "a100-40"),
    (r"a100", "a100-80"),
    (r"h100", "h100"),
    (r"h200", "h200"),
    (r"b200", "b200"),
    (r"v100", "v100-32"),
    (r"\bl4\b", "l4"),
    (r"\ba10\b", "a10"),
    (r"\bt4\b", "t4"),
    (r"4090", "rtx4090"),
)
_EIGHT_BIT = re.compile(r"fp8|float8|int8|fp4|mxfp|nvfp|\be4m3")
_NOMINAL_WATTS = {"h100": 700, "a100-80": 400, "a100-40": 400}


@dataclasses.dataclass(frozen=True)
class Case:
    """One published run, ready to be predicted."""

    id: str
    family: str
    model_name: str
    job: Job
    layout: Layout
    cluster: Cluster
    software: Software
    convention: Convention
    seconds: float
    """Published seconds per step."""
    measured: str
    """The field that `seconds` was taken from."""
    eight_bit: bool
    assumed: tuple[str, ...]

    @property
    def tflops_per_chip(self) -> float:
        """Published TFLOP/s per chip by `convention`."""
        return step_flops(self.job, self.convention) / self.seconds / self.cluster.num_chips / 1e12


def read(row: Mapping[str, Any], model_dims: Mapping[str, Any]) -> Case:
    """Returns the case of a record.

    Args:
        row: The record.
        model_dims: Dims of public models by name, for records that name a model without dims.

    Raises:
        Unusable: If the record lacks a field that cannot be assumed; the message names it.
    """
    assumed: list[str] = []
    if re.search(r"\blora\b", str(row.get("source") or "").lower()):
        raise Unusable("it trains LoRA without giving the rank")
    chip = chip_of(row, assumed)
    precision, eight_bit = _precision(row, chip)
    model = model_of(row, model_dims, assumed)
    length = _length(row)
    batch = _batch(row, length)
    software = software_of(row)
    job = Job(model, length, batch, precision)
    job = dataclasses.replace(job, **bytes_of(row, precision))
    cluster = _cluster(row, chip)
    layout, job = layout_of(row, job, cluster, software, assumed)
    convention = convention_of(row)
    measured, seconds = _seconds(row, job, cluster, convention)
    return Case(
        id=str(row.get("id", "?")),
        family=str(row.get("family", "?")),
        model_name=str(row.get("model", "?")),
        job=job,
        layout=layout,
        cluster=cluster,
        software=software,
        convention=convention,
        seconds=seconds,
        measured=measured,
        eight_bit=eight_bit,
        assumed=tuple(assumed),
    )


def read_file(
    path: Path, more_dims: Mapping[str, Any] | None = None
) -> tuple[list[Case], list[tuple[str, str]]]:
    """Returns the cases of a JSON file of records, and the ids of skipped records with the reasons.

    Args:
        path: File with a list of records, or with an object that has them under `rows` and,
            optionally, dims of public models under `model_dims`.
        more_dims: Dims of additional models by name.
    """
    record = json.loads(path.read_text())
    rows, known = record, dict(more_dims or {})
    if isinstance(record, Mapping):
        rows = record.get("rows", [])
        known |= (record.get("model_dims") or {}).get("dims", {})
    cases, left_out = [], []
    for number, row in enumerate(rows):
        name = f"row {number}"
        try:
            name = str(row.get("id", name))
            cases.append(read(row, known))
        except Unusable as reason:
            left_out.append((name, str(reason)))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as fault:
            left_out.append((name, f"it cannot be read: {fault!r}"))
    return cases, left_out


def chip_of(row: Mapping[str, Any], assumed: list[str]) -> Chip:
    """Returns the chip that a record names, with the memory or power it states.

    Raises:
        Unusable: If `hardware/chips.py` does not list the chip.
    """
    text = str(row.get("hardware") or "").lower().replace("_", " ")
    name = next((name for pattern, name in _CHIPS if re.search(pattern, text)), None)
    if name is None:
        raise Unusable(f"its hardware, {row.get('hardware')!r}, is not a chip of hardware.chips")
    chip = CHIPS[name]
    changes: dict[str, Any] = {}
    if name == "a100-80" and "80" not in text:
        assumed.append("A100 of 80 GB")
    if match := re.search(r"(\d+) ?gb\b(?!/)", text):
        changes["memory_bytes"] = float(match[1]) * 1e9
    if match := re.search(r"([\d.]+) ?tb/s", text):
        changes["memory_bytes_per_second"] = float(match[1]) * 1e12
    if (match := re.search(r"(\d+) ?w\b", text)) and name in _NOMINAL_WATTS:
        # Dynamic power grows with frequency times voltage squared, and voltage grows with
        # frequency. Near the limit, clocks follow about the square root of the power.
        slower = (float(match[1]) / _NOMINAL_WATTS[name]) ** 0.5
        changes["bf16_flops"] = (chip.bf16_flops or 0.0) * slower
        changes["fp8_flops"] = (chip.fp8_flops or 0.0) * slower
    return dataclasses.replace(chip, **changes) if changes else chip


def convention_of(row: Mapping[str, Any]) -> Convention:
    """Returns the FLOPs convention of a record: the one it states, or else `full`."""
    said = " ".join(str(row.get(key, "")) for key in ("remat", "flop_convention", "caveat")).lower()
    if re.search(r"hardware flops|\bhfu", str(row.get("remat", "")).lower()):
        return "hardware"
    if "non-causal" in said:
        return "full"
    closest = (row.get("check") or {}).get("closest")
    if closest in ("full", "causal"):
        return closest
    return "full"


def _precision(row: Mapping[str, Any], chip: Chip) -> tuple[Precision, bool]:
    """Returns the precision of the matmuls, and whether the record uses 8 or fewer bits."""
    text = str(row.get("precision") or "").lower()
    if _EIGHT_BIT.search(text):
        if chip.fp8_flops is None:
            raise Unusable(
                f"its precision, {row['precision']!r}, is not available on the {chip.full_name}"
            )
        if "fp4" in text:
            raise Unusable("4-bit matmuls are not in hardware.chips")
        return "fp8", True
    half = "fp16" in text or chip.bf16_flops is None
    return ("fp16" if half and chip.fp16_flops else "bf16"), False


def _positive(row: Mapping[str, Any], key: str) -> int:
    value = row.get(key)
    if not isinstance(value, int | float) or value <= 0:
        raise Unusable(f"it gives no {key}")
    return int(value)


def _length(row: Mapping[str, Any]) -> int:
    if not row.get("seq_len") and row.get("global_batch_tokens") and row.get("global_batch_seqs"):
        return round(row["global_batch_tokens"] / row["global_batch_seqs"])
    return _positive(row, "seq_len")


def _batch(row: Mapping[str, Any], length: int) -> int:
    if row.get("global_batch_seqs"):
        return _positive(row, "global_batch_seqs")
    if row.get("global_batch_tokens"):
        return max(1, round(row["global_batch_tokens"] / length))
    if row.get("per_chip_batch_seqs"):
        return max(1, round(row["per_chip_batch_seqs"] * _positive(row, "chips")))
    raise Unusable("it gives no batch")


def _cluster(row: Mapping[str, Any], chip: Chip) -> Cluster:
    chips = _positive(row, "chips")
    mesh = row.get("mesh")
    outer = mesh if isinstance(mesh, Mapping) else {}
    outer = math.prod(int(n) for key, n in outer.items() if str(key).startswith("dcn") and n)
    slices = int(row.get("slices") or outer) if chip.kind == "tpu" else 1
    if chips % slices:
        raise Unusable(f"{chips} chips do not divide into {slices} equal slices")
    per_host = math.gcd(chips // slices, 4 if chip.kind == "tpu" else chip.chips_per_host or 8)
    name = f"{slices}x{chip.name}, {chips} chips"
    return Cluster(name, chip, chips // per_host, per_host * chip.devices_per_chip, slices)


def _seconds(
    row: Mapping[str, Any], job: Job, cluster: Cluster, convention: Convention
) -> tuple[str, float]:
    """Returns the published seconds per step, from the field that needs the least conversion."""
    chips = cluster.num_chips
    flops = step_flops(job, convention)
    assert job.precision != "f32", "published runs multiply in 16 bits or less"
    peak = cluster.chip.flops_per_device(job.precision) if cluster.chip else None
    per_chip = (peak or 0.0) * (cluster.chip.devices_per_chip if cluster.chip else 1)
    ways = (
        ("step_time_s", lambda v: v),
        ("tokens_per_s_per_chip", lambda v: job.tokens / (v * chips)),
        ("seqs_per_s", lambda v: job.batch / v),
        ("tflops_per_chip", lambda v: flops / (v * 1e12 * chips)),
        ("mfu", lambda v: flops / (v * per_chip * chips)),
    )
    for key, to_seconds in ways:
        value = row.get(key)
        if isinstance(value, int | float) and value > 0:
            return key, to_seconds(value)
    raise Unusable("it gives no step time, rate or TFLOP/s")
