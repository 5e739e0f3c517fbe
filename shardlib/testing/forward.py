"""Localisation of errors in a forward pass by the outputs of every layer of a stack."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.functional.precision import precision
from shardlib.losses.signature import called_by_position
from shardlib.nn.stack import LayerStack, intercept
from shardlib.paths import named_leaves
from shardlib.sharding.constrain import use
from shardlib.testing.deviations import Quantity, bounds, deviations
from shardlib.testing.rounding import perturbations
from shardlib.testing.training import Change, Program
from shardlib.train.batches import batch_shardings
from shardlib.train.gradients import LossArguments, PartLoss, part_key

_INPUT, _OUTPUT = "input", "output"


def where_forward_differs(reference: Program, program: Program, relative: float) -> str:
    """Returns a sentence on the first layer whose output on a mesh differs from one device.

    Both models run once more, forward only and on the whole batch, without the rest of the step.
    Only layers that `scan_layers` runs are observed.

    Args:
        reference: The program of one device.
        program: The program of the mesh.
        relative: The relative change of parameters for measuring bounds.
    """
    on_one = _forward(reference)
    expected = on_one(None)
    probes = [on_one(change) for change in perturbations(relative)]
    found = _forward(program)(None)
    far = [d.quantity for d in deviations(found, expected, bounds(expected, probes, relative))]
    if not far:
        return (
            "A forward pass alone agrees; the error is in how the step splits or reduces the batch."
        )
    if len(expected) == 1:  # The loss: no layers were observed.
        return "To find the layer, run the layers by shardlib.scan_layers."
    first = far[0]
    if first.kind == _INPUT:
        return "The inputs of the layers differ already."
    if first.kind == "loss":
        return "The outputs of the layers agree; the error comes after them."
    return f"The forward pass goes wrong in layer {first.layer}; its inputs agree."


def _forward(program: Program) -> Callable[[Change | None], dict[Quantity, np.ndarray]]:
    """Returns a function that computes inputs of stacks, outputs of layers, and the loss."""
    scope, batch = program.definition.scope, program.problem.batches[0]
    loss_fn = called_by_position(program.problem.loss_fn)
    loss = PartLoss(program.definition, loss_fn, precision("f32"))

    def forward(state: Any, batch: Any) -> Any:
        seen: list[tuple[Any, Any]] = []

        def run(stack: LayerStack) -> Any:
            def call(layer: Any, carry: Any, inputs: Any) -> Any:
                carry, outputs = stack.call(layer, carry, inputs)
                return carry, (outputs, carry)

            watched = dataclasses.replace(stack, call=call)
            carry, (outputs, after), changed = watched.run(
                stack.state, stack.carry, stack.per_layer
            )
            seen.append((stack.carry, after))
            return carry, outputs, changed

        key = part_key(jax.random.fold_in(state.rng, state.step), 0)
        with use(scope.mesh, scope.rules), intercept(run):
            sums, _ = loss(LossArguments(state.params, state.model_state, batch, key))
        return seen, sums["loss"].value

    placed = jax.device_put(batch, batch_shardings(batch, scope, program.batch_axes))
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(forward).lower(program.start(), placed).compile()

    def run_from(change: Change | None) -> dict[Quantity, np.ndarray]:
        seen, value = compiled(program.start(change), placed)
        return {**_handed_on(seen), Quantity("loss", step=1): np.asarray(value)}

    return run_from


def _handed_on(seen: Sequence[tuple[Any, Any]]) -> dict[Quantity, np.ndarray]:
    found: dict[Quantity, np.ndarray] = {}
    for index, (before, after) in enumerate(seen):
        found |= {Quantity(_INPUT, f"{index}/{p}"): x for p, x in _floating(before).items()}
        layers = {p: list(x) for p, x in _floating(after).items()}
        for layer in range(max(map(len, layers.values()), default=0)):
            found |= {Quantity(_OUTPUT, f"{index}/{p}", layer): x[layer] for p, x in layers.items()}
    return found


def _floating(tree: Any) -> dict[str, np.ndarray]:
    leaves = {path: np.asarray(leaf) for path, leaf in named_leaves(tree).items()}
    return {p: x for p, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.floating)}
