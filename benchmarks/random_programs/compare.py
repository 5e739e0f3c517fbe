"""The gradients of a program on its mesh against those on one device."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib as sl
from random_programs.faults import likely_faults
from random_programs.found import with_found_rules
from random_programs.program import Program
from shardlib.explain.wrong_numbers import FAULTS, wrong_numbers
from shardlib.paths import named_leaves

LIMIT = 1e-3
"""A relative error of gradients above this is a wrong number, unless rounding alone makes half of
it on one device (`rounding_error`); rounding gives less than 1e-4 as a rule."""
LOSS_LIMIT = 1e-4
FLOOR = 1e-2
"""The error of a leaf is relative to its norm, or to this share of the norm of all leaves: some
gradients are zero in theory."""
MOVED_PARAMS = 8
"""How often the parameters are moved to see what rounding does."""

Gradients = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How far a program on its mesh is from one device, or with which text it was refused.

    The errors are relative: `gradient_error` of the norm over all leaves, `leaf_error` of the worst
    leaf.
    """

    loss_error: float = 0.0
    gradient_error: float = 0.0
    leaf_error: float = 0.0
    worst_leaf: str = ""
    faults: str = ""
    refused: str = ""
    rounding_error: float = 0.0
    """The error of the worst leaf that rounding makes on one device; measured past the limit."""
    told: str = ""
    """Codes of the faults that the check of the compiled step tells; it is not left to raise."""
    seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Whether the numbers are wrong by more than rounding."""
        gradients = max(self.gradient_error, self.leaf_error)
        limit = max(LIMIT, 2 * self.rounding_error)
        return not (self.refused or (gradients <= limit and self.loss_error <= LOSS_LIMIT))


def compare(program: Program, constrain: str, expected: tuple[float, Gradients]) -> Outcome:
    """Runs a program on its mesh and compares it with what one device gave."""
    start = time.perf_counter()
    try:
        told: list[str] = []
        loss, gradients = run(program, program.mesh, constrain, told)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Outcome(refused=text[:2000], seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    result = outcome(expected, (loss, gradients))
    if result.is_wrong:
        rounding = rounding_error(program, expected, enough=result.leaf_error / 2)
        result = dataclasses.replace(result, rounding_error=rounding)
    if result.is_wrong:
        forward = result.loss_error > LOSS_LIMIT
        faults = likely_faults(program, expected[1], gradients, forward=forward)
        result = dataclasses.replace(result, faults=faults)
    return dataclasses.replace(result, told=" ".join(told), seconds=seconds)


def compare_found(program: Program, expected: tuple[float, Gradients]) -> Outcome:
    """Runs a program under rules that are found for it, and compares it with one device."""
    start = time.perf_counter()
    try:
        placed = with_found_rules(program)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Outcome(refused=text[:2000], seconds=time.perf_counter() - start)
    return compare(placed, "auto", expected)


def outcome(expected: tuple[float, Gradients], actual: tuple[float, Gradients]) -> Outcome:
    """Returns the errors of one result against another."""
    norms = {path: float(np.linalg.norm(x)) for path, x in expected[1].items()}
    apart = {path: float(np.linalg.norm(actual[1][path] - x)) for path, x in expected[1].items()}
    total = float(np.linalg.norm(list(norms.values())))
    leaves = {path: apart[path] / max(norms[path], FLOOR * total) for path in apart}
    # A leaf that is not a number comes first.
    worst = max(leaves, key=lambda path: np.inf if np.isnan(leaves[path]) else leaves[path])
    return Outcome(
        loss_error=abs(actual[0] / expected[0] - 1),
        gradient_error=float(np.linalg.norm(list(apart.values()))) / total,
        leaf_error=leaves[worst],
        worst_leaf=worst,
    )


def rounding_error(program: Program, expected: tuple[float, Gradients], enough: float) -> float:
    """Returns how far rounding alone moves the worst leaf on one device, at most about `enough`.

    Each parameter is moved by two units in its last place, up or down, a few times. The gradient
    jumps where a ReLU's input is that close to zero.
    """
    random, largest = np.random.default_rng(program.seed), 0.0
    first_step = step_of(program, "data=1")
    for _ in range(MOVED_PARAMS):
        moved = {path: _moved(x, random) for path, x in program.params.items()}
        largest = max(largest, outcome(expected, first_step(moved)).leaf_error)
        if largest >= enough:
            break
    return largest


def _moved(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    ulps = random.choice(np.array([-2, 2], x.dtype), x.shape)
    return x * (1 + np.finfo(x.dtype).eps * ulps)


def run(
    program: Program, mesh: str, constrain: str = "user", told: list[str] | None = None
) -> tuple[float, Gradients]:
    """Returns the loss and the gradients of a program's first step, by path, float64.

    The momentum after the first step is the gradient itself. The codes of faults that the check of
    the compiled step finds are added to `told`; the step runs all the same.
    """
    return step_of(program, mesh, constrain, told)(program.params)


def step_of(
    program: Program, mesh: str, constrain: str = "user", told: list[str] | None = None
) -> Callable[[Mapping[str, np.ndarray]], tuple[float, Gradients]]:
    """Returns the function of `run` of the parameters; its step is compiled once."""
    sizes = sl.MeshConfig.parse(mesh).sizes
    made = sl.make_mesh(mesh, devices=jax.devices()[: math.prod(sizes.values())])
    step = sl.make_train_step(
        program.loss,
        batch_axes=program.placement.batch_axes,
        constrain=constrain,  # type: ignore[arg-type]
        allow_wrong_numbers=tuple(FAULTS),
    )
    batch = dict(program.batch)
    with sl.use(made, program.placement.rules):
        abstract = sl.abstract_state(
            program.module, optax.sgd(0.1, momentum=0.9), inputs=program.inputs
        )

    def first_step(params: Mapping[str, np.ndarray]) -> tuple[float, Gradients]:
        with sl.use(made, program.placement.rules):
            state = initial_state(abstract, params)
            if told is not None:
                traced = step.program(state, batch).trace(state, batch)
                faults = wrong_numbers(traced.lower().compile(), made, traced.jaxpr)
                told.extend(sorted({fault.code for fault in faults}))
            state, metrics = step(state, batch)
        gradients = jax.device_get(state.opt_state[0].trace)
        gradients = {path: x.astype(np.float64) for path, x in named_leaves(gradients).items()}
        return float(metrics["loss"]), gradients

    return first_step


def initial_state(abstract: Any, params: Mapping[str, np.ndarray]) -> Any:
    """Returns an abstract state with the program's own parameters, each in its place.

    They are made by numpy: compiling an initialisation would take as long as compiling the step.
    """

    def value(path: str, leaf: jax.ShapeDtypeStruct) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        inside, _, name = path.partition("/")
        return params[name] if inside == "params" else np.zeros(leaf.shape, leaf.dtype)

    leaves = [
        jax.device_put(value(path, leaf), leaf.sharding)
        for path, leaf in named_leaves(abstract).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)
