"""How many tensors a second the rules place, against building their PartitionSpecs by hand.

python benchmarks/rule_resolution.py
"""

import json
import time

from jax.sharding import PartitionSpec

from shardlib.rules import STANDARD

MESH = {"data": 2, "fsdp": 4, "tensor": 2}
TENSORS = [
    (("layers", "embed", "heads", "head_dim"), (32, 4096, 32, 128)),
    (("layers", "embed", "kv_heads", "head_dim"), (32, 4096, 8, 128)),
    (("layers", "embed", "mlp"), (32, 4096, 14336)),
    (("layers", "mlp", "embed"), (32, 14336, 4096)),
    (("vocab", "embed"), (128256, 4096)),
    (("layers", "norm"), (32, 4096)),
]
COUNT = 100_000


def tensors_per_second(place) -> float:
    start = time.perf_counter()
    for i in range(COUNT):
        place(i)
    return COUNT / (time.perf_counter() - start)


def main() -> None:
    def repeated(i: int) -> None:
        axes, shape = TENSORS[i % len(TENSORS)]
        STANDARD.resolve(axes, shape, MESH)

    def fresh(i: int) -> None:
        axes, shape = TENSORS[i % len(TENSORS)]
        STANDARD.resolve(axes, (*shape[:-1], shape[-1] * (i + 1)), MESH)

    def by_hand(i: int) -> None:
        PartitionSpec(None, "fsdp", "tensor")

    figures = {
        "repeated_tensors_per_second": round(tensors_per_second(repeated)),
        "fresh_tensors_per_second": round(tensors_per_second(fresh)),
        "by_hand_specs_per_second": round(tensors_per_second(by_hand)),
    }
    figures["fresh_ratio"] = round(
        figures["by_hand_specs_per_second"] / figures["fresh_tensors_per_second"], 1
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
