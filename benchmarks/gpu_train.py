"""Training a Llama of 0.7 B parameters in bf16 on one GPU: shardlib, plain JAX and PyTorch.

Rows of 4,096 random tokens, the same model, loss and optimizer (AdamW, parameters in float32,
matmuls in bfloat16) for shardlib's training step, for the hand-written `plain_jax.py` and for
`torch_llama.py` under `torch.compile` with each of PyTorch's attentions; and shardlib's step once
more with its matmuls in fp8. Each runs in a process of its own, so that memory is released; a
step's time is the median over windows of steps. The rows of JAX keep what matmuls and attention
give (`--remat dots`) and recompute the rest, which `torch.compile` decides by itself.

MFU counts model FLOPs by the causal convention, 6 for each matmul weight and token and 12 for each
pair of positions that causal attention needs, head and dim; recomputation does not count. It is
taken over the dense bfloat16 peak of the chip.

    python benchmarks/gpu_train.py
    python benchmarks/gpu_train.py --dry-run          # tiny sizes, on the CPU

The last line is JSON: `rows`, and shardlib's tokens/s over the others' as `ratio_plain_jax` and
`ratio_torch` (PyTorch's fastest attention).
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from plain_jax import PlainConfig

MFU_CONVENTION = "causal attention, model FLOPs without recomputation, dense bf16 peak"
TINY = {"layers": 2, "embed": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 96}
TINY |= {"vocab": 256, "batch": 2, "length": 32, "warmup": 2, "steps": 2, "windows": 2}
JAX_ROWS = ("shardlib", "plain_jax", "shardlib_fp8")
HERE = Path(__file__).parent


def plain_config(flags: argparse.Namespace) -> PlainConfig:
    return PlainConfig(
        num_layers=flags.layers,
        embed_dim=flags.embed,
        num_heads=flags.heads,
        num_kv_heads=flags.kv_heads,
        head_dim=flags.head_dim,
        mlp_dim=flags.mlp,
        vocab_size=flags.vocab,
        dtype="bfloat16",
        remat=flags.remat,
        attention="xla" if flags.dry_run else flags.jax_attention,
    )


def train_in_jax(flags: argparse.Namespace) -> dict[str, Any]:
    """Trains on random tokens, by shardlib or by hand; returns the figures of this process."""
    import jax

    from plain_jax import make_mesh, random_batch
    from step_overhead import plain_trainer, shardlib_trainer

    config, mesh = plain_config(flags), make_mesh("data", jax.devices()[:1])
    if flags.row == "plain_jax":
        trainer = plain_trainer(config, mesh, steps=1000)
    else:
        precision = "fp8" if flags.row == "shardlib_fp8" else None
        sizes = {"length": flags.length, "steps": 1000}
        trainer = shardlib_trainer(config, mesh, **sizes, precision=precision)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    batch = jax.device_put(random_batch(config, flags.batch, flags.length), rows)
    state, step = trainer.state, trainer.step
    trainer.state = None  # Its buffers are donated to the first step.
    losses, windows = [], []
    for _ in range(flags.warmup):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    for _ in range(flags.windows):
        start = time.perf_counter()
        for _ in range(flags.steps):
            state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        windows.append((time.perf_counter() - start) / flags.steps)
    seconds = statistics.median(windows)
    device = jax.devices()[0]
    return {
        "tokens_per_second": flags.batch * flags.length / seconds,
        "step_seconds": seconds,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "device": device.device_kind,
        "versions": f"jax {jax.__version__}",
    }


def model_facts(flags: argparse.Namespace) -> tuple[float, float]:
    """Returns the number of parameters and the model FLOPs of a step."""
    from shardlib.cost.transformer.flops import step_flops
    from shardlib.cost.workload import Job
    from shardlib.plan.api import of_dims
    from shardlib.registry import DataSpec
    from shardlib_models.transformer import FAMILY

    config = plain_config(flags)
    e, d = config.embed_dim, config.head_dim
    attention = 2 * e * d * (config.num_heads + config.num_kv_heads)
    layer = attention + 3 * e * config.mlp_dim + 2 * e
    num_params = config.num_layers * layer + 2 * e * config.vocab_size + e
    model = FAMILY.config(
        num_layers=config.num_layers,
        embed_dim=e,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=d,
        mlp_dim=config.mlp_dim,
    )
    data = DataSpec(vocab_size=config.vocab_size, sequence_length=flags.length)
    job = Job(of_dims(FAMILY.dims(model, data)), flags.length, flags.batch)
    return num_params, step_flops(job, "causal")


def peak_flops(device: str) -> float | None:
    """Returns the dense bfloat16 FLOP/s of a device by its kind; None where it is not known."""
    from types import SimpleNamespace

    from shardlib.hardware import chip_for

    chip = chip_for(SimpleNamespace(device_kind=device))
    return chip.flops_per_device("bf16") if chip else None


def run(command: list[str], flags: argparse.Namespace) -> dict[str, Any]:
    """Runs one row in its own process; returns its figures, or why there are none."""
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", **os.environ}
    if flags.dry_run:
        environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    if flags.xla_flags:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags.xla_flags}".strip()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        print(done.stderr, file=sys.stderr)
        return {"error": lines[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def contenders(flags: argparse.Namespace) -> dict[str, tuple[list[str], str]]:
    """Returns the command and the attention of each row by name."""
    sizes = [f"--{name.replace('_', '-')}={getattr(flags, name)}" for name in TINY]
    sizes.append(f"--remat={flags.remat}")
    own = [sys.executable, str(HERE / "gpu_train.py"), *sizes]
    own += [f"--jax-attention={flags.jax_attention}"] + ["--dry-run"] * flags.dry_run
    attention = "xla" if flags.dry_run else flags.jax_attention
    rows = {name: ([*own, f"--row={name}"], attention) for name in JAX_ROWS}
    if importlib.util.find_spec("torch") is None:
        return rows
    kinds = ["math"] if flags.dry_run else flags.torch_attention.split(",")
    torch = [sys.executable, str(HERE / "torch_llama.py"), *sizes]
    torch.append("--mode=eager" if flags.dry_run else f"--mode={flags.torch_mode}")
    return rows | {f"torch_{kind}": ([*torch, f"--attention={kind}"], kind) for kind in kinds}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the rows as aligned text."""
    head = ["", "tokens/s", "step s", "MFU", "peak GiB", "loss", "attention", "remat", "XLA flags"]
    lines = [head]
    for name, row in rows.items():
        if "error" in row:
            lines.append([name, row["error"]])
            continue
        mfu, peak = row["mfu"], row["peak_bytes"]
        lines.append(
            [
                name,
                f"{row['tokens_per_second']:,.0f}",
                f"{row['step_seconds']:.4f}",
                "-" if mfu is None else f"{mfu:.1%}",
                "-" if peak is None else f"{peak / 2**30:.1f}",
                f"{row['first_loss']:.3f} > {row['last_loss']:.3f}",
                row["attention"],
                row["remat"],
                row["xla_flags"],
            ]
        )
    full = [line for line in lines if len(line) == len(head)]
    widths = [max(len(line[i]) for line in full) for i in range(len(head))]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def compare(flags: argparse.Namespace) -> dict[str, Any]:
    """Runs every row and returns the figures."""
    num_params, flops = model_facts(flags)
    rows: dict[str, dict[str, Any]] = {}
    for name, (command, attention) in contenders(flags).items():
        print(name, end=" ", flush=True)
        row = run(command, flags)
        print(json.dumps(row), flush=True)
        if "error" not in row:
            peak = peak_flops(row["device"])
            row["mfu"] = flops / row["step_seconds"] / peak if peak else None
        in_jax = not name.startswith("torch")
        xla_flags = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), flags.xla_flags]))
        own = flags.remat if in_jax or flags.remat == "full" else "compiler"
        used = {"attention": attention, "remat": own}
        rows[name] = row | used | {"xla_flags": (xla_flags or "none") if in_jax else "-"}
    if not any(name.startswith("torch") for name in rows):
        rows["torch"] = {"error": "absent: PyTorch is not installed"}
    print(f"{num_params / 1e9:.3f} B parameters, {flags.batch} x {flags.length} tokens a step")
    print(f"MFU: {MFU_CONVENTION}")
    print(table(rows))
    speeds = {name: row.get("tokens_per_second") for name, row in rows.items()}
    torch = max((v for k, v in speeds.items() if k.startswith("torch") and v), default=None)
    figures = {"num_params": num_params, "tokens_per_step": flags.batch * flags.length}
    figures |= {"mfu_convention": MFU_CONVENTION, "rows": rows}
    for key, other in {"ratio_plain_jax": speeds["plain_jax"], "ratio_torch": torch}.items():
        ours = speeds["shardlib"]
        figures[key] = round(ours / other, 4) if ours and other else None
    return figures


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the flags of a command line, by default this process's own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 24, "embed": 1536, "heads": 12, "kv_heads": 4, "head_dim": 128, "mlp": 4096}
    sizes |= {"vocab": 32768, "batch": 4, "length": 4096, "warmup": 5, "steps": 10, "windows": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="dots")
    parser.add_argument("--jax-attention", choices=("cudnn", "xla"), default="cudnn")
    parser.add_argument("--torch-attention", default="flash,cudnn,flex", help="each is a row")
    modes = "of torch.compile: max-autotune-no-cudagraphs tries kernels for minutes"
    parser.add_argument("--torch-mode", default="default", help=modes)
    parser.add_argument("--xla-flags", default="", help="added to XLA_FLAGS of the JAX rows")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--row", choices=JAX_ROWS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    flags = parse()
    if flags.row:
        print(json.dumps(train_in_jax(flags)))
        return
    if flags.dry_run:
        vars(flags).update(TINY)
    print(json.dumps(compare(flags)))


if __name__ == "__main__":
    main()
