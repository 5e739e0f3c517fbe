"""Found rules next to the best plan with preset rules, priced by one cost model where it can."""

import dataclasses
import shlex
from collections.abc import Callable
from typing import Any

from shardlib.cost.layout import AXES
from shardlib.errors import ShardlibError
from shardlib.find import FoundRules
from shardlib.find.found import Price
from shardlib.humanize import duration
from shardlib.nn.remat import OFFLOAD
from shardlib.plan.result import Plans
from shardlib.plan.settings import mesh_text, to_overrides
from shardlib.plan.workloads.transformer import TransformerWorkload
from shardlib.run.config import RunConfig
from shardlib.run.plans.finding import Notify, find_for_run

_UNKNOWN = (
    "train.offload_optimizer",
    "train.pipeline.chunks_per_stage",
    "train.reduction.dtype",
)
"""Keys of a plan that the cost model of the search does not know."""


@dataclasses.dataclass(frozen=True)
class FoundOrPlan:
    """A step under found rules and one of the first plan."""

    found_mesh: str
    plan_mesh: str
    found_seconds: float
    plan_seconds: float
    found_model: str
    """The cost model that gives `found_seconds`."""
    plan_model: str
    """The cost model that gives `plan_seconds`."""
    plan_fits: bool
    reason: str
    """Why one cost model does not price both; empty if it does."""
    found_settings: tuple[str, ...]
    """The arguments of `shardlib train CONFIG` for the found rules."""
    plan_settings: tuple[str, ...]
    """Those for the first plan."""

    @property
    def quicker(self) -> str | None:
        """`found` or `plan`; None if their seconds are not comparable."""
        if self.reason:
            return None
        is_found = not self.plan_fits or self.found_seconds <= self.plan_seconds
        return "found" if is_found else "plan"

    @property
    def command(self) -> str:
        """The arguments for what is quicker, or for the found rules, as one line of a shell."""
        return shlex.join(self.plan_settings if self.quicker == "plan" else self.found_settings)

    def __str__(self) -> str:
        """Two sentences; what is to be copied is in `command`."""
        found = f"found rules on {self.found_mesh}: {duration(self.found_seconds)} a step"
        plan = f"the first plan, {self.plan_mesh}: {duration(self.plan_seconds)}"
        if self.reason:
            return (
                f"{found} by {self.found_model}; {plan} by {self.plan_model}. These two are not "
                f"comparable: {self.reason}.\nSettings of the found rules:"
            )
        what = "found rules" if self.quicker == "found" else "the first plan"
        fits = "" if self.plan_fits else ", and does not fit"
        return f"{found}; {plan}{fits}; both by {self.found_model}.\nTrain under {what}:"

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain data."""
        facts = dataclasses.asdict(self)
        lists = ("found_settings", "plan_settings")
        return facts | {key: list(facts[key]) for key in lists} | {"quicker": self.quicker}


def found_or_plan(
    found: FoundRules, plans: Plans, load: Callable[[list[str]], RunConfig], notify: Notify
) -> FoundOrPlan:
    """Returns found rules next to the best plan for a config.

    The cost model of the search prices both, if the plan sets nothing that it does not know.
    Otherwise each has the price of its own cost model. `load` returns the config with changes.
    """
    config, own, other, reason = load([]), found.prices[0], None, _unknown(plans)
    if not reason:
        try:
            own, other = _priced(found, plans, load, notify)
        except ShardlibError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
        else:
            if _model_of(own) != _model_of(other):
                reason = f"the search prices the plan by {_model_of(other)}"
    best, alike = plans.best, None if reason else other
    is_closed_form = isinstance(plans.workload, TransformerWorkload)
    planners = "the planner's formulas" if is_closed_form else "the planner's traced program"
    return FoundOrPlan(
        found.mesh_text,
        mesh_text(best.layout),
        own.seconds,
        best.seconds if alike is None else alike.seconds,
        _model_of(own),
        planners if alike is None else _model_of(alike),
        alike is None or alike.memory_bytes <= found.capacity_bytes,
        reason,
        tuple(_settings(found, plans, config)),
        tuple(plans.overrides()),
    )


def _unknown(plans: Plans) -> str:
    """Returns what the first plan sets and the cost model of the search does not know."""
    settings = plans.settings()
    unknown = [key for key in _UNKNOWN if key in settings]
    policy = str(settings.get("model.remat", ""))
    if policy.startswith(OFFLOAD) or "-" in policy:
        unknown.append("model.remat")
    given = to_overrides({key: settings[key] for key in unknown})
    return f"the search does not price {' '.join(given)}" if given else ""


def _priced(
    found: FoundRules, plans: Plans, load: Callable[[list[str]], RunConfig], notify: Notify
) -> tuple[Price, Price]:
    """Returns the prices of the found rules and of the plan by the cost model of the search.

    Raises:
        ShardlibError: If it cannot price the rules of the plan on their mesh.
    """
    layout = plans.best.layout
    sizes = {axis: layout.size(axis) for axis in AXES}
    config, planned = load([]), load(plans.overrides())
    own, _ = found.compare("found", found.rules, found.sizes)
    alike = found
    if not _is_same_step(found, config, planned):
        notify(f"pricing the first plan, {mesh_text(layout)}, by the cost model of the search")
        alike = find_for_run(planned, plans.cluster, lambda text: None)
    other, _ = alike.compare("the first plan", planned.axis_rules(), sizes)
    return own, other


def _is_same_step(found: FoundRules, config: RunConfig, planned: RunConfig) -> bool:
    """Returns whether a plan differs from found rules in its mesh and rules alone: the prices of a
    search are for one number of microbatches, and for one program of the model."""
    config = config if found.remat is None else config.with_remat(found.remat)
    same = (config.model, config.optimizer) == (planned.model, planned.optimizer)
    return same and planned.train.microbatches == found.microbatches


def _model_of(price: Price) -> str:
    is_traced = price.unhidden_seconds is None
    return f"the cost model of {'traced' if is_traced else 'partitioned'} programs"


def _settings(found: FoundRules, plans: Plans, config: RunConfig) -> list[str]:
    settings: dict[str, Any] = {"mesh": found.mesh_text}
    if plans.workload.batch != config.train.global_batch:
        settings["train.global_batch"] = plans.workload.batch
    settings["train.microbatches"] = found.microbatches
    if found.remat is not None:
        settings["model.remat"] = found.remat
    return to_overrides(settings | {"rules": "auto"})
