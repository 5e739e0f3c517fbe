"""Plans as config keys, as `train` reads them."""

from collections.abc import Mapping
from typing import Any

from shardlib.cost.layout import AXES, Layout
from shardlib.cost.machine.fabric import outer_degree
from shardlib.plan.problem import Choice, Plan

Settings = dict[str, Any]
"""Values by key path, such as `train.microbatches`."""


def mesh_text(layout: Layout) -> str:
    """Returns a layout's mesh as text such as `data=2x8,fsdp=4`; outer degrees cross slices."""
    sizes = []
    for axis in AXES:
        size = layout.size(axis)
        outer = outer_degree(layout, axis) if layout.slices > 1 else 1
        if outer > 1:
            sizes.append(f"{axis}={outer}x{size // outer}")
        elif size > 1:
            sizes.append(f"{axis}={size}")
    return ",".join(sizes) or "data=1"


def schedule(layout: Layout) -> str | None:
    """Returns the pipeline schedule of a layout by its config name; None without stages."""
    if layout.stage == 1:
        return None
    if layout.chunks > 1:
        return "interleaved"
    return "gpipe" if layout.microbatches < layout.stage else "1f1b"


def rules(layout: Layout) -> str | dict[str, Any]:
    """Returns the rules that use the axes as a layout says."""
    shared = layout.tensor > 1 and layout.sequence_parallel
    if layout.zero == 3 or layout.fsdp == 1:
        return "sequence" if shared else "standard"
    preset = f"zero{layout.zero}"
    if not shared:
        return preset
    return {"preset": preset, "activations": {"residual_length": "context+tensor"}}


def settings(
    plan: Plan, num_layers: int, *, batch: int | None = None, sums_once: bool = False
) -> Settings:
    """Returns all settings of a plan, by key path. The batch is in sequences; None leaves the
    config's value. `sums_once`: whether gradients are summed over `data` and `context` once a step
    by default."""
    layout = plan.layout
    by_key: Settings = {"mesh": mesh_text(layout), "rules": rules(layout)}
    if batch is not None:
        by_key["train.global_batch"] = batch
    by_key["train.microbatches"] = layout.microbatches
    if layout.reduces_once and not sums_once:
        by_key["train.reduction.dtype"] = "f32"
    if layout.offload_optimizer:
        by_key["train.offload_optimizer"] = True
    if name := schedule(layout):
        by_key["train.pipeline.schedule"] = name
        if layout.chunks > 1:
            by_key["train.pipeline.chunks_per_stage"] = layout.chunks
    return by_key | of_choice(plan.choice, num_layers)


def of_choice(choice: Choice, num_layers: int) -> Settings:
    """Returns the keys of a choice."""
    return {
        "model.remat": choice.policy(num_layers),
        "model.loss_chunks": choice.loss_chunks,
        "optimizer.momentum_dtype": choice.moments,
    }


def to_yaml(settings: Mapping[str, Any]) -> str:
    """Returns settings as YAML with nested sections."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, key = path.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = value
    return "\n".join(_lines(tree, "")) + "\n"


def to_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Returns settings as command-line arguments."""
    return [f"{path}={_scalar(value)}" for path, value in settings.items()]


def _lines(tree: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {_quoted(value)}")
    return lines


def _quoted(value: object) -> str:
    text = _scalar(value)
    # A colon would start a mapping.
    return f'"{text}"' if ":" in text else text


def _scalar(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_scalar(v)}" for key, v in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
