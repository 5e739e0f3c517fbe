"""Stacks of layers that a loss runs, and why a pipeline cannot divide some of them."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from shardlib.nn.stack import LayerStack, intercept


@dataclasses.dataclass(frozen=True)
class MetStack:
    """A stack of layers that a loss ran."""

    num_layers: int
    carry_bytes: int
    """Bytes of what passes from layer to layer."""
    faults: tuple[str, ...]
    """Why it cannot be cut into stages, each with its fix."""


@contextlib.contextmanager
def stacks_met() -> Iterator[list[MetStack]]:
    """Collects the stacks that a pipeline could divide, of each `scan_layers` in this context."""
    met: list[MetStack] = []

    def run(stack: LayerStack) -> tuple[Any, Any, dict[Any, Any]]:
        results = _, outputs, changed = stack.run(stack.state, stack.carry, stack.per_layer)
        sent = [x for x in _carry(stack) if not _is_extended(x)]
        faults = tuple(stack_faults(stack, outputs, changed))
        num_bytes = sum(x.size * x.dtype.itemsize for x in sent)
        met.append(MetStack(stack.num_layers, num_bytes, faults))
        return results

    with intercept(run):
        yield met


def stack_faults(stack: LayerStack, outputs: PyTree, changed: dict[Any, Any]) -> Sequence[str]:
    """Returns the reasons why a stack cannot be cut into stages, each with its fix. `outputs` and
    `changed` are results of `LayerStack.run`."""
    faults = []
    if jax.tree.leaves(outputs):
        shapes = ", ".join(f"{x.dtype}{list(x.shape[1:])}" for x in jax.tree.leaves(outputs))
        faults.append(
            f"each layer returns outputs in addition to the carry ({shapes}), which stages do not "
            "collect.\n  Let `call` return the carry and None, and sum up metrics in the carry."
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
    keys = [x for x in _carry(stack) if _is_extended(x)]
    if keys:
        faults.append(
            f"the carry of the layers holds {keys[0].dtype}, which stages cannot send.\n"
            "  Let layers draw from streams of their own (nnx.Rngs)."
        )
    return faults


def _carry(stack: LayerStack) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of the carry, which may hold Python numbers."""
    return jax.tree.leaves(jax.eval_shape(lambda: stack.carry))


def _is_extended(x: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)
