"""The equations of a traced program, with their name stacks and enclosing loops."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardlib.jaxprs import subprograms

RAGGED = ("ragged_dot", "ragged_dot_general")


class Placed(NamedTuple):
    """An equation and its context.

    `name` is JAX's name stack from the outermost program on, such as
    `transpose(jvp())/rematted_computation`. `times` counts executions; loops of unknown length
    count once. `devices` is the number of devices that a manual region around it splits the work
    over: its shapes are per device. `in_kernel` marks equations inside of a Pallas kernel.
    """

    equation: Any
    name: str
    times: int
    devices: int
    in_kernel: bool = False


def equations(jaxpr: Any) -> Iterator[Placed]:
    """Yields all equations of a program, each before its inner equations.

    Each branch of a conditional counts as taken.
    """
    yield from _walk(getattr(jaxpr, "jaxpr", jaxpr), Placed(None, "", 1, 1))


def _walk(jaxpr: Any, around: Placed) -> Iterator[Placed]:
    for equation in jaxpr.eqns:
        here = around._replace(equation=equation, name=joined(around.name, equation))
        yield here
        turns, _ = trips(equation)
        inside = here._replace(
            times=here.times * turns,
            devices=here.devices * manual_devices(equation),
            in_kernel=here.in_kernel or equation.primitive.name == "pallas_call",
        )
        for program in subprograms(equation):
            yield from _walk(program, inside)


def joined(name: str, equation: Any) -> str:
    """Returns the name stack of an equation, prefixed with the name stack around it."""
    stack = str(equation.source_info.name_stack)
    return f"{name}/{stack}" if name and stack else name or stack


def trips(equation: Any) -> tuple[int, bool]:
    """Returns the trip count of an equation's subprograms, and whether it is known."""
    name = equation.primitive.name
    if name == "scan":
        return equation.params["length"], True
    if name == "pallas_call":
        grid = getattr(equation.params.get("grid_mapping"), "grid", ())
        return math.prod(grid), True
    return 1, name != "while"


def manual_devices(equation: Any) -> int:
    """Returns the number of devices that a manual region splits its work over."""
    if equation.primitive.name != "shard_map":
        return 1
    mesh = equation.params["mesh"]
    axes = equation.params.get("newly_manual_axes", equation.params.get("manual_axes"))
    axes = mesh.shape if axes is None else axes
    return math.prod(mesh.shape[axis] for axis in axes)


def matmul_flops(equation: Any) -> float | None:
    """Returns the FLOPs of a matmul or convolution by its shapes, else None.

    A multiply-add is two FLOPs. A ragged matmul multiplies each row by the weights of its group.
    Rows without a group are counted too, because their number depends on the data.
    """
    name = equation.primitive.name
    if name == "dot_general":
        lhs = equation.invars[0].aval.shape
        (contracted, _), _ = equation.params["dimension_numbers"]
        out = math.prod(equation.outvars[0].aval.shape)
        return 2.0 * out * math.prod(lhs[dim] for dim in contracted)
    if name == "conv_general_dilated":
        return _convolution(equation)
    if name in RAGGED:
        return _ragged(equation)
    return None


def arriving_rows(jaxpr: Any) -> dict[int, int]:
    """Returns the mean rows that arrive on a device, by the rows of the receive buffer.

    A ragged exchange has a buffer for the worst case, but as many rows arrive as are offered.
    """
    found = {}
    for placed in equations(jaxpr):
        if placed.equation.primitive.name == "ragged_all_to_all":
            offered, room = (v.aval.shape[0] for v in placed.equation.invars[:2])
            if offered < room:
                found[room] = offered
    return found


def _convolution(equation: Any) -> float:
    """Returns the FLOPs of a convolution, with the whole window for each output despite padding."""
    rhs = equation.invars[1].aval.shape
    numbers = equation.params["dimension_numbers"]
    out_channels = rhs[numbers.rhs_spec[0]]
    window = math.prod(rhs) / out_channels  # Already a group's share of the input channels.
    out = math.prod(equation.outvars[0].aval.shape)
    dilation = math.prod(equation.params.get("lhs_dilation") or (1,))
    batch_groups = equation.params.get("batch_group_count", 1)
    return 2.0 * out * window / dilation / batch_groups


def _ragged(equation: Any) -> float:
    lhs, rhs = (v.aval.shape for v in equation.invars[:2])
    numbers = equation.params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        return 2.0 * math.prod(lhs) * rhs[-1]
    (_, contracted_rhs), (_, batched) = numbers.dot_dimension_numbers
    groups = set(numbers.rhs_group_dimensions)
    free = [
        size
        for dim, size in enumerate(rhs)
        if dim not in groups and dim not in contracted_rhs and dim not in batched
    ]
    return 2.0 * math.prod(lhs) * math.prod(free)
