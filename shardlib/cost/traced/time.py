"""Seconds of a traced step: the time of the costs of one device (`costs.Costs`)."""

import dataclasses
import functools
import math
from collections.abc import Mapping

from shardlib.cost.layout import AXES, Layout, Software
from shardlib.cost.machine import fabric, kernels
from shardlib.cost.machine.fabric import Link
from shardlib.cost.machine.measured import software_on
from shardlib.cost.machine.rates import Rates, rates_on
from shardlib.cost.traced.costs import Costs, Product, Way
from shardlib.cost.traced.layout import Axes
from shardlib.cost.transformer.communication_time import hidden
from shardlib.cost.transformer.step_time import StepTime
from shardlib.cost.workload import Precision
from shardlib.hardware import Cluster

_WAYS: tuple[Way, ...] = ("forward", "backward", "again")
_SHOWN = ("data", "fsdp", "expert", "context", "tensor")
_SUMS = ("all_reduce", "reduce_scatter")


def traced_time(
    gradient: Costs,
    update: Costs,
    layout: Layout,
    cluster: Cluster,
    software: Software,
    precision: Precision,
    constants: Mapping[str, float],
) -> StepTime:
    """Returns the time of a step.

    Args:
        gradient: Costs of one microbatch on one device.
        update: Costs of the optimizer on one device.
        layout: Layout with the number of microbatches.
        cluster: Cluster with its rates and links.
        software: Properties of the program, such as what it overlaps.
        precision: Precision of the matmuls with two-byte operands, or of all matmuls.
        constants: Constants of the cost model.
    """
    software = software_on(cluster, software)
    rates = rates_on(cluster, precision, constants)
    sums_twice = precision != "f32"
    wide = rates if precision == "f32" else _wide(cluster, constants, rates)
    device = _Device(layout, cluster, software, rates, wide, constants)
    micro = layout.microbatches
    products, passes = device.products(gradient), device.passes(gradient)
    window: dict[Way, float] = {way: products[way] + passes[way] for way in _WAYS}
    parts = device.exposed(gradient, window, sums_twice=sums_twice) | {
        "matmul": micro * (products["forward"] + products["backward"]),
        "elementwise": micro * (passes["forward"] + passes["backward"]),
        "recompute": micro * window["again"],
        "optimizer": device.whole(update),
    }
    slowest = rates.jitter * math.sqrt(2 * math.log(cluster.num_hosts))
    slowest += rates.skew * math.log2(layout.slices)
    return StepTime(**parts, waiting=slowest * sum(parts.values()))


def _wide(cluster: Cluster, constants: Mapping[str, float], rates: Rates) -> Rates:
    """Returns the rates of float32 matmuls if the devices have them."""
    if cluster.chip is not None and cluster.chip.bf16_flops is None:
        return rates
    return rates_on(cluster, "f32", constants)


