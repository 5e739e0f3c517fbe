"""Modules of the user: their workloads, and plans as code for them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxtyping import PyTree

from shardlib.errors import ModelError
from shardlib.functional.precision import POLICIES
from shardlib.plan.problem import Plan, Workload
from shardlib.plan.settings import mesh_text
from shardlib.rules import PRESETS, STANDARD, AxisRules

if TYPE_CHECKING:
    import optax

NOT_OF_MODULES = frozenset(("model.remat", "model.loss_chunks", "optimizer.momentum_dtype"))
"""Config keys that a plan cannot set in a user's module."""


def of_module(
    model: object,
    *,
    optimizer: "optax.GradientTransformation | None",
    loss: Callable[..., Any] | None,
    batch: PyTree,
    rules: AxisRules | None,
    inputs: PyTree,
    precision: str,
    platform: str | None,
) -> Any:
    """Returns the `model` argument, or the workload of its traced step if it is a module factory.

    Raises:
        ModelError: If a module lacks its optimizer, loss or batch, or a model that is not a module
            has one.
    """
    parts = {"optimizer": optimizer, "loss": loss, "batch": batch}
    options = {"rules": rules, "inputs": inputs}
    given = [name for name, part in {**parts, **options}.items() if part is not None]
    if not callable(model):
        if given:
            raise ModelError(
                f"{_listed(given)} can only be given with a module, and "
                f"{_named(model)} is not a module.\n"
                "  Leave them out, or give a module factory: lambda rngs: Model(rngs=rngs)."
            )
        return model
    if missing := [name for name, part in parts.items() if part is None]:
        raise ModelError(
            f"a plan for {_named(model)} traces its step, which lacks {_listed(missing)}.\n"
            "  Write sl.plan(make_model, optimizer=optimizer, loss=loss_fn, batch=batch, on=...)."
        )
    assert optimizer is not None, "it is not missing"
    assert loss is not None, "it is not missing"
    # Imported on demand: the other models do not need Flax.
    from shardlib.plan.workloads.tracing import trace_workload

    options = {"rules": rules or STANDARD, "inputs": inputs or (), "precision": precision}
    return trace_workload(model, optimizer, loss, batch, platform=platform, **options)


def as_code(plan: Plan, workload: Workload) -> str:
    """Returns the lines of code that run a plan for a module."""
    layout = plan.layout
    rules = getattr(workload, "rules", STANDARD)
    if layout.zero < 3 and layout.fsdp > 1:
        rules = PRESETS[f"zero{layout.zero}"]
    named = next((name.upper() for name, preset in PRESETS.items() if preset == rules), None)
    policy = getattr(workload, "precision", None)
    inputs = ["inputs=inputs"] if getattr(workload, "takes_inputs", False) else []
    stored = [f'precision="{name}"' for name, one in POLICIES.items() if one == policy]
    options = [f"microbatches={layout.microbatches}"] if layout.microbatches > 1 else []
    options += stored
    if layout.reduces_once and not workload.sums_once(layout):
        options.append('reduction=sl.ReductionConfig(dtype="f32")')
    lines = [
        f'mesh = sl.make_mesh("{mesh_text(layout)}")',
        f"with sl.use(mesh, {'rules' if named is None else f'sl.rules.{named}'}):",
        f"    state = sl.init_state({', '.join(['make_model', 'optimizer', *inputs, *stored])})",
        f"    step = sl.make_train_step({', '.join(['loss', *options])})",
    ]
    return "\n".join(lines)


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _named(model: object) -> str:
    if isinstance(model, str):
        return repr(model)
    return getattr(model, "__name__", type(model).__name__)
