"""The equations of a traced program, with their name stacks and enclosing loops."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from shardlib.cost.traced.layout import Equation
from shardlib.jaxprs import subprograms


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


def equations(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[Placed]:
    """Yields all equations of a program, each before its inner equations.

    Each branch of a conditional counts as taken.
    """
    program = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    yield from _walk(program, Placed(None, "", 1, 1))


def _walk(jaxpr: Jaxpr, around: Placed) -> Iterator[Placed]:
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


def joined(name: str, equation: JaxprEqn) -> str:
    """Returns the name stack of an equation, prefixed with the name stack around it."""
    stack = str(equation.source_info.name_stack)
    return f"{name}/{stack}" if name and stack else name or stack


def trips(equation: Equation) -> tuple[int, bool]:
    """Returns the trip count of an equation's subprograms, and whether it is known."""
    name = equation.primitive.name
    if name == "scan":
        return equation.params["length"], True
    if name == "pallas_call":
        grid = getattr(equation.params.get("grid_mapping"), "grid", ())
        return math.prod(grid), True
    return 1, name != "while"


def manual_devices(equation: Equation) -> int:
    """Returns the number of devices that a manual region splits its work over."""
    if equation.primitive.name != "shard_map":
        return 1
    mesh = equation.params["mesh"]
    axes = equation.params.get("newly_manual_axes", equation.params.get("manual_axes"))
    axes = mesh.shape if axes is None else axes
    return math.prod(mesh.shape[axis] for axis in axes)


def arriving_rows(jaxpr: ClosedJaxpr | Jaxpr) -> dict[int, int]:
    """Returns the mean rows that arrive on a device, by the rows of the receive buffer.

    A ragged exchange has a buffer for the worst case, but as many rows arrive as are offered.
    """
    rows = {}
    for placed in equations(jaxpr):
        if placed.equation.primitive.name == "ragged_all_to_all":
            offered, room = (v.aval.shape[0] for v in placed.equation.invars[:2])
            if offered < room:
                rows[room] = offered
    return rows
