"""Cutting a loss at the loop over its layers.

The loss calls `scan_layers` once. Before that call it computes the input of the first layer. After
it, it computes the loss from the output of the last layer. Each part is the same loss run under
`stack.intercept`: the first part stops at the loop, the last part receives the output in place of
the loop. Every stage recomputes other values that `call` and the layers need (masks, rotations, a
shared bias) up to the loop, for the microbatch that it runs. Unneeded values are dead code.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jaxtyping import PyTree

from shardlib.errors import ModelError
from shardlib.jaxprs import holds
from shardlib.nn.stack import LayerStack, intercept
from shardlib.nn.staged import stack_faults
from shardlib.nn.stages import StageCut
from shardlib.train.pipeline.execute import AXIS, CutLoss, Leaves, Part, Reads, Span, when

Loss = Callable[[Leaves, Part], tuple[jax.Array, PyTree]]
"""`loss(params, part) -> (loss, sums)` from parameters by path: a scalar and a pytree of
scalars."""


@dataclasses.dataclass(frozen=True)
class LossTrace:
    """Properties of a traced loss."""

    num_layers: int
    reads: Reads
    outputs: PyTree
    """Tree structure of the layer outputs other than the carry. It has no leaves."""
    sends: bool
    """Whether the model itself uses collective-permute, as ring attention does."""
    constrains: bool
    """Whether the model constrains an activation."""
    ends: tuple[ClosedJaxpr, ClosedJaxpr]
    """The parts before and after the layers. Their first arguments are the parameters, in the order
    of their paths."""


class _Reached(BaseException):
    """Signal that stops a loss at its loop over layers."""

    def __init__(self, stack: LayerStack):
        self.stack = stack


def trace_loss(
    loss: Loss,
    params: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    layers: frozenset[str],
    part: Part,
) -> LossTrace:
    """Traces a whole loss and returns its properties for cutting.

    Raises:
        ModelError: If the loss cannot be cut; the message lists every reason.
    """
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (dict(params), part))
    faults: list[str] = []
    made: list[Any] = []

    def pre(params: Leaves, part: Part) -> PyTree:
        stack = _reach(loss, params, part)
        made.append(stack)
        return stack.carry

    def stacked(params: Leaves, part: Part) -> list[Any]:
        return jax.tree.leaves(_reach(loss, params, part).state)

    def run(params: Leaves, part: Part, carry: PyTree) -> PyTree:
        stack = _reach(loss, params, part)
        carry, outputs, changed = stack.run(stack.state, carry, stack.per_layer)
        faults.extend(stack_faults(stack, outputs, changed))
        made.append(jax.tree.structure(outputs))
        return carry

    def post(params: Leaves, part: Part, carry: PyTree) -> PyTree:
        return _resume(loss, params, part, carry, made[1])

    first, carry = jax.make_jaxpr(pre, return_shape=True)(*args)
    middle = jax.make_jaxpr(run)(*args, carry)
    if faults:
        raise ModelError("\n".join(faults))
    last = jax.make_jaxpr(post)(*args, carry)
    names = list(args[0])
    reads = Reads(*(_reads(traced, sorted(names)) for traced in (first, middle, last)))
    own = _reads(jax.make_jaxpr(stacked)(*args), sorted(names))
    _check_divided(reads, layers, own)
    reads = reads._replace(chunk=reads.chunk - layers)
    sends, constrains = (
        any(holds(traced.jaxpr, name) for traced in (first, middle, last))
        for name in ("ppermute", "sharding_constraint")
    )
    return LossTrace(made[0].num_layers, reads, made[1], sends, constrains, (first, last))


def _check_divided(reads: Reads, layers: frozenset[str], own: frozenset[str]) -> None:
    """Raises `ModelError` if parts of the loss read parameters that stages hold in part."""
    if outside := sorted((reads.pre | reads.post) & layers):
        raise ModelError(
            "the loss reads variables of the stacked layers outside of scan_layers, but each stage "
            f"holds only its own layers: {', '.join(outside)}.\n"
            "  Read them only inside the layers, or use a mesh without stage."
        )
    if others := sorted((reads.chunk & layers) - own):
        raise ModelError(
            f"the rules divide {', '.join(others)} over {AXIS}, but a pipeline divides the "
            "layers of one scan_layers alone.\n"
            "  Make the other layers with stack_layers(..., axis_name='encoder_layers')."
        )


def cut(
    loss: Loss, traced: LossTrace, layers: Leaves, layers_cut: StageCut, *, skip_idle: bool
) -> CutLoss:
    """Returns the parts of a loss over the arrays that one stage sees. The stage's `layers`
    complete the tree of parameters in parts that do not read layers. Each call of `chunk` runs one
    chunk of `layers_cut`; if `skip_idle`, it skips slots without a layer."""
    slots = layers_cut.slots

    def pre(shared: Leaves, part: Part) -> PyTree:
        return _reach(loss, {**shared, **layers}, part).carry

    def chunk(layers: Leaves, shared: Leaves, x: PyTree, part: Part, span: Span) -> PyTree:
        stack = _reach(loss, {**shared, **layers}, part)

        def whole(leaf: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((traced.num_layers, *leaf.shape[1:]), leaf.dtype)

        template = dataclasses.replace(stack, state=jax.tree.map(whole, stack.state))

        def run(x: PyTree, start: int, length: int) -> PyTree:
            """Runs `length` layers from slot `start` on."""

            def own(leaf: jax.Array) -> jax.Array:
                return jax.lax.dynamic_slice_in_dim(leaf, span.first + start, length)

            def here(leaf: jax.Array) -> jax.Array:
                """Slices values made for all layers, such as random keys. Layers come sliced."""
                if leaf.shape[0] != slots:
                    return own(leaf)
                return jax.lax.slice_in_dim(leaf, start, start + length)

            state, inputs = jax.tree.map(here, stack.state), jax.tree.map(own, stack.per_layer)
            return template.run(state, x, inputs)[0]

        if span.count is None:
            return run(x, 0, slots)
        first, *more = sorted({*layers_cut.counts})
        x = run(x, 0, first)
        for low, high in itertools.pairwise((first, *more)):
            further = functools.partial(run, x, low, high - low)
            x = when(span.count >= high, further, x, skip=skip_idle)
        return x

    def post(shared: Leaves, x: PyTree, part: Part) -> tuple[jax.Array, PyTree]:
        return _resume(loss, {**shared, **layers}, part, x, traced.outputs)

    return CutLoss(pre, chunk, post, traced.reads)


def _reach(loss: Loss, params: Leaves, part: Part) -> LayerStack:
    """Runs a loss up to its loop over layers."""

    def stop(stack: LayerStack) -> PyTree:
        raise _Reached(stack)

    try:
        with intercept(stop):
            loss(params, part)
    except _Reached as reached:
        return reached.stack
    raise ModelError(
        "the model has no stacked layers to cut into stages: its loss never calls scan_layers.\n"
        "  Make its layers with stack_layers and run them with scan_layers, or use a mesh without "
        "stage."
    )


def _resume(loss: Loss, params: Leaves, part: Part, carry: PyTree, outputs: PyTree) -> PyTree:
    """Runs a loss with `carry` in place of its loop over layers."""
    calls = []

    def give(stack: LayerStack) -> PyTree:
        if calls:
            raise ModelError(
                "the loss calls scan_layers more than once, so it cannot be cut into stages.\n"
                "  Make one stack of all layers, or use a mesh without stage."
            )
        calls.append(stack)
        return carry, jax.tree.unflatten(outputs, ()), {}

    with intercept(give):
        return loss(params, part)


def _reads(traced: ClosedJaxpr, names: list[str]) -> frozenset[str]:
    """Returns the names of the leading arguments, the parameters, that the results depend on."""
    jaxpr = traced.jaxpr
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(v for v in equation.invars if not isinstance(v, Literal))
    return frozenset(name for name, v in zip(names, jaxpr.invars, strict=False) if v in needed)
