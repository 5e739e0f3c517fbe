"""Reports on what shardlib does: who is sharded how, why, and what it costs."""

from typing import Any

from shardlib.explain.params import ParamsReport as ParamsReport
from shardlib.explain.placement import draw as draw


def explain(subject: Any) -> ParamsReport:
    """Returns a report that prints as a table.

    Args:
        subject: A training state, concrete or abstract: a row for each leaf with its shape, dtype,
            logical axes, the rule that placed it, the alternatives refused and why, spec, and bytes
            per device.

    Raises:
        TypeError: If there is no report on such a subject.
    """
    from shardlib.explain.params import explain_params

    if hasattr(subject, "definition"):
        return explain_params(subject)
    raise TypeError(f"explain takes a training state, not {type(subject).__name__}")
