"""The layouts of parameters that rules decide before a search."""

import collections

from shardlib.cost.layout import Layout
from shardlib.errors import RuleError
from shardlib.find.equivalence import Classes
from shardlib.find.trace import TracedLoss
from shardlib.mesh import abstract_mesh
from shardlib.partitioner.layout import Dims, from_spec
from shardlib.rules import AxisRules
from shardlib.sharding.partition import place, place_model_state


def pinned_params(
    traced: TracedLoss,
    classes: Classes,
    rules: AxisRules,
    layout: Layout,
    *,
    with_auto: bool = False,
) -> dict[int, Dims]:
    """Returns the layouts of the parameters that rules place by path or by name, by tensor class;
    `with_auto` also of the others.

    Raises:
        RuleError: If the rules place parameters of one class differently.
    """
    mesh = abstract_mesh(str(layout), layout.num_devices)
    axes, frozen = traced.module.axes, traced.module.frozen
    placed = place(traced.params, axes, rules, mesh)
    state = place_model_state(traced.model_state, axes, rules, mesh, frozen)
    placed |= {path: one for path, one in state.items() if path in frozen}
    at = dict(zip(traced.paths, classes.arguments, strict=True))
    decided: dict[int, dict[Dims | None, str]] = collections.defaultdict(dict)
    for path, one in placed.items():
        is_given = with_auto or one.origin != "auto"
        dims = from_spec(one.spec, len(one.shape)).dims if is_given else None
        decided[at[path]].setdefault(dims, path)
    for layouts in decided.values():
        if len(layouts) > 1:
            raise RuleError(
                f"{', '.join(layouts.values())} have one structure and get one layout, but the "
                "given rules place them differently.\n"
                "  Give all of them the same rule, or none."
            )
    return {n: dims for n, layouts in decided.items() for dims in layouts if dims is not None}
