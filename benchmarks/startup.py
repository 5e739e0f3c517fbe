"""What shardlib adds to the time before training starts, against plain JAX.

Import: `import shardlib` after `import jax` (and then every public name, which are imported when
first used), each in a fresh interpreter. First step: from the command to the line of the first
finished step, `shardlib train` against `plain_jax.py` on the same tokens, with the same model,
optimizer, mesh and devices. Tokens are cached for both and programs for neither; the two alternate.

    python benchmarks/startup.py

The last line is JSON: `import_seconds`, and `first_step_ratio`, the median over pairs of shardlib's
time over the baseline's.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
CONFIG = """
model: {num_layers: 4, embed_dim: 128, num_heads: 4, mlp_dim: 344}
data: {path: "builtin:python", sequence_length: 256}
optimizer: {name: adamw, learning_rate: 3.0e-3, weight_decay: 0.1, clip_norm: 1.0}
train: {steps: 1, global_batch: 16, sample_length: 0, compilation_cache: null}
eval: {every_steps: 0}
checkpoint: {enabled: false}
"""
IMPORT = """
import time
import jax
start = time.perf_counter()
import shardlib
lazy = time.perf_counter()
for name in shardlib.__all__:
    getattr(shardlib, name)
print(lazy - start, time.perf_counter() - start)
"""
TOKENS = """
import sys
import numpy as np
from shardlib.config import load
from shardlib.data import open_data
from shardlib.run.config import RunConfig
config = load(RunConfig, sys.argv[1])
rows = open_data(config.data, global_batch=64, seed=0, split="train").read(0, 0, 64)
rows["tokens"].astype(np.uint16).tofile(sys.argv[2])
"""
FIRST_STEP = re.compile(r"\s*step\s+1\b")


def environment() -> dict[str, str]:
    """This environment, without a cache of compiled programs."""
    return {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}


def import_seconds() -> tuple[float, float]:
    """Returns what `import shardlib` adds to `import jax`, and what all of its names add."""
    lines = subprocess.run(
        [sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True
    ).stdout.split()
    return float(lines[0]), float(lines[1])


def seconds_to_first_step(command: list[str]) -> float:
    """Returns the seconds from starting a command to its line of step 1.

    Raises:
        SystemExit: If the command ends without such a line; shows what it printed.
    """
    start, seconds, lines = time.perf_counter(), None, []
    with subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if seconds is None and FIRST_STEP.match(line):
                seconds = time.perf_counter() - start
    if seconds is None or process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{''.join(lines)}")
    return seconds


def commands(directory: Path, devices: int) -> tuple[list[str], list[str]]:
    """Returns the two commands, after filling the cache of tokens."""
    tokens, config = directory / "tokens", directory / "config.yaml"
    config.write_text(CONFIG, encoding="utf-8")
    subprocess.run([sys.executable, "-c", TOKENS, str(config), str(tokens)], check=True)
    ours = [sys.executable, "-m", "shardlib", "train", str(config)]
    ours += [f"train.cpu_devices={devices}", f"mesh=data={devices}"]
    plain = [sys.executable, str(HERE / "plain_jax.py"), "--steps=1", f"--tokens={tokens}"]
    plain += [f"--devices={devices}", "--strategy=data"]
    return ours, plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--imports", type=int, default=7, help="interpreters for the import")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of first steps")
    parser.add_argument("--devices", type=int, default=8)
    flags = parser.parse_args()
    lazy, everything = zip(*(import_seconds() for _ in range(flags.imports)), strict=True)
    ours, plain = [], []
    with tempfile.TemporaryDirectory() as directory:
        mine, theirs = commands(Path(directory), flags.devices)
        for index in range(flags.pairs + 1):  # The first pair warms the file cache.
            fresh = [*mine, f"run_dir={directory}/run{index}"]
            ours.append(seconds_to_first_step(fresh))
            plain.append(seconds_to_first_step(theirs))
            print(f"first step: shardlib {ours[-1]:.2f} s, plain {plain[-1]:.2f} s", flush=True)
    ratios = [mine / theirs for mine, theirs in zip(ours[1:], plain[1:], strict=True)]
    figures = {
        "import_seconds": statistics.median(lazy),
        "import_all_names_seconds": statistics.median(everything),
        "first_step_ratio": statistics.median(ratios),
        "shardlib_first_step_seconds": statistics.median(ours[1:]),
        "plain_first_step_seconds": statistics.median(plain[1:]),
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
