"""Checkpoints against the raw means: a plain fsync write, a plain copy, the size of the state.

For a state of bfloat16 parameters and two float32 moments, sharded over virtual CPU devices:

- save_over_raw: speed of a save that is waited for, over that of one `write` and `fsync` of the
  same bytes into the same directory, just before it;
- blocked_over_copy: seconds until an asynchronous save returns, over those of copying every shard;
- save_peak_over_state, restore_peak_over_state: the highest resident memory, over the state that
  the process holds anyhow, less what the process held without a state.

    python benchmarks/checkpoints.py [--directory DIR] [--megabytes 1024]

Saving and restoring run in processes of their own. The last line is JSON: medians over the repeats.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COLUMNS, LAYERS = 1024, 8


def abstract_state(megabytes: int, devices: int) -> dict[str, dict[str, Any]]:
    """Returns shapes with shardings; starts the devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import shardlib as sl

    jax.config.update("jax_num_cpu_devices", devices)
    sharding = NamedSharding(sl.make_mesh(f"fsdp={devices}"), PartitionSpec("fsdp"))
    # Two bytes of parameter and eight of moments.
    rows = megabytes * 2**20 // (LAYERS * 10 * COLUMNS) // devices * devices

    def layers(dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        struct = jax.ShapeDtypeStruct((rows, COLUMNS), dtype, sharding=sharding)
        return {str(number): struct for number in range(LAYERS)}

    return {
        "params": layers(jnp.bfloat16),
        "mu": layers(jnp.float32),
        "nu": layers(jnp.float32),
    }


def materialize(struct: Any) -> Any:
    """Makes the state of rows of random numbers, repeated: quick to make, and no page is shared."""
    import jax
    import numpy as np

    seeds = iter(range(1000))

    def make(leaf: Any) -> Any:
        row = np.random.default_rng(next(seeds)).standard_normal((1, COLUMNS)).astype(leaf.dtype)

        def shard(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(leaf.shape[0])
            return np.broadcast_to(row, (stop - start, COLUMNS)).copy()

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

    return jax.block_until_ready(jax.tree.map(make, struct))


def resident_bytes(field: str) -> int:
    """Returns VmRSS or VmHWM of this process."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{field}:\s+(\d+) kB", status)[0]) * 1024


def measured(work: Callable[[], Any]) -> tuple[float, int]:
    """Returns the seconds that something takes, and how far resident memory rises meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew.
    before, start = resident_bytes("VmRSS"), time.perf_counter()
    work()
    return time.perf_counter() - start, resident_bytes("VmHWM") - before


def warm(directory: Path) -> None:
    """Imports and threads are no part of what is measured."""
    import jax.numpy as jnp

    from shardlib.checkpoint import RunCheckpoints

    with RunCheckpoints(directory / "warm") as checkpoints:
        checkpoints.save(0, {"x": jnp.ones(8)}, {}, wait=True)
        checkpoints.restore(0, {"x": jnp.ones(8)})
    shutil.rmtree(directory / "warm")


def write_raw(path: Path, arrays: list[Any]) -> None:
    """Writes arrays one after the other, to the disk itself."""
    import numpy as np

    with open(path, "wb", buffering=0) as file:
        for array in arrays:
            file.write(array.view(np.uint8).data)
        os.fsync(file.fileno())


def save_part(flags: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Returns what each repeat of a save took."""
    import jax

    from shardlib.checkpoint import CheckpointConfig, RunCheckpoints

    state = materialize(abstract_state(flags.megabytes, flags.devices))
    with RunCheckpoints(directory, CheckpointConfig(keep=1)) as checkpoints:
        warm(directory)
        checkpoints.prepare(state)
        rows = [save_once(checkpoints, state, 2 * repeat) for repeat in range(flags.repeats)]
    return {"state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)), "rows": rows}


def save_once(checkpoints: Any, state: Any, step: int) -> dict[str, float]:
    """Returns seconds of the raw means and of two saves, and the peak of the first in bytes."""
    import jax
    import numpy as np

    leaves = jax.tree.leaves(state)
    host = [np.asarray(shard.data) for leaf in leaves for shard in leaf.addressable_shards]
    file = checkpoints.directory / "raw"
    os.sync()
    raw, _ = measured(lambda: write_raw(file, host))
    os.unlink(file)
    copied, _ = measured(lambda: [np.array(array) for array in host])
    os.sync()
    saved, peak = measured(lambda: checkpoints.save(step, state, {}, wait=True))
    blocked, _ = measured(lambda: checkpoints.save(step + 1, state, {}))
    checkpoints.wait()
    return {"raw": raw, "copy": copied, "save": saved, "blocked": blocked, "peak": peak}


def restore_part(flags: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Returns what a restore took."""
    from shardlib.checkpoint import RunCheckpoints

    struct = abstract_state(flags.megabytes, flags.devices)
    with RunCheckpoints(directory) as checkpoints:
        warm(directory)
        checkpoints.prepare(struct)
        step = checkpoints.steps()[-1]
        # Once: a second one would find memory that the first has not given back.
        seconds, peak = measured(lambda: checkpoints.restore(step, struct))
    return {"seconds": seconds, "peak": peak}


def child(flags: argparse.Namespace, part: str, directory: Path) -> dict[str, Any]:
    """Runs one part in a process of its own."""
    command = [sys.executable, __file__, f"--part={part}", f"--directory={directory}"]
    command += [f"--{n}={getattr(flags, n)}" for n in ("megabytes", "devices", "repeats")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def figures(saved: dict[str, Any], restored: dict[str, Any]) -> dict[str, float]:
    """Returns the medians and ratios of what the two parts found."""
    size, rows = saved["state_bytes"], saved["rows"]
    seconds = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {
        "state_bytes": size,
        "raw_bytes_per_second": size / seconds["raw"],
        "save_bytes_per_second": size / seconds["save"],
        "save_over_raw": statistics.median(row["raw"] / row["save"] for row in rows),
        "copy_seconds": seconds["copy"],
        "blocked_seconds": seconds["blocked"],
        "blocked_over_copy": statistics.median(row["blocked"] / row["copy"] for row in rows),
        "save_peak_over_state": 1 + max(row["peak"] for row in rows) / size,
        "restore_bytes_per_second": size / restored["seconds"],
        "restore_peak_over_state": restored["peak"] / size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", help="where to write; the directory of temporary files")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--part", choices=("save", "restore"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.part:
        part = {"save": save_part, "restore": restore_part}[flags.part]
        print(json.dumps(part(flags, Path(flags.directory))))
        return
    with tempfile.TemporaryDirectory(dir=flags.directory, prefix="checkpoints-") as directory:
        found = figures(
            child(flags, "save", Path(directory)), child(flags, "restore", Path(directory))
        )
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
