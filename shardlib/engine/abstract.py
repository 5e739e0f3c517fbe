"""A step of the engine without a model in memory: its programs, and the shapes of its arguments.

It is compiled for devices that are not there, and it tells what an engine would allocate.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.engine.programs import (
    Arranger,
    DeviceState,
    EnginePrograms,
    StepArrays,
    num_groups,
)
from shardlib.engine.sizes import EngineSizes
from shardlib.engine.steps import EngineStep, GroupStep
from shardlib.functional.quantized import Bits, as_served
from shardlib.registry import DataSpec, ModelFamily
from shardlib.sharding.constrain import Scope
from shardlib.sharding.partition import place_model_state, weights_by_path


class AbstractStep(NamedTuple):
    """The programs of an engine, and the arguments of one step as `ShapeDtypeStruct`s."""

    programs: EnginePrograms
    params: Any
    state: DeviceState
    arrays: StepArrays

    def lower(self) -> jax.stages.Lowered:
        """Lowers the step."""
        return self.programs.program().lower(self.params, self.state, self.arrays)


def abstract_step(
    family: ModelFamily,
    config: Any,
    scope: Scope,
    sizes: EngineSizes,
    *,
    num_lanes: int = 0,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    weights: Bits | None = None,
    spec: DataSpec | None = None,
) -> AbstractStep:
    """Returns a step of an engine that serves a model.

    Args:
        family, config: The model; its family has `decoding`.
        scope: The mesh, of devices that need not be there, and the rules.
        sizes: Sizes of the engine; the groups follow from the mesh and the rules.
        num_lanes: Lanes of the step: 0 for one that decodes, more for one that reads prompts too.
        dtype: Of the parameters.
        weights: As in `Engine`.
        spec: The data of the model; None for a model that needs none.

    Raises:
        RuleError: If the rules cannot place a parameter.
    """

    data = spec or DataSpec()
    model = nnx.eval_shape(
        lambda: as_served(family.make(config, data, nnx.Rngs(0)), dtype, weights)
    )
    params = abstract_params(nnx.state(model), scope)
    sizes = dataclasses.replace(sizes, groups=num_groups(scope, params))
    programs = EnginePrograms(model, family.decoding, scope, sizes)  # type: ignore[arg-type]
    step = Arranger(dataclasses.replace(sizes, lane_counts=(num_lanes,)))
    whole = NamedSharding(scope.mesh, PartitionSpec())
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
        step.arrays(EngineStep((GroupStep((), ()),) * sizes.groups)),
    )
    return AbstractStep(programs, params, programs.abstract_state(params), arrays)


def abstract_params(params: Any, scope: Scope) -> Any:
    """Returns parameters as `ShapeDtypeStruct`s, placed by the rules."""
    weights = weights_by_path(params)
    placements = place_model_state(
        {weight.path: weight.value for weight in weights},
        {weight.path: weight.axes for weight in weights},
        scope.rules,
        scope.mesh,
        frozen={weight.path for weight in weights if weight.is_param},
    )

    def placed(path: str, value: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(scope.mesh, placements[path].spec)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    leaves = [placed(weight.path, weight.value) for weight in weights]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)
