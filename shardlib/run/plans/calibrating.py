"""Microbenchmarks of the available devices that calibrate the planner's cost model.

Each operation runs many times in a loop inside one compiled program, on all devices at once. Its
time is the slope between a short and a long loop, which excludes the launch of the program. Rounds
of all operations are interleaved, so that a disturbance of the machine affects all of them alike.
The lower quartile of each operation counts, since a disturbance only makes a machine slower.
"""

import dataclasses
import importlib.metadata
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from shardlib.cache_root import cache_root
from shardlib.cost.machine.fitting import fit_line, fit_matmul
from shardlib.cost.machine.measured import (
    COLLECTIVES,
    Calibration,
    Line,
    MeasuredCluster,
    Timed,
    load,
    measured_cluster,
)
from shardlib.errors import ConfigError, MeshError
from shardlib.hardware import CHIPS, Cluster, chip_for, parse_cluster
from shardlib.humanize import bandwidth, duration, flops
from shardlib.runtime.distributed import local_cpu_devices

_TYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
_MOST_REPEATS = 1024
_UNSTEADY = 0.5
"""Median relative error above which a fit is meaningless; idle machines stay below 0.3."""
_LOOP_SECONDS = {"cpu": 0.02, "gpu": 0.05, "tpu": 0.05}
_MATMULS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "cpu": (
        (16, 16, 16),
        (32, 128, 32),
        (64, 64, 64),
        (256, 32, 256),
        (256, 256, 256),
        (512, 128, 128),
        (512, 128, 344),
        (128, 512, 344),
        (512, 512, 512),
    ),
    "gpu": (
        *((side, side, side) for side in (256, 1024, 2048, 4096, 8192)),
        (8192, 1024, 4096),
        (8192, 4096, 1024),
        (1024, 8192, 4096),
    ),
}
_MATMULS["tpu"] = _MATMULS["gpu"]
_PASSES = {"cpu": (2**20, 2**21, 2**22), "gpu": (2**20, 2**24, 2**26, 2**28)}
_PASSES["tpu"] = _PASSES["gpu"]
_MOVED = {"cpu": (2**12, 2**18, 2**21), "gpu": (2**16, 2**20, 2**24, 2**27)}
_MOVED["tpu"] = _MOVED["gpu"]
_STACK_BYTES = 2**25
_LARGEST_STACK = 64
_AXES = ("outer", "inner")


@dataclasses.dataclass
class _Trial:
    """One operation to be timed."""

    what: str
    size: tuple[int, ...]
    run: Callable[[int], Any]
    """Runs the operation the given number of times in one program, and blocks until done."""
    pieces: int = 1
    """Number of operations in one run."""
    repeats: int = 1
    short: list[float] = dataclasses.field(default_factory=list)
    long: list[float] = dataclasses.field(default_factory=list)

    def time(self, repeats: int) -> float:
        start = time.perf_counter()
        self.run(repeats)
        return time.perf_counter() - start

    def warm_up(self, target_seconds: float) -> None:
        """Compiles the program and finds how many repeats fill a timed loop."""
        self.run(1)
        while self.repeats < _MOST_REPEATS and self.time(self.repeats) < target_seconds:
            self.repeats *= 4

    def round(self) -> None:
        """Measures one loop of a single repeat and one long loop."""
        self.short.append(self.time(1))
        self.long.append(self.time(1 + self.repeats))

    def result(self) -> Timed:
        """The slope between the lower quartiles of both loops."""
        low, middle, high = statistics.quantiles(self.long, n=4)
        grown = low - statistics.quantiles(self.short, n=4)[0]
        # If noise hides the slope, use a fraction of the loop's own time.
        each = max(grown / self.repeats, 0.2 * low / (1 + self.repeats))
        return Timed(self.what, self.size, each / self.pieces, (high - low) / 2 / middle)


