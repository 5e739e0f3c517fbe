"""Suggested config changes for a step that does not fit into memory."""

from typing import Any

from shardlib.cost.layout import Layout
from shardlib.errors import ModelError
from shardlib.hardware import Cluster
from shardlib.mesh import MeshConfig
from shardlib.nn import remat
from shardlib.plan.fixes import Fix, cheapest_fixes
from shardlib.plan.problem import Choice
from shardlib.run.calibrating import as_measured
from shardlib.run.config import RunConfig
from shardlib.run.planning import read_rules, workload_of


def fixes_of(config: RunConfig, cluster: Cluster, peak_bytes: float) -> list[Fix]:
    """Returns at most three changes that make a run fit and cost the least time.

    Args:
        config: The run, with its mesh.
        cluster: The cluster that the run does not fit.
        peak_bytes: Peak bytes of its compiled step. The cost model is assumed to have the same
            error after a change.

    Raises:
        ModelError: If the model, its rematerialisation or its axes cannot be planned.
    """
    _, workload = workload_of(config)
    cluster = as_measured(cluster)
    layout, choice = layout_of(config, cluster), choice_of(config)
    predicted = workload.memory(layout, choice, cluster).total
    over = peak_bytes - predicted
    return cheapest_fixes(workload, layout, choice, cluster, over_bytes=over)


def layout_of(config: RunConfig, cluster: Cluster) -> Layout:
    """Returns the layout of a run over a cluster.

    Raises:
        ModelError: If the run has a mesh axis that the planner does not know.
    """
    mesh: Any = config.mesh
    sizes: dict[str, Any] = dict(MeshConfig.parse(mesh).resolve(cluster.num_devices).sizes)
    train = config.train
    known = Layout.__dataclass_fields__
    if unknown := [name for name in sizes if name not in known]:
        raise ModelError(f"the planner does not know the mesh axis {', '.join(unknown)}")
    rules = read_rules(config.axis_rules())
    return Layout(
        **sizes,
        slices=cluster.num_slices,
        microbatches=train.num_microbatches,
        chunks=train.pipeline.chunks if train.pipeline.schedule == "interleaved" else 1,
        sequence_parallel=rules["sequence_parallel"],
        zero=rules["zero"][0],
        offload_optimizer=train.offload_optimizer and cluster.chip is not None,
    )


def choice_of(config: RunConfig) -> Choice:
    """Returns the choices of a run other than its mesh.

    Raises:
        ModelError: If no plan has the ranges of its rematerialisation. A plan applies a policy to
            the same number of layers in each stage, and none to the others.
    """
    policy = getattr(config.model, "remat", "none")
    chunks = getattr(config.model, "loss_chunks", 1)
    moments = config.optimizer.momentum_dtype
    if not policy[0].isdecimal():
        return Choice(policy, moments=moments, loss_chunks=chunks)
    num_layers = config.model.num_layers
    found = remat.runs(policy, num_layers, length=num_layers)
    pieces = max(len(found) // 2, 1)
    if len(found) > 1 and (found != found[:2] * pieces or found[1].policy != "none"):
        raise ModelError(f"the planner does not know the rematerialisation {policy!r}")
    return Choice(found[0].policy, found[0].num_layers, moments, chunks, pieces)
