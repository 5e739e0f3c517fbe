"""A machine that was measured: what its devices achieve when all of them are busy.

`shardlib calibrate` times matmuls, passes over memory and collectives on the devices at hand, all
of them at work at once, and writes what it found as JSON. A `MeasuredCluster` is planned with these
figures in place of datasheets and of the constants that were fitted to published runs.

That all devices work while one thing is timed is what makes virtual CPU devices plannable: they
share the cores of one machine, so each gets its part of them, whatever their number; and what moves
between them is copied by the same cores, which then compute nothing else.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlib.errors import ConfigError
from shardlib.hardware import Cluster
from shardlib.plan.layout import Software

FORMAT = 1
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift")


@dataclasses.dataclass(frozen=True)
class Timed:
    """One measured operation."""

    what: str
    size: tuple[int, ...]
    """Rows, fan-in, fan-out and bytes of a number of a matmul; bytes of anything else."""
    seconds: float
    """Lower quartile of the rounds."""
    spread: float
    """Half the range between quartiles, relative to the median."""


@dataclasses.dataclass(frozen=True)
class Line:
    """Seconds of an operation by its bytes: a start-up and a rate."""

    seconds: float
    bytes_per_second: float
    error: float
    """Median relative error of the line on what it was fitted to."""

    def __call__(self, num_bytes: float, pieces: float = 1.0) -> float:
        return self.seconds * pieces + num_bytes / self.bytes_per_second


@dataclasses.dataclass(frozen=True)
class MatmulFit:
    """Seconds of matmuls by `kernels.matmul`, of one precision."""

    flops: float
    fill: float
    seconds: float
    error: float


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """What was measured on one machine, with all its devices at work; figures are of one device."""

    platform: str
    device_kind: str
    devices: int
    hosts: int
    cores: int
    """Processor cores of the machine."""
    memory_bytes: float
    """Of one device."""
    versions: Mapping[str, str]
    matmul: Mapping[str, MatmulFit]
    """By precision: `f32`, `bf16`."""
    memory: Line
    exp: Line
    """The same with an exponential of each number, in float32."""
    fresh: Line
    """A program of one pass that writes to memory which was not in use before; with its start."""
    collectives: Mapping[str, Mapping[int, Line]]
    """By kind and by number of devices in a group, all groups at once. Bytes are those of the whole
    array that is gathered, reduced or scattered, and those that a device holds for the others."""
    timed: tuple[Timed, ...] = ()
    across: Mapping[str, Mapping[int, Line]] = dataclasses.field(default_factory=dict)
    """The same as `collectives`, of groups that lie as far apart as they can, as those of the outer
    mesh axes do; empty where all devices are of one host."""

    @property
    def exp_seconds(self) -> float:
        """Seconds of one exponential beside the pass over memory that it is part of."""
        # A number of float32 is read once and written twice; see `run.calibrating`.
        each = 12 / self.exp.bytes_per_second - 12 / self.memory.bytes_per_second
        return max(each, 0.0)

    @property
    def fresh_seconds(self) -> float:
        """Seconds of each byte of memory that a program asks the system for."""
        # Half of what the pass moves is new.
        return max(2 / self.fresh.bytes_per_second - 2 / self.memory.bytes_per_second, 0.0)

    @property
    def fit_errors(self) -> dict[str, float]:
        """The median relative error of each fit, by what was measured."""
        fits = {f"matmul {name}": fit for name, fit in self.matmul.items()}
        fits |= {"memory": self.memory, "exp": self.exp, "fresh": self.fresh}  # type: ignore[dict-item]
        for table, how in ((self.collectives, "over"), (self.across, "across")):
            for kind, by_size in table.items():
                fits |= {f"{kind} {how} {size}": line for size, line in by_size.items()}  # type: ignore[dict-item]
        return {what: fit.error for what, fit in fits.items()}

    @property
    def fit_error(self) -> float:
        """The worst of them."""
        return max(self.fit_errors.values())

    @property
    def spread(self) -> float:
        """The median spread of what was timed: how quiet the machine was."""
        return statistics.median(one.spread for one in self.timed) if self.timed else 0.0


@dataclasses.dataclass(frozen=True)
class MeasuredCluster(Cluster):
    """A cluster with the figures of `shardlib calibrate`."""

    calibration: Calibration | None = None

    @property
    def measured(self) -> Calibration:
        """What was measured."""
        assert self.calibration is not None, "a measured cluster holds what was measured"
        return self.calibration


def measured_cluster(cluster: Cluster, calibration: Calibration) -> MeasuredCluster:
    """Returns a cluster to plan with what was measured on it.

    Raises:
        ConfigError: If another number or kind of devices was measured, or GPUs of another number of
            hosts.
    """
    chip = cluster.chip
    kinds = chip.device_kinds if chip else ("cpu",)
    hosts = cluster.num_hosts if chip and chip.kind == "gpu" else calibration.hosts
    if (cluster.num_devices, hosts) != (calibration.devices, calibration.hosts) or (
        calibration.device_kind not in kinds
    ):
        on = f" on {calibration.hosts} host{'s' * (calibration.hosts > 1)}"
        here = f" on {hosts} host{'s' * (hosts > 1)}"
        differ = hosts != calibration.hosts
        raise ConfigError(
            f"the calibration is of {calibration.devices} devices of kind "
            f"{calibration.device_kind!r}{on * differ}, but {cluster.name} has "
            f"{cluster.num_devices} of kind {' or '.join(map(repr, kinds))}{here * differ}.\n"
            f"  Measure it: shardlib calibrate --on {cluster.name}"
        )
    own = {field.name: getattr(cluster, field.name) for field in dataclasses.fields(Cluster)}
    return MeasuredCluster(**own, calibration=calibration)


def software_on(cluster: Cluster, software: Software, *, context: int = 1) -> Software:
    """Returns software as it runs on a cluster: on virtual CPU devices attention is not fused, but
    for the ring over a `context` axis, and idle stages of a pipeline compute what is then
    discarded."""
    if cluster.platform != "cpu":
        return software
    attention = "unfused" if context == 1 else "flash"
    return dataclasses.replace(software, attention=attention, skip_idle=False)


def save(calibration: Calibration, path: Path) -> None:
    """Writes a calibration as JSON.

    Raises:
        ConfigError: If the file cannot be written.
    """
    record = {"format": FORMAT, "fit_error": round(calibration.fit_error, 4)}
    record |= dataclasses.asdict(calibration)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"the calibration cannot be written to {path}: {error.strerror}.\n"
            "  Set SHARDLIB_CACHE, or pass --output, to a place that can be."
        ) from None


def load(path: Path) -> Calibration:
    """Reads a calibration.

    Raises:
        ConfigError: If the file is absent, is no calibration, or holds a figure that is no positive
            number.
    """
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"the calibration {path} cannot be read: {error.strerror}.\n"
            "  Measure the devices at hand: shardlib calibrate"
        ) from None
    except ValueError as error:
        raise _malformed(path, f"it is no JSON ({error})") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise _malformed(path, f"its format is not {FORMAT}")
    try:
        calibration = _read(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _malformed(path, f"{type(error).__name__}: {error}") from None
    faults = _faults(calibration)
    if faults:
        raise _malformed(path, "; ".join(faults))
    return calibration


def _read(record: Mapping[str, Any]) -> Calibration:
    known = {field.name for field in dataclasses.fields(Calibration)}
    fields = {name: value for name, value in record.items() if name in known}
    fields["matmul"] = {name: MatmulFit(**fit) for name, fit in record["matmul"].items()}
    fields |= {name: Line(**record[name]) for name in ("memory", "exp", "fresh")}
    for table in ("collectives", "across"):
        fields[table] = {
            kind: {int(size): Line(**line) for size, line in by_size.items()}
            for kind, by_size in record.get(table, {}).items()
        }
    fields["timed"] = tuple(
        Timed(one["what"], tuple(one["size"]), one["seconds"], one["spread"])
        for one in record["timed"]
    )
    return Calibration(**fields)


def _faults(calibration: Calibration) -> list[str]:
    figures = {f"matmul.{name}": (fit.flops,) for name, fit in calibration.matmul.items()}
    figures |= {"memory": (calibration.memory.bytes_per_second,)}
    figures |= {"exp": (calibration.exp.bytes_per_second,)}
    figures |= {"fresh": (calibration.fresh.bytes_per_second,)}
    figures |= {"devices": (calibration.devices,), "cores": (calibration.cores,)}
    for table in ("collectives", "across"):
        for kind, by_size in getattr(calibration, table).items():
            figures |= {
                f"{table}.{kind}.{size}": (line.bytes_per_second,) for size, line in by_size.items()
            }
    faults = [
        f"{name} is {value!r}"
        for name, values in figures.items()
        for value in values
        if not (isinstance(value, int | float) and 0 < value < math.inf)
    ]
    if not calibration.matmul:
        faults.append("it holds no matmuls")
    if calibration.devices > 1:
        missing = [kind for kind in COLLECTIVES if not calibration.collectives.get(kind)]
        faults += [f"it holds no {kind}" for kind in missing]
    if calibration.hosts > 1:
        missing = [kind for kind in COLLECTIVES if not calibration.across.get(kind)]
        faults += [f"it holds no {kind} across hosts" for kind in missing]
    return faults


def _malformed(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path} is no calibration that can be read: {what}.\n  Measure again: shardlib calibrate"
    )
