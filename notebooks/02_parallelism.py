# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # shardlib: every way to split a model
#
# One small language model, trained under each strategy: data, ZeRO, FSDP, tensor, sequence,
# context, expert and pipeline parallelism, and several at once. The model does not change; the
# mesh and the rules do. For each you see where its parameters lie, what its compiled step sends
# over which mesh axis, and that its loss is that of one device.

# %%
import importlib.util
import pathlib
import shutil
import subprocess
import sys

SOURCE = "shardlib"  # or the path of a checkout

if importlib.util.find_spec("shardlib") is None:
    is_gpu = shutil.which("nvidia-smi")
    is_tpu = any(list(pathlib.Path("/dev").glob(name)) for name in ("accel*", "vfio/[0-9]*"))
    extra = "[cuda]" if is_gpu else "[tpu]" if is_tpu else ""
    # With this bound on jax, Colab keeps the numpy that it has loaded: nothing needs a restart.
    wanted = [SOURCE + extra, "jax<0.12"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)

# %%
import tempfile

import jax
import numpy as np
import optax

import shardlib as sl
from shardlib.registry import DataSpec, family
from shardlib_models.moe import MoEConfig

sl.local_cpu_devices(8)  # where there is no accelerator, the CPU stands for 8 devices

# Each step is compiled twice below, to be explained and to be run: the second time from a cache.
jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

devices = jax.devices()[:8]
assert len(devices) == 8, "this notebook splits over 8 devices; JAX_PLATFORMS=cpu gives them"

# %% [markdown]
# ## The model and its batch
#
# A decoder-only transformer with grouped-query attention, over packed rows: `segment_ids` number
# the documents of a row.

# %%
LENGTH, VOCAB, BATCH = 32, 128, 16
data = DataSpec(vocab_size=VOCAB, sequence_length=LENGTH)
transformer = family("transformer")
size = {"num_layers": 4, "embed_dim": 32, "num_heads": 8, "num_kv_heads": 4, "mlp_dim": 64}

rng = np.random.default_rng(0)
segment_ids = np.sort(rng.integers(1, 4, (BATCH, LENGTH)), axis=1).astype(np.int32)
starts = np.stack([np.searchsorted(row, row) for row in segment_ids])
batch = {
    "tokens": rng.integers(0, VOCAB, (BATCH, LENGTH), dtype=np.int32),
    "targets": rng.integers(0, VOCAB, (BATCH, LENGTH), dtype=np.int32),
    "segment_ids": segment_ids,
    "positions": (np.arange(LENGTH)[None] - starts).astype(np.int32),
}
batch_axes = dict.fromkeys(batch, ("batch", "length"))


def loss_fn(model, batch, rng):
    return transformer.loss(model, batch, rng, train=True)


losses = {}


def split(name, mesh, rules=sl.rules.STANDARD, show=None, model=(), **options):
    """Trains two steps on a mesh, and shows what is where and what is sent."""
    config = transformer.config(**size | dict(model))
    mesh = sl.make_mesh(mesh, devices=devices[:1] if "one device" in name else devices)
    with sl.use(mesh, rules):
        state = sl.init_state(
            lambda rngs: transformer.make(config, data, rngs), optax.adamw(1e-2), seed=0
        )
        step = sl.make_train_step(loss_fn, batch_axes=batch_axes, **options)
    if show is not None:
        leaf = state.params
        for key in show.split("/"):
            leaf = leaf[key]
        print(f"{show} {leaf.shape}, {leaf.sharding.spec}\n{sl.draw(leaf)}\n")
    if "one device" not in name:
        print(sl.explain(step, state, batch))
    losses[name] = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses[name].append(float(metrics["loss"]))
    print("\nlosses", *(f"{loss:.6f}" for loss in losses[name]))
    return state, metrics


UP = "layers/mlp/up/kernel"  # [layers, embed, mlp]

# %% [markdown]
# ## One device
#
# What every other run is compared with.

# %%
_ = split("one device", "data=1")

# %% [markdown]
# ## Data parallelism
#
# Every device holds all parameters and an eighth of the batch; gradients are all-reduced once.

# %%
_ = split("data", "data=8", show=UP)

# %% [markdown]
# ## ZeRO
#
# The same axis, three tables of rules. Stage 1 splits the optimizer state over `fsdp`, stage 2 the
# gradients too, stage 3 (FSDP) the parameters as well: each layer's are gathered inside of the loop
# over layers, and dropped again.

# %%
_ = split("ZeRO-1", "data=2,fsdp=4", sl.rules.ZERO1, show=UP)

# %%
_ = split("ZeRO-2", "data=2,fsdp=4", sl.rules.ZERO2)

# %%
_ = split("FSDP", "fsdp=8", show=UP)

# %% [markdown]
# ## Tensor parallelism, and sequence parallelism
#
# Heads and the MLP's hidden units are split (Megatron-LM). What is left replicated, norms and the
# residual stream, sequence parallelism splits along the length: an all-reduce becomes a
# reduce-scatter and an all-gather. (XLA for CPU has no reduce-scatter, and writes an all-reduce and
# a cut.) There are 4 key-value heads for 8 devices: `explain` says that they are replicated.

# %%
_ = split("tensor", "tensor=8", show=UP)

# %%
_ = split("sequence", "data=2,tensor=4", sl.rules.SEQUENCE)

# %% [markdown]
# ## Context parallelism
#
# The sequence is split. Keys and values travel around a ring; in zig-zag order every device has
# the same work although attention is causal. Or they are gathered, or heads are exchanged for
# positions (Ulysses).

# %%
_ = split("context, ring", "context=8", model={"context": "ring"})

# %%
_ = split("context, Ulysses", "data=2,context=4", model={"context": "ulysses"})

# %% [markdown]
# ## Pipeline parallelism
#
# The stacked layers are cut into stages. `1f1b` holds the activations of as many microbatches as
# there are stages, `gpipe` those of all; `pipeline_bubble` is the share of the time that stages
# wait, as counted by the program.

# %%
_, metrics = split("pipeline", "stage=4,data=2", show=UP, microbatches=4)
print(f"bubble {float(metrics['pipeline_bubble']):.3f}, in theory {3 / (4 + 3):.3f}")

# %% [markdown]
# ## Several at once

# %%
_ = split("stage, fsdp, tensor", "stage=2,fsdp=2,tensor=2", show=UP, microbatches=4)

# %% [markdown]
# ## Expert parallelism
#
# A mixture of 8 experts of which each token takes 2. Along `expert` the batch is split as well:
# tokens travel to the devices that hold their experts by all-to-all, and their results back. It is
# another model, so it is compared with one device of its own.

# %%
experts = {"moe": MoEConfig(num_experts=8, experts_per_token=2)}
_ = split("one device, experts", "data=1", model=experts)

# %%
_ = split("experts", "expert=4,fsdp=2", show="layers/mlp/experts/up", model=experts)

# %% [markdown]
# ## The same loss everywhere

# %%
for name, found in losses.items():
    reference = losses["one device, experts" if "experts" in name else "one device"]
    off = max(abs(a / b - 1) for a, b in zip(found, reference, strict=True))
    print(f"{name:20} {found[-1]:.6f}  off by {off:.1e}")
    assert off < 1e-5
