"""Functions that shardlib partitions."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard
from jaxtyping import PyTree

from shardlib.cost.traced.products import PRODUCTS
from shardlib.errors import ModelError, PartitionError, RuleError, did_you_mean
from shardlib.garbage import garbage_left
from shardlib.jaxprs import REMAT, Operation, Value, flatten, subprograms
from shardlib.mesh import entry_axes
from shardlib.partitioner import attention, indexing, products, reductions, shapes  # noqa: F401
from shardlib.partitioner.analyze import Analysis, is_unsupported
from shardlib.partitioner.layout import Dims, Sizes, ValueLayout, from_spec
from shardlib.partitioner.lower import Lowering, Shard
from shardlib.partitioner.program import PartitionedProgram, Step, source_of
from shardlib.partitioner.regions import is_region
from shardlib.paths import named_leaves
from shardlib.sharding.constrain import Scope, active_or, manual_axes, platform

Specs: TypeAlias = PyTree
"""A `PartitionSpec` for each argument or leaf, or a prefix of such a tree."""
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function traced for given arguments."""

    closed: ClosedJaxpr
    shape: PyTree
    """The structure of its result, with shapes in place of arrays."""

    def __call__(self, arguments: tuple[PyTree, ...]) -> PyTree:
        """Runs the function, with its operations left to XLA."""
        results = jaxpr_as_fun(self.closed)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(self.shape), results)


@dataclasses.dataclass(frozen=True)
class PartitionedFunction:
    """A traced function and the layouts of its values."""

    traced: Traced
    program: PartitionedProgram
    outputs: tuple[ValueLayout, ...]


def trace(fn: Callable[..., Any], arguments: tuple[PyTree, ...]) -> Traced:
    """Traces a function of pytrees; arguments are arrays, tracers or `ShapeDtypeStruct`s."""
    return Traced(*jax.make_jaxpr(fn, return_shape=True)(*arguments))


@garbage_left()
def analyze(
    traced: Traced,
    scope: Scope,
    inputs: Sequence[ValueLayout],
    outputs: Callable[[PyTree], Sequence[ValueLayout | None]],
    batch_axes: Sequence[str],
    planned: Mapping[Value, Dims] | None = None,
) -> PartitionedFunction:
    """Decides the layouts of the values of a function.

    Raises:
        PartitionError: If it holds an operation that cannot be partitioned.
    """
    closed = traced.closed
    wanted = tuple(outputs(traced.shape))
    consts = [_const_layout(x, scope) for x in closed.consts]
    analysis = Analysis(scope.sizes, batch_axes, planned)
    dims = [None if layout is None else layout.dims for layout in wanted]
    program = analysis.program(closed.jaxpr, [*consts, *inputs], dims)
    left = [ValueLayout(layout.dims) for layout in program.outputs]
    outs = tuple(
        here if layout is None else layout for here, layout in zip(left, wanted, strict=True)
    )
    return PartitionedFunction(traced, program, outs)


def _const_layout(x: jax.typing.ArrayLike, scope: Scope) -> ValueLayout:
    """Returns the layout of a captured array: its own on this mesh, otherwise whole."""
    rank = len(jax.numpy.shape(x))
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == scope.mesh:
        return from_spec(sharding.spec, rank)
    return from_spec((), rank)


@garbage_left()
def execute(
    analyzed: PartitionedFunction,
    scope: Scope,
    arguments: tuple[PyTree, ...],
    *,
    quiet: bool = False,
) -> PyTree:
    """Returns the results of a function, run as one manual region over all remaining axes."""
    traced, program = analyzed.traced, analyzed.program
    if not quiet and (held := program.held_whole()):
        _LOG.warning(
            "every device computes these operations whole, as no rule can cut them: %s",
            "; ".join(held),
        )
    sizes = {name: n for name, n in scope.sizes.items() if name not in manual_axes()}

    def local(*shards: jax.Array) -> list[jax.Array]:
        lowering = Lowering(sizes, ordered=platform() == "cpu")
        values = [Shard(layout, x) for layout, x in zip(program.inputs, shards, strict=True)]
        results = lowering.run(program, values)
        return [lowering.shard(v, want) for v, want in zip(results, analyzed.outputs, strict=True)]

    leaves = [*traced.closed.consts, *jax.tree.leaves(arguments)]
    leaves = _on_explicit_axes(leaves, program.inputs, scope)
    region = jax.shard_map(
        local,
        mesh=scope.mesh_here,
        in_specs=tuple(layout.spec for layout in program.inputs),
        out_specs=[layout.spec for layout in analyzed.outputs],
        axis_names=set(sizes),
        check_vma=False,
    )
    return jax.tree.unflatten(jax.tree.structure(traced.shape), region(*leaves))


