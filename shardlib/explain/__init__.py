"""Reports on what shardlib does: who is sharded how, why, and what it costs."""

from typing import Any, overload

from shardlib.explain.params import ParamsReport as ParamsReport
from shardlib.explain.params import explain_params
from shardlib.explain.placement import draw as draw
from shardlib.explain.program import ProgramReport as ProgramReport
from shardlib.explain.program import read_program


@overload
def explain(subject: Any) -> ParamsReport: ...
@overload
def explain(subject: Any, state: Any, batch: Any, /) -> ProgramReport: ...
def explain(subject: Any, *arguments: Any) -> ParamsReport | ProgramReport:
    """Returns a report that prints as a table.

    `explain(state)` tells of every leaf of a training state, concrete or abstract, its shape,
    dtype, logical axes, the rule that placed it, the alternatives refused and why, its spec and its
    bytes on each device.

    `explain(step, state, batch)` compiles a step and tells which collectives it runs over which
    mesh axes, how often, and how many bytes they carry. State and batch may be abstract.

    Raises:
        TypeError: If there is no report on such a subject.
    """
    if hasattr(subject, "definition") and not arguments:
        return explain_params(subject)
    if hasattr(subject, "lower") and arguments and hasattr(arguments[0], "definition"):
        mesh = arguments[0].definition.scope.mesh
        return read_program(subject.lower(*arguments).compile(), mesh)
    raise TypeError(
        f"explain takes a training state, or a step with a state and a batch, not "
        f"{type(subject).__name__} and {len(arguments)} more"
    )
