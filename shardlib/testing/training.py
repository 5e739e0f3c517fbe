"""A few training steps on one mesh, with results on the host."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardlib.paths import key_string, named_leaves, path_string
from shardlib.train.state import TrainState, init_state, state_shardings
from shardlib.train.step import make_train_step

Leaves = dict[str, np.ndarray]
Change = Callable[[Leaves], Leaves]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The leaves of a training state by path."""

    params: Leaves
    opt_state: Leaves
    model_state: Leaves


@dataclasses.dataclass(frozen=True)
class Training:
    """Some steps of training.

    `losses` has one entry for each step. `gradients` holds the gradients of the first step by the
    path of their parameter.
    """

    initial: Snapshot
    gradients: Leaves
    losses: np.ndarray
    final: Snapshot


@dataclasses.dataclass(frozen=True)
class Problem:
    """The training problem, apart from the mesh."""

    make_model: Any
    loss_fn: Any
    batches: Sequence[Any]
    optimizer: optax.GradientTransformation
    inputs: Any
    seed: int


class Argument(NamedTuple):
    """A leaf of the step's arguments: `parameter layers/up`, `batch tokens`."""

    kind: str
    path: str

    def __str__(self) -> str:
        return f"{self.kind} {self.path}".strip()


class Program:
    """The compiled step of a problem on a mesh, to be run any number of times from its start.

    The keyword arguments `step_options` are passed to `make_train_step`. Matrix products are
    computed in full float32, even if the platform's default is less.
    """

    def __init__(self, problem: Problem, mesh: Any, rules: Any, **step_options: Any):
        self.problem, self.mesh = problem, mesh
        optimizer = optax.chain(record_gradients(), problem.optimizer)
        state = init_state(
            problem.make_model,
            optimizer,
            seed=problem.seed,
            inputs=problem.inputs,
            mesh=mesh,
            rules=rules,
        )
        step = make_train_step(problem.loss_fn, **step_options)
        # As a call of the step does: groups of unequal speed take their rows from elsewhere.
        self._batches = [step.arrange(state, batch) for batch in problem.batches]
        with jax.default_matmul_precision("highest"):
            traced = step.program(state, self._batches[0]).trace(state, self._batches[0])
            self.compiled = traced.lower().compile()
        self.jaxpr = traced.jaxpr
        self.definition = state.definition
        self.batch_axes = step.batch_axes
        self.arguments = _arguments(state, self._batches[0])
        self.forms = _forms(state)
        self._shardings = state_shardings(state)
        self._start = jax.tree.map(_to_host, state)
        self._dtypes = jax.tree.map(lambda x: x.dtype, state)

    def run(self, steps: int, change: Change | None = None) -> Training:
        """Trains for some steps, with the batches used in turn.

        Args:
            steps: Number of steps.
            change: Changes the initial parameters.
        """
        state = self.start(change)
        initial, gradients, losses = _snapshot(state), {}, []
        for index in range(steps):
            state, metrics = self.compiled(state, self._batches[index % len(self._batches)])
            losses.append(float(metrics["loss"]))
            if index == 0:
                gradients = _leaves(state.opt_state[0])
        return Training(initial, gradients, np.array(losses), _snapshot(state))

    def start(self, change: Change | None = None) -> TrainState:
        """Returns the state before the first step, with its parameters changed by `change`."""
        start = self._start
        if change is not None:
            changed = iter(change(named_leaves(start.params)).values())
            params = jax.tree.map(lambda _: next(changed), start.params)
            start = dataclasses.replace(start, params=params)
        return jax.tree.map(_to_devices, start, self._dtypes, self._shardings)


def record_gradients() -> optax.GradientTransformation:
    """Returns an optimizer without updates whose state is the gradients of the last step."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (updates, updates),
    )


_KINDS = {"params": "parameter", "model_state": "model state", "opt_state": "optimizer state"}


def _arguments(state: TrainState, batch: Any) -> list[Argument]:
    """Returns the flattened arguments of the step."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    fields = [key_string(path[0]) for path in paths]
    return [
        *(
            Argument(_KINDS.get(field, field), path_string(path[1:]))
            for field, path in zip(fields, paths, strict=True)
        ),
        *(Argument("batch", path) for path in named_leaves(batch)),
    ]


def _forms(state: TrainState) -> dict[Argument, str]:
    """Returns the shapes and dtypes of the model's variables."""
    return {
        Argument(_KINDS[part], path): f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        for part in ("params", "model_state")
        for path, leaf in named_leaves(getattr(state, part)).items()
    }


def _snapshot(state: TrainState) -> Snapshot:
    # The optimizer's own state comes after the recorded gradients.
    return Snapshot(_leaves(state.params), _leaves(state.opt_state[1]), _leaves(state.model_state))


def _leaves(tree: Any) -> Leaves:
    return {path: _to_host(leaf) for path, leaf in named_leaves(tree).items()}


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _to_host(leaf: Any) -> np.ndarray:
    # A copy: the step donates the buffer behind a view.
    return np.array(jax.random.key_data(leaf) if _is_key(leaf.dtype) else leaf)


def _to_devices(leaf: np.ndarray, dtype: Any, sharding: Any) -> jax.Array:
    value = jax.random.wrap_key_data(jnp.asarray(leaf)) if _is_key(dtype) else leaf
    return jax.device_put(value, sharding)
