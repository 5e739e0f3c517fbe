"""The forward pass of a loss, traced for the search."""

import dataclasses

import jax
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import PyTree

from shardlib.errors import DataError
from shardlib.find.axes import Kind, Names, TracedAxes, params_table
from shardlib.functional import AxesByPath, FunctionalModule, check_trained
from shardlib.functional.precision import Precision
from shardlib.jaxprs import CUSTOM_GRADIENTS, called, equations, holds
from shardlib.losses.signature import called_without_inputs
from shardlib.nn.attention.as_one import attention_is_met, unshared_attention
from shardlib.nn.staged import MetStack, stacks_met
from shardlib.partitioner.layout import num_bytes
from shardlib.paths import named_leaves
from shardlib.plan.workloads.tracing import LossFn, names_met, naming, total_loss
from shardlib.rules import FSDP, AxisRules

INPUT = "<batch>/"
"""Before the paths of the leaves of a batch."""
_SHOWN = 4
"""Leaves that an error names."""
GRADIENT_BYTES = 4
"""Bytes of an element of a gradient, in float32."""


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """The forward pass of a loss, and its arguments."""

    module: FunctionalModule
    names: frozenset[str]
    """Logical axes by which the model places activations."""
    program: TracedAxes
    paths: tuple[str, ...]
    """The paths of the arguments of the program."""
    params: PyTree
    """Shapes of the parameters in their stored dtype."""
    model_state: PyTree
    """Shapes of the model state, with parameters that are not trained."""
    state_bytes: float
    """Bytes of state for an element of a trained parameter: itself, a float32 gradient and its part
    of the optimizer state."""
    moment_bytes: float
    """Bytes of the optimizer state among them."""
    attends: bool = False
    """Whether the model calls `attend`, which asks for rules of activations by name."""
    unshared: tuple[str, ...] = ()
    """Why `attend` refuses devices along `context`."""
    stacks: tuple[MetStack, ...] = ()
    """The stacks of layers that a pipeline could divide."""
    updated: tuple[str, ...] = ()
    """The paths of the model state that the loss updates."""


def fsdp_alone(axes: AxesByPath) -> AxisRules:
    """Returns the rules of `fsdp`, also for names that only the model knows and for dims that it
    does not divide; `axes` are by path."""
    named = {name for names in axes.values() for name in names or () if name is not None}
    whole = {name for name, (cut, *_) in FSDP.params if not cut}
    return FSDP.override(params={name: ["fsdp", None] for name in sorted(named - whole)})


def trace_loss(
    module: FunctionalModule,
    loss: LossFn,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    precision: Precision,
) -> TracedLoss:
    """Traces the loss of a batch; allocates nothing. Other arguments are as in `find_rules`."""
    loss = called_without_inputs(loss)
    params, model_state = module.shapes()
    check_trained(module, params)
    _check(batch)
    params = jax.eval_shape(lambda p: precision.store(p, module.float32), params)
    model_state = jax.eval_shape(
        lambda held: precision.store(held, module.float32, only=module.frozen), model_state
    )
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    key = jax.eval_shape(lambda: jax.random.key(0))
    arguments = (params, model_state, batch, key)
    traced, stacks, updated = [], list[MetStack](), list[str]()

    def forward(*arguments: PyTree) -> jax.Array:
        with stacks_met() as run:
            total, state = total_loss(module, precision, loss, *arguments)
        stacks[:], after = run, named_leaves(state)
        updated[:] = [p for p, x in named_leaves(arguments[1]).items() if after[p] is not x]
        return total

    met = names_met(FSDP, lambda: traced.append(jax.make_jaxpr(forward)(*arguments)))
    closed, names = traced[0], list[Names]()
    if met:
        with naming(FSDP, met):
            # JAX would return the cached first trace of a function.
            closed = jax.make_jaxpr(lambda *a: forward(*a))(*arguments)
        placed = [*named_leaves(params), *named_leaves(model_state)]
        names = [params_table(module.axes.get(path) or ()) for path in placed]
    paths, kinds = _paths_and_kinds(module, *arguments)
    frozen = [at for at, path in enumerate(paths) if path in module.frozen]
    moment_bytes = _bytes_of(jax.eval_shape(optimizer.init, params), params)
    state_bytes = _bytes_of(params, params) + GRADIENT_BYTES + moment_bytes
    program = TracedAxes(closed, kinds, names, frozen)
    if _has_other_gradients(closed.jaxpr):
        with naming(FSDP, met):
            gradient = jax.make_jaxpr(jax.grad(forward))(*arguments)
        program.connect_as(TracedAxes(gradient, kinds, fenced=True))
    return TracedLoss(
        module,
        frozenset(met),
        program,
        tuple(paths),
        params,
        model_state,
        state_bytes,
        moment_bytes,
        attention_is_met(),
        unshared_attention(),
        tuple(stacks),
        tuple(updated),
    )


def _has_other_gradients(jaxpr: Jaxpr) -> bool:
    """Returns whether gradients may connect dims that the forward pass does not: custom gradients
    do, and the residuals of branches share arrays."""
    return holds(jaxpr, *CUSTOM_GRADIENTS, "cond") or _has_free_derivative(jaxpr)


def _has_free_derivative(jaxpr: Jaxpr) -> bool:
    """Returns whether a function with a `custom_jvp` keeps dims apart that its derivative may
    connect. Those of JAX, such as `relu`, do not."""
    found: dict[str, ClosedJaxpr] = {}
    for equation, _ in equations(jaxpr):
        if equation.primitive.name == "custom_jvp_call":
            inner, consts = called(equation)
            if inner is not None:
                found.setdefault(str(inner), ClosedJaxpr(inner, list(consts)))
    for one in found.values():
        kinds: list[Kind] = ["activation"] * len(one.jaxpr.invars)
        if TracedAxes(one, kinds).keeps_apart():
            return True
    return False


def _paths_and_kinds(
    module: FunctionalModule, params: PyTree, model_state: PyTree, batch: PyTree, key: PyTree
) -> tuple[list[str], list[Kind]]:
    """Returns the path and the kind of each argument of a loss."""
    paths: list[str] = []
    kinds: list[Kind] = []
    named: tuple[tuple[PyTree, str, Kind], ...] = (
        (params, "", "param"),
        (model_state, "", "constant"),
        (batch, INPUT, "input"),
        (key, "key", "constant"),
    )
    for tree, prefix, kind in named:
        leaves = named_leaves(tree)
        paths += [prefix + path for path in leaves]
        kinds.extend("param" if path in module.frozen else kind for path in leaves)
    return paths, kinds


def _bytes_of(tree: PyTree, params: PyTree) -> float:
    """Returns the bytes of a tree for an element of the parameters."""
    return sum(map(num_bytes, jax.tree.leaves(tree))) / sum(x.size for x in jax.tree.leaves(params))


def _check(batch: PyTree) -> None:
    """Raises for leaves without rows."""
    wrong = [
        path or "the batch"
        for path, leaf in named_leaves(batch).items()
        if not getattr(leaf, "shape", ()) or leaf.shape[0] == 0
    ]
    if wrong or not jax.tree.leaves(batch):
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise DataError(
            f"{', '.join(wrong[:_SHOWN]) or 'the batch'}{more} has no rows.\n"
            "  Give arrays or ShapeDtypeStructs [rows, ...], without scalars and lists of numbers."
        )
