"""Rules found for a model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from shardlib.errors import ConfigError, MeshError, ModelError, did_you_mean
from shardlib.find.context import CONTEXT
from shardlib.find.equivalence import Classes
from shardlib.find.found import FoundRules
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
    make: Callable[..., Any],
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
        make: Module factory as for `init_state`: `make(rngs) -> module`, or a linen module.
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
        ModelError: If the model cannot be created, or cannot compute in the precision.
        DataError: If a leaf of the batch has no rows.
        ConfigError: If `microbatches` or `seconds` is not positive.
    """
    _check_positive(microbatches, seconds)
    cluster, module = of_one_kind(on), functional(make, inputs, wrt)
    capacity = capacity_bytes(cluster) if memory_bytes is None else memory_bytes
    sizes = _sizes(mesh, cluster) if mesh else None
    with attention_as_one(cluster.platform, every=bool(sizes and sizes[CONTEXT] > 1)):
        traced, step = _traced(module, loss, batch, optimizer, rules, inputs, precision, cluster)
    classes, others = Classes(traced.program, traced.paths), tuple(forbidden)
    search = Search(traced, classes, step, cluster, rules, microbatches, capacity, others, notify)
    return search.best([sizes] if sizes else list(search.meshes()), seconds)


def _check_positive(microbatches: int | None, seconds: float) -> None:
    if (microbatches is not None and microbatches < 1) or seconds <= 0:
        raise ConfigError(
            f"microbatches is {microbatches} and seconds is {seconds}, but both must be positive."
        )


def _traced(
    module: FunctionalModule,
    loss: LossFn,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    rules: AxisRules | None,
    inputs: Inputs,
    precision: str | Precision,
    cluster: Cluster,
) -> tuple[TracedLoss, TracedWorkload]:
    """Returns the trace of the loss, for the solver, and of the step on the platform of a cluster,
    for the cost model."""
    check_transformation(optimizer)
    dtypes = precision_named(precision)
    try:
        traced = trace_loss(module, loss, batch, optimizer, dtypes)
    except (TypeError, jax.dtypes.TypePromotionError) as error:
        # In float32 the same loss fails again if its dtypes are not the reason.
        trace_loss(module, loss, batch, optimizer, precision_named("f32"))
        raise ModelError(
            f"the loss of {module.name} takes parameters in float32, but not in "
            f"{jnp.dtype(dtypes.compute)}: {str(error).rstrip()}\n"
            '  Pass precision="f32", or let the model compute in the dtype of its parameters.'
        ) from error
    workload = trace_workload(
        module,
        optimizer,
        loss,
        batch,
        rules=rules or fsdp_alone(module.axes),
        inputs=inputs,
        precision=dtypes,
        platform=cluster.platform,
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
