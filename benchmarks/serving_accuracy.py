"""Predicted tokens per second of served models with published measurements, row by row.

Each row is the throughput of answers under full load on one replica, in float16. The prediction is
that of the best number of slots and chunk on the same mesh, in bfloat16, which has the same rates.

Source: NVIDIA, TensorRT-LLM, docs/source/performance/perf-overview.md, version 0.14.0: in-flight
batching with requests at an infinite rate, columns FP16 of H100 80GB HBM3 and A100-SXM4-80GB.
"""

import argparse
import json
import statistics
from typing import NamedTuple

from shardlib.plan.serving import plan_serving


class Row(NamedTuple):
    """A measurement: tokens of answers per second on a number of GPUs with tensor parallelism."""

    model: str
    tensor: int
    prompt: int
    answer: int
    h100: float
    a100: float | None


ROWS = (
    Row("llama3-8b", 1, 128, 2048, 9150.7, 4963.4),
    Row("llama3-8b", 1, 500, 2000, 7498.3, 3945.2),
    Row("llama3-8b", 1, 1000, 1000, 7054.5, 3634.4),
    Row("llama3-8b", 1, 2048, 128, 1904.3, 795.4),
    Row("llama3-8b", 1, 2048, 2048, 4159.7, 2265.0),
    Row("llama3-8b", 1, 5000, 500, 1708.0, 790.7),
    Row("llama3-70b", 4, 128, 2048, 5072.0, 2484.2),
    Row("llama3-70b", 4, 1000, 1000, 3730.2, 1765.9),
    Row("llama3-70b", 4, 2048, 2048, 2386.7, 1230.2),
    Row("llama3-70b", 4, 5000, 500, 831.3, 362.3),
    Row("llama3-70b", 8, 128, 2048, 7554.2, 4463.7),
    Row("llama3-70b", 8, 1000, 1000, 5963.1, 3054.9),
    Row("llama3-70b", 8, 2048, 2048, 3991.2, 2144.3),
    Row("llama3-70b", 8, 5000, 500, 1446.4, 662.6),
    Row("mistral-7b", 1, 1000, 1000, 7697.1, 3804.6),
    Row("mistral-7b", 1, 2048, 2048, 4367.9, 2331.8),
    Row("mixtral-8x7b", 4, 1000, 1000, 15509.2, 7357.2),
    Row("mixtral-8x7b", 4, 2048, 2048, 9143.3, 4963.9),
    Row("mixtral-8x7b", 8, 1000, 1000, 27684.9, 13948.2),
    Row("mixtral-8x7b", 8, 2048, 2048, 19291.8, 10553.0),
    Row("mixtral-8x22b", 8, 1000, 1000, 9759.9, 4753.6),
    Row("mixtral-8x22b", 8, 2048, 2048, 5857.9, 3377.8),
)
"""Lengths with long answers, and some with short ones. The rows of 8B are of Llama 3.1, which has
the dims of Llama 3."""


def predicted(row: Row, chip: str) -> float | None:
    """Returns the predicted tokens per second; None if the mesh has no plan."""
    # As Llama 3, with more positions.
    model = row.model.replace("llama3-", "llama3.1-")
    context = row.prompt + row.answer
    plans = plan_serving(
        model, on=f"{row.tensor}x{chip}", context=context, prompt=row.prompt, top=9
    )
    mesh = "data=1" if row.tensor == 1 else f"tensor={row.tensor}"
    found = [plan.tokens_per_second for plan in plans.plans if plan.mesh == mesh]
    return found[0] if found else None


def main() -> None:
    """Prints a line for each measurement, and the median and range of their ratios as JSON."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    ratios: dict[str, list[float]] = {"h100": [], "a100-80": []}
    for row in ROWS:
        for chip, measured in (("h100", row.h100), ("a100-80", row.a100)):
            found = measured and predicted(row, chip)
            if not found or not measured:
                continue
            ratios[chip].append(found / measured)
            print(
                f"{row.model:14} {row.tensor}x{chip:8} {row.prompt:>5}/{row.answer:<5} measured "
                f"{measured:8.0f}  predicted {found:8.0f}  {found / measured:.2f}"
            )
    facts = {
        chip: {
            "rows": len(each),
            "median": round(statistics.median(each), 3),
            "least": round(min(each), 3),
            "most": round(max(each), 3),
        }
        for chip, each in ratios.items()
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
