"""How long the planner searches, and what its pruning leaves to price.

    python benchmarks/plan_speed.py                 # the search alone, processor seconds
    python benchmarks/plan_speed.py --published     # first plans beside published configurations

The baseline of the first is pricing everything: the layouts with every number of microbatches times
the choices of each, at the time that one takes. The second compares, for every usable row of
`data/published_runs.json`, the first plan with the best plan of the published mesh, and with the
published configuration as it is (microbatches, rematerialisation), all priced as shardlib would run
them; where such a configuration is faster, it says what of it a plan cannot say. The last line is
JSON.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

from published import Case, read_file
from shardlib.cost.transformer.memory import peak_memory
from shardlib.cost.transformer.step_time import step_time
from shardlib.cost.workload import NONE, Job
from shardlib.hardware import parse_cluster
from shardlib.plan.search import candidates, search
from shardlib.plan.workloads.named_models import named_model
from shardlib.plan.workloads.transformer import TransformerWorkload

DATA = Path(__file__).parent / "data" / "published_runs.json"
CASES = (
    ("llama3-8b", "8xh100", 512),
    ("llama3-70b", "v5p-128", 512),
    ("llama3-70b", "64x8xh100", 512),
    ("llama3-70b", "v5p-17920", 2240),
    ("llama3-405b", "2048x8xh100", 2048),
    ("mixtral-8x22b", "v5p-2048", 1024),
    ("deepseek-v3", "256x8xh100", 8192),
)


def main() -> None:
    """Prints a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--published", action="store_true", help="compare with published rows")
    print(json.dumps(published() if parser.parse_args().published else speed()))


def speed() -> dict[str, float]:
    """Searches each case once."""
    print(
        f"{'model':14} {'cluster':12} {'devices':>7} {'layouts':>8} {'fit':>6} {'steps':>9} "
        f"{'priced':>7} {'search':>8} {'all':>9} {'ratio':>7}"
    )
    found: dict[str, float] = {}
    for name, on, batch in CASES:
        named, cluster = named_model(name), parse_cluster(on)
        workload = TransformerWorkload(Job(named.model, named.length, batch))
        began = time.process_time()
        result = search(workload, cluster)
        seconds = time.process_time() - began
        tried = list(candidates(workload, cluster))
        steps = sum(len(c.microbatches) * len(workload.choices(c.layout, cluster)) for c in tried)
        best = result.plans[0]
        began = time.process_time()
        for _ in range(200):
            workload.memory(best.layout, best.choice, cluster)
            workload.time(best.layout, best.choice, cluster)
        everything = (time.process_time() - began) / 200 * steps
        print(
            f"{name:14} {on:12} {cluster.num_devices:7,} {result.layouts:8,} {result.fitting:6,} "
            f"{steps:9,} {result.priced:7,} {seconds:7.2f}s {everything:8.1f}s "
            f"{everything / seconds:6.0f}x  {best.layout}"
        )
        found[f"{name} on {on}"] = round(seconds, 3)
    return found | {"slowest_seconds": max(found.values())}


def published() -> dict[str, float]:
    """Plans every published row."""
    cases = [case for case in read_file(DATA)[0] if not case.eight_bit]
    faster, excused, unexplained, meshes, gains = 0, 0, 0, 0, []
    for case in cases:
        workload = TransformerWorkload(dataclasses.replace(case.job, remat=NONE))
        theirs = step_time(case.job, case.layout, case.cluster).total
        best = search(workload, case.cluster, top=1).plans[0]
        same_mesh = search(workload, case.cluster, top=1, keep=case.layout).plans
        meshes += not same_mesh or best.seconds <= same_mesh[0].seconds * (1 + 1e-9)
        gain = theirs / best.seconds - 1
        gains.append(gain)
        faster += gain >= -1e-9
        reason = "" if gain >= -1e-9 else _excuse(case)
        excused += bool(reason)
        unexplained += gain < -1e-9 and not reason
        print(
            f"{case.id:30} {case.layout!s:38} {theirs:9.3f}s {best.layout!s:38} "
            f"{best.seconds:9.3f}s {gain:+7.1%} {reason}"
        )
    gains.sort()
    return {
        "rows": len(cases),
        "at_least_as_fast_as_the_mesh": meshes,
        "at_least_as_fast": faster,
        "slower_for_a_reason": excused,
        "slower": unexplained,
        "median_gain": round(gains[len(gains) // 2], 4),
    }


def _excuse(case: Case) -> str:
    """What of a published configuration a plan cannot say; empty when nothing."""
    assert case.cluster.chip is not None
    memory = peak_memory(case.job, case.layout, case.cluster)
    if not memory.fits(case.cluster.chip.memory_bytes_per_device):
        return f"does not fit by the memory model: {memory.total / 2**30:.1f} GiB"
    if case.layout.shard_optimizer:
        return "data cuts the optimizer state beside whole parameters in half precision"
    if "input" in case.job.remat.offloaded:
        return "inputs of layers wait in host memory"
    if "attention" in case.job.remat.kept and case.job.remat != NONE:
        return "keeps what the attention kernel needs and little else"
    return ""


if __name__ == "__main__":
    main()
