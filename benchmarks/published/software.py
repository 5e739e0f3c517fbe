"""Software of a published record, as properties of the cost model."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from shardlib.cost.layout import Software
from shardlib.cost.workload import Precision

_OLD = Software(attention="unfused", fusion="kernels", overlap_tensor=False, overlap_data=False)
"""Megatron-LM of 2021 and 2022, and Alpa: scores in memory, collectives between the kernels."""

_BY_FRAMEWORK = (
    (r"deepspeed", dataclasses.replace(_OLD, overlap_data=True, single_rail=True)),
    (r"megatron-?(core|bridge)|nemo", Software(fusion="kernels", dispatch_once=True)),
    # Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2, "Better balance".
    (r"meta's trainer", Software(fusion="kernels", balance_head=True)),
    # DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", sections 3.2.1 to 3.2.3.
    (r"hai-llm", Software(fusion="kernels", balance_head=True, dispatch_once=True)),
    (r"megatron", _OLD),
    (r"alpa", dataclasses.replace(_OLD, fusion="compiled")),
    (r"composer|llm-foundry", Software(attention="flash1", fusion="eager", overlap_tensor=False)),
    (r"torch|fsdp", Software(fusion="eager", overlap_tensor=False)),
)


def software_of(row: Mapping[str, Any]) -> Software:
    """Returns the properties of a record's program, from its framework and other fields."""
    framework = str(row.get("framework") or "").lower()
    found = next((s for pattern, s in _BY_FRAMEWORK if re.search(pattern, framework)), Software())
    changes: dict[str, Any] = {}
    if row.get("compile") and found.fusion == "eager":
        changes["fusion"] = "compiled"
    if re.search(r"async ?tp", str(row.get("caveat") or "").lower()):
        changes["overlap_tensor"] = True
    return dataclasses.replace(found, **changes)


def bytes_of(row: Mapping[str, Any], precision: Precision) -> dict[str, int]:
    """Returns the widths of a record's state, as arguments of `Job`.

    Gradients are kept in float32, except if a record says that everything is in half precision, and
    in the float16 training of Micikevicius et al. 2018.
    """
    text = " ".join(str(row.get(key) or "") for key in ("fsdp_mixed", "precision", "remat"))
    pure = "PURE" in text
    widths = {"gradient_bytes": 2 if pure or precision == "fp16" else 4}
    if "bf16 weights" in text and "fp32" not in text:
        widths |= {"gradient_bytes": 2, "param_bytes": 2, "moment_bytes": 4}
    return widths
