"""Reports on training states and compiled steps: shardings, their reasons and their costs."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, overload

from shardlib.explain.analysis.collectives import ProgramReport as ProgramReport
from shardlib.explain.analysis.collectives import read_program as read_program
from shardlib.explain.analysis.params import ParamsReport as ParamsReport
from shardlib.explain.analysis.params import explain_params
from shardlib.explain.aot.call import unbound
from shardlib.explain.report.draw import draw as draw
from shardlib.explain.report.report import StepReport as StepReport
from shardlib.explain.report.report import explain_step
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

    `explain(state)` lists every leaf of a training state, concrete or abstract: its shape, dtype,
    logical axes, the rule that placed it, the alternatives refused and why, its PartitionSpec and
    its bytes on each device.

    `explain(step, state, batch)` compiles any jitted function. It reports which collectives run
    over which mesh axes, how long they take, what fills the memory, what bounds the step and its
    faults. Arguments may be abstract: arrays or `ShapeDtypeStruct`s with `NamedSharding`s.

    Args:
        subject: A training state, a training step, a Flax module or any other function.
        arguments: Positional arguments of the function.
        on: The target cluster, such as `"v5e-16"` or `"8xh100"`, with as many devices as the mesh.
            It need not be attached. By default, the devices of the arguments.
        optimize: Whether a TPU program is fully optimized, as for a run, which takes five times as
            long. Otherwise its collectives are the same and its peak is a few percent off.
        keywords: Keyword arguments of the function.

    Raises:
        TypeError: If the subject is neither a state nor a function with its arguments.
        MeshError: If mesh and cluster differ in their number of devices, or there is no mesh.
        MissingExtraError: If the compiler of the cluster's platform is not installed.
    """
    called = arguments or keywords
    if hasattr(subject, "definition") and not called:
        if on is not None or optimize:
            raise TypeError(
                "on and optimize apply to a compiled function, not to a state.\n"
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
    _check_arguments(subject, arguments, keywords)
    function, first, named = unbound(subject)
    whole = (*first, *arguments), {**named, **keywords}
    return explain_step(function, *whole, on=on, optimize=optimize)


def _check_arguments(
    subject: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(subject)
    except (TypeError, ValueError):  # It is not written in Python: the call itself will tell.
        return
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        name = getattr(subject, "__name__", type(subject).__name__)
        raise TypeError(
            f"{name} cannot be called with the arguments given: {error}.\n"
            "  Give all arguments of a call, as in sl.explain(step, state, batch)."
        ) from None
