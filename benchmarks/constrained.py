"""A step that XLA partitions under the layouts that shardlib chose for its products.

Inside `constrained()`, steps with `constrain="auto"` are decided by shardlib as always. What then
runs is the traced program itself, with the operands and results of every product constrained to the
layouts decided for them, also inside of scans. All else is left to XLA.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.sharding import NamedSharding

from shardlib.cost.traced.products import PRODUCTS
from shardlib.jaxprs import array_of, is_literal, scan_parts
from shardlib.partitioner import PartitionedFunction, ValueLayout
from shardlib.partitioner.factors import bind
from shardlib.partitioner.program import PartitionedProgram, Step
from shardlib.sharding.constrain import Scope
from shardlib.train import partitioning


@contextlib.contextmanager
def constrained() -> Iterator[None]:
    """Traces steps of shardlib for XLA's partitioner, under constraints."""
    with mock.patch.object(partitioning, "execute", _execute):
        yield


def _execute(analyzed: PartitionedFunction, scope: Scope, arguments: tuple[Any, ...]) -> Any:
    traced = analyzed.traced
    leaves = [*traced.closed.consts, *jax.tree.leaves(arguments)]
    results = _run(analyzed.program, leaves, scope)
    placed = [_at(x, layout, scope) for x, layout in zip(results, analyzed.outputs, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(traced.shape), placed)


def _run(program: PartitionedProgram, values: Sequence[Any], scope: Scope) -> list[Any]:
    env = dict(zip(program.flat.invars, values, strict=True))

    def read(atom: Any) -> Any:
        if is_literal(atom):
            return jnp.asarray(atom.val, array_of(atom).dtype)
        if atom not in env:  # A constant captured by an inner call.
            return atom.const
        return env[atom]

    for step in program.steps:
        operation = step.operation
        # `explain` attributes operations to stages by these names.
        names = source_info_util.current_name_stack() + operation.names
        traceback = operation.equation.source_info.traceback
        with source_info_util.user_context(traceback, name_stack=names):
            results = _step(step, [read(v) for v in operation.invars], scope)
        env.update(zip(operation.outvars, results, strict=True))
    return [read(v) for v in program.flat.outvars]


def _step(step: Step, ins: list[Any], scope: Scope) -> list[Any]:
    if step.operation.name == "scan":
        return _scan(step, ins, scope)
    if step.operation.name not in PRODUCTS:
        return list(bind(step.operation, ins))
    ins = [_at(x, layout, scope) for x, layout in zip(ins, step.operands, strict=True)]
    layouts = step.settled or step.results
    results = bind(step.operation, ins)
    return [_at(x, layout, scope) for x, layout in zip(results, layouts, strict=True)]


def _scan(step: Step, ins: list[Any], scope: Scope) -> list[Any]:
    params = step.operation.params
    num_consts, num_carry = scan_parts(step.operation)
    end = num_consts + num_carry
    fixed = [*params["jaxpr"].consts, *ins[:num_consts]]

    def trip(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _run(step.bodies[0], [*fixed, *carry, *rows], scope)
        return results[:num_carry], results[num_carry:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(trip, ins[num_consts:end], ins[end:], **options)
    return [*carry, *stacked]


def _at(x: Any, layout: ValueLayout, scope: Scope) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(scope.mesh, layout.spec))
