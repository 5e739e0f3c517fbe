"""What a fault costs a run of two processes, in seconds, against its first start on this machine.

- stop: from SIGTERM to one of the two until both have saved the same step and ended.
- restart: from SIGKILL to one of the two, under `shardlib launch --restarts`, until the group has
  written a step that it had not written before.
- hang: from freezing one of the two (SIGSTOP) until the other has ended, less the limit of its
  watchdog, which it has to wait for.
- start: from the command to its first step, with compiled programs kept from before.

    python benchmarks/recovery.py

The last line is JSON: medians of the seconds, and `restart_over_start`.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

CONFIG = """
model: {num_layers: 2, embed_dim: 64, num_heads: 4, mlp_dim: 128, vocab_size: 264}
data: {path: "builtin:python", tokenizer: bytes, sequence_length: 64}
train: {steps: 1000000, global_batch: 8, sample_length: 0, cpu_devices: 2, log_every: 1000}
mesh: fsdp=2
eval: {every_steps: 0}
checkpoint: {every_steps: 10}
"""
HANG_LIMIT_SECONDS = 3.0


class Group:
    """A run of two processes under a launcher; none of them outlives the block."""

    def __init__(self, config: Path, run_dir: Path, *words: str):
        launch = ["launch", "--processes=2", "--restarts=1", "--"]
        train = ["train", str(config), f"run_dir={run_dir}", *words]
        self._metrics, self._output = run_dir / "metrics.jsonl", run_dir.with_suffix(".txt")
        with open(self._output, "w") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "shardlib", *launch, *train], stdout=output, stderr=output
            )

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        if self.launcher.poll() is None:
            children = self.processes()
            self.launcher.kill()
            for process in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        self.launcher.wait()

    def processes(self) -> list[int]:
        """Returns the ids of the processes that the launcher has started."""
        pid = self.launcher.pid
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def last_step(self) -> int:
        """Returns the last step that is written; 0 before there is one."""
        if not self._metrics.exists():
            return 0
        *lines, _ = self._metrics.read_text().split("\n")
        return json.loads(lines[-1])["step"] if lines else 0

    def seconds_until(self, is_over: Callable[[], bool]) -> float:
        """Waits until something holds.

        Raises:
            SystemExit: If the launcher ends before; shows what it printed.
        """
        start = time.perf_counter()
        while not is_over():
            if self.launcher.poll() is not None:
                raise SystemExit(f"the run has ended:\n{self._output.read_text()}")
            time.sleep(0.005)
        return time.perf_counter() - start

    def seconds_to_end(self, code: int) -> float:
        """Waits for the launcher.

        Raises:
            SystemExit: If it ends with another code.
        """
        start = time.perf_counter()
        if self.launcher.wait() != code:
            raise SystemExit(f"not the exit code {code}:\n{self._output.read_text()}")
        return time.perf_counter() - start


def measure(config: Path, root: Path) -> dict[str, float]:
    """Returns the seconds of one start, restart, stop and hang."""
    with Group(config, root / "run") as group:
        found = {"start": group.seconds_until(lambda: group.last_step() >= 1)}
        group.seconds_until(lambda: group.last_step() >= 25)
        os.kill(random.choice(group.processes()), signal.SIGKILL)
        time.sleep(0.1)
        before = group.last_step()
        found["restart"] = 0.1 + group.seconds_until(lambda: group.last_step() > before)
        os.kill(random.choice(group.processes()), signal.SIGTERM)
        found["stop"] = group.seconds_to_end(0)
    with Group(config, root / "hung", f"watchdog.step={HANG_LIMIT_SECONDS}") as group:
        group.seconds_until(lambda: group.last_step() >= 5)
        first, second = sorted(group.processes())
        os.kill(second, signal.SIGSTOP)
        seconds = group.seconds_until(lambda: first not in group.processes())
        found["hang"] = seconds - HANG_LIMIT_SECONDS
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    flags = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.yaml"
        config.write_text(CONFIG, encoding="utf-8")
        for index in range(flags.repeats + 1):  # The first compiles.
            root = Path(directory) / str(index)
            root.mkdir()
            rows.append(measure(config, root))
            print(", ".join(f"{k} {v:.2f} s" for k, v in rows[-1].items()), flush=True)
    medians = {
        f"{name}_seconds": statistics.median(row[name] for row in rows[1:]) for name in rows[0]
    }
    ratio = medians["restart_seconds"] / medians["start_seconds"]
    figures = {**medians, "restart_over_start": ratio}
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
