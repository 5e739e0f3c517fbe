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
# # shardlib: rules found for your model
#
# A transformer in plain Flax, with no name and no constraint in it. shardlib discovers its logical
# axes, finds how each should lie on a mesh, and hands over a short table of rules: to read, to
# change, to train with. Nothing needs an accelerator.

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
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib as sl

sl.local_cpu_devices(8)  # without an accelerator, the CPU acts as 8 devices

# %% [markdown]
# ## A model that names nothing

# %%
VOCAB = 256


class Block(nnx.Module):
    def __init__(self, dim, heads, rngs):
        self.heads = heads
        self.norms = nnx.List([nnx.RMSNorm(dim, rngs=rngs) for _ in range(2)])
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nnx.Linear(dim, dim, use_bias=False, rngs=rngs))
        self.up = nnx.Linear(dim, 4 * dim, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, use_bias=False, rngs=rngs)

    def __call__(self, x):
        y = self.norms[0](x)
        parts = (self.query(y), self.key(y), self.value(y))
        query, key, value = (p.reshape(*p.shape[:2], self.heads, -1) for p in parts)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(jax.nn.silu(self.up(self.norms[1](x))))


class LM(nnx.Module):
    def __init__(self, rngs, dim=64, heads=4, layers=2):
        self.tokens = nnx.Param(0.1 * jax.random.normal(rngs.params(), (VOCAB, dim)))
        self.blocks = nnx.List([Block(dim, heads, rngs) for _ in range(layers)])
        self.head = nnx.Linear(dim, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = jnp.take(self.tokens[...], ids, axis=0)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, batch):
    logits = model(batch["text"][:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["text"][:, 1:]).mean()


# %% [markdown]
# ## Its rules on eight H100
#
# 4 layers of width 4096, 16 sequences of 1024 tokens. The loss is traced and an integer program
# finds the layout of every parameter and activation. Nothing is allocated.

# %%
optimizer = optax.adamw(1e-3)
large = {
    "loss": loss_fn,
    "batch": {"text": jax.ShapeDtypeStruct((16, 1025), jnp.int32)},
    "optimizer": optimizer,
    "on": "8xh100",
}


def make_large(rngs):
    return LM(rngs, dim=4096, heads=32, layers=4)


found = sl.find_rules(make_large, mesh="fsdp=4,tensor=2", **large)
print(found)

# %% [markdown]
# Each line of the first table is a rule: a logical axis, and the mesh axes that cut it in
# parameters and in activations. Heads and the hidden width of the MLP are cut over `tensor`, and
# each matrix over `fsdp` as well, as in Megatron.
#
# ## Which mesh?
#
# Without `mesh`, all meshes of `data`, `fsdp` and `tensor` are compared.

# %%
best = sl.find_rules(make_large, **large)
print("the best mesh:", best.mesh_text)
for one in (found, best):
    price = one.prices[0]
    print(f"{price.name}: {price.seconds:.4f} s, {price.memory_bytes / 2**30:.1f} GiB")

# %% [markdown]
# ## An override
#
# The table is yours. Rules that you give are kept, and the others are found around them: here the
# MLP must not be cut over `tensor`.

# %%
given = sl.rules.STANDARD.override(
    paths={"blocks/*/up/kernel": ("embed", None), "blocks/*/down/kernel": (None, "embed")}
)
changed = sl.find_rules(make_large, mesh="fsdp=4,tensor=2", rules=given, **large)
print(f"found: {found.seconds:.4f} s, with the override: {changed.seconds:.4f} s")

# %% [markdown]
# ## Train under them
#
# The rules belong to the paths of the model, so they train a small model of the same structure.

# %%
text = pathlib.Path(jax.__file__).with_name("errors.py").read_bytes()
data = np.frombuffer(text, np.uint8).astype(np.int32)
random = np.random.default_rng(0)


def make_small(rngs):
    return LM(rngs, layers=4)


def draw():
    starts = random.integers(0, len(data) - 65, 16)
    return {"text": np.stack([data[start : start + 65] for start in starts])}


with sl.use(found.mesh, found.rules.at_other_sizes()):
    state = sl.init_state(make_small, optimizer, seed=0)
    step = sl.make_train_step(loss_fn)
    for number in range(61):
        state, metrics = step(state, draw())
        if number % 20 == 0:
            print(number, float(metrics["loss"]))

# %% [markdown]
# ## Explain
#
# Where each parameter lies and by which rule, and what the compiled step sends.

# %%
print(sl.explain(state))
print(sl.explain(step, state, draw()).program)

# %% [markdown]
# ## The same numbers on every mesh
#
# Two training steps on the mesh are compared with one device: loss, gradients and parameters, up to
# rounding.

# %%
rules = found.rules.at_other_sizes()
print(sl.testing.assert_equivalent(make_small, loss_fn, draw(), found.mesh, rules=rules, steps=2))
