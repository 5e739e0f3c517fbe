"""The Llama-style step of `plain_jax.py` in PyTorch, compiled by `torch.compile`.

The PyTorch baseline of `gpu_train.py`: the same sizes, initial distribution, loss and AdamW,
parameters in float32 and matmuls in bfloat16. Attention is PyTorch's own: `flash`, `cudnn` or
`math` of scaled-dot-product attention, or `flex`. Without a GPU it runs on the CPU.

    python benchmarks/torch_llama.py --attention flash

The last line is JSON: tokens/s, step time, peak memory, losses.
"""

import argparse
import json
import math
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.scale).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Block(nn.Module):
    """One layer over x [batch, length, embed]."""

    def __init__(self, flags: Any, attend: Any):
        super().__init__()
        e, d, self.head_dim, self.attend = flags.embed, flags.head_dim, flags.head_dim, attend
        self.attention_norm, self.mlp_norm = RMSNorm(e), RMSNorm(e)
        self.query = nn.Linear(e, flags.heads * d, bias=False)
        self.key = nn.Linear(e, flags.kv_heads * d, bias=False)
        self.value = nn.Linear(e, flags.kv_heads * d, bias=False)
        self.out = nn.Linear(flags.heads * d, e, bias=False)
        self.gate = nn.Linear(e, flags.mlp, bias=False)
        self.up = nn.Linear(e, flags.mlp, bias=False)
        self.down = nn.Linear(flags.mlp, e, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        query, key, value = (
            projection(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        y = self.attend(rotate(query, cos, sin), rotate(key, cos, sin), value)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens and targets [batch, length] in, the mean cross-entropy out."""

    def __init__(self, flags: Any, attend: Any):
        super().__init__()
        self.recompute = flags.remat == "full"
        self.token_embedding = nn.Embedding(flags.vocab, flags.embed)
        self.layers = nn.ModuleList(Block(flags, attend) for _ in range(flags.layers))
        self.final_norm = RMSNorm(flags.embed)
        self.head = nn.Linear(flags.embed, flags.vocab, bias=False)
        exponents = torch.arange(0, flags.head_dim, 2) / flags.head_dim
        angles = torch.arange(flags.length)[:, None] * 10_000.0 ** -exponents[None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        residual = 0.02 / math.sqrt(2 * flags.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                is_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=residual if is_residual else 0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Under autocast an embedding stays in float32; the residual stream is to be in bfloat16.
        x = self.token_embedding(tokens).to(torch.bfloat16)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = layer(x, self.cos, self.sin)
        logits = self.head(self.final_norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_attend(kind: str, length: int, device: str) -> Any:
    """Returns causal attention over [batch, heads, length, head_dim] with grouped heads."""
    if kind != "flex":

        def attend(query: Any, key: Any, value: Any) -> torch.Tensor:
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )

        return attend
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query >= key

    mask = create_block_mask(causal, None, None, length, length, device=device)
    return lambda query, key, value: flex_attention(
        query, key, value, block_mask=mask, enable_gqa=True
    )


def train(flags: argparse.Namespace) -> dict[str, Any]:
    """Trains on random tokens and returns the figures."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = Llama(flags, make_attend(flags.attention, flags.length, device)).to(device)
    decayed = [p for name, p in model.named_parameters() if not name.endswith("scale")]
    kept = [p for name, p in model.named_parameters() if name.endswith("scale")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": kept, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    how = {"backend": "eager"} if flags.mode == "eager" else {"mode": flags.mode}
    compiled = torch.compile(model, **how)
    shape = flags.batch, flags.length + 1
    tokens = torch.randint(flags.vocab, shape).to(device)
    allowed = [] if flags.attention == "flex" else [BACKENDS[flags.attention]]

    def step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    windows, loss = [], torch.zeros(())
    with sdpa_kernel(allowed or list(BACKENDS.values())):
        first = float(step())
        for _ in range(flags.warmup - 1):
            step()
        wait()
        for _ in range(flags.windows):
            start = time.perf_counter()
            for _ in range(flags.steps):
                loss = step()
            wait()
            windows.append((time.perf_counter() - start) / flags.steps)
    seconds = statistics.median(windows)
    return {
        "tokens_per_second": flags.batch * flags.length / seconds,
        "step_seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "first_loss": first,
        "last_loss": float(loss),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": f"torch {torch.__version__}",
    }


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes of the model and of the measurement."""
    for name, default in {
        "layers": 24,
        "embed": 1536,
        "heads": 12,
        "kv-heads": 4,
        "head-dim": 128,
        "mlp": 4096,
        "vocab": 32768,
        "batch": 4,
        "length": 4096,
        "warmup": 5,
        "steps": 10,
        "windows": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_sizes(parser)
    parser.add_argument("--attention", choices=(*BACKENDS, "flex"), default="flash")
    parser.add_argument("--mode", default="default", help="of torch.compile, or eager")
    print(json.dumps(train(parser.parse_args())))


if __name__ == "__main__":
    main()
