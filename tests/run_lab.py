"""Tiny runs: one that all tests of a folder start from, and the means to make others."""

import contextlib
import dataclasses
import io
import json
import pathlib
import random
import shutil
import subprocess
import sys

import pytest
from jax.experimental.compilation_cache import compilation_cache

from shardlib import cli, run
from shardlib.config import load
from shardlib.run import RunConfig

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "birds", "sing", "trees")

CONFIG = """
run_dir: {run_dir}
model:
  name: transformer
  num_layers: 2
  embed_dim: 32
  num_heads: 4
  mlp_dim: 64
  vocab_size: 264
  dropout: 0.1
data: {{path: {text}, tokenizer: bytes, sequence_length: 16, eval_fraction: 0.2, eval_steps: 2}}
# The number of steps takes no part in the program, which is compiled once for all runs.
optimizer: {{learning_rate: 1.0e-2, warmup_steps: 2, schedule: constant}}
train:
  steps: 20
  global_batch: 8
  cpu_devices: 8
  sample_prompt: "the "
  sample_length: 8
  compilation_cache: {compiled}
mesh: fsdp=8
checkpoint: {{every_steps: 10}}
eval: {{every_steps: 10}}
"""


@dataclasses.dataclass(frozen=True)
class Lab:
    """Where tiny runs are made: their text, their config file, their compiled programs."""

    root: pathlib.Path
    config_file: pathlib.Path

    def config(self, run_dir, *overrides) -> RunConfig:
        return load(RunConfig, self.config_file, [f"run_dir={run_dir}", *overrides])

    def load(self, path) -> RunConfig:
        return load(RunConfig, path, [f"train.compilation_cache={self.root / 'compiled'}"])

    def command(self, *words):
        """The command line as a process of its own."""
        return [sys.executable, "-W", "error", "-m", "shardlib", *map(str, words)]

    def call(self, *words):
        """Runs the command line in this process, in which JAX has started and has 8 devices."""
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
            pytest.raises(SystemExit) as exited,
        ):
            cli.main(list(map(str, words)))
        code = exited.value.code or 0
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def shardlib(self, *words, **options):
        """Runs the command line to its end as a process of its own."""
        return subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            **options,
        )


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run of 20 steps on fsdp=8, with checkpoints at 10 and 20, and what it printed."""

    run_dir: pathlib.Path
    out: str
    result: run.TrainResult

    def copy(self, run_dir, *, at=20):
        """The run as it was after a step."""
        shutil.copytree(self.run_dir, run_dir)
        if at == 10:
            shutil.rmtree(run_dir / "checkpoints" / "00000020")
        return run_dir


def read_rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_losses(run_dir):
    return [row["loss"] for row in read_rows(run_dir)]


@pytest.fixture
def rows():
    return read_rows


@pytest.fixture
def losses():
    return read_losses


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    root = tmp_path_factory.mktemp("lab")
    text, compiled = root / "text", root / "compiled"
    text.mkdir()
    rng = random.Random(0)
    for index in range(12):
        lines = [" ".join(rng.choices(WORDS, k=8)) for _ in range(20)]
        (text / f"{index}.txt").write_text("\n".join(lines) + "\n")
    config_file = root / "tiny.yaml"
    config_file.write_text(CONFIG.format(run_dir=root / "run", text=text, compiled=compiled))
    return Lab(root, config_file)


@pytest.fixture(scope="session", autouse=True)
def caches(lab):
    """Programs are compiled once for all runs of a folder, and text is read once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDLIB_CACHE", str(lab.root / "cache"))
        yield


@pytest.fixture(scope="session")
def finished(lab, caches):
    compilation_cache.reset_cache()  # JAX asks for its directory once.
    run_dir = lab.root / "finished"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        result = run.train(lab.config(run_dir))
    return Finished(run_dir, out.getvalue(), result)
