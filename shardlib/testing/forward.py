"""Where a forward pass goes wrong: what every layer of a stack hands on."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.constrain import use
from shardlib.loss_signature import called_by_position
from shardlib.paths import named_leaves
from shardlib.precision import precision
from shardlib.stack import LayerStack, intercept
from shardlib.testing.deviations import Quantity, bounds, deviations
from shardlib.testing.rounding import perturbations
from shardlib.testing.training import Change, Program
from shardlib.train.gradients import PartLoss, part_key
from shardlib.train.step import batch_shardings

_INPUT, _OUTPUT = "input", "output"


def where_forward_differs(reference: Program, program: Program, relative: float) -> str:
    """Returns a sentence on the first layer whose output on a mesh is not that on one device.

    Both models run once more, forward and on the whole batch, without whatever else the step does.
    Only layers that `scan_layers` runs are seen.

    Args:
        reference: The program of one device.
        program: The program of the mesh.
        relative: The relative change of parameters that bounds are measured with.
    """
    on_one = _forward(reference)
    expected = on_one(None)
    probes = [on_one(change) for change in perturbations(relative)]
    found = _forward(program)(None)
    far = [d.quantity for d in deviations(found, expected, bounds(expected, probes, relative))]
    if not far:
        return (
            "A forward pass alone agrees: what is wrong is in how the step splits or reduces the "
            "batch."
        )
    if len(expected) == 1:  # The loss: no layers were seen.
        return "To have the layer named, run the layers by shardlib.scan_layers."
    first = far[0]
    if first.kind == _INPUT:
        return "What goes into the layers differs already."
    if first.kind == "loss":
        return "What the layers return agrees: what is wrong comes behind them."
    return f"The forward pass goes wrong in layer {first.layer}: what goes into it agrees."


def _forward(program: Program) -> Callable[[Change | None], dict[Quantity, np.ndarray]]:
    """Returns what gives the inputs of all stacks, what each layer hands on, and the loss."""
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
            sums, _ = loss(state.params, state.model_state, batch, key)
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
