"""Reports on what shardlib does: who is sharded how, why, and what it costs."""

from typing import Any, overload

from shardlib.explain.call import unbound
from shardlib.explain.params import ParamsReport as ParamsReport
from shardlib.explain.params import explain_params
from shardlib.explain.placement import draw as draw
from shardlib.explain.program import ProgramReport as ProgramReport
from shardlib.explain.program import read_program as read_program
from shardlib.explain.report import StepReport as StepReport
from shardlib.explain.report import explain_step
from shardlib.hardware import Cluster


@overload
def explain(subject: Any) -> ParamsReport: ...
@overload
def explain(
    subject: Any,
    *arguments: Any,
    on: str | Cluster | None = None,
    optimize: bool = False,
    **keywords: Any,
) -> StepReport: ...
def explain(
    subject: Any,
    *arguments: Any,
    on: str | Cluster | None = None,
    optimize: bool = False,
    **keywords: Any,
) -> ParamsReport | StepReport:
    """Returns a report that prints as tables.

    `explain(state)` tells of every leaf of a training state, concrete or abstract, its shape,
    dtype, logical axes, the rule that placed it, the alternatives refused and why, its spec and its
    bytes on each device.

    `explain(step, state, batch)` compiles any jitted function and tells which collectives it runs
    over which mesh axes and how long they take, what fills the memory, what bounds it, and what is
    wrong with it. Arguments may be abstract: arrays or `ShapeDtypeStruct`s with `NamedSharding`s.

    Args:
        subject: A training state; or a training step, a Flax module, or any other function.
        arguments: What the function is called with.
        on: A cluster that need not be there, such as `"v5e-16"` or `"8xh100"`, with as many devices
            as the mesh; the devices of the arguments when left out.
        optimize: Whether a program for TPUs is optimized as one that is run, which takes five times
            as long; without, its collectives are the same and its peak is a few percent off.
        keywords: What the function is called with by name.

    Raises:
        TypeError: If there is no report on such a subject.
        MeshError: If mesh and cluster do not have the same number of devices, or there is no mesh.
        MissingExtraError: If the compiler of the cluster's platform is not installed.
    """
    called = arguments or keywords
    if hasattr(subject, "definition") and not called:
        if on is not None or optimize:
            raise TypeError(
                "on and optimize are of a function that is compiled, and a state is none.\n"
                "  Explain the step: sl.explain(step, state, batch, on='v5e-16')."
            )
        return explain_params(subject)
    if not callable(subject) or not called:
        name = type(subject).__name__
        given = f"{getattr(subject, '__name__', name)} alone" if callable(subject) else name
        raise TypeError(
            f"explain takes a training state, or a function with its arguments, not {given}.\n"
            "  Write sl.explain(state) or sl.explain(step, state, batch)."
        )
    function, first, named = unbound(subject)
    whole = (*first, *arguments), {**named, **keywords}
    return explain_step(function, *whole, on=on, optimize=optimize)
