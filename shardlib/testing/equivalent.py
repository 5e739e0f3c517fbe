"""A proof for any model that training on a mesh equals training on one device."""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from shardlib.errors import DataError, MeshError, ModelError
from shardlib.humanize import plural
from shardlib.losses.signature import LossFn
from shardlib.mesh import MeshConfig, MeshSpec, describe, make_mesh
from shardlib.rules import ANY, STANDARD, Auto, AxisRules
from shardlib.testing.deviations import Deviation, Expected, Quantity
from shardlib.testing.forward import where_forward_differs
from shardlib.testing.rounding import (
    Rounding,
    perturbations,
    reductions,
    roundings,
    unit_roundoff,
)
from shardlib.testing.training import CompiledTraining, MakeModel, Problem, by_layer
from shardlib.train.batches import BatchAxes

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
            verb = "deviates" if len(others) == 1 else "deviate"
            counts = collections.Counter(d.quantity.kind for d in others)
            kinds = ", ".join(plural(n, kind) for kind, n in counts.items())
            lines.append(f"Of {self.num_compared - 1} others {len(others)} {verb}: {kinds}.")
        return "\n    ".join(lines)


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """The comparisons of `assert_equivalent`, mesh by mesh."""

    comparisons: tuple[Comparison, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.comparisons))


def assert_equivalent(
    make_model: MakeModel,
    loss_fn: LossFn,
    batch: PyTree,
    meshes: Meshes,
    *,
    rules: AxisRules = STANDARD,
    optimizer: optax.GradientTransformation | None = None,
    steps: int = 3,
    microbatches: int = 1,
    batch_axes: BatchAxes | None = None,
    inputs: PyTree = (),
    wrt: Any = None,
    seed: int = 0,
    devices: Sequence[Any] | None = None,
    **step_options: Any,
) -> Equivalence:
    """Trains on each mesh and on one device, in float32, and asserts equal numbers.

    `Reference` says what is compared, and describes the arguments that are not listed here. A model
    on a CPU runs on virtual devices: call `sl.local_cpu_devices(8)` before JAX is first used.

    Args:
        meshes: One or more of `"data=8"`, a mapping, a `MeshConfig` or a `Mesh`.
        rules: The sharding rules.
        steps: Number of training steps.
        devices: Source of the devices of the meshes; all devices by default.
        step_options: More arguments of `make_train_step`, for the meshes alone: with any of them
            the results must equal the plain step's.

    Returns:
        The comparisons; `str()` shows how close to its bound each mesh came.

    Raises:
        AssertionError: If anything differs by more than rounding explains. For each mesh the
            message names the first such quantity, in the order of computation, with its layer, its
            difference and its bound, and counts the others. All meshes are compared first.
        MeshError, ModelError, DataError: See `Reference`.
    """
    made = _meshes(meshes, jax.devices() if devices is None else devices)
    arguments = {"microbatches": microbatches, "batch_axes": batch_axes, "inputs": inputs}
    arguments["wrt"] = wrt
    device = made[0].devices.flat[0]
    reference = Reference(
        make_model, loss_fn, batch, optimizer=optimizer, seed=seed, device=device, **arguments
    )
    comparisons = [reference.compare(m, rules=rules, steps=steps, **step_options) for m in made]
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

    It compares the initial state (bit for bit), the loss of every step, every gradient of the first
    step, and parameters, optimizer state and model state after the last step; stacked layers one by
    one. Differences may only come from rounding: from the change that another order of the
    program's largest sum allows, propagated through the model itself. See
    `shardlib.testing.rounding` for the derivation. No tolerance needs to be chosen.

    Args:
        make_model: `make(rngs) -> module` for an NNX or linen module, or a linen module itself.
        loss_fn: `loss_fn(model, batch, rng)`, as for `make_train_step`.
        batch: A pytree of host arrays, or a list of them, used in turn.
        optimizer: Any optax transformation; `optax.adamw(1e-3)` by default.
        microbatches: Number of parts of each batch, on one device too: random masks and batch
            statistics belong to a part.
        batch_axes: Logical axes of batch leaves, as for `make_train_step`.
        inputs: For linen, example arguments, as for `init_state`.
        wrt: The trained variables, as for `init_state`.
        seed: Seed of parameters and random masks.
        device: The one device; the first of `jax.devices()` by default.

    Raises:
        DataError: If the batches differ in structure or shapes.
    """

    def __init__(
        self,
        make_model: MakeModel,
        loss_fn: LossFn,
        batch: PyTree,
        *,
        optimizer: optax.GradientTransformation | None = None,
        microbatches: int = 1,
        batch_axes: BatchAxes | None = None,
        inputs: PyTree = (),
        wrt: Any = None,
        seed: int = 0,
        device: object = None,
    ):
        optimizer = optax.adamw(1e-3) if optimizer is None else optimizer
        batches = _batches(batch)
        self._problem = Problem(make_model, loss_fn, batches, optimizer, inputs, seed, wrt)
        self._options = {"microbatches": microbatches, "batch_axes": batch_axes}
        self._device = jax.devices()[0] if device is None else device
        self._expectations: dict[int, Expected] = {}

    def compare(
        self,
        mesh: OneMesh,
        *,
        rules: AxisRules = STANDARD,
        steps: int = 3,
        make_model: MakeModel | None = None,
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
            MeshError: If the mesh needs more devices than there are.
            ModelError: If there is no step, the loss on one device is not finite, or rounding alone
                changes this training so much that a comparison is meaningless; if the model has
                different variables on the mesh, or computes there in a narrower dtype than on one
                device.
        """
        if steps < 1:
            raise ModelError(f"steps={steps} compares no training.\n  Take at least one step.")
        (mesh,) = _meshes(mesh, jax.devices())
        expected = self._expected(steps)
        problem = self._problem
        if make_model is not None:
            problem = dataclasses.replace(problem, make_model=make_model)
        program = CompiledTraining(problem, mesh, rules, **{**self._options, **step_options})
        _refuse_other_forms(self._program, program)
        _refuse_narrower(self._program, program)
        values = by_layer(program.run(steps), self._program.uses)
        deviations = expected.deviations(values)
        return Comparison(
            mesh,
            deviations,
            len(values),
            len(expected.blurred()),
            *expected.nearest(values),
            self._hint(deviations[0].quantity, program) if deviations else "",
            program.compiled,
        )

    def check_comparable(self, steps: int = 3) -> None:
        """Trains on one device, as `compare` would.

        Raises:
            ModelError: If the loss is not finite, or rounding alone changes the training so much
                that a comparison is meaningless.
        """
        self._expected(steps)

    def _hint(self, first: Quantity, program: CompiledTraining) -> str:
        if first.kind == "gradient":
            return "The loss of that step agrees; the error is in the backward pass."
        if first.kind == "loss" and first.step == 1:
            relative = reductions(self._program.jaxpr).relative
            return where_forward_differs(self._program, program, relative)
        return ""

    @functools.cached_property
    def _program(self) -> CompiledTraining:
        mesh = make_mesh("data=1", devices=[self._device])
        return CompiledTraining(self._problem, mesh, _REPLICATED, **self._options)

    def _expected(self, steps: int) -> Expected:
        if steps in self._expectations:
            return self._expectations[steps]
        program, uses = self._program, self._program.uses
        values = by_layer(program.run(steps), uses)
        for quantity, value in values.items():
            if quantity.kind == "loss" and not np.isfinite(value):
                raise ModelError(
                    f"{quantity} is {value} on one device, so nothing can be compared.\n"
                    "  Lower the learning rate, or take fewer steps."
                )
        relative = reductions(program.jaxpr).relative
        probes = (by_layer(program.run(steps, c), uses) for c in perturbations(relative))
        expected = Expected.measured(values, probes, relative)
        first = next(roundings(program.jaxpr), None)
        expected.refuse_chaos(_told(first, program) if first else "")
        self._expectations[steps] = expected
        return expected


