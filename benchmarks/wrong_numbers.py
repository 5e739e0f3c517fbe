"""Random programs on random meshes against the same programs on one device.

A seed decides a program: a Flax model of random pieces (dense chains, scans, recurrent nets,
convolutions, norms, attention, experts, graph nets, associative scans, slices, sorts, …), its
batch and loss, a mesh of 8 devices, and where parameters and batch lie. Its loss and its gradients,
leaf by leaf, are compared with those of one device; they are wrong where a relative error is above
1e-3. Each program runs with `constrain="auto"`, where shardlib decides where values lie, and with
`"user"`, where XLA does. The second shows how often the partitioner of XLA gives wrong numbers, and
by which of the faults A to E; the first has to show none. With `"found"`, shardlib also finds the
rules, on meshes of `data`, `fsdp` and `tensor`, and often with less memory than a program takes, so
that it has to be cut. A program past the limit runs on one
device again with its parameters moved in the last place. Where that alone makes half of the error
(a ReLU whose input is zero up to rounding), it is right, and counted as `within_rounding` too.

    python benchmarks/wrong_numbers.py --programs 60
    python benchmarks/wrong_numbers.py --only 17 --constrain user     # one program
    python benchmarks/wrong_numbers.py --kind recurrent,images --programs 100 --workers 4

Every program is a line of text, and of JSON in the file of `--out`. The last line of the output is
JSON: for each of `--constrain` how many were right, wrong, refused (an error) and crashed (the
compiler ended the process), the wrong ones by fault, how many of the wrong and of the right ones
the check of the compiled step tells, and the largest error of a right one.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any

DEVICES = 8
# Compiling is nearly all of the time; these change no collective. Later XLA has no fusion emitters.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" + (
    " --xla_cpu_use_fusion_emitters=false" if version("jax").startswith("0.10.") else ""
)
PROGRAMS_PER_PROCESS = 200


def records(seed: int, modes: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Runs one program, on one device and then on its mesh in each mode."""
    from random_programs.compare import compare, compare_found, run
    from random_programs.program import draw_program

    program = draw_program(seed)
    about = {
        "seed": seed,
        "kind": program.kind,
        "pieces": program.pieces,
        "mesh": program.mesh,
        "style": program.placement.style,
        "own_names": bool(program.placement.own_names),
    }
    expected = run(program, "data=1")
    for mode in modes:
        result = (
            compare_found(program, expected)
            if mode == "found"
            else compare(program, mode, expected)
        )
        status = "refused" if result.refused else "wrong" if result.is_wrong else "right"
        yield about | {"constrain": mode, "status": status} | dataclasses.asdict(result)


def work(seeds: Iterable[int], modes: list[str]) -> None:
    """Runs programs in this process; each is announced first, so that a crash can be placed."""
    import jax

    import shardlib as sl

    sl.local_cpu_devices(DEVICES)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    for seed in seeds:
        print(json.dumps({"begins": seed}), flush=True)
        for record in records(seed, modes):
            print(json.dumps(record), flush=True)
        jax.clear_caches()


