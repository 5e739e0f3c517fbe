"""Measured machines: the rates that devices achieve when all of them are busy.

`shardlib calibrate` times matmuls, passes over memory and collectives on all devices at once, and
writes the results as JSON. The planner uses these figures for a `MeasuredCluster`, in place of
datasheets and of the constants fitted to published runs.

Timing all devices at once makes virtual CPU devices plannable. They share the cores of one machine,
so each device gets its part of them, whatever their number. The same cores copy what moves between
devices, and compute nothing meanwhile.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlib.cost.layout import Software
from shardlib.cost.machine.constants import family_of
from shardlib.errors import ConfigError, MeshError
from shardlib.hardware import Cluster

FORMAT = 1
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift")


@dataclasses.dataclass(frozen=True)
class Timed:
    """One measured operation."""

    what: str
    size: tuple[int, ...]
    """Rows, fan-in, fan-out and bytes per element of a matmul; bytes of any other operation."""
    seconds: float
    """Lower quartile of the rounds."""
    spread: float
    """Half the interquartile range, relative to the median."""


@dataclasses.dataclass(frozen=True)
class Line:
    """Seconds of an operation by its bytes: a start-up and a rate."""

    seconds: float
    bytes_per_second: float
    error: float
    """Median relative error of the line on the points it was fitted to."""

    def __call__(self, num_bytes: float, pieces: float = 1.0) -> float:
        return self.seconds * pieces + num_bytes / self.bytes_per_second


@dataclasses.dataclass(frozen=True)
class MatmulFit:
    """Fit of `kernels.matmul` to the matmuls of one precision."""

    flops: float
    fill: float
    seconds: float
    error: float


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """Measurements of one machine with all its devices busy; figures are per device."""

    platform: str
    device_kind: str
    devices: int
    hosts: int
    cores: int
    """Processor cores of the machine."""
    memory_bytes: float
    """Memory of one device."""
    versions: Mapping[str, str]
    matmul: Mapping[str, MatmulFit]
    """Matmul fits by precision: `f32`, `bf16`."""
    memory: Line
    exp: Line
    """A pass over memory with an exponential of each element, in float32."""
    fresh: Line
    """A program of one pass that writes to fresh memory, including its start."""
    collectives: Mapping[str, Mapping[int, Line]]
    """Collectives by kind and by number of devices in a group, with all groups at once. Bytes count
    the whole array that is gathered, reduced or scattered; for `all_to_all` and `shift`, what a
    device holds for the others."""
    timed: tuple[Timed, ...] = ()
    across: Mapping[str, Mapping[int, Line]] = dataclasses.field(default_factory=dict)
    """Collectives of groups that lie as far apart as they can, as groups of the outer mesh axes do;
    empty if all devices are on one host."""

    @property
    def exp_seconds(self) -> float:
        """Seconds of one exponential on top of the pass over memory that contains it."""
        # A float32 element is read once and written twice; see `run.plans.calibrating`.
        each = 12 / self.exp.bytes_per_second - 12 / self.memory.bytes_per_second
        return max(each, 0.0)

    @property
    def fresh_seconds(self) -> float:
        """Seconds per byte of memory that a program requests from the system."""
        # Half of the bytes that the pass moves are new.
        return max(2 / self.fresh.bytes_per_second - 2 / self.memory.bytes_per_second, 0.0)

    @property
    def fit_errors(self) -> dict[str, float]:
        """Median relative error of each fit, by what was measured."""
        fits = {f"matmul {name}": fit for name, fit in self.matmul.items()}
        fits |= {"memory": self.memory, "exp": self.exp, "fresh": self.fresh}  # type: ignore[dict-item]
        for table, how in ((self.collectives, "over"), (self.across, "across")):
            for kind, by_size in table.items():
                fits |= {f"{kind} {how} {size}": line for size, line in by_size.items()}  # type: ignore[dict-item]
        return {what: fit.error for what, fit in fits.items()}

    @property
    def fit_error(self) -> float:
        """The largest of `fit_errors`."""
        return max(self.fit_errors.values())

    @property
    def spread(self) -> float:
        """Median spread of the timings, a measure of noise on the machine."""
        return statistics.median(one.spread for one in self.timed) if self.timed else 0.0


@dataclasses.dataclass(frozen=True)
class MeasuredCluster(Cluster):
    """A cluster with the figures of `shardlib calibrate`."""

    calibration: Calibration | None = None

    @property
    def measured(self) -> Calibration:
        """The calibration of this cluster."""
        assert self.calibration is not None, "a measured cluster holds what was measured"
        return self.calibration


def measured_cluster(cluster: Cluster, calibration: Calibration) -> MeasuredCluster:
    """Returns a cluster with the measurements made on it.

    Raises:
        ConfigError: If the calibration is of another number or kind of devices, or of GPUs on
            another number of hosts.
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


def check_known(cluster: Cluster) -> None:
    """Raises `MeshError` if nothing is known about the devices of a cluster."""
    if cluster.chip is None and not isinstance(cluster, MeasuredCluster):
        raise MeshError(
            f"cluster {cluster.name!r}: the speed and memory of its devices are not known.\n"
            "  Run `shardlib calibrate` on them first, or name TPUs or GPUs, as in v5p-128, 8xh100."
        )


def software_on(cluster: Cluster, software: Software, *, context: int = 1) -> Software:
    """Returns software as it runs on a cluster. On virtual CPU devices attention is not fused,
    except for the ring over a `context` axis, and idle stages of a pipeline compute results that
    are discarded."""
    if cluster.platform != "cpu":
        return software
    attention = "unfused" if context == 1 else "flash"
    return dataclasses.replace(software, attention=attention, skip_idle=False)


def prices_cudnn(cluster: Cluster) -> bool:
    """Returns whether cuDNN's attention has a rate of its own: on Hopper, unless the cluster was
    measured, which gives one rate for all kernels."""
    chip = cluster.chip
    is_hopper = chip is not None and family_of(chip) == "hopper"
    return is_hopper and not isinstance(cluster, MeasuredCluster)


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
            "  Set SHARDLIB_CACHE, or pass --output, to a writable path."
        ) from None


def load(path: Path) -> Calibration:
    """Reads a calibration.

    Raises:
        ConfigError: If the file is absent, is not a calibration, or holds a figure that is not a
            positive number.
    """
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"the calibration {path} cannot be read: {error.strerror}.\n"
            "  Measure the devices at hand: shardlib calibrate"
        ) from None
    except ValueError as error:
        raise _malformed(path, f"it is not JSON ({error})") from None
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
    lines = {name: getattr(calibration, name) for name in ("memory", "exp", "fresh")}
    for table in ("collectives", "across"):
        for kind, by_size in getattr(calibration, table).items():
            lines |= {f"{table}.{kind}.{size}": line for size, line in by_size.items()}
    figures = {f"matmul.{name}": fit.flops for name, fit in calibration.matmul.items()}
    figures |= {name: line.bytes_per_second for name, line in lines.items()}
    figures |= {"devices": calibration.devices, "cores": calibration.cores}
    faults = [
        f"{name} is {value!r}"
        for name, value in figures.items()
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
        f"{path} is not a readable calibration: {what}.\n  Measure again: shardlib calibrate"
    )