def _on_explicit_axes(
    leaves: Sequence[Any], layouts: Sequence[ValueLayout], scope: Scope
) -> list[Any]:
    """Returns arrays in their layouts along explicit mesh axes, along which `shard_map` moves
    nothing."""
    mesh = scope.mesh_here
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
    if not explicit:
        return [*leaves]

    def spec(layout: ValueLayout) -> PartitionSpec:
        dims = (tuple(axis for axis in axes if axis in explicit) for axes in layout.dims)
        return PartitionSpec(*(axes or None for axes in dims))

    pairs = zip(leaves, layouts, strict=True)
    return [reshard(x, NamedSharding(mesh, spec(layout))) for x, layout in pairs]


def partitioned(
    fn: Callable[..., Any],
    in_specs: Specs,
    out_specs: Specs = None,
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

    def call(*arguments: PyTree) -> PyTree:
        scope = active_or(None, None)
        sizes = {name: n for name, n in scope.sizes.items() if name not in manual_axes()}
        inputs = argument_layouts(in_specs, arguments, sizes, params)

        def outputs(shape: PyTree) -> list[ValueLayout | None]:
            return result_layouts(out_specs, shape, sizes)

        traced = trace(fn, arguments)
        analyzed = analyze(traced, scope, inputs, outputs, batch_mesh_axes(scope))
        return _underived(lambda *leaves: execute(analyzed, scope, leaves))(*arguments)

    return call


def _underived(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` with an error as its derivative: JAX would differentiate the collectives of the
    manual region and lose terms."""
    guarded = jax.custom_jvp(fn)

    @guarded.defjvp
    def _(primals: object, tangents: object) -> NoReturn:
        raise ModelError(
            "the result of `partitioned` cannot be differentiated.\n"
            "  Take the derivative inside: partitioned(jax.value_and_grad(loss), ...)."
        )

    return guarded


def batch_mesh_axes(scope: Scope) -> tuple[str, ...]:
    """Returns the mesh axes that cut the batch according to the rules."""
    every = math.prod(scope.sizes.values())
    return tuple(entry_axes(scope.sharding(("batch",), (every,), "activations").spec[0]))


@dataclasses.dataclass(frozen=True)
class Partition:
    """The partitioner of a function, and the reason."""

    by: Literal["shardlib", "XLA"]
    why: str
    whole: tuple[str, ...] = ()
    """Large operations that every device computes whole under shardlib, with source lines."""


def who_partitions(
    traced: Traced, analyze: Callable[[], PartitionedFunction], constrains: bool | None = None
) -> tuple[Partition, PartitionedFunction | None]:
    """Returns the partitioner of a function, and the function's layouts if it is shardlib.

    XLA partitions functions with operations that shardlib cannot partition, or with constraints
    around manual regions, and functions whose constraints decide all layouts. In the latter no
    product of the forward pass has to move an activation, the operands and results of every product
    are cut alike, and a partitioner has nothing to choose.

    Args:
        traced: The function.
        analyze: Returns the layouts of its values.
        constrains: Whether the model constrains an activation; None if all constraints in the
            function belong to the model.
    """
    every = list(operations(traced.closed.jaxpr))
    if constrains is None:
        constrains = any(operation.name == "sharding_constraint" for operation in every)
    refused = (o for o in every if is_unsupported(o) and (constrains or not is_region(o)))
    if (refused := next(refused, None)) is not None:
        return Partition("XLA", f"it holds {refused.name} at {source_of(refused)}"), None
    try:
        analyzed = analyze()
    except PartitionError as error:
        return Partition("XLA", str(error).partition("\n")[0]), None
    none = "the model constrains no activation"
    why = next(_open(analyzed.program), None) if constrains else none
    if why is None:
        return Partition("XLA", "the constraints of the model decide where each product lies"), None
    return Partition("shardlib", why, tuple(analyzed.program.held_whole())), analyzed


def operations(jaxpr: Jaxpr) -> Iterator[Operation]:
    """Yields the operations of a jaxpr, and the operations inside loops and recomputations."""
    for operation in flatten(jaxpr, fenced=True).operations:
        yield operation
        if operation.name in ("scan", "while", "cond", *REMAT):
            for body in subprograms(operation.equation):
                yield from operations(body)


def _forward(program: PartitionedProgram) -> Iterator[Step]:
    """Yields the steps of a forward pass, including bodies: all but transposed operations."""
    for step in program.steps:
        if not step.operation.stack.lstrip("/").startswith("transpose("):
            yield step
            for body in step.bodies:
                yield from _forward(body)


def _open(program: PartitionedProgram) -> Iterator[str]:
    """Yields the reasons why layouts of products are open, or would be wrong under XLA."""
    for step in _forward(program):
        operation = step.operation
        if operation.name not in PRODUCTS:
            continue
        at, params = source_of(operation), operation.params
        if step.moved_bytes:
            yield f"no constraint decides the layout of {operation.name} at {at}"
        if params.get("feature_group_count", 1) > 1 or params.get("batch_group_count", 1) > 1:
            yield f"XLA computes wrong gradients of grouped convolutions, such as the one at {at}"


def argument_layouts(
    specs: Specs, arguments: Sequence[PyTree], sizes: Sizes, params: Sequence[int]
) -> list[ValueLayout]:
    """Returns the layouts of the leaves of all arguments, which are pytrees of arrays and numbers.
    Each has a spec, or a pytree of specs that is a prefix of it; the arguments at `params` hold
    parameters.

    Raises:
        RuleError: If specs do not fit; the message lists all of them.
    """
    is_one = not isinstance(specs, tuple | list) or isinstance(specs, PartitionSpec)
    if is_one or len(specs) != len(arguments):
        raise RuleError(
            f"in_specs is {specs!r}, and the number of arguments is {len(arguments)}.\n"
            '  Give a tuple of one entry for each argument, such as (P("data"), None).'
        )
    layouts, faults = [], []
    for number, (spec_tree, argument) in enumerate(zip(specs, arguments, strict=True)):
        name = f"in_specs[{number}]"
        for leaf, spec, path in _pairs(spec_tree, argument, name):
            faults += _faults(f"{name}{path}", spec, jnp.shape(leaf), sizes)
            if not faults:
                layouts.append(from_spec(spec, jnp.ndim(leaf), stored=number in params))
    _refuse(faults)
    return layouts


def result_layouts(specs: Specs, shape: PyTree, sizes: Sizes) -> list[ValueLayout | None]:
    """Returns the layouts of the leaves of a result from its shapes; None if unspecified.

    Raises:
        RuleError: If specs do not fit; the message lists all of them.
    """
    if specs is None:
        return [None] * len(jax.tree.leaves(shape))
    triples = list(_pairs(specs, shape, "out_specs"))
    _refuse([f for x, s, path in triples for f in _faults(f"out_specs{path}", s, x.shape, sizes)])
    return [from_spec(spec, len(leaf.shape)) for leaf, spec, _ in triples]


def _pairs(specs: Specs, tree: PyTree, name: str) -> Iterator[tuple[Any, Any, str]]:
    """Yields each leaf of a tree, its spec, and its path."""

    def is_spec(x: object) -> bool:
        return x is None or isinstance(x, PartitionSpec)

    try:
        repeated = jax.tree.map(
            lambda spec, part: [spec] * len(jax.tree.leaves(part)), specs, tree, is_leaf=is_spec
        )
    except (ValueError, TypeError) as error:
        raise RuleError(
            f"{name} does not fit {jax.tree.structure(tree)}: {str(error).partition(chr(10))[0]}\n"
            "  Give one PartitionSpec for all of it, or one for each of its parts."
        ) from None
    for (path, leaf), spec in zip(
        named_leaves(tree).items(), jax.tree.leaves(repeated, is_leaf=is_spec), strict=True
    ):
        yield leaf, spec, f" of {path!r}" if path else ""


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise RuleError(
            "\n".join(faults) + "\n  Name axes of the mesh, each once, on dims that they divide."
        )


def _faults(name: str, spec: object, shape: Sequence[int], sizes: Sizes) -> Iterator[str]:
    """Yields the faults of the spec of an array."""
    if spec is None:
        return
    if not isinstance(spec, PartitionSpec):
        yield f"{name} is {spec!r}, not a PartitionSpec or None."
        return
    if len(spec) > len(shape):
        yield f"{name} is {spec} for an array of shape {tuple(shape)}, which has fewer dims."
        return
    if PartitionSpec.UNCONSTRAINED in spec:
        yield f"{name} is {spec}, which leaves a dim open."
        return
    axes = [axis for entry in spec for axis in entry_axes(entry)]
    for axis in dict.fromkeys(axes):
        if axis not in sizes:
            axis_names = ", ".join(sizes)
            yield f"{name} names {axis!r}, the mesh has {axis_names}.{did_you_mean(axis, sizes)}"
        elif axes.count(axis) > 1:
            yield f"{name} is {spec}, which names {axis!r} twice."
    for dim, entry in enumerate(spec):
        parts = math.prod(sizes.get(axis, 1) for axis in entry_axes(entry))
        if shape[dim] % parts:
            yield f"{name} is {spec}: {parts} devices do not divide dim {dim} of {tuple(shape)}."
