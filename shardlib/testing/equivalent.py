"""A proof for any model that training on a mesh equals training on one device."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from shardlib.errors import DataError, MeshError, ModelError
from shardlib.mesh import MeshConfig, MeshSpec, describe, make_mesh
from shardlib.rules import ANY, STANDARD, Auto, AxisRules
from shardlib.testing.comparable import refuse_chaos, refuse_narrower, refuse_other_forms
from shardlib.testing.deviations import (
    Deviation,
    Order,
    Quantity,
    blurred,
    bounds,
    counted,
    deviations,
    nearest,
    quantities,
)
from shardlib.testing.forward import where_forward_differs
from shardlib.testing.order import first_uses
from shardlib.testing.rounding import perturbations, reductions
from shardlib.testing.training import Problem, Program

OneMesh: TypeAlias = "MeshSpec | Mesh"
Meshes: TypeAlias = "OneMesh | Iterable[OneMesh]"

_REPLICATED = AxisRules(params={ANY: None}, activations={ANY: None}, auto=Auto(None))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison of a training on a mesh with the same training on one device.

    `deviations` are in the order in which the quantities are computed. Of the `num_compared`
    quantities, rounding may change `num_blurred` by more than 1 in 128, such as gradients that are
    zero except for rounding; they prove little. `nearest` is the largest difference as a share of
    its bound, and `nearest_quantity` its quantity. `hint` says what else is known of the first
    deviation. `compiled` is the step on the mesh.
    """

    mesh: Mesh
    deviations: tuple[Deviation, ...]
    num_compared: int
    num_blurred: int
    nearest: float
    nearest_quantity: Quantity
    hint: str
    compiled: jax.stages.Compiled = dataclasses.field(repr=False)

    def __str__(self) -> str:
        name = f"mesh {describe(self.mesh)}"
        if not self.deviations:
            blurred = f" ({self.num_blurred} blurred by rounding)" if self.num_blurred else ""
            return (
                f"{name}: equal to one device in {self.num_compared} quantities{blurred}; at most "
                f"{self.nearest:.0%} of what rounding explains, in {self.nearest_quantity}"
            )
        first, *others = self.deviations
        lines = [f"{name}: {first}."]
        if self.hint:
            lines.append(self.hint)
        if others:
            count = self.num_compared - 1
            verb = "deviates" if len(others) == 1 else "deviate"
            lines.append(f"Of {count} others {len(others)} {verb}: {counted(others)}.")
        return "\n    ".join(lines)


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """The comparisons of `assert_equivalent`, mesh by mesh."""

    comparisons: tuple[Comparison, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.comparisons))


