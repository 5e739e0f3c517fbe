"""Objectives of the planner: the clusters to try and the best of their plans, by time, cost or
chips."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Literal

from shardlib.errors import ConfigError, MeshError, did_you_mean
from shardlib.hardware import Cluster, parse_cluster
from shardlib.hardware.chips import CHIPS, Chip
from shardlib.plan.problem import Plan, Workload
from shardlib.plan.search import Found, search

Objective = Literal["time", "cost", "chips"]
OBJECTIVES: tuple[Objective, ...] = ("time", "cost", "chips")

_MOST_CHIPS = 32768
_DAY = 86400.0


@dataclasses.dataclass(frozen=True)
class Goal:
    """Goal of a plan."""

    objective: Objective = "time"
    """`time`: the fastest step on the whole cluster. `cost`: the fewest chip-hours, on the cluster
    or on a smaller one of the same chip. `chips`: the smallest cluster that suffices."""
    tokens: float | None = None
    """Tokens or images that the run trains on."""
    days: float | None = None
    """Time limit of the run, in days."""
    price: float | None = None
    """USD per chip-hour."""

    def __post_init__(self) -> None:
        faults = []
        if self.objective not in OBJECTIVES:
            hint = did_you_mean(str(self.objective), OBJECTIVES)
            faults.append(
                f"no objective is called {self.objective!r}.{hint}\n"
                f"  Choose one of: {', '.join(OBJECTIVES)}."
            )
        for name in ("tokens", "days", "price"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and 0 < float(value) < math.inf):
                faults.append(
                    f"{name} is {value!r}, but must be a positive number.\n  Give another one."
                )
        if faults:
            raise ConfigError("\n".join(faults))

    def seconds(self, tokens_per_step: float) -> float:
        """Returns the most seconds that a step may take."""
        if self.days is None or self.tokens is None:
            return math.inf
        return self.days * _DAY * tokens_per_step / self.tokens


def clusters(on: str, objective: Objective = "time", *, deadline: bool = True) -> list[Cluster]:
    """Returns the clusters that a name stands for, smallest first.

    `v5p-128` stands for itself and, unless the objective is `time`, for smaller clusters of its
    chip; `v5p` stands for clusters of all sizes.

    Args:
        on: A cluster, or a chip alone.
        objective: Objective of the plan.
        deadline: Whether the run has a time limit, which determines the number of chips.

    Raises:
        MeshError: If the name is unknown, or has no size and nothing determines it.
    """
    chip = CHIPS.get(on.strip().lower())
    if chip is not None:
        names = list(_names(chip))
        if objective == "time" and not deadline:
            raise MeshError(
                f"cluster {on!r} has no size.\n"
                f"  Add it, as in {names[3]}; or give an objective of cost or chips, or tokens "
                "and days, and the plan chooses the size."
            )
        return [parse_cluster(name) for name in names]
    cluster = parse_cluster(on)
    if objective == "time" or cluster.chip is None:
        return [cluster]
    smaller = (parse_cluster(name) for name in _names(cluster.chip))
    return [*(c for c in smaller if c.num_devices < cluster.num_devices), cluster]


def next_larger(cluster: Cluster) -> Cluster | None:
    """Returns a cluster with at least twice the chips, or None if no such cluster exists."""
    if cluster.chip is None:
        return None
    larger = (parse_cluster(name) for name in _names(cluster.chip))
    enough = (c for c in larger if c.num_chips >= 2 * cluster.num_chips)
    return next((c for c in enough if c.num_chips % cluster.num_chips == 0), None)


def roomier(cluster: Cluster) -> list[Cluster]:
    """Returns clusters of the same number of GPUs with more memory, least first; empty for a TPU
    slice."""
    chip = cluster.chip
    if chip is None or chip.kind != "gpu" or cluster.devices_per_host != chip.chips_per_host:
        return []
    others = (c for c in CHIPS.values() if c.kind == "gpu" and c.memory_bytes > chip.memory_bytes)
    like = (
        c
        for c in others
        if (c.chips_per_host, c.nvlink_chips) == (8, 8) == (chip.chips_per_host, chip.nvlink_chips)
    )
    ordered = sorted(like, key=lambda c: c.memory_bytes)
    return [parse_cluster(f"{cluster.num_hosts}x8x{c.name}") for c in ordered]


def best_found(
    workload: Workload, tried: Sequence[Cluster], goal: Goal, *, top: int
) -> Found[Plan] | None:
    """Returns the search result on the cluster that suits a goal best; None if nothing fits or is
    fast enough on any.
    """
    limit = goal.seconds(workload.tokens)
    suited: list[Found[Plan]] = []
    for cluster in tried:
        if not _may_do(workload, cluster, limit):
            continue
        outcome = search(workload, cluster, top=top)
        if outcome.plans and outcome.plans[0].seconds <= limit:
            suited.append(outcome)
            if goal.objective == "chips" or (goal.objective == "time" and goal.days):
                break
    if goal.objective == "cost":
        return min(suited, key=lambda f: f.plans[0].device_seconds, default=None)
    return suited[0] if suited else None


def _may_do(workload: Workload, cluster: Cluster, limit: float) -> bool:
    """Returns whether the devices could be fast enough at peak FLOP/s."""
    if cluster.chip is None:
        return True
    peak = max(cluster.chip.flops_per_device(p) or 0.0 for p in ("bf16", "fp16", "fp8"))
    return workload.flops <= peak * cluster.num_devices * limit


def _names(chip: Chip) -> Iterator[str]:
    """Yields the names of the clusters of a chip, smallest first."""
    if chip.kind == "gpu":
        host = chip.chips_per_host or 8
        count = 1
        while count < host:
            yield f"{count}x{chip.name}"
            count *= 2
        hosts = sorted({f * 2**n for n in range(13) for f in (1, 3)})
        yield from (f"{n}x{host}x{chip.name}" for n in hosts if n * host <= _MOST_CHIPS)
        return
    most = chip.max_chips or 256
    sizes = [2**n for n in range(most.bit_length()) if 2**n <= most]
    sizes = [size for size in sizes if size >= (1 if chip.torus_dims == 2 else 4) and size != 2]
    yield from (_slice(chip, size) for size in sizes)
    slices = 2
    while slices * sizes[-1] <= _MOST_CHIPS:
        yield f"{slices}x{_slice(chip, sizes[-1])}"
        slices *= 2


def _slice(chip: Chip, chips: int) -> str:
    if chip.name in ("v4", "v5p"):
        return f"{chip.name}-{2 * chips}"
    if chip.torus_dims == 2:
        return f"{chip.name}-{chips}"
    sides = [1] * chip.torus_dims
    while math.prod(sides) < chips:
        sides[sides.index(min(sides))] *= 2
    return f"{chip.name}:" + "x".join(map(str, sorted(sides)))