def calibrate(
    on: str | None = None,
    *,
    devices: Sequence[Any] | None = None,
    rounds: int = 7,
    target_seconds: float | None = None,
) -> Calibration:
    """Measures the available devices, all of them busy at once. Takes some tens of seconds.

    Args:
        on: `cpu:8` emulates 8 devices on the CPU, before JAX starts. Any other cluster must be the
            available one. Default: all devices.
        devices: Devices to measure instead.
        rounds: Number of times each operation is timed.
        target_seconds: Duration of a timed loop.

    Raises:
        MeshError: If the available devices do not form the cluster.
        ConfigError: If `rounds` is below three.
    """
    if rounds < 3:
        raise ConfigError(f"rounds={rounds} are too few to tell a spread.\n  Ask for 3 or more.")
    devices = _devices(on) if devices is None else list(devices)
    platform = devices[0].platform
    kind = platform if platform in _MATMULS else "gpu"
    hosts = len({device.process_index for device in devices})
    trials = list(_trials(devices, kind, hosts))
    for trial in trials:
        trial.warm_up(target_seconds or _LOOP_SECONDS[kind])
    for _ in range(rounds):
        for trial in trials:
            trial.round()
    return _fitted(devices, hosts, [trial.result() for trial in trials])


def check_steady(calibration: Calibration) -> None:
    """Rejects a calibration that was disturbed by other work.

    Raises:
        ConfigError: If times do not follow the sizes of the timed operations.
    """
    off = {what: error for what, error in calibration.fit_errors.items() if error > _UNSTEADY}
    if off:
        what = ", ".join(f"{name} by {error:.0%}" for name, error in off.items())
        raise ConfigError(
            f"the devices were too busy to be measured: times deviate from the best linear fit, "
            f"{what}; nothing was written.\n  Run it again while nothing else runs."
        )


def report(calibration: Calibration) -> str:
    """Returns a calibration as readable text."""
    found, count = calibration, calibration.devices
    lines = [
        f"{count} devices of kind {found.device_kind!r} on {found.cores} cores, all at work at "
        f"once; {len(found.timed)} operations timed, spread {found.spread:.0%}, worst fit error "
        f"{found.fit_error:.0%}",
        *(
            f"matmul {name:4}  {flops(fit.flops):>12}/s a device, {flops(fit.flops * count)}/s in "
            f"all; {duration(fit.seconds)} to start (fit error {fit.error:.0%})"
            for name, fit in found.matmul.items()
        ),
        f"memory       {bandwidth(found.memory.bytes_per_second):>14} a device "
        f"(fit error {found.memory.error:.0%})",
    ]
    for table, how in ((found.collectives, "over"), (found.across, "across")):
        lines += [
            f"{kind:14} {how} {size:3}: {duration(line.seconds):>8} to start, "
            f"{bandwidth(line.bytes_per_second):>12} (fit error {line.error:.0%})"
            for kind, by_size in table.items()
            for size, line in by_size.items()
        ]
    return "\n".join(lines)


def calibration_path(cluster: Cluster) -> Path:
    """Returns the calibration file of a cluster, named by its device kind, its number of devices
    and, if there are several, its number of hosts."""
    kind = cluster.chip.name if cluster.chip else "cpu"
    many = cluster.num_hosts > 1
    size = f"{cluster.num_hosts}x{cluster.devices_per_host}" if many else cluster.num_devices
    return cache_root() / "calibration" / f"{kind}-{size}.json"


def as_measured(cluster: Cluster) -> Cluster:
    """Returns a cluster with its calibration on this machine, or the cluster unchanged without one.

    Raises:
        ConfigError: If the calibration cannot be read, or the cluster has CPU devices and no
            calibration. Nothing else is known about the speed of CPU devices.
    """
    path = calibration_path(cluster)
    if isinstance(cluster, MeasuredCluster) or (cluster.chip is not None and not path.exists()):
        return cluster
    if not path.exists():
        raise ConfigError(
            f"the speed of {cluster.name} is unknown: plans for CPU devices need a calibration.\n"
            f"  Measure them first: shardlib calibrate --on {cluster.name}"
        )
    return measured_cluster(cluster, load(path))


def cluster_at_hand(calibration: Calibration) -> Cluster:
    """Returns the cluster that was measured, without the measurements."""
    if calibration.platform == "cpu":
        return parse_cluster(f"cpu:{calibration.devices}")
    for chip in CHIPS.values():
        if calibration.device_kind in chip.device_kinds:
            return Cluster(
                f"{calibration.devices}x{chip.name}",
                chip,
                calibration.hosts,
                calibration.devices // calibration.hosts,
            )
    raise MeshError(
        f"devices of kind {calibration.device_kind!r} are not a known chip.\n"
        "  Plan for one of shardlib.hardware.CHIPS."
    )


