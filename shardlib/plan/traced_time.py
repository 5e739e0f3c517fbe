"""Seconds of a step from what one device of it does: the time of `jaxpr_costs.Costs`."""

import math
from collections.abc import Mapping
from typing import Any

from shardlib.hardware import Cluster
from shardlib.plan import fabric
from shardlib.plan.cost import StepTime
from shardlib.plan.fabric import Link
from shardlib.plan.jaxpr_costs import Costs, Product, Way
from shardlib.plan.jaxpr_layout import Moved
from shardlib.plan.kernels import padded, roofline
from shardlib.plan.layout import AXES, Layout, Software
from shardlib.plan.measured import software_on
from shardlib.plan.rates import Rates, rates_on
from shardlib.plan.traffic import hidden
from shardlib.plan.workload import Precision

_WAYS: tuple[Way, ...] = ("forward", "backward", "again")
_SHOWN = ("data", "fsdp", "expert", "context", "tensor")


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
        gradient: Of one microbatch on one device.
        update: Of the optimizer on one device.
        layout: For its microbatches.
        cluster: For rates and links.
        software: What it overlaps.
        precision: Of the matmuls with operands of two bytes, or of all.
        constants: Of the cost model.
    """
    software = software_on(cluster, software)
    rates = rates_on(cluster, precision, constants)
    wide = rates if precision == "f32" else _wide(cluster, constants, rates)
    links = fabric.links(cluster, layout, constants, single_rail=software.single_rail)
    micro = layout.microbatches
    products = dict.fromkeys(_WAYS, 0.0)
    for (way, product), count in gradient.products.items():
        products[way] += count * _product(wide if product.width > 2 else rates, product)
    passes = {way: _passes(gradient, way, rates) for way in _WAYS}
    window = {way: products[way] + passes[way] for way in _WAYS}
    back = window["backward"] + window["again"]
    seconds: dict[str, float] = dict.fromkeys(_SHOWN, 0.0)
    for axis, moved in _by_axis(gradient, links, of_param=False).items():
        seconds[axis] += micro * moved["all"]
    left = _left(sum(seconds.values()), micro * (window["forward"] + back), software, rates)
    seconds = {axis: value * left for axis, value in seconds.items()}
    for axis, moved in _by_axis(gradient, links, of_param=True).items():
        fraction = rates.hide_gather if software.overlap_gather else 0.0
        gathered = hidden(moved["forward"], window["forward"], fraction)
        gathered += hidden(moved["backward"], back, fraction)
        often = micro if axis == "fsdp" else 1
        fraction = rates.hide_data if software.overlap_data else 0.0
        seconds[axis] += micro * gathered + often * hidden(moved["summed"], back, fraction)
    optimizer = sum(c * _product(wide, p) for (_, p), c in update.products.items())
    optimizer += sum(_passes(update, way, rates) for way in _WAYS)
    for moved in (_by_axis(update, links, of_param=flag) for flag in (False, True)):
        optimizer += sum(sum(kinds.values()) for kinds in moved.values())
    parts = {axis: seconds[axis] for axis in _SHOWN} | {
        "matmul": micro * (products["forward"] + products["backward"]),
        "elementwise": micro * (passes["forward"] + passes["backward"]),
        "recompute": micro * window["again"],
        "optimizer": optimizer,
    }
    slowest = rates.jitter * math.sqrt(2 * math.log(cluster.num_hosts))
    slowest += rates.skew * math.log2(layout.slices)
    return StepTime(**parts, waiting=slowest * sum(parts.values()))


def _wide(cluster: Cluster, constants: Mapping[str, float], rates: Rates) -> Rates:
    """Rates of matmuls in float32, where the devices have them."""
    if cluster.chip is not None and cluster.chip.bf16_flops is None:
        return rates
    return rates_on(cluster, "f32", constants)


def _product(rates: Rates, product: Product) -> float:
    """Seconds of one product; see `kernels.matmul`."""
    fan_in, fan_out = padded(product.fan_in, rates.tile), padded(product.fan_out, rates.tile)
    steps = product.rows * (fan_in + rates.fill) * fan_out * product.groups
    compute = 2 * steps / rates.flops
    return roofline(compute, product.num_bytes / rates.memory) + rates.kernel_seconds


def _passes(costs: Costs, way: Way, rates: Rates) -> float:
    """Seconds of what goes over memory; a kernel that hardly moves anything takes its start."""
    moved = costs.fused_bytes[way] / rates.memory
    work = costs.exponentials[way] * rates.exp_seconds
    return roofline(moved, costs.kernels[way] * rates.kernel_seconds) + work


def _left(exposed: float, window: float, software: Software, rates: Rates) -> float:
    """Share of the collectives of activations that computation does not hide."""
    if not exposed or not software.overlap_tensor:
        return 1.0
    return hidden(exposed, window, rates.hide_tensor) / exposed


def _by_axis(
    costs: Costs, links: Mapping[str, Link], *, of_param: bool
) -> dict[str, dict[str, float]]:
    """Seconds of collectives by mesh axis: of parameters gathered in either pass, of gradients
    summed, of all else together.

    Over several axes a sum is hierarchical: each axis carries what the faster ones leave. Small
    gradients are summed together with large ones, so that one start counts for an axis.
    """
    found: dict[str, dict[str, float]] = {}
    started: set[tuple[str, str]] = set()
    for (way, moved), count in costs.moved.items():
        if moved.of_param != of_param:
            continue
        kind = "all"
        if of_param:
            kind = "summed" if moved.kind in ("all_reduce", "reduce_scatter") else way
            kind = "backward" if kind == "again" else kind
        size = moved.num_bytes
        for axis in (a for a in reversed(AXES) if a in moved.axes):
            link = links[axis]
            pieces = float((axis, moved.kind) not in started) if kind == "summed" else 1.0
            started.add((axis, moved.kind))
            seconds = count * _collective(link, moved, size, pieces)
            by_kind = found.setdefault(
                axis, dict.fromkeys(("forward", "backward", "summed", "all"), 0.0)
            )
            by_kind[kind] += seconds
            size /= link.size
        if moved.axes and moved.kind in ("all_reduce", "reduce_scatter"):
            _cross(found, links, moved, size, kind, count)
    return found


def _cross(
    found: Mapping[str, dict[str, float]],
    links: Mapping[str, Link],
    moved: Moved,
    size: float,
    kind: str,
    count: float,
) -> None:
    """Adds what a sum over `data` sends between slices."""
    across = links.get("slices")
    if across is not None and across.size > 1 and "data" in moved.axes:
        found["data"][kind] += count * across.all_reduce(size * across.size)


def _collective(link: Link, moved: Moved, size: float, pieces: float) -> float:
    ways: dict[str, Any] = {
        "all_reduce": link.all_reduce,
        "all_gather": link.gather,
        "reduce_scatter": link.reduce_scatter,
    }
    if moved.kind == "all_to_all":
        return link.all_to_all(size)
    return ways[moved.kind](size, pieces)
