"""Functions that shardlib partitions."""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding

from shardlib.errors import ModelError
from shardlib.garbage import garbage_left
from shardlib.mesh import entry_axes
from shardlib.partitioner import indexing, products, reductions, shapes  # noqa: F401 (rules)
from shardlib.partitioner.analyze import Analysis
from shardlib.partitioner.layout import Layout, from_spec
from shardlib.partitioner.lower import Lowering, Value
from shardlib.partitioner.program import Program
from shardlib.partitioner.specs import argument_layouts, result_layouts
from shardlib.sharding.constrain import Scope, active_or, manual_axes, platform

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function traced for given arguments."""

    closed: ClosedJaxpr
    shape: Any
    """The structure of its result, with shapes in place of arrays."""

    def __call__(self, arguments: tuple[Any, ...]) -> Any:
        """Runs the function, with its operations left to XLA."""
        results = jaxpr_as_fun(self.closed)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(self.shape), results)


@dataclasses.dataclass(frozen=True)
class Laid:
    """A traced function and the layouts of its values."""

    traced: Traced
    program: Program
    outputs: tuple[Layout, ...]


def trace(fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Traced:
    """Traces a function of pytrees; arguments are arrays, tracers or `ShapeDtypeStruct`s."""
    return Traced(*jax.make_jaxpr(fn, return_shape=True)(*arguments))


@garbage_left()
def analyze(
    traced: Traced,
    scope: Scope,
    inputs: Sequence[Layout],
    outputs: Callable[[Any], Sequence[Layout | None]],
    batch_axes: Sequence[str],
) -> Laid:
    """Decides the layouts of the values of a function.

    Args:
        traced: The function.
        scope: The mesh and rules.
        inputs: Layouts of the leaves of the arguments.
        outputs: Returns the layouts of the leaves of the result, given the abstract result.
        batch_axes: The mesh axes of the batch.

    Raises:
        PartitionError: If it holds an operation that cannot be partitioned.
    """
    closed = traced.closed
    wanted = tuple(outputs(traced.shape))
    consts = [_const_layout(x, scope) for x in closed.consts]
    analysis = Analysis(scope.sizes, batch_axes)
    dims = [None if layout is None else layout.dims for layout in wanted]
    program = analysis.program(closed.jaxpr, [*consts, *inputs], dims)
    left = [Layout(layout.dims) for layout in program.outputs]
    outs = tuple(
        here if layout is None else layout for here, layout in zip(left, wanted, strict=True)
    )
    return Laid(traced, program, outs)


def _const_layout(x: Any, scope: Scope) -> Layout:
    """Returns the layout of a captured array: its own on this mesh, otherwise whole."""
    rank = len(jax.numpy.shape(x))
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == scope.mesh:
        return from_spec(sharding.spec, rank)
    return from_spec((), rank)


@garbage_left()
def execute(laid: Laid, scope: Scope, arguments: tuple[Any, ...]) -> Any:
    """Returns the results of a function, run as one manual region over all remaining axes.

    Args:
        laid: The function.
        scope: The mesh and rules.
        arguments: Its arguments, in the layouts given to `analyze`.
    """
    traced, program = laid.traced, laid.program
    if held := program.held_whole():
        _LOG.warning(
            "every device computes these operations whole, as no rule can cut them: %s",
            "; ".join(held),
        )
    sizes = {name: n for name, n in scope.sizes.items() if name not in manual_axes()}

    def local(*shards: Any) -> list[Any]:
        lowering = Lowering(sizes, ordered=platform() == "cpu")
        values = [Value(layout, x) for layout, x in zip(program.inputs, shards, strict=True)]
        results = lowering.run(program, values)
        return [lowering.shard(v, want) for v, want in zip(results, laid.outputs, strict=True)]

    leaves = [*traced.closed.consts, *jax.tree.leaves(arguments)]
    region = jax.shard_map(
        local,
        mesh=scope.mesh_here,
        in_specs=tuple(layout.spec for layout in program.inputs),
        out_specs=[layout.spec for layout in laid.outputs],
        axis_names=set(sizes),
        check_vma=False,
    )
    return jax.tree.unflatten(jax.tree.structure(traced.shape), region(*leaves))


def partitioned(
    fn: Callable[..., Any],
    in_specs: Any,
    out_specs: Any = None,
    *,
    params: Sequence[int] = (),
) -> Callable[..., Any]:
    """Returns `fn` partitioned by shardlib: XLA decides no sharding.

    Call the result inside `sl.use(mesh, rules)`. It computes the same values as `fn`. Take
    derivatives inside of `fn`: `partitioned(jax.value_and_grad(loss), ...)`.

    Args:
        fn: A function of pytrees of arrays.
        in_specs: A tuple with a `PartitionSpec` of mesh axes for each argument, or a pytree of them
            that is a prefix of the argument; None for replicated values.
        out_specs: The same for the result; if left out, the computation decides.
        params: Positions of arguments that hold parameters: these are gathered over the batch axes
            where they are used.

    Raises:
        RuleError: Outside of `sl.use`, or if specs do not fit the mesh or their arrays.
        PartitionError: If `fn` holds an operation that cannot be partitioned.
    """

    def call(*arguments: Any) -> Any:
        scope = active_or(None, None)
        sizes = {name: n for name, n in scope.sizes.items() if name not in manual_axes()}
        inputs = argument_layouts(in_specs, arguments, sizes, params)

        def outputs(shape: Any) -> list[Layout | None]:
            return result_layouts(out_specs, shape, sizes)

        traced = trace(fn, arguments)
        laid = analyze(traced, scope, inputs, outputs, batch_mesh_axes(scope))
        return _underived(lambda *leaves: execute(laid, scope, leaves))(*arguments)

    return call


def _underived(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` with an error as its derivative: JAX would differentiate the collectives of the
    manual region and lose terms."""
    guarded = jax.custom_jvp(fn)

    @guarded.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise ModelError(
            "the result of `partitioned` cannot be differentiated.\n"
            "  Take the derivative inside: partitioned(jax.value_and_grad(loss), ...)."
        )

    return guarded


def batch_mesh_axes(scope: Scope) -> tuple[str, ...]:
    """Returns the mesh axes that cut the batch according to the rules."""
    every = math.prod(scope.sizes.values())
    return tuple(entry_axes(scope.sharding(("batch",), (every,), "activations").spec[0]))