def assert_equivalent(
    make_model: Any,
    loss_fn: Any,
    batch: Any,
    meshes: Meshes,
    *,
    rules: AxisRules = STANDARD,
    optimizer: optax.GradientTransformation | None = None,
    steps: int = 3,
    microbatches: int = 1,
    batch_axes: Mapping[str, tuple[str | None, ...]] | None = None,
    inputs: Any = (),
    seed: int = 0,
    devices: Sequence[Any] | None = None,
    **step_options: Any,
) -> Equivalence:
    """Trains on each mesh and on one device, in float32, and asserts equal numbers.

    It compares the initial state (bit for bit), the loss of every step, every gradient of the first
    step, and parameters, optimizer state and model state after the last step; stacked layers one by
    one. Differences may only come from rounding: from the change that another order of the
    program's largest sum allows, propagated through the model itself. See
    `shardlib.testing.rounding` for the derivation. No tolerance needs to be chosen.

    A model on a CPU runs on virtual devices: call `sl.local_cpu_devices(8)` before JAX is first
    used.

    Args:
        make_model: `make(rngs) -> module` for an NNX or linen module, or a linen module itself.
        loss_fn: `loss_fn(model, batch, rng)`, as for `make_train_step`.
        batch: A pytree of host arrays, or a list of them, used in turn.
        meshes: One or more of `"data=8"`, a mapping, a `MeshConfig` or a `Mesh`.
        rules: The sharding rules.
        optimizer: Any optax transformation; `optax.adamw(1e-3)` by default.
        steps: Number of training steps.
        microbatches: Number of parts of each batch, on one device too: random masks and batch
            statistics belong to a part.
        batch_axes: Logical axes of batch leaves, as for `make_train_step`.
        inputs: For linen, example arguments, as for `init_state`.
        seed: Seed of parameters and random masks.
        devices: Source of the devices of the meshes; all devices by default.
        step_options: More arguments of `make_train_step`, for the meshes alone: with any of them
            the results must equal the plain step's.

    Returns:
        The comparisons; `str()` shows how close to its bound each mesh came.

    Raises:
        AssertionError: If anything differs by more than rounding explains. For each mesh the
            message names the first such quantity, in the order of computation, with its layer, its
            difference and its bound, and counts the others. All meshes are compared first.
        MeshError: If a mesh needs more devices than there are.
        ModelError: If the loss on one device is not finite, or rounding alone changes this training
            so much that a comparison is meaningless; if a model has different variables on a mesh,
            or computes there in a narrower dtype than on one device.
        DataError: If the batches differ in structure or shapes.
    """
    given = list(jax.devices() if devices is None else devices)
    made = _meshes(meshes, given)
    reference = Reference(
        make_model,
        loss_fn,
        batch,
        optimizer=optimizer,
        microbatches=microbatches,
        batch_axes=batch_axes,
        inputs=inputs,
        seed=seed,
        device=made[0].devices.flat[0],
    )
    comparisons = [
        reference.compare(mesh, rules=rules, steps=steps, **step_options) for mesh in made
    ]
    wrong = [comparison for comparison in comparisons if comparison.deviations]
    if wrong:
        verb = "differs" if len(wrong) == 1 else "differ"
        raise AssertionError(
            f"{len(wrong)} of {len(made)} {'mesh' if len(made) == 1 else 'meshes'} {verb} from one "
            "device:\n  " + "\n  ".join(map(str, wrong))
        )
    return Equivalence(tuple(comparisons))


