"""Localisation of errors in a forward pass by the outputs of every layer of a stack."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from shardlib.functional.precision import precision
from shardlib.losses.signature import called_by_position
from shardlib.nn.stack import LayerStack, intercept
from shardlib.paths import named_leaves
from shardlib.sharding.constrain import use
from shardlib.testing.deviations import Expected, Quantity
from shardlib.testing.rounding import Change, perturbations
from shardlib.testing.training import CompiledTraining
from shardlib.train.batches import batch_shardings
from shardlib.train.gradients import LossArguments, PartLoss, part_key
from shardlib.train.state import TrainState

_INPUT, _OUTPUT = "input", "output"
_Seen = list[tuple[PyTree, PyTree]]
"""For each stack, the carry before its layers, and the carries after each layer."""


def where_forward_differs(
    reference: CompiledTraining, program: CompiledTraining, relative: float
) -> str:
    """Returns a sentence on the first layer whose output on a mesh differs from one device.

    Both models run once more, forward only and on the whole batch, without the rest of the step.
    Only layers that `scan_layers` runs are observed.
    """
    on_one = _forward(reference)
    probes = [on_one(change) for change in perturbations(relative)]
    expected = Expected.measured(on_one(None), probes, relative)
    deviations = expected.deviations(_forward(program)(None))
    if not deviations:
        return (
            "A forward pass alone agrees; the error is in how the step splits or reduces the batch."
        )
    if len(expected.values) == 1:  # The loss: no layers were observed.
        return "To find the layer, run the layers by shardlib.scan_layers."
    first = deviations[0].quantity
    if first.kind == _INPUT:
        return "The inputs of the layers differ already."
    if first.kind == "loss":
        return "The outputs of the layers agree; the error comes after them."
    return f"The forward pass goes wrong in layer {first.layer}; its inputs agree."


def _forward(program: CompiledTraining) -> Callable[[Change | None], dict[Quantity, np.ndarray]]:
    """Returns a function that computes inputs of stacks, outputs of layers, and the loss."""
    scope, batch = program.definition.scope, program.problem.batches[0]
    loss_fn = called_by_position(program.problem.loss_fn)
    loss = PartLoss(program.definition, loss_fn, precision("f32"))

    def forward(state: TrainState, batch: PyTree) -> tuple[_Seen, Array]:
        seen: _Seen = []

        def run(stack: LayerStack) -> tuple[PyTree, PyTree, dict[Any, Any]]:
            def call(layer: nnx.Module, carry: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
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
        return {**_by_layer(seen), Quantity("loss", step=1): np.asarray(value)}

    return run_from


def _by_layer(stacks: Sequence[tuple[PyTree, PyTree]]) -> dict[Quantity, np.ndarray]:
    """Returns the inputs of each stack, then the outputs of its layers in order."""
    values: dict[Quantity, np.ndarray] = {}
    for index, (before, after) in enumerate(stacks):
        values |= {Quantity(_INPUT, f"{index}/{p}"): x for p, x in _floating(before).items()}
        outputs = _floating(after)
        for layer in range(max(map(len, outputs.values()), default=0)):
            values |= {
                Quantity(_OUTPUT, f"{index}/{path}", layer): np.asarray(leaf[layer])
                for path, leaf in outputs.items()
            }
    return values


def _floating(tree: PyTree) -> dict[str, np.ndarray]:
    leaves = {path: np.asarray(leaf) for path, leaf in named_leaves(tree).items()}
    return {p: x for p, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.floating)}
