"""Answers per second of `sl.Engine` against transformers' continuous batching and vLLM, in one run.

A Llama of 134 million parameters with random weights continues prompts of 64 to 191 random tokens
by 64 tokens each, greedily, in float32 on the cores of this machine, or with JAX_PLATFORMS=cuda in
either dtype on its GPU. All read the same folder, and take turns; the figures are medians of the
rounds. vLLM runs on a CPU, uncompiled and in a process of its own, which is stopped while others
are measured, and ends before the other measurements.

- tokens_per_second: tokens of answers over wall time, their `ratio` to transformers, and with
  `--vllm` their `vllm_ratio`;
- host_share: of a step, the time that neither runs the program nor waits for it, without overlap;
- programs: compiled steps, and how many more after the warm-up;
- prefix_ratio: time to the first token of a prompt of 1,024 tokens of which 90 % are in the cache,
  over that of a new one;
- stall_ratio: 99th percentile of the time of a step while a prompt of 2,048 tokens is read in
  chunks of 64, over that of steps that only decode, with 8 sequences that run: of the steps of 5
  such prompts, as of one it would be the longest step;
- resident_mb: resident memory beyond weights and pages, before transformers is imported.

    python benchmarks/serving.py [--requests 64] [--rounds 3] [--layers 12] [--embed 768]
        [--vocab 32000] [--dtype float32] [--slots 32] [--without-transformers]
        [--vllm PYTHON]

The last line is JSON.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import numpy as np
from flax import nnx

import shardlib as sl
from shardlib.registry import DataSpec
from shardlib_models.transformer import make
from shardlib_models.transformer_config import TransformerConfig

ANSWER = 64
CONTEXT = 2304
STALLS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--embed", type=int, default=768, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--slots", type=int, default=32, help="sequences that run at a time")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python that has vLLM")
    asked = parser.parse_args()
    if asked.vllm is not None and jax.default_backend() != "cpu":
        parser.error("--vllm compares on a CPU alone: set JAX_PLATFORMS=cpu")
    config = TransformerConfig(
        embed_dim=asked.embed,
        num_layers=asked.layers,
        num_heads=asked.embed // 64,
        num_kv_heads=asked.embed // 64,
        mlp_dim=asked.embed * 8 // 3,
        vocab_size=asked.vocab,
        max_positions=4096,
    )
    with tempfile.TemporaryDirectory() as folder:
        sl.hf.save(make(config, DataSpec(), nnx.Rngs(0)), folder)
        figures = measured(Path(folder), asked)
    print(json.dumps(figures))


def measured(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(64, 192, asked.requests)
    prompts = [rng.integers(0, asked.vocab, size).tolist() for size in sizes]
    loaded = sl.hf.load(folder, dtype=asked.dtype)
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(loaded.model)))
    pages = asked.slots * 40
    engine = sl.Engine(loaded, context=CONTEXT, slots=asked.slots, pages=pages, prefix_cache=False)
    # As a server does: the engine has kernels of its own.
    del loaded
    engine.warm_up()
    programs = engine.stats().num_compiled
    ours, theirs, of_vllm = [rate(lambda: [len(a.ids) for a in ours_of(engine, prompts)])], [], []
    held = weights + sum(x.nbytes for x in jax.tree.leaves(engine._state.pages))
    beyond = resident() - (held if jax.default_backend() == "cpu" else 0)
    peer = None if asked.without_transformers else Peer(folder, asked.dtype)
    vllm = None if asked.vllm is None else VllmPeer(folder, prompts, asked)
    for _ in range(asked.rounds):
        ours.append(rate(lambda: [len(a.ids) for a in ours_of(engine, prompts)]))
        if peer is not None:
            theirs.append(rate(lambda: peer.counts(prompts)))
        if vllm is not None:
            of_vllm.append(rate(vllm.counts))
        print(f"tokens per second: {ours[-1]}, transformers {theirs[-1:]}, vLLM {of_vllm[-1:]}")
    if vllm is not None:
        vllm.end()
    loaded = sl.hf.load(folder, dtype=asked.dtype)
    figures: dict[str, Any] = {
        "tokens_per_second": statistics.median(ours),
        "programs": programs,
        "programs_later": engine.stats().num_compiled - programs,
        "resident_mb": round(beyond / 2**20),
        "host_share": host_share(loaded, prompts[:32]),
        "stall_ratio": stall_ratio(loaded, asked.vocab, rng),
        "prefix_ratio": prefix_ratio(loaded, asked.vocab, rng),
    }
    if theirs:
        figures["transformers_tokens_per_second"] = statistics.median(theirs)
        figures["ratio"] = round(statistics.median(ours) / statistics.median(theirs), 2)
    if of_vllm:
        figures["vllm_tokens_per_second"] = statistics.median(of_vllm)
        figures["vllm_ratio"] = round(statistics.median(ours) / statistics.median(of_vllm), 2)
    return figures


def ours_of(engine: sl.Engine, prompts: list[list[int]]) -> Any:
    return engine.generate(prompts, max_tokens=ANSWER, ignore_end=True)


def rate(answer: Any) -> float:
    start = time.perf_counter()
    counts = answer()
    return round(sum(counts) / (time.perf_counter() - start), 1)


class Peer:
    """Continuous batching of transformers."""

    def __init__(self, folder: Path, dtype: str):
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        torch.set_num_threads(os.cpu_count() or 1)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model = model.eval().to("cpu" if jax.default_backend() == "cpu" else "cuda")
        self.config = GenerationConfig(
            max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0
        )

    def counts(self, prompts: list[list[int]]) -> list[int]:
        found = self.model.generate_batch(prompts, generation_config=self.config)
        return [len(one.generated_tokens) for one in found.values()]


class VllmPeer:
    """vLLM in a process of its own."""

    def __init__(self, folder: Path, prompts: list[list[int]], asked: argparse.Namespace):
        (folder / "prompts.json").write_text(json.dumps(prompts))
        script = Path(__file__).with_name("vllm_peer.py")
        sizes = map(str, (asked.slots, CONTEXT, ANSWER))
        self._process = subprocess.Popen(
            [asked.vllm, script, folder, folder / "prompts.json", asked.dtype, *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={name: x for name, x in os.environ.items() if name != "PYTHONPATH"},
        )
        self._said("ready")
        self.counts()

    def counts(self) -> list[int]:
        self._process.send_signal(signal.SIGCONT)
        print("go", file=self._process.stdin, flush=True)
        counts = json.loads(self._said("["))
        # Its threads spin while they wait, and take a core from the others.
        self._process.send_signal(signal.SIGSTOP)
        return counts

    def end(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.communicate()

    def _said(self, start: str) -> str:
        for line in self._process.stdout or ():
            if line.startswith(start):
                return line
        raise SystemExit(f"vLLM ended with {self._process.wait()}; see its messages above.")


def host_share(loaded: Any, prompts: list[list[int]]) -> float:
    engine = sl.Engine(loaded, context=512, pages=32 * 40, overlap=False)
    engine.warm_up()
    run, waited = engine._programs.run, [0.0]

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = jax.block_until_ready(run(*arguments))
        waited[0] += time.perf_counter() - start
        return result

    engine._programs.run = timed  # type: ignore[method-assign]
    start = time.perf_counter()
    ours_of(engine, prompts)
    return round(1 - waited[0] / (time.perf_counter() - start), 4)


def stall_ratio(loaded: Any, vocab: int, rng: np.random.Generator) -> float:
    engine = sl.Engine(loaded, context=CONTEXT, pages=32 * 40, chunk=64)
    engine.warm_up()
    idle, busy = [], []
    for _ in range(STALLS):
        for _ in range(8):
            engine.submit(rng.integers(0, vocab, 64).tolist(), max_tokens=200, ignore_end=True)
        for _ in range(20):
            engine.step()
        idle += [step_seconds(engine) for _ in range(40)]
        late = engine.submit(rng.integers(0, vocab, 2048).tolist(), max_tokens=1, ignore_end=True)
        while not late.finished:
            busy.append(step_seconds(engine))
        while engine.step():
            pass
    return round(float(np.percentile(busy, 99) / np.percentile(idle, 99)), 2)


def step_seconds(engine: sl.Engine) -> float:
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def prefix_ratio(loaded: Any, vocab: int, rng: np.random.Generator) -> float:
    engine = sl.Engine(loaded, context=CONTEXT, pages=32 * 40)
    engine.warm_up()

    def first_token_seconds(prompt: list[int]) -> float:
        start = time.perf_counter()
        engine.generate([prompt], max_tokens=1, ignore_end=True)
        return time.perf_counter() - start

    ratios = []
    for _ in range(5):
        stem = rng.integers(0, vocab, 928).tolist()
        prompts = [[*stem, *rng.integers(0, vocab, 96).tolist()] for _ in range(2)]
        new, cached = map(first_token_seconds, prompts)
        ratios.append(cached / new)
    return round(statistics.median(ratios), 3)


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
