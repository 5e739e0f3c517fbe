"""Cutting a loss at the loop over its layers.

The loss calls `scan_layers` once. Up to that call it makes the input of the first layer, after it
the loss of the last layer's output. Each part is the same loss run under `stack.intercept`: the one
up to the loop stops there, the one after gets the output in place of the loop. Whatever `call` and
the layers need besides (masks, rotations, a shared bias) is computed up to the loop again by every
stage, for the microbatch that it runs; what is not needed is dead code.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardlib.errors import ModelError
from shardlib.jaxprs import subprograms
from shardlib.pipeline.execute import Cut, Leaves, Part, Reads
from shardlib.stack import LayerStack, intercept

Loss = Callable[[Leaves, Part], tuple[jax.Array, Any]]
"""`loss(params, part) -> (loss, sums)`: parameters by path; a scalar and a pytree of scalars."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a loss turned out to be when it was traced."""

    num_layers: int
    reads: Reads
    outputs: Any
    """Structure of what the layers return beside the carry, which has no leaves."""
    sends: bool
    """Whether the model itself sends by collective-permute, as ring attention does."""
    constrains: bool
    """Whether the model constrains an activation."""


class _Reached(BaseException):
    """Ends a loss at its loop over layers."""

    def __init__(self, stack: LayerStack):
        self.stack = stack


def plan(loss: Loss, params: Leaves, layers: frozenset[str], part: Part) -> Plan:
    """Traces a loss whole, and finds where it can be cut.

    Args:
        loss: The loss.
        params: All parameters by path, arrays or `ShapeDtypeStruct`s.
        layers: Paths of those that the stages share out.
        part: A microbatch, arrays or `ShapeDtypeStruct`s.

    Raises:
        ModelError: If it cannot be cut; the message lists every reason.
    """
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (dict(params), part))
    faults: list[str] = []
    made: list[Any] = []

    def pre(params: Leaves, part: Part) -> Any:
        stack = _reach(loss, params, part)
        made.append(stack)
        return stack.carry

    def run(params: Leaves, part: Part, carry: Any) -> Any:
        stack = _reach(loss, params, part)
        carry, outputs, changed = stack.run(stack.state, carry, stack.per_layer)
        faults.extend(_stack_faults(stack, outputs, changed))
        made.append(jax.tree.structure(outputs))
        return carry

    def post(params: Leaves, part: Part, carry: Any) -> Any:
        return _resume(loss, params, part, carry, made[1])

    first, carry = jax.make_jaxpr(pre, return_shape=True)(*args)
    middle = jax.make_jaxpr(run)(*args, carry)
    if faults:
        raise ModelError("\n".join(faults))
    last = jax.make_jaxpr(post)(*args, carry)
    names = list(args[0])
    reads = Reads(*(_reads(traced, sorted(names)) for traced in (first, middle, last)))
    outside = sorted((reads.pre | reads.post) & layers)
    if outside:
        raise ModelError(
            "the loss reads variables of the stacked layers outside of scan_layers, where a "
            f"pipeline has no more than one stage's: {', '.join(outside)}.\n"
            "  Read them inside of the layers only, or use a mesh without stage."
        )
    reads = reads._replace(chunk=reads.chunk - layers)
    sends, constrains = (
        any(_holds(traced.jaxpr, name) for traced in (first, middle, last))
        for name in ("ppermute", "sharding_constraint")
    )
    return Plan(_num_layers(made[0]), reads, made[1], sends, constrains)