def supervise(seeds: list[int], modes: list[str]) -> Iterator[dict[str, Any]]:
    """Runs programs in processes of their own, one after the other, and outlives their crashes."""
    left = list(seeds)
    while left:
        batch = left[:PROGRAMS_PER_PROCESS]
        command = [sys.executable, __file__, "--worker", "--constrain", ",".join(modes)]
        process = subprocess.Popen(
            [*command, "--only", ",".join(map(str, batch))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        seed, done = batch[0], set[str]()
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue  # A line of the integer solver.
            record = json.loads(line)
            if "begins" in record:
                seed, done = record["begins"], set()
            else:
                done.add(record["constrain"])
                yield record
        complaint = process.stderr.read()
        if process.wait() == 0:
            left = left[len(batch) :]
            continue
        crashed, *later = [mode for mode in modes if mode not in done]
        text = f"exit status {process.returncode}: {last_line(complaint)}"
        yield {"seed": seed, "constrain": crashed, "status": "crashed", "refused": text}
        yield from supervise([seed] if later else [], later)
        left = left[left.index(seed) + 1 :]


def last_line(text: str) -> str:
    """Returns what a process said last."""
    return (text.strip().splitlines() or [""])[-1][:600]


def choose_seeds(first: int, count: int, kinds: list[str]) -> list[int]:
    """Returns the first seeds whose programs are of these kinds; of any kind when none is given."""
    from random_programs.program import kind_of

    matching = (s for s in itertools.count(first) if not kinds or kind_of(s) in kinds)
    return list(itertools.islice(matching, count))


def describe(record: dict[str, Any]) -> str:
    """Returns one line about one program."""
    what = " ".join(record.get("pieces", ()))
    head = f"{record['seed']:>6} {record['constrain']:>4} {record['status']:<7}"
    where = f"{record.get('mesh', ''):<24} {record.get('style', ''):<12}"
    if record["status"] in ("refused", "crashed"):
        return f"{head} {where} {what}: {record['refused'].splitlines()[0][:120]}"
    errors = f"loss {record['loss_error']:.0e} gradients {record['gradient_error']:.0e}"
    fault = f" fault {record['faults']}" if record["faults"] else ""
    told = f" told {record['told']}" if record["told"] else ""
    return f"{head} {where} {errors}{fault}{told} {record['kind']}: {what}"


def summarize(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns counts and the largest errors of the right programs of one mode."""
    from random_programs.compare import LOSS_LIMIT

    status = collections.Counter(record["status"] for record in results)
    wrong = [record for record in results if record["status"] == "wrong"]
    right = [record for record in results if record["status"] == "right"]
    refused = [r["refused"] for r in results if r["status"] in ("refused", "crashed")]
    return {
        "programs": len(results),
        **{name: status[name] for name in ("right", "wrong", "refused", "crashed")},
        "within_rounding": sorted(r["seed"] for r in right if r["rounding_error"]),
        "wrong_forward": sum(record["loss_error"] > LOSS_LIMIT for record in wrong),
        "faults": collections.Counter(record["faults"] for record in wrong),
        "wrong_told": sum(bool(record["told"]) for record in wrong),
        "wrong_not_told": sorted(record["seed"] for record in wrong if not record["told"]),
        "right_told": sum(bool(record["told"]) for record in right),
        "wrong_kinds": collections.Counter(record["kind"] for record in wrong),
        "wrong_seeds": sorted(record["seed"] for record in wrong),
        "largest_right_error": max((r["gradient_error"] for r in right), default=0.0),
        "largest_right_leaf_error": max((r["leaf_error"] for r in right), default=0.0),
        "refusals": collections.Counter(text.splitlines()[0][:160] for text in refused),
        "seconds": round(sum(record.get("seconds", 0.0) for record in results), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", help="these seeds, separated by commas")
    parser.add_argument("--constrain", default="user,auto", help="auto, user or found, by commas")
    parser.add_argument("--kind", default="", help="kinds of models, separated by commas")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", help="a file for one line of JSON for each program")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    modes = flags.constrain.split(",")
    os.environ["JAX_PLATFORMS"] = "cpu"
    # The partitioner warns of what it replicates.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    os.environ["JAX_TRACEBACK_FILTERING"] = "off"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
    if flags.worker:
        return work(map(int, flags.only.split(",")), modes)
    kinds = [kind for kind in flags.kind.split(",") if kind]
    seeds = choose_seeds(flags.seed, flags.programs, kinds)
    if flags.only:
        seeds = [int(seed) for seed in flags.only.split(",")]
    print(json.dumps(measure(seeds, modes, flags.workers, flags.out)))


def measure(seeds: list[int], modes: list[str], workers: int, out: str | None) -> dict[str, Any]:
    """Runs programs, says how each ended, and returns the summary of each mode."""
    results: list[dict[str, Any]] = []

    def share(part: list[int]) -> None:
        for record in supervise(part, modes):
            results.append(record)
            print(describe(record), flush=True)
            if out:
                with open(out, "a") as file:
                    file.write(json.dumps(record) + "\n")

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(share, seeds[i::workers]) for i in range(workers)]:
            future.result()
    return {mode: summarize([r for r in results if r["constrain"] == mode]) for mode in modes}


if __name__ == "__main__":
    main()