def _refuse_other_forms(reference: CompiledTraining, program: CompiledTraining) -> None:
    """Rejects a model that has different variables on a mesh than on one device."""
    one, here = reference.forms, program.forms
    faults = [
        f"{name} is {here.get(name, 'absent')}, on one device {one.get(name, 'absent')}."
        for name in dict.fromkeys((*one, *here))
        if one.get(name) != here.get(name)
    ]
    if faults:
        raise ModelError(
            f"mesh {describe(program.mesh)} has a different model than one device:\n  "
            + "\n  ".join(faults)
            + "\n  Make the same variables on every mesh."
        )


def _refuse_narrower(reference: CompiledTraining, program: CompiledTraining) -> None:
    """Rejects a program that computes in a dtype narrower than any on one device."""
    widest = max((unit_roundoff(r.dtype) for r in roundings(reference.jaxpr)), default=0.0)
    narrower = (r for r in roundings(program.jaxpr) if unit_roundoff(r.dtype) > widest)
    first = next(narrower, None)
    if first is None:
        return
    raise ModelError(
        f"mesh {describe(program.mesh)} cannot be compared: its step rounds "
        f"{_told(first, program)}, but the step on one device does not.\n"
        f"  Leave out what asks for {first.dtype} there (precision, reduction, or the model's own "
        "code), or compute in it on one device too."
    )


def _told(rounding: Rounding, program: CompiledTraining) -> str:
    """Returns what a rounding rounds, to which dtype and where."""
    what = "a result" if rounding.argument is None else program.arguments[rounding.argument]
    return f"{what} to {rounding.dtype} (at {rounding.source})"


def _batches(batch: PyTree) -> list[PyTree]:
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


def _meshes(meshes: Meshes, devices: Sequence[Any]) -> list[Mesh]:
    """Makes meshes, each over the first devices that it needs.

    Raises:
        MeshError: If there are too few devices; lists all meshes that need more.
    """
    is_one = isinstance(meshes, str | Mapping | MeshConfig | Mesh)
    made, faults, most = [], [], 0
    for spec in [meshes] if is_one else list(meshes):
        if isinstance(spec, Mesh):
            made.append(spec)
            continue
        config = MeshConfig.parse(spec)  # type: ignore[arg-type]
        sizes = config.sizes.values()
        count = len(devices) if -1 in sizes else math.prod(sizes)
        if count > len(devices):
            most = max(most, count)
            faults.append(f"mesh {config} needs {count} devices, but there are {len(devices)}.")
        else:
            made.append(make_mesh(config, devices=devices[:count]))
    if faults:
        raise MeshError(
            "\n".join(faults) + "\n  For virtual devices on a CPU, set JAX_PLATFORMS=cpu and call "
            f"sl.local_cpu_devices({most}) before JAX is first used."
        )
    if not made:
        raise MeshError("no mesh to compare was given.\n  Pass one, or a list of them.")
    return made
