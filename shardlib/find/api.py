"""Rules found for a model."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from shardlib.errors import ConfigError, MeshError, ModelError, did_you_mean
from shardlib.find.context import CONTEXT
from shardlib.find.equivalence import Classes
from shardlib.find.found import FoundRules
from shardlib.find.outer_search import best_rules
from shardlib.find.search import SEARCHED, Search
from shardlib.find.trace import TracedLoss, fsdp_alone, trace_loss
from shardlib.functional import FunctionalModule, Inputs, functional
from shardlib.functional.precision import Precision
from shardlib.functional.precision import precision as precision_named
from shardlib.hardware import Cluster, of_one_kind
from shardlib.mesh import MeshConfig, abstract_mesh, mesh_sizes
from shardlib.nn.attention.as_one import AsOne, attention_as_one, traced_alike
from shardlib.optim.transforms import check_transformation
from shardlib.paths import named_leaves
from shardlib.plan.search import capacity_bytes
from shardlib.plan.workloads.tracing import LossFn, TracedWorkload, trace_workload
from shardlib.rules import AxisRules
from shardlib.sharding.constrain import check_rules
from shardlib.sharding.partition import warn_of_unmatched_paths


def find_rules(
    make: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    *,
    loss: LossFn,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    on: str | Cluster,
    mesh: str | MeshConfig | None = None,
    rules: AxisRules | None = None,
    inputs: Inputs = (),
    wrt: Any = None,
    precision: str | Precision = "bf16",
    microbatches: int | None = None,
    seconds: float = 60.0,
    memory_bytes: float | None = None,
    forbidden: Sequence[FoundRules] = (),
    stages: bool = True,
    notify: Callable[[str], None] = lambda text: None,
) -> FoundRules:
    """Returns the rules under which a model trains fastest on a cluster, by the cost model.

    The model need not name any axis; the rules are for the names that it places activations by. An
    integer program over the traced loss lays every tensor out; nothing is allocated or compiled.
    Print it for a report; train under `sl.use(found.mesh, found.rules)` with `found.microbatches`.

    Args:
        make: Module factory as for `init_state`, or a linen module. A mapping has one for each
            rematerialisation, from the least to the most (unchecked); `found.remat` is the best.
        loss, precision: As for `make_train_step`.
        batch: Arrays or `ShapeDtypeStruct`s of a whole step, rows first.
        optimizer: Any optax transformation.
        on: The cluster, such as `8xh100` or `v5p-128`.
        mesh: Of `stage`, `data`, `fsdp`, `expert`, `context` and `tensor`; default: the best one.
        rules: Of the parameters that they name, by path or metadata: then no stages are tried.
        inputs: Example arguments of the module; for linen.
        wrt: The trained variables, as for `init_state`; others have rules too.
        microbatches: Parts of a batch that run one after the other; default: the quickest that fit.
        seconds: The time limit of one mesh. Processes may differ in what ends: search in one.
        memory_bytes: Memory of a device for state and activations; default: the chip's.
        forbidden: Answers not to give again: a quarter of the layouts of their mesh must differ.
        stages: Whether to search meshes with `stage`; their pipelines are priced as `1f1b`.
        notify: Called with a line after each mesh.

    Raises:
        MeshError: If the cluster, the mesh or the batch cannot be used.
        RuleError: If the given rules place parameters of one structure differently.
        DoesNotFitError: If no layout fits into the devices; it says how much is missing.
        PartitionError: If no answer was found in time.
        ModelError: If a loss or a model cannot be trained, or models differ in their state.
        DataError: If a leaf of the batch has no rows.
        ConfigError: If a number is not positive, or an argument is of another kind.
    """
    _check_arguments(rules, forbidden, microbatches, seconds=seconds, memory_bytes=memory_bytes)
    cluster = of_one_kind(on)
    capacity = capacity_bytes(cluster) if memory_bytes is None else memory_bytes
    sizes = None if mesh in (None, "", "auto") else _sizes(mesh, cluster)
    step = _Step(loss, batch, optimizer, rules, inputs, wrt, precision, cluster)
    how: AsOne = "rows" if sizes and sizes[CONTEXT] > 1 else "regions"
    request = _Request(step, how, microbatches, capacity, tuple(forbidden), stages)
    return best_rules(request.programs(by_remat(make)), [sizes] if sizes else None, seconds, notify)


def by_remat(
    make: Callable[..., Any] | Mapping[str, Callable[..., Any]],
) -> Mapping[str | None, Callable[..., Any]]:
    """Returns module factories by the name of their rematerialisation, which is None for a factory
    without a name.

    Raises:
        ConfigError: If the mapping is empty.
    """
    if not isinstance(make, Mapping):
        return {None: make}
    if not make:
        raise ConfigError(
            "make is a mapping without a model.\n"
            "  Give a module factory for each rematerialisation, or one alone."
        )
    return {**make}


def _check_alike(modules: Mapping[str | None, FunctionalModule]) -> None:
    """Raises `ModelError` if models differ in parameters or in other state."""
    (first, held), *others = ((remat, set(_state_of(one))) for remat, one in modules.items())
    different = {other: sorted({path for path, *_ in held ^ its}) for other, its in others}
    if faults := [f"{other}: {', '.join(paths)}" for other, paths in different.items() if paths]:
        raise ModelError(
            f"models differ in their state from that of remat {first}:\n    "
            + "\n    ".join(faults)
            + "\n  Let each `make` of the mapping create the same parameters and model state."
        )


def _state_of(module: FunctionalModule) -> Iterator[tuple[str, bool, tuple[int, ...], Any]]:
    """Yields the path of each leaf, whether it is trained, its shape and its dtype."""
    for tree, is_trained in zip(module.shapes(), (True, False), strict=True):
        for path, leaf in named_leaves(tree).items():
            yield path, is_trained, leaf.shape, leaf.dtype


def _check_arguments(
    rules: AxisRules | None,
    forbidden: Sequence[FoundRules],
    microbatches: int | None,
    **reals: float | None,
) -> None:
    """Raises for arguments of another type, and `ConfigError` for all numbers that are not
    positive."""
    if rules is not None:
        check_rules(rules)
    if isinstance(forbidden, FoundRules) or not all(isinstance(x, FoundRules) for x in forbidden):
        raise ConfigError(
            "forbidden is not a sequence of answers of find_rules.\n"
            "  Give them in a list: forbidden=[found]."
        )
    counted = microbatches is None or (isinstance(microbatches, Integral) and microbatches > 0)
    faults = [] if counted else [f"microbatches={microbatches!r} is not a positive int or None"]
    for name, value in reals.items():
        if value is not None and not (isinstance(value, Real) and value > 0):
            faults.append(f"{name}={value!r} is not a positive number")
    if faults:
        raise ConfigError(f"{'; '.join(faults)}.\n  Correct it, or leave it out.")


@dataclasses.dataclass(frozen=True)
class _Step:
    """A training step without its model."""

    loss: LossFn
    batch: PyTree
    optimizer: optax.GradientTransformation
    rules: AxisRules | None
    inputs: Inputs
    wrt: Any
    precision: str | Precision
    cluster: Cluster

    def traced(self, module: FunctionalModule) -> tuple[TracedLoss, TracedWorkload]:
        """Returns the trace of the loss, for the solver, and of the step on the platform of the
        cluster, for the cost model."""
        check_transformation(self.optimizer)
        dtypes = precision_named(self.precision)
        step = module, self.loss, self.batch, self.optimizer
        try:
            traced = trace_loss(*step, dtypes)
        except (TypeError, jax.dtypes.TypePromotionError) as error:
            # In float32 the same loss fails again if its dtypes are not the reason.
            trace_loss(*step, precision_named("f32"))
            raise ModelError(
                f"the loss of {module.name} takes parameters in float32, but not in "
                f"{jnp.dtype(dtypes.compute)}: {str(error).rstrip()}\n"
                '  Pass precision="f32", or let the model compute in the dtype of its parameters.'
            ) from error
        workload = trace_workload(
            module,
            self.optimizer,
            self.loss,
            self.batch,
            rules=self.rules or fsdp_alone(module.axes),
            inputs=self.inputs,
            precision=dtypes,
            platform=self.cluster.platform,
            names=traced.names,
        )
        # Attention is one operation in all traces of a search.
        return traced, dataclasses.replace(workload, retrace=traced_alike(workload.retrace))


@dataclasses.dataclass(frozen=True)
class _Request:
    """A training step, and what is asked of its rules."""

    step: _Step
    attention: AsOne
    """Attention that is one operation."""
    microbatches: int | None
    capacity_bytes: float
    forbidden: tuple[FoundRules, ...]
    stages: bool

    def programs(
        self, makes: Mapping[str | None, Callable[..., Any]]
    ) -> list[Callable[[], Search]]:
        """Returns functions that trace a model, by the order of its rematerialisations.

        Raises:
            ModelError: If models differ in their state.
        """
        modules = {
            remat: functional(make, self.step.inputs, self.step.wrt)
            for remat, make in makes.items()
        }
        _check_alike(modules)
        return [functools.partial(self._search, *one) for one in modules.items()]

    def _search(self, remat: str | None, module: FunctionalModule) -> Search:
        """Returns the search for the rules of a model, which it traces."""
        step = self.step
        with attention_as_one(step.cluster.platform, self.attention):
            traced, workload = step.traced(module)
        if step.rules is not None:
            params = [*named_leaves(traced.params), *module.frozen]
            warn_of_unmatched_paths(step.rules, params, module.name)
        return Search(
            traced,
            Classes(traced.program, traced.paths),
            workload,
            step.cluster,
            step.rules,
            self.microbatches,
            self.capacity_bytes,
            self.forbidden,
            remat,
            self.stages,
        )


def _sizes(mesh: str | MeshConfig, cluster: Cluster) -> dict[str, int]:
    sizes = mesh_sizes(abstract_mesh(mesh, cluster.num_devices))
    for axis, size in sizes.items():
        if size > 1 and axis not in SEARCHED:
            raise MeshError(
                f"rules are found for meshes of {', '.join(SEARCHED)}, and this one has "
                f"{axis}={size}.{(meant := did_you_mean(axis, SEARCHED))}\n"
                f"  {'Correct it' if meant else f'Leave {axis} out'}."
            )
    return {axis: sizes.get(axis, 1) for axis in SEARCHED}