@dataclasses.dataclass(eq=False)
class _Device:
    """One device of a layout, which turns costs into seconds."""

    layout: Layout
    cluster: Cluster
    software: Software
    rates: Rates
    wide: Rates
    """Rates of matmuls with four-byte operands."""
    constants: Mapping[str, float]

    def products(self, costs: Costs) -> dict[Way, float]:
        """Returns the seconds of matmuls and convolutions."""
        found = dict.fromkeys(_WAYS, 0.0)
        for (way, product), count in costs.products.items():
            found[way] += count * _product(self.wide if product.width > 2 else self.rates, product)
        return found

    def passes(self, costs: Costs) -> dict[Way, float]:
        """Returns the seconds of passes over memory. A kernel that hardly moves anything takes its
        launch time."""
        rates, found = self.rates, {}
        for way in _WAYS:
            moved = costs.fused_bytes[way] / rates.memory
            work = costs.exponentials[way] * rates.exp_seconds
            found[way] = kernels.roofline(moved, costs.kernels[way] * rates.kernel_seconds) + work
        return found

    def whole(self, costs: Costs) -> float:
        """Returns the seconds of a program that overlaps with nothing else."""
        computed = sum(c * _product(self.wide, p) for (_, p), c in costs.products.items())
        computed += sum(self.passes(costs).values())
        moved = (self._by_axis(costs, of_param=flag) for flag in (False, True))
        return computed + sum(sum(kinds.values()) for part in moved for kinds in part.values())

    def exposed(
        self, costs: Costs, window: Mapping[Way, float], *, sums_twice: bool
    ) -> dict[str, float]:
        """Returns the seconds by mesh axis of the collectives of a step that computation does not
        hide.

        Args:
            costs: Costs of one microbatch.
            window: Seconds of computation of one microbatch.
            sums_twice: Whether a float32 sum has twice the bytes of a sum in the program's dtype.
        """
        rates, software, micro = self.rates, self.software, self.layout.microbatches
        back = window["backward"] + window["again"]
        seconds: dict[str, float] = dict.fromkeys(_SHOWN, 0.0)
        for axis, moved in self._by_axis(costs, of_param=False).items():
            seconds[axis] += micro * moved["all"]
        left = _left(sum(seconds.values()), micro * (window["forward"] + back), software, rates)
        seconds = {axis: value * left for axis, value in seconds.items()}
        for axis, moved in self._by_axis(costs, of_param=True).items():
            fraction = rates.hide_gather if software.overlap_gather else 0.0
            gathered = hidden(moved["forward"], window["forward"], fraction)
            gathered += hidden(moved["backward"], back, fraction)
            fraction = rates.hide_data if software.overlap_data else 0.0
            summed = micro * hidden(moved["summed"], back, fraction)
            if axis == "data" and self.layout.reduces_once:
                # The sum is in float32, with nothing left to hide behind; see
                # `cost.transformer.gradient_reduction`.
                summed = moved["summed"] * (2 if sums_twice else 1)
            seconds[axis] += micro * gathered + summed
        return seconds

    def _by_axis(self, costs: Costs, *, of_param: bool) -> dict[str, dict[str, float]]:
        """Returns the seconds of collectives by mesh axis: of parameters gathered in either pass,
        of gradient sums, and of all other collectives together. A collective over several axes
        counts for the outermost one.

        Small gradients are summed together with large ones and share their start.
        """
        found: dict[str, dict[str, float]] = {}
        started: set[tuple[Axes, str]] = set()
        for (way, moved), count in costs.moved.items():
            if moved.of_param != of_param:
                continue
            kind = "all"
            if of_param:
                kind = (
                    "summed" if moved.kind in _SUMS else ("forward", "backward")[way != "forward"]
                )
            size = moved.num_bytes
            for axes in self._groups(moved.axes, kind):
                pieces = float((axes, moved.kind) not in started) if kind == "summed" else 1.0
                started.add((axes, moved.kind))
                link, between = self._links_of(axes)
                seconds = _collective(link, moved.kind, size, pieces)
                if moved.kind != "all_to_all":
                    size /= link.size
                if between is not None:
                    seconds += _collective(between, moved.kind, size, pieces)
                kinds = ("forward", "backward", "summed", "all")
                by_kind = found.setdefault(axes[0], dict.fromkeys(kinds, 0.0))
                by_kind[kind] += count * seconds
        return found

    def _groups(self, axes: Axes, kind: str) -> list[Axes]:
        """Returns the groups of axes that a collective runs over in turn, innermost group first,
        with axes ordered from the outermost. Sums over `data` that wait for the end of a step are
        separate."""
        ordered = tuple(axis for axis in AXES if axis in axes)
        if kind == "summed" and self.layout.reduces_once and ordered[:1] == ("data",):
            return [group for group in (ordered[1:], ordered[:1]) if group]
        return [ordered]

    @functools.cached_property
    def _links_of(self) -> "functools._lru_cache_wrapper[tuple[Link, Link | None]]":
        return functools.lru_cache(None)(self._find_links)

    def _find_links(self, axes: Axes) -> tuple[Link, Link | None]:
        """Returns the link of several axes as if they were one, and the link between the slices
        they cross."""
        size = math.prod(self.layout.size(axis) for axis in axes)
        joint = dataclasses.replace(self.layout, **{**dict.fromkeys(axes, 1), axes[0]: size})
        single = self.software.single_rail
        found = fabric.links(self.cluster, joint, self.constants, single_rail=single)
        between = found.get("slices") if axes[0] == "data" else None
        return found[axes[0]], between


def _product(rates: Rates, product: Product) -> float:
    rows = product.rows * product.groups
    seconds = kernels.product(rates, rows, product.fan_in, product.fan_out, product.num_bytes)
    return seconds + rates.kernel_seconds


def _left(exposed: float, window: float, software: Software, rates: Rates) -> float:
    """Returns the fraction of the collectives of activations that computation does not hide."""
    if not exposed or not software.overlap_tensor:
        return 1.0
    return hidden(exposed, window, rates.hide_tensor) / exposed


def _collective(link: Link, kind: str, size: float, pieces: float) -> float:
    if kind == "all_to_all":
        return link.all_to_all(size)
    if kind == "all_reduce":
        return link.all_reduce(size, pieces)
    return (link.gather if kind == "all_gather" else link.reduce_scatter)(size, pieces)
