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
# # shardlib: know before you rent
#
# Which mesh, will it fit, how fast, and why is it slow? This notebook answers all of it with no
# accelerator: a planner prices every way to run a published model on a cluster, and a step of a
# model of your own is compiled for TPUs that are not here, read, mended and read again.

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
import json

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl

sl.local_cpu_devices(8)  # where there is no accelerator, the CPU stands for 8 devices

# %% [markdown]
# ## Plan: the best mesh for a model and a cluster
#
# Llama 3 70B on 64 chips of TPU v5p. The planner tries every mesh, rule set, rematerialisation and
# number of microbatches that shardlib can run, prices each by a cost model that was fitted to
# published training runs, and prints the best, as a fragment that a config takes as it is.

# %%
plans = sl.plan(
    "llama3-70b", on="v5p-128", global_batch_tokens="4M", why_not=["fsdp=64", "data=64"]
)
print(plans)

# %% [markdown]
# How many chips does it take to train on a trillion tokens in 30 days?

# %%
answer = sl.plan("llama3-70b", on="v5p", tokens="1T", days=30, objective="chips")
print(answer.best.cluster.name, answer.best.layout)

# %% [markdown]
# ## Explain: what a compiled step does
#
# A model of your own, with a fault in it: its activations are brought together on every device
# before the last layer, as happens by a single careless line. Its step is compiled for eight chips
# of TPU v5e, if the compiler is here (`pip install 'shardlib[tpu]'`), else for eight CPU devices.

# %%
CLUSTER = "v5e:2x4" if importlib.util.find_spec("libtpu") else "cpu:8"
EMBED, HIDDEN, BATCH = 512, 2048, 4096


class Model(nnx.Module):
    def __init__(self, rngs, careless):
        def kernel(*axes):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)

        options = {"use_bias": False, "rngs": rngs}
        self.up = nnx.Linear(EMBED, HIDDEN, kernel_init=kernel("embed", "mlp"), **options)
        self.down = nnx.Linear(HIDDEN, EMBED, kernel_init=kernel("mlp", "embed"), **options)
        self.careless = careless

    def __call__(self, x):
        x = jax.nn.gelu(self.up(x))
        if self.careless:
            x = sl.constrain(x, None, None)  # replicated on purpose: the fault
        return self.down(x)


def loss(model, batch, rng):
    return jnp.mean(jnp.square(model(batch) - batch))


def explained(careless, mesh="fsdp=4,tensor=2"):
    mesh = sl.make_mesh(mesh, devices=jax.devices()[:8])
    with sl.use(mesh, sl.rules.STANDARD):
        state = sl.abstract_state(lambda rngs: Model(rngs, careless), optax.adamw(1e-3))
        step = sl.make_train_step(loss)
    rows = NamedSharding(mesh, P("fsdp"))
    batch = jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32, sharding=rows)
    return sl.explain(step, state, batch, on=CLUSTER)


faulty = explained(careless=True)
print(faulty)

# %% [markdown]
# The report names the fault, its line and how to fix it. The fixed step, and what that
# changed:

# %%
mended = explained(careless=False)
print(faulty.diff(mended))
assert faulty.findings
assert not [f for f in mended.findings if f.code.startswith(("SL1", "SL2")) and f.code != "SL105"]

# %% [markdown]
# The same as a page with drawings: memory over the step, who sends how much to whom, how the
# largest parameters are cut. `report.html()` is one file that needs no network; `report.to_json()`
# is for your own tools.

# %%
try:
    from IPython.display import HTML, display
except ImportError:
    pass
else:
    display(HTML(mended.html()))
print(list(json.loads(mended.to_json())))

# %% [markdown]
# The same from the command line, for a config:
#
#     shardlib plan    configs/llama3_8b.yaml --on 64xh100
#     shardlib explain configs/llama3_8b.yaml train.global_batch=128 --on v5e-16 --html report.html
#     shardlib explain --diff configs/llama3_8b.yaml mesh=fsdp=-1 --on v5p-128
#     shardlib explain configs/quickstart.yaml --on cpu:8 --strict --baseline faults.yaml   # in CI
