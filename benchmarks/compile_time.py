"""Compile time of a training step, by number of layers and of devices.

The layers of a transformer are one loop and the devices one program, so neither should cost much:
the step is traced, lowered and compiled for 8 and 64 layers on 8 virtual CPU devices, and for 8
layers on 256. Nothing is allocated or run. Each case has a process of its own, in which the step is
compiled once to warm up and then a few times more, from scratch and without a persistent cache.
What counts is the CPU time of all threads of the process, which other work on the machine disturbs
less than the time on the clock; the figures are medians.

    python benchmarks/compile_time.py

The last line is JSON: seconds of tracing, of lowering and of compiling for each case, and
`layers_ratio` and `devices_ratio`, the larger case over the smaller one.
"""

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import Any

PARTS = ("trace", "lower", "compile")


def measure(layers: int, devices: int, flags: argparse.Namespace) -> dict[str, float]:
    """Returns the median CPU-seconds of each part of a compilation, and of the whole."""
    import jax
    import jax.numpy as jnp
    import optax

    import shardlib as sl
    from shardlib.registry import DataSpec
    from shardlib_models.transformer import FAMILY

    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_compilation_cache", False)
    config = FAMILY.config(num_layers=layers, embed_dim=flags.embed, num_heads=4, remat=flags.remat)
    data = DataSpec(vocab_size=256, sequence_length=flags.length)
    tokens = jax.ShapeDtypeStruct((flags.batch, flags.length), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    times: list[dict[str, float]] = []
    with sl.use(sl.make_mesh(flags.mesh), sl.rules.STANDARD):
        state = sl.abstract_state(
            lambda rngs: FAMILY.make(config, data, rngs), optax.adamw(1e-3), precision="bf16"
        )
        for _ in range(flags.repeats + 1):
            jax.clear_caches()
            loss = functools.partial(FAMILY.loss, train=True)
            step = sl.make_train_step(loss, precision="bf16")
            marks = [time.process_time()]
            traced = step.program(state, batch).trace(state, batch)
            marks.append(time.process_time())
            lowered = traced.lower()
            marks.append(time.process_time())
            lowered.compile()
            marks.append(time.process_time())
            spent = [after - before for before, after in itertools.pairwise(marks)]
            times.append(dict(zip(PARTS, spent, strict=True)) | {"total": sum(spent)})
    return {part: statistics.median(t[part] for t in times[1:]) for part in (*PARTS, "total")}


def in_own_process(layers: int, devices: int, arguments: list[str]) -> dict[str, float]:
    """Returns what `measure` finds in a process of its own."""
    case = ["--case", str(layers), str(devices)]
    command = [sys.executable, __file__, *case, *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs=2, default=(8, 64))
    parser.add_argument("--devices", type=int, nargs=2, default=(8, 256))
    parser.add_argument("--mesh", default="data=-1,fsdp=2,tensor=2")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--embed", type=int, default=256)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--repeats", type=int, default=5, help="timed compilations of each case")
    parser.add_argument("--case", type=int, nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.case:
        layers, devices = flags.case
        print(json.dumps(measure(layers, devices, flags)))
        return
    (few, many), (small, large) = flags.layers, flags.devices
    figures: dict[str, Any] = {}
    totals = []
    for layers, devices in ((few, small), (many, small), (few, large)):
        found = in_own_process(layers, devices, sys.argv[1:])
        name = f"{layers}_layers_{devices}_devices"
        print(f"{name}: " + ", ".join(f"{part} {found[part]:.3f} s" for part in found))
        figures |= {f"{name}_{part}_seconds": round(found[part], 4) for part in found}
        totals.append(found["total"])
    figures["layers_ratio"] = round(totals[1] / totals[0], 3)
    figures["devices_ratio"] = round(totals[2] / totals[0], 3)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