class Reference:
    """A training on one device, run once, to compare with trainings on any number of meshes.

    The arguments are as in `assert_equivalent`.
    """

    def __init__(
        self,
        make_model: Any,
        loss_fn: Any,
        batch: Any,
        *,
        optimizer: optax.GradientTransformation | None = None,
        microbatches: int = 1,
        batch_axes: Mapping[str, tuple[str | None, ...]] | None = None,
        inputs: Any = (),
        seed: int = 0,
        device: Any = None,
    ):
        optimizer = optax.adamw(1e-3) if optimizer is None else optimizer
        batches = _batches(batch)
        self._problem = Problem(make_model, loss_fn, batches, optimizer, inputs, seed)
        self._options = {"microbatches": microbatches, "batch_axes": batch_axes}
        self._device = jax.devices()[0] if device is None else device
        self._bounds: dict[int, dict[Quantity, float]] = {}

    def compare(
        self,
        mesh: OneMesh,
        *,
        rules: AxisRules = STANDARD,
        steps: int = 3,
        make_model: Any = None,
        **step_options: Any,
    ) -> Comparison:
        """Trains on a mesh and compares; deviations do not raise.

        Args:
            mesh: The mesh.
            rules: The sharding rules.
            steps: Number of training steps.
            make_model: Another implementation of the same model, with the same parameters, used on
                the mesh alone.
            step_options: More arguments of `make_train_step`. They may set other `microbatches`
                than on one device, for a model without random masks.

        Raises:
            ModelError: If a comparison is impossible; see `assert_equivalent`.
        """
        (mesh,) = _meshes(mesh, None)
        expected = self._expected(steps)
        problem = self._problem
        if make_model is not None:
            problem = dataclasses.replace(problem, make_model=make_model)
        program = Program(problem, mesh, rules, **{**self._options, **step_options})
        refuse_other_forms(self._program, program)
        refuse_narrower(self._program, program)
        found = quantities(program.run(steps), self._order)
        allowed = self._allowed(steps)
        far = tuple(deviations(found, expected, allowed))
        return Comparison(
            mesh,
            far,
            len(expected),
            len(blurred(expected, allowed)),
            *nearest(found, expected, allowed),
            self._hint(far, program),
            program.compiled,
        )

    def _hint(self, far: Sequence[Deviation], program: Program) -> str:
        first = far[0].quantity if far else None
        if first is not None and first.kind == "gradient":
            return "The loss of that step agrees; the error is in the backward pass."
        if first is not None and first.kind == "loss" and first.step == 1:
            relative = reductions(self._program.jaxpr).relative
            return where_forward_differs(self._program, program, relative)
        return ""

    @functools.cached_property
    def _program(self) -> Program:
        mesh = make_mesh("data=1", devices=[self._device])
        return Program(self._problem, mesh, _REPLICATED, **self._options)

    @functools.cached_property
    def _order(self) -> Order:
        arguments = enumerate(self._program.arguments)
        params = {at: path for at, (kind, path) in arguments if kind == "parameter"}
        return Order(first_uses(self._program.jaxpr), params)

    @functools.cached_property
    def _trainings(self) -> dict[int, dict[Quantity, np.ndarray]]:
        return {}

    def _expected(self, steps: int) -> dict[Quantity, np.ndarray]:
        if steps not in self._trainings:
            training = self._program.run(steps)
            if not np.isfinite(training.losses).all():
                first = int(np.argmin(np.isfinite(training.losses)))
                raise ModelError(
                    f"the loss of step {first + 1} is {training.losses[first]} on one device, so "
                    "nothing can be compared.\n  Lower the learning rate, or take fewer steps."
                )
            self._trainings[steps] = quantities(training, self._order)
        return self._trainings[steps]

    def _allowed(self, steps: int) -> dict[Quantity, float]:
        if steps not in self._bounds:
            relative = reductions(self._program.jaxpr).relative
            expected = self._expected(steps)
            probes = (self._program.run(steps, change) for change in perturbations(relative))
            found = [quantities(probe, self._order) for probe in probes]
            allowed = bounds(expected, found, relative)
            refuse_chaos(expected, allowed)
            self._bounds[steps] = allowed
        return self._bounds[steps]


def _batches(batch: Any) -> list[Any]:
    batches = list(batch) if isinstance(batch, list) else [batch]
    if not batches:
        raise DataError("no batch to train on was given.\n  Pass one, or a list of them.")
    shapes = [jax.tree.map(lambda x: (np.shape(x), np.asarray(x).dtype), b) for b in batches]
    for index, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise DataError(
                f"batch {index} is {shape}, but batch 0 is {shapes[0]}.\n"
                "  Pass batches of one structure, shape and dtype."
            )
    return batches


def _meshes(meshes: Meshes, devices: Sequence[Any] | None) -> list[Mesh]:
    """Makes meshes, each over the first devices that it needs.

    Raises:
        MeshError: If there are too few devices; lists all meshes that need more.
    """
    is_one = isinstance(meshes, str | Mapping | MeshConfig | Mesh)
    given = list(jax.devices() if devices is None else devices)
    made, faults, needed = [], [], 0
    for spec in [meshes] if is_one else list(meshes):
        if isinstance(spec, Mesh):
            made.append(spec)
            continue
        config = MeshConfig.parse(spec)  # type: ignore[arg-type]
        count = _count(config, len(given))
        if count > len(given):
            needed = max(needed, count)
            faults.append(f"mesh {config} needs {count} devices, but there are {len(given)}.")
        else:
            made.append(make_mesh(config, devices=given[:count]))
    if faults:
        raise MeshError(
            "\n".join(faults) + "\n  For virtual devices on a CPU, set JAX_PLATFORMS=cpu and call "
            f"sl.local_cpu_devices({needed}) before JAX is first used."
        )
    if not made:
        raise MeshError("no mesh to compare was given.\n  Pass one, or a list of them.")
    return made


def _count(config: MeshConfig, available: int) -> int:
    """Returns the number of devices of a mesh; all devices if one degree is open."""
    product = 1
    for axis in config.axes:
        if axis.size == -1:
            return available
        product *= axis.size
    return product
