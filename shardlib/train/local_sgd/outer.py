"""Local SGD and DiLoCo: groups that train separately for many steps and then synchronize.

They suit groups along `data` that are joined only by a slow network. Each group trains a copy of
the model on its rows of the batch. Every `inner_steps` steps, the mean progress of the copies is
the gradient for an outer optimizer, and all groups continue from the updated model. In between
nothing is sent over `data`.

```python
local = make_local_sgd(sl.make_train_step(loss_fn), LocalSGDConfig(inner_steps=100))
groups = local.init(sl.init_state(make, optimizer))
for batch in batches:
    groups, metrics = local(groups, batch)
state = local.merge(groups)
```

Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv:2311.08105, algorithm 1; Stich 2019, "Local SGD Converges Fast and Communicates Little",
arXiv:1805.09767.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from shardlib.config import configclass
from shardlib.errors import ConfigError, MeshError, ModelError
from shardlib.functional import updated
from shardlib.losses.aggregate import Aggregate, Max, Mean, Min, is_output
from shardlib.losses.microbatch import widened
from shardlib.losses.signature import check_arity
from shardlib.mesh import mesh_sizes
from shardlib.paths import path_string
from shardlib.sharding.constrain import use
from shardlib.sharding.manual import manual
from shardlib.sharding.partition import Placement
from shardlib.train.batches import batch_shardings, input_shardings, microbatch_shapes
from shardlib.train.gradients import Inputs
from shardlib.train.local_sgd.state import (
    LocalSGDState,
    check_whole,
    local_shardings,
    over_groups,
    repeat,
    replace_own,
)
from shardlib.train.program import JittedStep, PlacedProgram, refuse_donated
from shardlib.train.reduce.hierarchical import Hops, outer_degree, sum_groups
from shardlib.train.reduce.reduction import AXIS, ReductionConfig
from shardlib.train.reduce.uneven import check_rows
from shardlib.train.state import Definition, TrainState, state_shardings
from shardlib.train.step import TrainStep, check_window

Metrics: TypeAlias = dict[str, Aggregate]


@configclass
class LocalSGDConfig:
    """Groups along `data` that train separately and synchronize periodically (DiLoCo)."""

    groups: int | None = None
    """Number of groups, a multiple of the devices along `data`. A device with several groups trains
    them one after the other. Unset: one per device."""
    inner_steps: int = 500
    """Optimizer steps of each group between synchronizations."""
    outer_learning_rate: float = 0.7
    """Learning rate of the outer optimizer. 1 without momentum takes the mean of the groups."""
    outer_momentum: float = 0.9
    """Momentum of the outer optimizer."""
    nesterov: bool = True
    """Whether the outer optimizer uses Nesterov momentum."""
    dtype: Literal["f32", "bf16"] = "f32"
    """Dtype in which groups send their progress. Sums are in float32."""

    def __post_init__(self) -> None:
        faults = []
        if self.inner_steps < 1:
            faults.append(f"inner_steps must be at least 1, not {self.inner_steps}")
        if self.groups is not None and self.groups < 1:
            faults.append(f"groups must be at least 1, or null, not {self.groups}")
        if self.outer_learning_rate <= 0:
            faults.append(f"outer_learning_rate must be positive, not {self.outer_learning_rate}")
        if not 0 <= self.outer_momentum < 1:
            faults.append(f"outer_momentum must lie in [0, 1), not {self.outer_momentum}")
        if faults:
            raise ValueError("; ".join(faults))

    def count(self, devices: int) -> int:
        """Returns the number of groups for a number of devices along `data`.

        Raises:
            MeshError: If the number of devices does not divide the number of groups.
        """
        groups = self.groups or devices
        if groups % devices:
            raise MeshError(
                f"{groups} groups do not divide over the {devices} devices along {AXIS}.\n"
                f"  Use a multiple of {devices}, or leave groups out."
            )
        return groups


def make_local_sgd(step: TrainStep, config: LocalSGDConfig) -> "LocalSGD":
    """Returns the step of groups that train separately.

    Args:
        step: The step of one group on its rows, from `make_train_step`. Its microbatches, gradient
            clipping, schedule and guards apply to each group separately.
        config: Number of groups, inner steps and outer optimizer.

    Raises:
        ConfigError: If the step has a reduction over `data`.
    """
    if step.reduction != ReductionConfig():
        raise ConfigError(
            "local SGD does not sum gradients over data, but the step has a reduction.\n"
            "  Leave reduction out; local_sgd.dtype sets the dtype in which groups send their "
            "progress."
        )
    return LocalSGD(step, config, check=step.check, compiler_options=step.compiler_options)


@dataclasses.dataclass(eq=False)
class LocalSGD(JittedStep):
    """A compiled step of groups that train separately; see `make_local_sgd`."""

    inner: TrainStep
    config: LocalSGDConfig

    def init(self, state: TrainState) -> LocalSGDState:
        """Returns groups that all start from one state. Abstract states give abstract groups.

        Raises:
            MeshError: If the number of devices along `data` does not divide the number of groups.
            RuleError: If the rules shard parameters, model state or optimizer state over `data`, or
                the optimizer state is in host memory.
        """
        count = self._count(state.definition)
        check_whole(state.definition)

        def start(state: TrainState) -> LocalSGDState:
            agreed = jax.tree.map(widened, state.params)
            momentum = jax.tree.map(jnp.zeros_like, agreed)
            return LocalSGDState(agreed, momentum, replace_own(state, lambda x: repeat(x, count)))

        abstract = jax.eval_shape(start, state)
        placed = local_shardings(abstract)
        if all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
            return jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, placed
            )
        return jax.jit(start, out_shardings=placed)(state)

    def __call__(
        self, state: LocalSGDState, batch: PyTree, *inputs: PyTree
    ) -> tuple[LocalSGDState, Metrics]:
        """Returns all groups after a step, synchronized if it was the last of `inner_steps`.

        Args:
            state: The groups, which are donated.
            batch: Pytree of arrays [b, ...]. Group g takes the g-th of `groups` equal blocks of
                rows.
            inputs: Extra inputs of the loss, the same for all groups; see `make_train_step`.

        Returns:
            The groups, and the metrics of the step as `Mean`s and other aggregates of arrays
            [groups, ...], sharded over `data`, so that no device waits for the metrics of another
            group. `group_means` reads them.
        """
        if not isinstance(state, LocalSGDState):
            raise ModelError(
                f"local SGD needs a LocalSGDState, not a {type(state).__name__}.\n"
                "  Create it once: groups = local.init(state)."
            )
        refuse_donated(state, inputs)
        return self._run(state, batch, inputs)

    def merge(self, state: LocalSGDState) -> TrainState:
        """Returns one state to evaluate, export or resume from, with the last synchronized
        parameters.

        Optimizer and model state are averaged over groups. Integers, such as step counts, are taken
        from the first group.
        """

        def merged(state: LocalSGDState) -> TrainState:
            def mean(x: jax.Array) -> jax.Array:
                if not jnp.issubdtype(x.dtype, jnp.inexact):
                    return x[0]
                return jnp.mean(widened(x), axis=0).astype(x.dtype)

            groups = state.groups
            params = jax.tree.map(lambda x, g: x.astype(g.dtype), state.params, groups.params)
            return dataclasses.replace(replace_own(groups, mean), params=params)

        key = state.definition
        if key not in self._programs:
            placed = state_shardings(jax.eval_shape(merged, state))
            self._programs[key] = jax.jit(merged, out_shardings=placed)
        return self._programs[key](state)

    def _compile(self, state: LocalSGDState, batch: PyTree, inputs: Inputs) -> PlacedProgram:
        scope, inner = state.definition.scope, self.inner
        check_window(inner.guards, state.groups)
        check_arity(inner.loss_fn, inputs)
        given = batch_shardings(batch, scope, inner.batch_axes), *input_shardings(inputs, scope)
        check_rows(batch, self._count(state.definition) * inner.microbatches)
        batch_shardings(microbatch_shapes(batch, inner.microbatches), scope, inner.batch_axes)
        placed = local_shardings(state)
        by_group = NamedSharding(scope.mesh, PartitionSpec(*over_groups(scope.mesh)))

        def local_step(
            state: LocalSGDState, batch: PyTree, *inputs: PyTree
        ) -> tuple[LocalSGDState, Metrics]:
            return self._step(state, batch, inputs, given[1:])

        return self._jitted(
            local_step,
            given,
            scope.mesh,
            donate_argnums=0,
            in_shardings=(placed, *given),
            out_shardings=(placed, by_group),
        )

    def _step(
        self, state: LocalSGDState, batch: PyTree, inputs: Inputs, inputs_at: PyTree
    ) -> tuple[LocalSGDState, Metrics]:
        definition = state.definition
        with use(definition.scope.mesh, definition.scope.rules):
            groups, metrics = self._inner_step(state.groups, batch, inputs, inputs_at)
            state = dataclasses.replace(state, groups=groups)
            is_last = groups.step % self.config.inner_steps == 0
            return jax.lax.cond(is_last, self._agree, lambda state: state, state), metrics

    def _inner_step(
        self, groups: TrainState, batch: PyTree, inputs: Inputs, inputs_at: PyTree
    ) -> tuple[TrainState, Metrics]:
        """Runs one step of every group. A device along `data` holds one or more groups."""
        definition, step = groups.definition, groups.step
        count = self._count(definition)
        own = (
            *(groups.params, groups.model_state, groups.opt_state, groups.spike_window),
            jnp.arange(count),
        )

        def held(
            own: PyTree, step: jax.Array, rng: jax.Array, rows: PyTree, inputs: Inputs
        ) -> PyTree:
            def one(group: PyTree) -> PyTree:
                params, model_state, opt_state, window, index, rows = group
                key = jax.random.fold_in(rng, index)
                state = TrainState(step, params, model_state, opt_state, key, definition, window)
                new, metrics = self.inner.apply(state, rows, inputs, inputs_at)
                return new.params, new.model_state, new.opt_state, new.spike_window, metrics

            here = own[-1].shape[0]
            rows = jax.tree.map(lambda x: x.reshape(here, x.shape[0] // here, *x.shape[1:]), rows)
            if here == 1:
                only = jax.tree.map(lambda x: x[0], (*own, rows))
                return jax.tree.map(lambda x: x[None], one(only))
            return jax.lax.map(one, (*own, rows))

        if mesh_sizes(definition.scope.mesh).get(AXIS, 1) > 1:
            split, shared = PartitionSpec(AXIS), PartitionSpec()
            held = manual(held, (AXIS,), (split, shared, shared, split, shared), split)
        *own, metrics = held(own, step, groups.rng, batch, inputs)
        params, model_state, opt_state, window = own
        new = TrainState(step + 1, params, model_state, opt_state, groups.rng, definition, window)
        return new, metrics

    def _agree(self, state: LocalSGDState) -> LocalSGDState:
        """Runs the outer step, which gives all groups the same parameters and the mean model
        state."""
        config, groups = self.config, state.groups
        definition, count = state.definition, self._count(state.definition)
        progress = jax.tree.map(
            lambda agreed, x: agreed[None] - widened(x), state.params, groups.params
        )
        gradient = self._mean(progress, definition.params, definition, config.dtype == "bf16")

        def accumulate(momentum: PyTree) -> PyTree:
            return jax.tree.map(lambda m, g: config.outer_momentum * m + g, momentum, gradient)

        momentum = accumulate(state.momentum)
        direction = accumulate(momentum) if config.nesterov else momentum
        params = jax.tree.map(
            lambda x, d: x - config.outer_learning_rate * d, state.params, direction
        )
        restarted = jax.tree.map(
            lambda x, g: repeat(x.astype(g.dtype), count), params, groups.params
        )
        statistics = self._mean_state(groups.model_state, definition, count)
        groups = dataclasses.replace(groups, params=restarted, model_state=statistics)
        return LocalSGDState(params, momentum, groups)

    def _mean_state(self, model_state: PyTree, definition: Definition, count: int) -> PyTree:
        """Returns the model state with floating-point statistics averaged over groups. Each group
        keeps its other values and its untrained parameters."""
        statistics = {
            path: widened(x)
            for path, x in updated(definition.module, model_state).items()
            if jnp.issubdtype(x.dtype, jnp.inexact)
        }
        if not statistics:
            return model_state
        means = self._mean(statistics, definition.model_state, definition, bf16=False)

        def agreed(path: KeyPath, x: jax.Array) -> jax.Array:
            mean = means.get(path_string(path))
            return x if mean is None else repeat(mean.astype(x.dtype), count)

        return jax.tree_util.tree_map_with_path(agreed, model_state)

    def _mean(
        self, tree: PyTree, places: Mapping[str, Placement], definition: Definition, bf16: bool
    ) -> PyTree:
        """Returns the mean over groups of float32 arrays [groups, ...]."""
        mesh, count = definition.scope.mesh, self._count(definition)
        devices = mesh_sizes(mesh).get(AXIS, 1)
        held = jax.tree.map(
            lambda x: jnp.sum(x.reshape(devices, count // devices, *x.shape[1:]), axis=1), tree
        )
        if devices == 1:
            total = jax.tree.map(lambda x: x[0], held)
        else:
            outer = outer_degree(mesh, AXIS)
            hops = Hops(AXIS, devices // outer, outer, bf16, bf16)
            total, _ = sum_groups(held, {}, places, hops)
        return jax.tree.map(lambda x: x / count, total)

    def _count(self, definition: Definition) -> int:
        return self.config.count(mesh_sizes(definition.scope.mesh).get(AXIS, 1))


def merged(step: TrainStep | LocalSGD, state: TrainState | LocalSGDState) -> TrainState:
    """Returns the training state of a model, merged if it has groups; see `LocalSGD.merge`."""
    if isinstance(state, TrainState):
        return state
    assert isinstance(step, LocalSGD)
    return step.merge(state)


def group_means(metrics: Mapping[str, Aggregate]) -> dict[str, float]:
    """Returns each metric over the groups of this process. Means are weighted, so that groups with
    more tokens count more.

    Raises:
        ModelError: If the loss returns arrays. The message names them.
    """
    wrong = [name for name, x in metrics.items() if is_output(x) or jnp.ndim(x[0]) > 1]
    if wrong:
        raise ModelError(
            f"the loss returns arrays: {', '.join(wrong)}; groups report numbers.\n"
            "  Read metrics[name].value, [groups, ...], directly."
        )
    return {name: _over_groups(metric) for name, metric in metrics.items()}


def _over_groups(metric: Aggregate) -> float:
    def here(groups: jax.Array) -> np.ndarray:
        # Several devices may hold copies of one group.
        parts = {
            shard.index[0].start: np.asarray(shard.data) for shard in groups.addressable_shards
        }
        return np.concatenate(list(parts.values()))

    if isinstance(metric, Mean):
        return float(np.sum(here(metric.total))) / (float(np.sum(here(metric.weight))) or 1.0)
    combine = {Max: np.max, Min: np.min}.get(type(metric), np.sum)
    return float(combine(here(metric.value)))
