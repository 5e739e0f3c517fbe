"""Numbers that XLA's partitioner gets wrong, found in the program that it made.

`wrong_numbers(compiled, mesh)` reads a compiled program and returns what is wrong in it.
"""

from collections.abc import Mapping
from typing import Any

import jax

from shardlib.explain.hlo import Module, parse
from shardlib.explain.wrong_numbers import tiles
from shardlib.explain.wrong_numbers.faults import FAULTS as FAULTS
from shardlib.explain.wrong_numbers.faults import Fault as Fault
from shardlib.explain.wrong_numbers.faults import faults_of, is_automatic
from shardlib.explain.wrong_numbers.interpret import Reader
from shardlib.explain.wrong_numbers.values import Value, shapes_of
from shardlib.mesh import mesh_sizes


def wrong_numbers(compiled: Any, mesh: Any, jaxpr: Any = None) -> tuple[Fault, ...]:
    """Returns the places where a compiled program computes other numbers than what was written.

    Args:
        compiled: A `jax.stages.Compiled`.
        mesh: The mesh that it was compiled for.
        jaxpr: What it was traced from, a `ClosedJaxpr`; without it SL207 and SL210 are not looked
            for.

    Returns:
        One fault for each operation, ordered by code; none for a program on one device, or for one
        whose collectives are the user's own.
    """
    text = compiled.as_text() or ""
    if not is_automatic(text):
        return ()
    return read(parse(text), mesh_sizes(mesh), jaxpr, compiled.output_shardings)


def read(
    module: Module, mesh: Mapping[str, int], jaxpr: Any = None, outputs: Any = None
) -> tuple[Fault, ...]:
    """Returns what is wrong in the text of a program; see `wrong_numbers`.

    Args:
        module: The program.
        mesh: Sizes of the mesh axes, in mesh order.
        jaxpr: What it was traced from.
        outputs: The shardings of what it returns, as a pytree. Without them a result is compared
            with the argument whose memory it takes.
    """
    devices = _partitions(module)
    if devices < 2 or module.entry not in module.computations:
        return ()
    reader = Reader(module, devices)
    entry = module.computations[module.entry]
    parameters = {int(one.operands): one for one in entry if one.opcode == "parameter"}
    arguments = []
    for number in range(len(parameters)):
        shape = (shapes_of(parameters[number].shape) or [()])[0]
        sharding = parameters[number].attributes.get("sharding", "")
        value = tiles.by_text(sharding, shape, reader.context)
        arguments.append(value or tiles.nothing_known(shape))
    found = reader.run(module.entry, arguments)
    results = (found,) if isinstance(found, Value) else found
    _compare_results(reader, module, results, arguments, jax.tree.leaves(outputs))
    return tuple(faults_of(module, reader, mesh, jaxpr))


def _compare_results(
    reader: Reader, module: Module, results: Any, arguments: list[Value], outputs: list[Any]
) -> None:
    """Compares what comes out with where it is said to lie."""
    root = next(one for one in module.computations[module.entry] if one.root)
    expected: dict[int, Value] = {}
    if len(outputs) == len(results):
        for n, (value, sharding) in enumerate(zip(results, outputs, strict=True)):
            if isinstance(value, Value):
                known = tiles.by_sharding(sharding, value.layout.shape, reader.context)
                expected |= {} if known is None else {n: known}
    else:
        for output, number, _ in module.donations():
            expected[output[0] if output else 0] = arguments[number]
    by_name = {one.name: one for one in module.computations[module.entry]}
    for n, value in expected.items():
        result = results[n]
        if isinstance(result, Value) and result.layout.shape == value.layout.shape:
            named = root.operand_names[n] if root.opcode == "tuple" else root.name
            for dim in range(len(value.layout.dims)):
                at = by_name.get(named, root)
                reader.compare(module.entry, at, (result.layout, dim), (value.layout, dim))


def _partitions(module: Module) -> int:
    _, _, rest = module.header.partition("num_partitions=")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return int(digits or 1)
