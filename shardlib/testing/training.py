"""A few training steps on one mesh, with results on the host."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import Mesh, Sharding
from jaxtyping import PyTree

from shardlib.losses.signature import LossFn
from shardlib.paths import key_string, named_leaves, path_string
from shardlib.rules import AxisRules
from shardlib.testing.deviations import Quantity, Values
from shardlib.testing.rounding import Change
from shardlib.testing.traced import LAST, Key, Use, first_uses
from shardlib.train.state import TrainState, init_state, state_shardings
from shardlib.train.step import make_train_step

_KINDS = {"params": "parameter", "model_state": "model state", "opt_state": "optimizer state"}
MakeModel = Callable[[nnx.Rngs], object] | linen.Module
"""`make(rngs) -> module` for an NNX or linen module, or a linen module itself."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """The training problem, apart from the mesh."""

    make_model: MakeModel
    loss_fn: LossFn
    batches: Sequence[PyTree]
    optimizer: optax.GradientTransformation
    inputs: PyTree
    seed: int
    wrt: Any = None


class CompiledTraining:
    """The compiled step of a problem on a mesh, to be run any number of times from its start.

    The keyword arguments `step_options` are passed to `make_train_step`. Matrix products are
    computed in full float32, even if the platform's default is less.
    """

    def __init__(self, problem: Problem, mesh: Mesh, rules: AxisRules, **step_options: Any):
        self.problem, self.mesh = problem, mesh
        state = init_state(
            problem.make_model,
            optax.chain(record_gradients(), problem.optimizer),
            seed=problem.seed,
            inputs=problem.inputs,
            wrt=problem.wrt,
            mesh=mesh,
            rules=rules,
        )
        step = make_train_step(problem.loss_fn, **step_options)
        # As a call of the step does: groups of unequal speed take their rows from elsewhere.
        self._batches = [step.arrange(state, batch) for batch in problem.batches]
        with jax.default_matmul_precision("highest"):
            traced = step.program(state, self._batches[0]).trace(state, self._batches[0])
            self.compiled = traced.lower().compile()
        self.jaxpr = traced.jaxpr.jaxpr
        self.definition = state.definition
        self.batch_axes = step.batch_axes
        leaves, _ = jax.tree_util.tree_flatten_with_path((state, {"batch": self._batches[0]}))
        fields = [(key_string(path[1]), path_string(path[2:])) for path, _ in leaves]
        self.arguments = [Quantity(_KINDS.get(field, field), path) for field, path in fields]
        """The arguments of the step, flattened."""
        self.forms = {
            argument: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
            for argument, (_, leaf) in zip(self.arguments, leaves, strict=True)
            if argument.kind in ("parameter", "model state")
        }
        """The dtypes and shapes of the model's variables."""
        self._shardings = state_shardings(state)
        self._start = jax.tree.map(_to_host, state)
        self._dtypes = jax.tree.map(lambda x: x.dtype, state)

    def run(self, steps: int, change: Change | None = None) -> dict[Quantity, np.ndarray]:
        """Trains for some steps, with the batches used in turn, after a change of the initial
        parameters.

        Returns:
            The initial state, the loss of the first step, its gradients, the losses of later steps,
            and the state after them.
        """
        state = self.start(change)
        values = _values_of_state(state, step=0)
        for index in range(steps):
            state, metrics = self.compiled(state, self._batches[index % len(self._batches)])
            values[Quantity("loss", step=index + 1)] = np.asarray(metrics["loss"], np.float64)
            if index == 0:
                values |= _values("gradient", state.opt_state[0])
        return values | _values_of_state(state, step=steps)

    def start(self, change: Change | None = None) -> TrainState:
        """Returns the state before the first step, with its parameters changed by `change`."""
        start = self._start
        if change is not None:
            start = dataclasses.replace(start, params=jax.tree.map(change, start.params))
        return jax.tree.map(_to_devices, start, self._dtypes, self._shardings)

    @functools.cached_property
    def uses(self) -> dict[str, Use]:
        """The first use of each parameter by its path."""
        uses = first_uses(self.jaxpr)
        return {
            argument.path: uses.get(variable, LAST)
            for argument, variable in zip(self.arguments, self.jaxpr.invars, strict=True)
            if argument.kind == "parameter"
        }


def by_layer(values: Values, uses: Mapping[str, Use]) -> dict[Quantity, np.ndarray]:
    """Returns values with stacks split into layers, each kind in the order in which it is computed.

    Parameters are sorted by their use, and gradients from the last layer to the first.
    """
    ordered: dict[Quantity, np.ndarray] = {}
    for (kind, _), group in itertools.groupby(values, lambda q: (q.kind, q.step)):
        layers = sorted(_layers(group, values, uses), key=lambda entry: entry[0])
        for _, quantity, value in reversed(layers) if kind == "gradient" else layers:
            ordered[quantity] = value
    return ordered


def _layers(
    group: Iterable[Quantity], values: Values, uses: Mapping[str, Use]
) -> Iterable[tuple[Key, Quantity, np.ndarray]]:
    for quantity in group:
        use, value = use_of(quantity.path, uses), values[quantity]
        if use.layers is not None and value.shape[:1] == (use.layers,):
            for layer, part in enumerate(value):
                yield use.key(layer), quantity._replace(layer=layer), np.asarray(part)
        else:
            yield use.key(None), quantity, value


def use_of(path: str, uses: Mapping[str, Use]) -> Use:
    """Returns the use of a parameter, or of the parameter of an optimizer leaf."""
    parts = path.split("/")
    suffixes = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((uses[suffix] for suffix in suffixes if suffix in uses), LAST)


def record_gradients() -> optax.GradientTransformation:
    """Returns an optimizer without updates whose state is the gradients of the last step."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (updates, updates),
    )


def _values_of_state(state: TrainState, step: int) -> dict[Quantity, np.ndarray]:
    prefix = "" if step else "initial "
    return {
        **_values(f"{prefix}parameter", state.params, step),
        # The optimizer's own state comes after the recorded gradients.
        **_values(f"{prefix}optimizer state", state.opt_state[1], step),
        **_values(f"{prefix}model state", state.model_state, step),
    }


def _values(kind: str, tree: PyTree, step: int = 0) -> dict[Quantity, np.ndarray]:
    values = {}
    for path, leaf in named_leaves(tree).items():
        value = _to_host(leaf)
        is_exact = kind.startswith("initial") or not jnp.issubdtype(value.dtype, jnp.inexact)
        values[Quantity(kind, path, None, step, is_exact)] = value
    return values


def _is_key(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _to_host(leaf: jax.Array) -> np.ndarray:
    # A copy: the step donates the buffer behind a view.
    return np.array(jax.random.key_data(leaf) if _is_key(leaf.dtype) else leaf)


def _to_devices(leaf: np.ndarray, dtype: np.dtype, sharding: Sharding) -> jax.Array:
    value = jax.random.wrap_key_data(jnp.asarray(leaf)) if _is_key(dtype) else leaf
    return jax.device_put(value, sharding)
