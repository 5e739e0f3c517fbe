"""Loading and saving of a Hugging Face folder against the plain way: whole files, stacked, placed.

A Llama of 1.24 billion bfloat16 parameters, the shape of Llama 3.2 1B, is loaded onto virtual CPU
devices with `fsdp`, whose memory counts as the host's, and saved again:

- anonymous_over_params: the highest anonymous memory beyond that before, over the parameters;
- mapped_tensors: the highest mapped memory beyond that before, over the largest tensor;
- mib_per_cpu_second: parameters over the CPU time of the process.

    python benchmarks/weights.py [--layers 16] [--mesh fsdp=8]

Each way runs in a process of its own. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SIZES = {
    "embed_dim": 2048,
    "num_heads": 32,
    "num_kv_heads": 8,
    "mlp_dim": 8192,
    "vocab_size": 128256,
    "max_positions": 8192,
    "rope_theta": 5e5,
    "tied_embeddings": True,
}


class Peak:
    """The highest anonymous and mapped memory of this process, in bytes beyond the start."""

    def __enter__(self) -> "Peak":
        self._start, self.anonymous, self.mapped = self._now(), 0, 0
        self._cpu, self._ended = time.process_time(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu_seconds = time.process_time() - self._cpu
        self._ended.set()
        self._thread.join()

    def _now(self) -> tuple[int, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        return int(fields["RssAnon"][0]) * 1024, int(fields["RssFile"][0]) * 1024

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            anonymous, mapped = self._now()
            self.anonymous = max(self.anonymous, anonymous - self._start[0])
            self.mapped = max(self.mapped, mapped - self._start[1])


def write_folder(folder: Path, layers: int) -> None:
    """Writes a folder of random weights, one tensor at a time."""
    import ml_dtypes
    import numpy as np
    from flax import nnx

    from shardlib.functional import functional
    from shardlib.hf.architecture import find_architecture
    from shardlib.hf.load import parameters
    from shardlib.hf.safetensors import write
    from shardlib.hf.tensor_table import TensorTable
    from shardlib.registry import DataSpec
    from shardlib_models.transformer import make
    from shardlib_models.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=layers, **SIZES)
    _, described = find_architecture("LlamaForCausalLM")
    module = functional(lambda rngs: make(config, DataSpec(), nnx.Rngs(0)))
    layout = TensorTable(described.table(config), parameters(module))
    dtype = np.dtype(ml_dtypes.bfloat16)
    specs = {name: (shape, dtype) for name, shape, _ in layout.tensors()}
    row = np.random.default_rng(0).standard_normal(8192).astype(dtype)
    values = ((name, np.resize(row, shape)) for name, (shape, _) in specs.items())
    folder.mkdir()
    write(folder, specs, values)
    (folder / "config.json").write_text(json.dumps(described.write(config)))


def place_plainly(folder: Path, mesh: str) -> Any:
    """Loads the whole files, stacks the layers on the host, and places the results."""
    import jax
    import numpy as np
    from safetensors.numpy import load_file

    import shardlib as sl

    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    names = sorted(
        {
            name.replace(f".{number}.", ".{}.")
            for name in tensors
            for number in name.split(".")
            if number.isdigit()
        }
        | tensors.keys()
    )
    stacked = {}
    for name in names:
        if "{}" in name:
            number = 0
            layers = []
            while name.format(number) in tensors:
                layers.append(tensors[name.format(number)].T)
                number += 1
            stacked[name] = np.stack(layers)
        elif not any(part.isdigit() for part in name.split(".")):
            stacked[name] = tensors[name]
    rules = sl.rules.FSDP
    return jax.block_until_ready(sl.shard(stacked, sl.make_mesh(mesh), rules))


def measure(way: str, folder: Path, mesh: str) -> dict[str, float]:
    """Returns the figures of one way, in this process."""
    import jax
    import jax.numpy as jnp

    import shardlib as sl
    from shardlib import hf
    from shardlib.hf.safetensors import Tensors

    sizes = [entry.num_bytes for entry in Tensors(folder).entries.values()]
    with sl.use(sl.make_mesh(mesh), sl.rules.FSDP):
        jax.block_until_ready(jnp.zeros(8))
        loaded = hf.load(folder) if way == "save" else None
        with Peak() as peak:
            if way == "plain":
                kept: Any = place_plainly(folder, mesh)
            elif way == "load":
                kept = hf.load(folder)
            else:
                kept = hf.save(loaded, folder.with_name("saved"))
        del kept
    return {
        "anonymous_over_params": round(peak.anonymous / sum(sizes), 3),
        "mapped_tensors": round(peak.mapped / max(sizes), 3),
        "mib_per_cpu_second": round(sum(sizes) / 2**20 / peak.cpu_seconds, 1),
    }


def main() -> None:
    """Runs every way in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--mesh", default="fsdp=8")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way == "write":
        return write_folder(Path(options.folder), options.layers)
    if options.way:
        return print(json.dumps(measure(options.way, Path(options.folder), options.mesh)))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    figures = {}
    with tempfile.TemporaryDirectory() as directory:
        for way in ("write", "load", "plain", "save"):
            command = [sys.executable, __file__, "--way", way, "--folder", f"{directory}/model"]
            command += ["--layers", str(options.layers), "--mesh", options.mesh]
            out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            if out.stdout:
                figures[way] = json.loads(out.stdout.splitlines()[-1])
                print(way, figures[way], file=sys.stderr)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
