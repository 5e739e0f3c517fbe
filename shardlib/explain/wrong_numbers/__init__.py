"""Detection of programs that XLA's partitioner miscompiles.

`wrong_numbers(compiled, mesh)` reads a compiled program and returns its faults.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh, Sharding
from jax.stages import Compiled

from shardlib.explain.hlo.text import Module, parse
from shardlib.explain.wrong_numbers.faults import FAULTS as FAULTS
from shardlib.explain.wrong_numbers.faults import Fault as Fault
from shardlib.explain.wrong_numbers.faults import faults_of
from shardlib.explain.wrong_numbers.interpret import HloReader
from shardlib.explain.wrong_numbers.prescan import is_suspect, without_copies
from shardlib.explain.wrong_numbers.values import (
    Spec,
    SpmdValue,
    axes_of_sharding,
    by_axes,
    by_text,
    nothing_known,
    shapes_of,
)
from shardlib.garbage import garbage_left
from shardlib.mesh import mesh_sizes

NOTHING: Mapping[int, Spec] = MappingProxyType({})


def wrong_numbers(
    compiled: Compiled, mesh: Mesh | AbstractMesh, jaxpr: ClosedJaxpr | None = None
) -> tuple[Fault, ...]:
    """Returns the places where a compiled program computes other numbers than its source.

    Args:
        compiled: A `jax.stages.Compiled`.
        mesh: The mesh that it was compiled for.
        jaxpr: The traced program, a `ClosedJaxpr`. SL207 and SL210 are only found with it.

    Returns:
        One fault for each operation, ordered by code. Empty for a program on one device, or for a
        program in which the user wrote all collectives.
    """
    with garbage_left():
        return _wrong_numbers(compiled, mesh_sizes(mesh), jaxpr)


def _wrong_numbers(
    compiled: Compiled, sizes: Mapping[str, int], jaxpr: ClosedJaxpr | None
) -> tuple[Fault, ...]:
    text = compiled.as_text() or ""
    if not is_suspect(text, sizes, jaxpr):
        return ()
    inputs, outputs = map(jax.tree.leaves, (compiled.input_shardings, compiled.output_shardings))
    places = dict(enumerate(inputs)), dict(enumerate(outputs))
    shorter, stands_for = without_copies(text)
    faults = read(parse(shorter), sizes, jaxpr, *places, stands_for)
    if faults and len(shorter) < len(text):
        # Only the whole text shows which of the equal computations has the fault.
        return read(parse(text), sizes, jaxpr, *places)
    return faults


def read(
    module: Module,
    mesh: Mapping[str, int],
    jaxpr: ClosedJaxpr | None = None,
    inputs: Mapping[int, Spec | Sharding] = NOTHING,
    outputs: Mapping[int, Spec | Sharding] = NOTHING,
    stands_for: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Fault, ...]:
    """Returns the faults in the text of a program. See `wrong_numbers`.

    Args:
        module: The program.
        mesh: Sizes of the mesh axes, in mesh order.
        jaxpr: The traced program.
        inputs: Shardings of its parameters by number, or the mesh axes of their dims. A missing
            sharding is read from the text if the text has it.
        outputs: Shardings of its results, likewise. A result without a sharding is compared with
            the parameter whose donated buffer it takes.
        stands_for: The computation to read in place of each computation removed from the text.
    """
    devices = _partitions(module)
    if devices < 2 or module.entry not in module.computations:
        return ()
    reader = HloReader(module, devices, stands_for)
    entry = module.computations[module.entry]
    parameters = {int(one.operands): one for one in entry if one.opcode == "parameter"}
    arguments = []
    for number in range(len(parameters)):
        shape = (shapes_of(parameters[number].shape) or ((),))[0]
        value = _placed(inputs.get(number), mesh, shape, reader)
        text = parameters[number].attributes.get("sharding", "")
        value = value or by_text(text, shape, reader.context)
        arguments.append(value or nothing_known(shape))
    results = reader.run(module.entry, arguments)
    results = (results,) if isinstance(results, SpmdValue) else results
    expected = {
        output[0] if output else 0: arguments[number] for output, number, _ in module.donations()
    }
    for n, sharding in outputs.items():
        result = results[n] if n < len(results) else None
        if isinstance(result, SpmdValue):
            value = _placed(sharding, mesh, result.layout.shape, reader)
            expected |= {} if value is None else {n: value}
    reader.compare_results(module.entry, results, expected)
    return tuple(faults_of(module, reader, mesh, jaxpr))


def _placed(
    sharding: Spec | Sharding | None,
    mesh: Mapping[str, int],
    shape: tuple[int, ...],
    reader: HloReader,
) -> SpmdValue | None:
    if not isinstance(sharding, tuple):
        sharding = axes_of_sharding(sharding, len(shape), mesh)
    return None if sharding is None else by_axes(sharding, mesh, shape, reader.context)


def _partitions(module: Module) -> int:
    match = re.search(r"num_partitions=(\d+)", module.header)
    return int(match[1]) if match else 1
