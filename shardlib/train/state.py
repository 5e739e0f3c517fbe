"""The state of a training run, one pytree that is created directly on its shards."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from shardlib.errors import ModelError
from shardlib.functional import FunctionalModule, Inputs, functional, refuse_no_params
from shardlib.functional.precision import Precision
from shardlib.functional.precision import precision as precision_named
from shardlib.optim.transforms import check_transformation
from shardlib.paths import named_leaves, path_string
from shardlib.rules import AxisRules
from shardlib.sharding.constrain import Scope, active_or
from shardlib.sharding.partition import (
    Placement,
    place,
    place_model_state,
    place_optimizer,
    shardings,
    warn_of_unmatched,
)
from shardlib.train.guards import GuardsConfig, SpikeWindow, empty_window
from shardlib.train.weights import place_weights

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
    """The model, optimizer, mesh, rules and placements of a state.

    It is compared by identity, which keeps dispatch cheap. States made by different `init_state`
    calls therefore have different tree structures. Compare their `params` or their leaves.
    """

    module: FunctionalModule
    optimizer: optax.GradientTransformation
    scope: Scope
    params: Mapping[str, Placement]
    model_state: Mapping[str, Placement]
    opt_state: Mapping[str, Placement]
    gradients: Mapping[str, Placement]
    """Placement in which the gradient of each parameter is accumulated."""
    updates: Mapping[str, Placement]
    """Placement in which each parameter is updated, equal to the one of its optimizer state."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes.

    `params` and `model_state` are nested dicts of arrays. `step` counts the steps so far (int32
    scalar), including steps whose update the guards refused. `rng` is the key from which every step
    derives its own key. `spike_window` is set if the guards detect spikes.
    """

    step: jax.Array
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    rng: jax.Array
    definition: Definition = dataclasses.field(metadata={"static": True})
    spike_window: SpikeWindow | None = None

    @property
    def model(self) -> Any:
        """The model with the current parameters, to call outside of training.

        It is an NNX module or a bound linen module.
        """
        definition = self.definition
        return definition.module.merge(self.params, self.model_state, self.rng)


def abstract_state(
    make: Any,
    optimizer: optax.GradientTransformation,
    *,
    inputs: Inputs = (),
    wrt: Any = None,
    precision: str | Precision = "f32",
    guards: GuardsConfig | None = None,
    mesh: Mesh | None = None,
    rules: AxisRules | None = None,
) -> TrainState:
    """Returns the state as `ShapeDtypeStruct`s with shardings, without allocating anything.

    It takes the arguments of `init_state`. The mesh may be an `AbstractMesh`, so a state can be
    inspected without devices.

    Raises:
        RuleError: If tensors cannot be placed; the message lists all of them.
        ModelError: If the model cannot be created or has no trainable parameter.
    """
    scope = active_or(mesh, rules)
    check_transformation(optimizer)
    module = functional(make, inputs, wrt)
    dtypes = precision_named(precision)
    shapes, rng = module.shapes(), jax.random.key(0)
    refuse_no_params(module, shapes[0])

    def start(params: PyTree, model_state: PyTree, rng: jax.Array) -> tuple[Any, ...]:
        params = dtypes.store(params, module.float32)
        model_state = dtypes.store(model_state, module.float32, only=module.frozen)
        return _start(optimizer, params, model_state, rng)

    step, params, model_state, opt_state, rng = jax.eval_shape(start, *shapes, rng)
    if scope.rules.names is not None:
        held = named_leaves(model_state)
        checked = named_leaves(params) | {path: held[path] for path in module.frozen}
        scope.rules.names.check_params({path: x.shape for path, x in checked.items()}, module.name)
    definition = _definition(module, optimizer, scope, params, model_state, opt_state)
    window = jax.eval_shape(lambda: empty_window(guards))
    state = TrainState(step, params, model_state, opt_state, rng, definition, window)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        state,
        state_shardings(state),
    )


def _definition(
    module: FunctionalModule,
    optimizer: optax.GradientTransformation,
    scope: Scope,
    params: PyTree,
    model_state: PyTree,
    opt_state: PyTree,
) -> Definition:
    """Returns the placements of all parts of a state, given by their shapes."""
    places = {
        section: place(params, module.axes, scope.rules.of(section), scope.mesh)
        for section in ("params", "gradients", "opt_state")
    }
    return Definition(
        module,
        optimizer,
        scope,
        places["params"],
        place_model_state(model_state, module.axes, scope.rules, scope.mesh, module.frozen),
        place_optimizer(opt_state, places["opt_state"]),
        places["gradients"],
        places["opt_state"],
    )


def init_state(
    make: Any,
    optimizer: optax.GradientTransformation,
    *,
    seed: int = 0,
    inputs: Inputs = (),
    wrt: Any = None,
    params: PyTree = None,
    fresh: Sequence[str] = (),
    precision: str | Precision = "f32",
    guards: GuardsConfig | None = None,
    mesh: Mesh | None = None,
    rules: AxisRules | None = None,
) -> TrainState:
    """Creates a training state directly on its shards, in one compiled program.

    ```python
    state = sl.init_state(lambda rngs: Model(rngs=rngs), optimizer)       # fresh
    state = sl.init_state(model, optimizer)                               # an NNX module in memory
    state = sl.init_state(Net(), optimizer, inputs=(x,), params=loaded)   # loaded weights
    ```

    Args:
        make: `make(rngs) -> module` for an NNX or linen module, a linen module, or an NNX module in
            memory. Arrays of a module in memory are copied onto their shards, and the module is not
            changed.
        optimizer: Any optax transformation, including those that evaluate the loss themselves.
        seed: Seed of the parameters and all later randomness, from 0 to 2**32 - 1, with equal
            results on every mesh.
        inputs: For linen, example arguments of the module's `__call__`: a tuple, or a dict of
            keyword arguments.
        wrt: The trained variables. For NNX, a filter of variables (a variable type, a function of
            path and variable, or a tuple of these); default `nnx.Param`. For linen, the name of one
            or several collections; default `"params"`. Parameters that are not trained
            (`nnx.Param`s, the collection `params`) are part of `model_state`. They are placed and
            cast like trained ones, and do not change.
        params: Weights to start from, as arrays of NumPy or JAX by path (nested or flat mappings),
            an `nnx.State`, an NNX module, or the variables of a linen module, on any devices. They
            are copied onto their shards bit for bit. They must include all parameters, also
            untrained ones. Model state (batch statistics) is given completely or is initialised.
        fresh: Patterns over the paths of parameters that `params` leaves out and that are
            initialised, as in `("**/lora_*",)`.
        precision: A `Precision` or its name. Only its parameter dtype is used here.
        guards: The guards of the step. Only whether they detect spikes is used here.
        mesh: The mesh; defaults to the active one.
        rules: The rules; default to the active ones.

    Raises:
        RuleError: If tensors cannot be placed. The message lists all of them, and nothing is
            allocated.
        ModelError: If the seed is out of range, the model cannot be created or has no trainable
            parameter, or weights are missing, unknown, or have another shape or dtype. The message
            lists all of them, and nothing is allocated.
    """
    options: Any = {"inputs": inputs, "wrt": wrt, "precision": precision, "guards": guards}
    abstract = abstract_state(make, optimizer, **options, mesh=mesh, rules=rules)
    _warn_of_idle(abstract.definition.scope)
    if params is None and isinstance(make, nnx.Module):
        params = make
    return materialize(abstract, seed=seed, params=params, fresh=fresh)


def materialize(
    abstract: TrainState,
    *,
    seed: int = 0,
    params: PyTree = None,
    fresh: Sequence[str] = (),
    donate: bool = False,
) -> TrainState:
    """Creates the state described by an abstract state; see `init_state`.

    With `donate`, arrays of `params` that lie on their shards become part of the state without a
    copy, and cannot be used again.
    """
    definition = abstract.definition
    placements = [*definition.params.values(), *definition.model_state.values()]
    warn_of_unmatched(definition.scope.rules, placements, definition.module.name)
    leaves = {**named_leaves(abstract.params), **named_leaves(abstract.model_state)}
    given = {}
    if params is not None:
        given = place_weights(definition.module, leaves, params, fresh, donate=donate)

    def init(given: Mapping[str, jax.Array], key: jax.Array) -> TrainState:
        init_key, rng = jax.random.split(key)
        trees = abstract.params, abstract.model_state
        if leaves.keys() - given.keys():
            trees = definition.module.init(init_key)
        made = _filled(trees[0], abstract.params, given)
        held = _filled(trees[1], abstract.model_state, given)
        window = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract.spike_window)
        step, *rest = _start(definition.optimizer, made, held, rng)
        return TrainState(step, *rest, definition=definition, spike_window=window)

    placed = jax.tree.map(lambda x: x.sharding, abstract)
    is_cpu = definition.scope.mesh.devices.flat[0].platform == "cpu"
    compiled = jax.jit(
        init,
        out_shardings=placed,
        donate_argnums=0,
        compiler_options=_NARROW if is_cpu and jax.__version_info__ >= (0, 11) else None,
    )
    return compiled(given, _key(seed))


# XLA of jax 0.12 for CPUs rounds wide vectors in another way than the rest of a row: the initial
# numbers would depend on how rows are cut.
_NARROW = {"xla_cpu_prefer_vector_width": 128}


def _warn_of_idle(scope: Scope) -> None:
    """Logs the mesh axes that found rules do not name, as on another mesh than they are for."""
    if scope.rules.names is not None:
        for axis, count in scope.rules.idle(scope.mesh).items():
            _LOG.warning(
                "the found rules name no mesh axis %r: its %d devices hold and compute the same. "
                "Name a mesh without it, or find rules for this mesh.",
                axis,
                count,
            )


def _key(seed: int) -> jax.Array:
    # JAX drops the bits above: seeds that differ by 2**32 would give equal parameters.
    if not isinstance(seed, Integral) or not 0 <= seed < 2**32:
        raise ModelError(
            f"seed={seed!r} is not a whole number from 0 to 2**32 - 1.\n"
            "  Choose another, such as seed=0."
        )
    return jax.random.key(int(seed))


def _filled(tree: PyTree, abstract: PyTree, given: Mapping[str, jax.Array]) -> PyTree:
    """Returns `tree` with given leaves replaced and all others cast to the dtypes of `abstract`."""

    def leaf(path: KeyPath, x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = path_string(path)
        return given[name] if name in given else jax.lax.convert_element_type(x, like.dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree, abstract)


def _start(
    optimizer: optax.GradientTransformation, params: PyTree, model_state: PyTree, rng: jax.Array
) -> tuple[Any, ...]:
    state = (jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params), rng)
    # A weakly typed leaf would change its type in the first step and force a second compilation.
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), state)


def state_shardings(state: TrainState) -> TrainState:
    """Returns the sharding of every leaf of a state, as a tree of the same structure."""
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