def _devices(on: str | None) -> list[Any]:
    cluster = None if on is None else parse_cluster(on)
    if cluster is not None and cluster.chip is None:
        local_cpu_devices(cluster.num_devices)
    devices = jax.devices()
    if cluster is None:
        return devices
    kinds = cluster.chip.device_kinds if cluster.chip else ("cpu",)
    if len(devices) != cluster.num_devices or devices[0].device_kind not in kinds:
        raise MeshError(
            f"{on} is not available: there are {len(devices)} devices of kind "
            f"{devices[0].device_kind!r}.\n"
            "  Run this on the machine itself, or leave --on out to measure these devices."
        )
    return devices


def _trials(devices: list[Any], kind: str, hosts: int) -> Iterator[_Trial]:
    everywhere = Mesh(_grid(devices, 1), _AXES, axis_types=(AxisType.Auto,) * 2)
    yield _passes(everywhere, "empty", 4, lambda x: x)
    for name in _TYPES:
        for shape in _MATMULS[kind]:
            yield _matmul(everywhere, name, shape)
    for num_bytes in _PASSES[kind]:
        yield _passes(everywhere, "memory", num_bytes, lambda x: x * 0.999 + 0.5)
        yield _passes(everywhere, "exp", num_bytes, lambda x: jnp.exp(-x))
        yield _fresh(everywhere, num_bytes)
    for size in range(2, len(devices) + 1):
        if len(devices) % size == 0:
            meshes = {"over": _grid(devices, size)}
            if hosts > 1:
                # As far apart as they can be.
                meshes["across"] = _grid(devices, len(devices) // size).T
            for how, grid in meshes.items():
                mesh = Mesh(grid, _AXES, axis_types=(AxisType.Auto,) * 2)
                for collective in COLLECTIVES:
                    for num_bytes in _MOVED[kind]:
                        yield _collective(mesh, collective, how, num_bytes)


def _grid(devices: list[Any], inner: int) -> np.ndarray:
    grid = np.empty(len(devices), object)
    grid[:] = devices
    return grid.reshape(-1, inner)


def _loop(mesh: Mesh, body: Callable[[Any], Any], make: Callable[[], Any]) -> Callable[[int], Any]:
    """Returns a function that runs `body` on a carry `repeats` times on every device.

    Each run takes the result of the last one, so that XLA can neither drop nor hoist a run.
    """

    def each(carry: PyTree, repeats: jax.Array) -> PyTree:
        return jax.lax.fori_loop(0, repeats, lambda _, x: body(x), carry)

    def on_all(function: Callable[..., Any], in_specs: PyTree[P]) -> Callable[..., PyTree]:
        return jax.jit(
            jax.shard_map(
                function, mesh=mesh, in_specs=in_specs, out_specs=P(_AXES), check_vma=False
            )
        )

    program, carry = on_all(each, (P(_AXES), P())), on_all(make, ())()

    def run(repeats: int) -> PyTree:
        return jax.block_until_ready(program(carry, jnp.int32(repeats)))

    return run


def _matmul(mesh: Mesh, precision: str, shape: tuple[int, int, int]) -> _Trial:
    rows, fan_in, fan_out = shape
    dtype = jnp.dtype(_TYPES[precision])

    def make() -> PyTree:
        ones = jnp.ones((rows, fan_in), dtype), jnp.ones((fan_in, fan_out), dtype)
        return (*ones, jnp.zeros((rows, fan_out), dtype))

    def body(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, w, _ = carry
        y = x @ w
        # One element of the result feeds the operand of the next matmul.
        return jax.lax.dynamic_update_slice(x, y[:1, :1] * 1e-3, (0, 0)), w, y

    return _Trial(f"matmul {precision}", (*shape, dtype.itemsize), _loop(mesh, body, make))


def _passes(mesh: Mesh, what: str, num_bytes: int, pass_over: Callable[[Any], Any]) -> _Trial:
    """A trial that passes over a stack of arrays too large for the caches: a training step, too,
    reads its results back only long after it wrote them."""
    count = min(max(_STACK_BYTES // num_bytes, 1), _LARGEST_STACK)

    def make() -> PyTree:
        return jnp.ones((count, num_bytes // 4), jnp.float32)

    def body(stack: jax.Array) -> jax.Array:
        return jax.lax.map(pass_over, stack)

    # One read and two writes: XLA fills the stack of results with zeros first.
    return _Trial(what, (3 * num_bytes,), _loop(mesh, body, make), pieces=count)


def _fresh(mesh: Mesh, num_bytes: int) -> _Trial:
    """A trial that launches a separate program each time, whose result is freshly allocated."""
    placed = NamedSharding(mesh, P(_AXES))
    x = jax.jit(lambda: jnp.ones((mesh.size * num_bytes // 4,)), out_shardings=placed)()
    program = jax.jit(lambda x: x * 0.999 + 0.5)

    def run(repeats: int) -> PyTree:
        for _ in range(repeats):
            jax.block_until_ready(program(x))

    return _Trial("fresh", (2 * num_bytes,), run)


def _collective(mesh: Mesh, kind: str, how: str, num_bytes: int) -> _Trial:
    axis, size = _AXES[1], mesh.shape[_AXES[1]]
    part = num_bytes // 4 // size
    ring = [(i, (i + 1) % size) for i in range(size)]
    ways: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda x: jax.lax.psum(x, axis),
        "all_gather": lambda x: jax.lax.all_gather(x[:part], axis, tiled=True),
        "reduce_scatter": lambda x: jax.lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True),
        "all_to_all": lambda x: jax.lax.all_to_all(
            x, axis, split_axis=0, concat_axis=0, tiled=True
        ),
        "shift": lambda x: jax.lax.ppermute(x, axis, ring),
    }

    def body(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, _ = carry
        y = ways[kind](x)
        return jax.lax.dynamic_update_slice(x, y[:1] * 1e-3, (0,)), y

    def make() -> PyTree:
        length = part if kind == "reduce_scatter" else part * size
        return jnp.ones((part * size,), jnp.float32), jnp.zeros((length,), jnp.float32)

    return _Trial(f"{kind} {how} {size}", (part * size * 4,), _loop(mesh, body, make))


def _fitted(devices: Sequence[Any], hosts: int, timed: Sequence[Timed]) -> Calibration:
    """Fits what was timed, less what the loop itself takes."""
    (empty,) = (one for one in timed if one.what == "empty")
    by_kind: dict[str, list[Timed]] = {}
    for one in timed:
        left = max(one.seconds - empty.seconds, 0.1 * one.seconds)
        by_kind.setdefault(one.what, []).append(dataclasses.replace(one, seconds=left))
    memory = fit_line(by_kind["memory"])
    return Calibration(
        platform=devices[0].platform,
        device_kind=devices[0].device_kind,
        devices=len(devices),
        hosts=hosts,
        cores=os.cpu_count() or 1,
        memory_bytes=_memory_bytes(devices),
        versions={name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        matmul={name: fit_matmul(by_kind[f"matmul {name}"], memory) for name in _TYPES},
        memory=memory,
        exp=fit_line(by_kind["exp"]),
        fresh=fit_line(by_kind["fresh"]),
        collectives=_lines(by_kind, "over"),
        across=_lines(by_kind, "across"),
        timed=tuple(timed),
    )


def _lines(by_kind: Mapping[str, Sequence[Timed]], how: str) -> dict[str, dict[int, Line]]:
    lines: dict[str, dict[int, Line]] = {}
    for what, timed in by_kind.items():
        kind, *rest = what.split()
        if rest[:1] == [how]:
            lines.setdefault(kind, {})[int(rest[1])] = fit_line(timed)
    return lines


def _memory_bytes(devices: Sequence[Any]) -> float:
    """Memory of one device in bytes; virtual CPU devices share the memory of the machine."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        return float(limit)
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)
    chip = chip_for(devices[0])
    return chip.memory_bytes_per_device if chip else math.inf
