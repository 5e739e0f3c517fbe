"""The state of a training run: one pytree, made on its shards."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.constrain import Scope, active_or
from shardlib.functional import FunctionalModule, Inputs, functional
from shardlib.partition import (
    Placement,
    place,
    place_model_state,
    place_optimizer,
    shardings,
)
from shardlib.precision import Precision
from shardlib.precision import precision as precision_named
from shardlib.rules import AxisRules
from shardlib.train.guards import GuardsConfig
from shardlib.train.spikes import SpikeWindow, empty_window


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
    """What a state is the state of.

    Compared by identity, so that a dispatch costs nothing: states made by different `init_state`
    calls have different tree structures. Compare their `params`, or their leaves.
    """

    module: FunctionalModule
    optimizer: optax.GradientTransformation
    scope: Scope
    params: Mapping[str, Placement]
    model_state: Mapping[str, Placement]
    opt_state: Mapping[str, Placement]
    gradients: Mapping[str, Placement]
    """Where the gradient of each parameter is summed up."""
    updates: Mapping[str, Placement]
    """Where each parameter is updated: where its optimizer state lies."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes.

    `params` and `model_state` are nested dicts of arrays, `step` counts the steps so far (int32
    scalar), also those whose update the guards refused, and `rng` is the key from which every step
    derives its own. `spike_window` is there where the guards look for spikes.
    """

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    rng: jax.Array
    definition: Definition = dataclasses.field(metadata={"static": True})
    spike_window: SpikeWindow | None = None

    @property
    def model(self) -> Any:
        """The model over the present parameters, to call outside of training.

        An NNX module, or a bound linen module.
        """
        definition = self.definition
        return definition.module.merge(self.params, self.model_state, self.rng)


def abstract_state(
    make: Any,
    optimizer: optax.GradientTransformation,
    *,
    inputs: Inputs = (),
    precision: str | Precision = "f32",
    guards: GuardsConfig | None = None,
    mesh: Mesh | None = None,
    rules: AxisRules | None = None,
) -> TrainState:
    """Returns the state as `ShapeDtypeStruct`s with shardings, allocating nothing.

    The arguments are those of `init_state`. The mesh may be an `AbstractMesh`, so that a state can
    be inspected with no device at hand.

    Raises:
        RuleError: If tensors cannot be placed; the message lists all of them.
        ModelError: If the model cannot be made.
    """
    scope = active_or(mesh, rules)
    module = functional(make, inputs)
    dtypes = precision_named(precision)

    def init(key: jax.Array) -> tuple[Any, ...]:
        return _init(module, optimizer, lambda params: dtypes.store(params, module.float32), key)

    step, params, model_state, opt_state, rng = jax.eval_shape(init, jax.random.key(0))
    places = {
        section: place(params, module.axes, scope.rules.of(section), scope.mesh)
        for section in ("params", "gradients", "opt_state")
    }
    definition = Definition(
        module,
        optimizer,
        scope,
        places["params"],
        place_model_state(model_state, module.axes, scope.rules, scope.mesh),
        place_optimizer(opt_state, places["opt_state"]),
        places["gradients"],
        places["opt_state"],
    )
    window = jax.eval_shape(lambda: empty_window(guards))
    state = TrainState(step, params, model_state, opt_state, rng, definition, window)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        state,
        state_shardings(state),
    )


def init_state(
    make: Any,
    optimizer: optax.GradientTransformation,
    *,
    seed: int = 0,
    inputs: Inputs = (),
    precision: str | Precision = "f32",
    guards: GuardsConfig | None = None,
    mesh: Mesh | None = None,
    rules: AxisRules | None = None,
) -> TrainState:
    """Makes a training state, every leaf on its shards inside of one compiled program.

    Args:
        make: `make(rngs) -> module` for an NNX or linen module, or a linen module itself.
        optimizer: Any optax transformation, also those that evaluate the loss themselves.
        seed: Decides the parameters and all later randomness, equally on every mesh.
        inputs: For linen, example arguments of the module's `__call__`: a tuple, or a dict of
            keyword arguments.
        precision: A `Precision` or its name; here only the dtype of the parameters matters.
        guards: Those of the step; here only whether they look for spikes matters.
        mesh: The mesh; the active one when left out.
        rules: The rules; the active ones when left out.

    Raises:
        RuleError: If tensors cannot be placed; the message lists all of them. Nothing is allocated
            then.
        ModelError: If the model cannot be made.
    """
    abstract = abstract_state(
        make,
        optimizer,
        inputs=inputs,
        precision=precision,
        guards=guards,
        mesh=mesh,
        rules=rules,
    )
    return materialize(abstract, seed=seed)


def materialize(abstract: TrainState, *, seed: int = 0) -> TrainState:
    """Makes the state that `abstract_state` described; see `init_state`."""
    definition = abstract.definition

    def store(params: Any) -> Any:
        return jax.tree.map(lambda p, like: p.astype(like.dtype), params, abstract.params)

    def init(key: jax.Array) -> TrainState:
        step, *rest = _init(definition.module, definition.optimizer, store, key)
        window = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract.spike_window)
        return TrainState(step, *rest, definition=definition, spike_window=window)

    placed = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(init, out_shardings=placed)(jax.random.key(seed))


def _init(
    module: FunctionalModule,
    optimizer: optax.GradientTransformation,
    store: Callable[[Any], Any],
    key: jax.Array,
) -> tuple[Any, ...]:
    init_key, rng = jax.random.split(key)
    params, model_state = module.init(init_key)
    params = store(params)
    state = (jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params), rng)
    # A weakly typed leaf would come out of the first step as another type, and compile it twice.
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), state)


def state_shardings(state: TrainState) -> TrainState:
    """Returns the sharding of every leaf of a state, as a tree of its structure."""
    mesh, definition = state.definition.scope.mesh, state.definition
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    return TrainState(
        replicated,
        shardings(state.params, definition.params, mesh),
        shardings(state.model_state, definition.model_state, mesh),
        shardings(state.opt_state, definition.opt_state, mesh),
        replicated,
        definition,
        jax.tree.map(lambda _: replicated, state.spike_window),
    )