def cut(loss: Loss, plan: Plan, layers: Leaves, layers_per_chunk: int) -> Cut:
    """Returns the parts of a loss, for one stage.

    Args:
        loss: The loss that was planned, of arrays that the stage sees.
        plan: What `plan` found.
        layers: This stage's layers, which complete the parameters where only others are read.
        layers_per_chunk: How many layers each call of `chunk` runs.
    """

    def pre(shared: Leaves, part: Part) -> Any:
        return _reach(loss, {**shared, **layers}, part).carry

    def chunk(layers: Leaves, shared: Leaves, x: Any, part: Part, first_layer: jax.Array) -> Any:
        stack = _reach(loss, {**shared, **layers}, part)

        def here(leaf: jax.Array) -> jax.Array:
            """What is made for all layers, such as random keys, is cut; layers come cut."""
            if leaf.shape[0] == layers_per_chunk:
                return leaf
            return jax.lax.dynamic_slice_in_dim(leaf, first_layer, layers_per_chunk)

        def whole(leaf: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((plan.num_layers, *leaf.shape[1:]), leaf.dtype)

        layers_here = jax.tree.map(here, stack.state)
        stack = dataclasses.replace(stack, state=jax.tree.map(whole, stack.state))
        return stack.run(layers_here, x, stack.per_layer)[0]

    def post(shared: Leaves, x: Any, part: Part) -> tuple[jax.Array, Any]:
        return _resume(loss, {**shared, **layers}, part, x, plan.outputs)

    return Cut(pre, chunk, post, plan.reads)


def _reach(loss: Loss, params: Leaves, part: Part) -> LayerStack:
    """Runs a loss up to its loop over layers."""

    def stop(stack: LayerStack) -> Any:
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


def _resume(loss: Loss, params: Leaves, part: Part, carry: Any, outputs: Any) -> Any:
    """Runs a loss with `carry` in place of its loop over layers."""
    calls = []

    def give(stack: LayerStack) -> Any:
        if calls:
            raise ModelError(
                "the loss calls scan_layers more than once, so that no one place is left to cut "
                "the model into stages.\n"
                "  Make one stack of all layers, or use a mesh without stage."
            )
        calls.append(stack)
        return carry, jax.tree.unflatten(outputs, ()), {}

    with intercept(give):
        return loss(params, part)


def _stack_faults(stack: LayerStack, outputs: Any, changed: dict[Any, Any]) -> list[str]:
    faults = []
    if jax.tree.leaves(stack.per_layer):
        faults.append(
            "the layers are given inputs of their own (per_layer), which stages do not hand out.\n"
            "  Keep what differs from layer to layer in their variables."
        )
    if jax.tree.leaves(outputs):
        shapes = ", ".join(f"{x.dtype}{list(x.shape[1:])}" for x in jax.tree.leaves(outputs))
        faults.append(
            f"each layer returns outputs beside the carry ({shapes}), which stages do not collect."
            "\n  Let `call` return None beside the carry, and add up what it reports in the carry."
        )
    variables = dict(nnx.to_flat_state(stack.state))
    kept = sorted(
        "/".join(map(str, path))
        for path in changed
        if not isinstance(variables[path], nnx.RngState)
    )
    if kept:
        faults.append(
            f"the layers update variables when they are called: {', '.join(kept)}. A pipeline "
            "runs every layer twice for each microbatch and keeps no order of updates.\n"
            "  Use layers without running statistics, or a mesh without stage."
        )
    keys = [x for x in jax.tree.leaves(stack.carry) if _is_extended(x)]
    if keys:
        faults.append(
            f"the carry of the layers holds {keys[0].dtype}, which stages cannot send.\n"
            "  Let layers draw from streams of their own (nnx.Rngs)."
        )
    return faults


def _is_extended(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _num_layers(stack: LayerStack) -> int:
    return jax.tree.leaves(stack.state)[0].shape[0]


def _holds(jaxpr: Jaxpr, name: str) -> bool:
    """Whether a program holds an operation, in itself or in what it calls."""
    return any(
        equation.primitive.name == name or any(_holds(s, name) for s in subprograms(equation))
        for equation in jaxpr.eqns
    )


def _reads(traced: ClosedJaxpr, names: list[str]) -> frozenset[str]:
    """The parameters, which are the first arguments, that the results depend on."""
    jaxpr = traced.jaxpr
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(v for v in equation.invars if not isinstance(v, Literal))
    return frozenset(name for name, v in zip(names, jaxpr.invars, strict=False) if v in needed)
