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
# # shardlib: quickstart
#
# Train Flax models under named sharding rules: your own linen and NNX models first, then a language
# model with checkpoints, resumption and sampling. The notebook runs unchanged on a CPU (as 8
# virtual devices), on one GPU, and on one TPU chip or several.

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

# %% [markdown]
# ## Devices
#
# Virtual CPU devices must be asked for before JAX first looks at its devices. Accelerators are not
# affected.

# %%
import dataclasses
import tempfile

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import nnx

import shardlib as sl
from shardlib import run
from shardlib.config import from_dict
from shardlib.hardware import chip_for

sl.local_cpu_devices(8)

print(f"jax {jax.__version__}: {jax.device_count()} x {jax.devices()[0].device_kind}")
if chip := chip_for(jax.devices()[0]):
    memory, speed = chip.memory_bytes_per_device / 2**30, chip.memory_bytes_per_second / 1e9
    print(f"{chip.full_name}: {memory:.0f} GiB a device, {speed:.0f} GB/s a chip")

# %% [markdown]
# ## A mesh and rules
#
# A mesh gives names to the axes of a grid of devices; `-1` takes what remains. Rules map the
# *logical* axes of parameters and activations (`embed`, `mlp`, `batch`, …) to mesh axes.

# %%
mesh = sl.make_mesh("fsdp=-1")
rules = sl.rules.STANDARD.override(classes=["fsdp", None])  # alternatives: the first that fits

for axis, alternatives in rules.params:
    print(f"{axis:12}", " or ".join("+".join(a) or "replicated" for a in alternatives))

# %% [markdown]
# ## Your own linen model, as it is
#
# It names no axes, so its large parameters are sharded along their largest dim that divides. The
# training state, optimizer included, is made on its shards inside one compiled program.


# %%
class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, images, train: bool):
        x = nn.relu(nn.BatchNorm(not train)(nn.Conv(16, (3, 3), use_bias=False)(images)))
        x = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(nn.Dropout(0.1, deterministic=not train)(x))


rng = np.random.default_rng(0)
labels = rng.integers(0, 10, 64).astype(np.int32)
images = rng.normal(size=(64, 8, 8, 1)).astype(np.float32) + labels[:, None, None, None] / 4 - 1
batch = {"images": images, "labels": labels}


def loss_fn(model, batch, rng):
    logits = model(batch["images"], train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


with sl.use(mesh, rules):
    state = sl.init_state(ConvNet(), optax.adamw(3e-3), seed=0, inputs=(images, True))
    step = sl.make_train_step(loss_fn)

for i in range(20):
    state, metrics = step(state, batch)
    if i % 5 == 4:
        print(f"step {i + 1}: loss {metrics['loss']:.4f}")

# %% [markdown]
# Who is sharded how, by which rule, and what each device holds:

# %%
print(sl.explain(state))

# %% [markdown]
# Which device has which piece of one array:

# %%
print(sl.draw(state.params["Dense_0"]["kernel"]))

# %% [markdown]
# ## An NNX model with logical names of its own
#
# Names need not be ours: give them rules. Inside of the model `sl.constrain` places activations;
# outside of `sl.use` it does nothing. Models that carry no names can be given some by path:
# `rules.override(paths={"**/Dense_*/kernel": ("embed", "mlp")})`.


# %%
def named(*axes):
    init = nnx.initializers.lecun_normal()
    return nnx.with_metadata(init, out_sharding=axes, eager_sharding=False)


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.read = nnx.Linear(64, 128, kernel_init=named("pixels", "hidden"), rngs=rngs)
        self.answer = nnx.Linear(128, 10, kernel_init=named("hidden", "digits"), rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.read(images.reshape(images.shape[0], -1)))
        return self.answer(sl.constrain(x, "batch", "hidden"))


own_rules = sl.AxisRules(
    params={"hidden": "fsdp", "pixels": None, "digits": None},
    activations={"batch": "data+fsdp", "hidden": None},
    auto=sl.rules.Auto("fsdp"),
)


def own_loss(model, batch, rng):
    logits = model(batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


with sl.use(mesh, own_rules):
    own_state = sl.init_state(lambda rngs: Mlp(rngs), optax.adamw(1e-2), seed=0)
    own_step = sl.make_train_step(own_loss, microbatches=2)

for _ in range(20):
    own_state, metrics = own_step(own_state, batch)
print(f"loss {metrics['loss']:.4f};", own_state.params["read"]["kernel"].sharding.spec)

# %% [markdown]
# ## Nothing is silent
#
# A name that no rule knows, a dim that does not divide, a misspelt mesh axis: one error, before
# anything is allocated.

# %%
try:
    with sl.use(mesh, own_rules.override(hidden="fdsp")):
        pass
except sl.ShardlibError as error:
    print(error)

# %% [markdown]
# ## A language model, from a config
#
# The same config as YAML is what `shardlib train` reads. The text is Python's own standard library;
# its tokenizer is trained at the first use and kept. `configs/quickstart.yaml` goes on long enough
# to write visible Python; these few steps do not.

# %%
RUN_DIR = tempfile.mkdtemp() + "/quickstart"
config = from_dict(
    run.RunConfig,
    {
        "run_dir": RUN_DIR,
        "model": {"name": "transformer", "num_layers": 2, "embed_dim": 64, "num_heads": 4},
        "data": {"path": "builtin:python", "sequence_length": 64, "eval_steps": 2},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 20, "clip_norm": 1.0},
        "train": {"steps": 80, "global_batch": 16, "log_every": 20, "sample_length": 64},
        "mesh": "fsdp=-1",
    },
    source="the notebook",
)
result = run.train(config)

# %% [markdown]
# The same config again resumes from the newest checkpoint: here with more steps, and on another
# mesh, from which the numbers do not depend.

# %%
result = run.train(
    dataclasses.replace(config, mesh="data=-1", train=dataclasses.replace(config.train, steps=120))
)

# %%
print(run.generate(RUN_DIR, prompt="def ", length=64, temperature=0.7))

# %% [markdown]
# Next: `shardlib train configs/quickstart.yaml` in a terminal,
# `shardlib explain configs/llama3_8b.yaml --on v5p-128` for a model that needs a cluster, and
# `shardlib train --help` for every key.
