"""Rules found for a model."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from shardlib.errors import ConfigError, MeshError, ModelError, did_you_mean
from shardlib.find.context import CONTEXT
from shardlib.find.equivalence import Classes
from shardlib.find.found import FoundRules
from shardlib.find.outer_search import OuterSearch
from shardlib.find.search import SEARCHED, Search
from shardlib.find.trace import TracedLoss, fsdp_alone, trace_loss
from shardlib.functional import FunctionalModule, Inputs, functional
from shardlib.functional.precision import Precision
from shardlib.functional.precision import precision as precision_named
from shardlib.hardware import Cluster, of_one_kind
from shardlib.mesh import MeshConfig, abstract_mesh, mesh_sizes
from shardlib.nn.attention.as_one import attention_as_one, traced_alike
from shardlib.optim.transforms import check_transformation
from shardlib.plan.search import capacity_bytes
from shardlib.plan.workloads.tracing import LossFn, TracedWorkload, trace_workload
from shardlib.rules import AxisRules


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
    notify: Callable[[str], None] = lambda text: None,
) -> FoundRules:
    """Returns the rules under which a model trains fastest on a cluster, by the cost model.

    The model need not name any axis; the rules are for the names that it places activations by. An
    integer program over the traced loss lays every tensor out; nothing is allocated or compiled.
    Print the result for a report; train under `sl.use(found.mesh, found.rules)` with
    `microbatches=found.microbatches`. Find them in one process: `seconds` may end searches apart.

    Args:
        make: Module factory as for `init_state`, or a linen module. A mapping of names has one for
            each rematerialisation, from the least to the most; `found.remat` names the best one.
        loss: Loss as for `make_train_step`.
        batch: Arrays or `ShapeDtypeStruct`s of a whole step, rows first.
        optimizer: Any optax transformation.
        on: The cluster, such as `8xh100` or `v5p-128`.
        mesh: The mesh, of `data`, `fsdp`, `expert`, `context` and `tensor`; default: the best one.
        rules: Rules for the parameters that they name, by path or metadata; no activations.
        inputs: Example arguments of the module; for linen.
        wrt: The trained variables, as for `init_state`; others have rules too.
        precision: Precision as for `make_train_step`.
        microbatches: Parts of a batch that run one after the other; default: the quickest that fit.
        seconds: The time limit for the integer program of one mesh.
        memory_bytes: Memory of a device for state and activations; default: the chip's.
        forbidden: Answers not to give again: a quarter of the layouts of their mesh must differ.
        notify: Called with a line after each mesh.

    Raises:
        MeshError: If the cluster, the mesh or the batch cannot be used.
        RuleError: If the given rules place parameters of one structure differently.
        DoesNotFitError: If no layout fits into the devices; it says how much is missing.
        PartitionError: If no answer was found in time.
        ModelError: If a model cannot compute in the precision, or models differ in parameters.
        DataError: If a leaf of the batch has no rows.
        ConfigError: If `microbatches` or `seconds` is not positive, or no `make` is given.
    """
    _check_positive(microbatches, seconds)
    cluster = of_one_kind(on)
    capacity = capacity_bytes(cluster) if memory_bytes is None else memory_bytes
    sizes = _sizes(mesh, cluster) if mesh else None
    of_all = bool(sizes and sizes[CONTEXT] > 1)
    step = _Step(loss, batch, optimizer, rules, inputs, wrt, precision, cluster, of_all)
    programs = step.programs(by_remat(make), microbatches, capacity, tuple(forbidden))
    return OuterSearch(programs, seconds, notify).best([sizes] if sizes else None)


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


def _check_positive(microbatches: int | None, seconds: float) -> None:
    if (microbatches is not None and microbatches < 1) or seconds <= 0:
        raise ConfigError(
            f"microbatches is {microbatches} and seconds is {seconds}, but both must be positive."
        )


@dataclasses.dataclass(frozen=True)
class _Step:
    """A training step, whose model may be given in several ways."""

    loss: LossFn
    batch: PyTree
    optimizer: optax.GradientTransformation
    rules: AxisRules | None
    inputs: Inputs
    wrt: Any
    precision: str | Precision
    cluster: Cluster
    attends_as_one: bool
    """Whether attention without a kernel is one operation as well."""

    def programs(
        self, makes: Mapping[str | None, Callable[..., Any]], *options: Any
    ) -> list[Callable[[], Search]]:
        """Returns functions that trace a model by its rematerialisation; `options` are further
        fields of a search."""
        return [functools.partial(self._program, *one, options) for one in makes.items()]

    def _program(
        self, remat: str | None, make: Callable[..., Any], options: Sequence[Any]
    ) -> Search:
        module, platform = functional(make, self.inputs, self.wrt), self.cluster.platform
        with attention_as_one(platform, every=self.attends_as_one):
            traced, workload = self._traced(module)
        classes = Classes(traced.program, traced.paths)
        return Search(traced, classes, workload, self.cluster, self.rules, *options, remat=remat)

    def _traced(self, module: FunctionalModule) -> tuple[TracedLoss, TracedWorkload]:
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


def _sizes(mesh: str | MeshConfig, cluster: Cluster) -> dict[str, int]:
    sizes = mesh_sizes(abstract_mesh(mesh, cluster.num_devices))
    for axis, size in sizes.items():
        if size > 1 and axis not in SEARCHED:
            raise MeshError(
                f"rules are found for meshes of {', '.join(SEARCHED)}, and this one has "
                f"{axis}={size}.{did_you_mean(axis, SEARCHED)}\n"
                f"  Leave {axis} out."
            )
    return {axis: sizes.get(axis, 1) for axis in SEARCHED}
