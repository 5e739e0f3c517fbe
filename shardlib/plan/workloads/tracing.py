"""Workloads of any model, priced from a traced program instead of a formula.

The loss and its gradient are traced once, without a mesh. Axis names that the model gives to
activations stay in the program. To price a layout, its rules turn these names, the parameters and
the batch into layouts, which are propagated through the program (`cost.traced.layout`); then the
computation, memory passes and communication of one device are counted (`cost.traced.costs`). The
optimizer's update is a separate program, so that an update with matmuls is priced in full.

`sl.attention.attend` is priced as the kernel that a platform has for it, with what devices along
`context` send each other. A traced program does not show other kernels that a compiler substitutes
for operations (attention written out is priced as written), and what hand-written code would do on
axes of more than one device (`jax.shard_map`, experts that exchange tokens). The layers of one
`scan_layers` are divided where the rules cut them over `stage` (`cost.traced.stages`).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec
from jaxtyping import PyTree

from shardlib.cost.layout import SHARDLIB, Software
from shardlib.cost.traced.primitives import PARAMS_TABLE, constrained_names
from shardlib.cost.traced.step import BatchAxes, TracedStep
from shardlib.functional import FunctionalModule, Inputs, call, check_trained, functional
from shardlib.functional.boundary import boundary
from shardlib.functional.precision import Precision
from shardlib.functional.precision import precision as precision_named
from shardlib.losses.microbatch import widened
from shardlib.losses.results import loss_mean, loss_sums, refuse_integer_loss
from shardlib.losses.signature import called_by_position, noting
from shardlib.mesh import abstract_mesh
from shardlib.nn.attention.as_one import attention_as_one
from shardlib.optim.transforms import check_transformation
from shardlib.plan.workloads.traced import TracedWorkload
from shardlib.rules import STANDARD, AxisRules
from shardlib.rules.resolve import ANY, Kind
from shardlib.sharding.constrain import Priced, pricing, recording, use

_KINDS: tuple[Kind, ...] = ("params", "activations")
LossFn = Callable[..., Any]
"""Loss as for `make_train_step`."""


def trace_workload(
    make: Callable[..., Any] | FunctionalModule,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    batch: PyTree,
    *,
    rules: AxisRules = STANDARD,
    inputs: Inputs = (),
    wrt: Any = None,
    precision: str | Precision = "f32",
    batch_axes: BatchAxes | None = None,
    platform: str | None = None,
    software: Software = SHARDLIB,
    unit: str | None = None,
    names: Collection[str] | None = None,
) -> TracedWorkload:
    """Traces a step of any model; allocates and compiles nothing.

    Args:
        make: Module factory as for `init_state`: `make(rngs) -> module`, or a linen module.
        optimizer: Any optax transformation.
        loss_fn: Loss as for `make_train_step`, without further inputs: `loss_fn(model, batch)` or
            `loss_fn(model, batch, rng)` returns the loss or `(loss, aux)`.
        batch: Batch of a whole step, as arrays or `ShapeDtypeStruct`s.
        rules: Rules from logical axes to mesh axes. With `STANDARD` plans may keep parameters whole
            over `fsdp`, as `ZERO1` and `ZERO2` do; other rules are kept.
        inputs: Example arguments of the module; for linen.
        wrt: The trained variables, as for `init_state`.
        precision: Precision as for `make_train_step`.
        batch_axes: Logical axes of batch leaves by path; default `("batch", None, ...)`.
        platform: `cpu`, `gpu` or `tpu`, for models that choose an implementation by platform, as
            attention does; None to trace again for each platform that is asked about.
        software: Properties of the program.
        unit: Unit of a batch without a length, in the plural; default: by its shapes.
        names: Logical axes of activations, as `names_met` returns them; None to trace for them.

    Raises:
        ModelError: If the model cannot be created.
        RuleError: If the model names an axis without a rule.
    """
    module, dtypes = functional(make, inputs, wrt), precision_named(precision)
    loss_fn = called_by_position(loss_fn)
    step = _step(module, dtypes, optimizer, loss_fn, batch, rules, batch_axes, platform, names)
    options: dict[str, Any] = {
        "rules": rules,
        "inputs": inputs,
        "wrt": wrt,
        "precision": precision,
        "batch_axes": batch_axes,
        "platform": platform,
        "software": software,
        "unit": unit,
    }
    retrace = functools.partial(trace_workload, make, optimizer, loss_fn, **options)
    named = {"unit_of_examples": unit, "takes_inputs": bool(inputs), "platform": platform}
    return TracedWorkload(module.name, step, step.batch, dtypes, retrace, software, **named)


def _step(
    module: FunctionalModule,
    dtypes: Precision,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    batch: PyTree,
    rules: AxisRules,
    batch_axes: BatchAxes | None,
    platform: str | None,
    names: Collection[str] | None,
) -> TracedStep:
    """Returns the traced step of a module, from arguments as in `trace_workload`."""
    check_transformation(optimizer)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, model_state = module.shapes()
    check_trained(module, params)
    params = jax.eval_shape(lambda p: dtypes.store(p, module.float32), params)
    model_state = jax.eval_shape(
        lambda held: dtypes.store(held, module.float32, only=module.frozen), model_state
    )
    opt_state = jax.eval_shape(optimizer.init, params)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)

    def gradient(*arguments: PyTree) -> Any:
        return _gradient(module, dtypes, loss_fn, *arguments)

    arguments = (params, model_state, batch, key)
    if names is None:
        # JAX would return the cached first trace of a function, so each trace uses a new function.
        met = lambda: jax.eval_shape(lambda *a: gradient(*a), *arguments)  # noqa: E731
        names = names_met(rules, met, platform)
    with naming(rules, names, platform) as priced:
        program = jax.make_jaxpr(gradient)(*arguments).jaxpr
    named = constrained_names(program) | {"batch"}
    named |= {name for axes in module.axes.values() for name in axes or () if name}
    update = _update(optimizer, params, opt_state)
    shapes = (module, params, model_state, opt_state, batch)
    about = (rules, dict(batch_axes or {}), frozenset(named), priced.asked_platform)
    return TracedStep(program, update, *shapes, *about)


def _gradient(
    module: FunctionalModule,
    dtypes: Precision,
    loss_fn: LossFn,
    params: PyTree,
    model_state: PyTree,
    batch: PyTree,
    key: jax.Array,
) -> Any:
    """Returns the gradients of a batch, in float32, and its loss."""

    def loss(params: PyTree) -> Any:
        return total_loss(module, dtypes, loss_fn, params, model_state, batch, key)[0]

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(widened, gradients), value


def total_loss(
    module: FunctionalModule,
    dtypes: Precision,
    loss_fn: LossFn,
    params: PyTree,
    model_state: PyTree,
    batch: PyTree,
    key: jax.Array,
) -> Any:
    """Returns the loss of a batch, a float32 scalar, and the new model state."""
    model_key, loss_key = jax.random.split(key)

    def total(model: Any) -> Any:
        given = dtypes.cast_batch(batch)
        with boundary(model, dtypes.compute, given), noting(module.name, given):
            result = loss_fn(model, given, loss_key)
        refuse_integer_loss(result)
        return loss_mean(loss_sums(result, given)).total

    return call(module, params, model_state, model_key, total, precision=dtypes)


def _update(optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree) -> Any:
    """Returns the jaxpr of an update, from gradients, optimizer state and parameters."""

    def update(grads: PyTree, opt_state: PyTree, params: PyTree) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            extra = optax.with_extra_args_support(optimizer)
            updates, new = extra.update(grads, opt_state, params, value=jnp.float32(1.0))
            return optax.apply_updates(params, updates), new

    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    return jax.make_jaxpr(update)(grads, opt_state, params).jaxpr


@dataclasses.dataclass(frozen=True)
class _Naming(AxisRules):
    """Rules that leave the logical axes of an activation in the program, as if each were a mesh
    axis."""

    given: AxisRules | None = None

    def __hash__(self) -> int:
        return hash(("naming", self.given))

    def spec(self, logical_axes: Any, shape: Any, mesh: Any, kind: Any = "params") -> Any:
        assert self.given is not None
        self.given.spec(logical_axes, shape, {}, kind)
        before = PARAMS_TABLE if kind == "params" else ""
        seen: set[str | None] = set()
        names = []
        for name in logical_axes:
            names.append(None if name is None or name in seen else before + name)
            seen.add(name)
        return PartitionSpec(*names)

    def check(self, mesh: object) -> None:
        """Does nothing, because the underlying rules were checked."""


def names_met(
    rules: AxisRules, trace: Callable[[], object], platform: str | None = None
) -> set[str]:
    """Returns the logical axes of activations in a trace under rules that match any axis. Other
    rules name all that there are. `platform` is as in `trace_workload`."""
    if ANY not in {name for kind in _KINDS for name, _ in rules.table(kind)}:
        return set()
    mesh = _on_platform(abstract_mesh("data=1", 1), platform)
    with recording() as met, _pricing(platform), use(mesh, rules):  # type: ignore[arg-type]
        trace()
    return met


def _on_platform(mesh: AbstractMesh, platform: str | None) -> AbstractMesh:
    if platform is None:
        return mesh
    return mesh.update(abstract_device=AbstractDevice(platform, None, platform=platform))


@contextlib.contextmanager
def naming(
    rules: AxisRules, names: Collection[str], platform: str | None = None
) -> Iterator[Priced]:
    """Activates a mesh of logical axes, so that constraints in a program name them, for a cost
    model. `names` are other axes that the rules match; `platform` is as in `trace_workload`."""
    known = {name for table in _KINDS for name, _ in rules.table(table)}.union(names)
    both = sorted({*known, *(PARAMS_TABLE + name for name in known)})
    mesh = AbstractMesh((1,) * len(both), tuple(both), axis_types=(AxisType.Auto,) * len(both))
    named: Any = _Naming(rules.params, rules.activations, given=rules)
    with _pricing(platform) as priced, use(_on_platform(mesh, platform), named):  # type: ignore[arg-type]
        yield priced


@contextlib.contextmanager
def _pricing(platform: str | None) -> Iterator[Priced]:
    with pricing() as priced, attention_as_one(platform):
        yield priced
