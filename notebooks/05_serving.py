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
# # shardlib: train, serve, stream, embed
#
# A language model is trained for a few seconds, and then answers: in this process, and behind the
# OpenAI API. The engine serves the trainer's own model, on a mesh, under a table of rules.

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
    extra = "[serve,cuda]" if is_gpu else "[serve,tpu]" if is_tpu else "[serve]"
    # With this bound on jax, Colab keeps the numpy that it has loaded: nothing needs a restart.
    wanted = [SOURCE + extra, "jax<0.12", "openai"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)

# %%
import re
import tempfile

import numpy as np
import openai

import shardlib as sl
from shardlib import run
from shardlib.config import from_dict

sl.local_cpu_devices(8)  # without an accelerator, the CPU acts as 8 devices

# %% [markdown]
# ## Train
#
# The config of the quickstart, made small: the text is Python's own standard library.

# %%
RUN_DIR = tempfile.mkdtemp() + "/served"
config = {
    "run_dir": RUN_DIR,
    "model": {"name": "transformer", "num_layers": 2, "embed_dim": 64, "num_heads": 4},
    "data": {"path": "builtin:python", "sequence_length": 128, "eval_steps": 2},
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 20, "clip_norm": 1.0},
    "train": {"steps": 100, "global_batch": 16, "log_every": 25, "sample_length": 0},
    "mesh": "fsdp=-1",
}
run.train(from_dict(run.RunConfig, config, source="the notebook"))

# %% [markdown]
# ## Serve in this process
#
# `load_run` opens the run on any mesh: here each device has slots of its own (`data`). All prompts
# run at once; a new one starts between the steps of the others.

# %%
with sl.use(sl.make_mesh("data=-1"), sl.rules.SERVE):
    trained = sl.load_run(RUN_DIR)
engine = sl.Engine(trained, slots=8, context=128, chunk=32)

for token in engine.stream("def ", max_tokens=24):
    print(token, end="")

# %%
prompts = ["import ", "class A", "    return ", "# "]
for prompt, answer in zip(prompts, engine.generate(prompts, max_tokens=12), strict=True):
    print(f"{prompt!r:14} {answer.text!r}")

# %% [markdown]
# The same prompt and seed have the same answer, alone or among others.

# %%
drawn = {"max_tokens": 12, "temperature": 0.8, "seed": 7}
alone = engine.generate("import ", **drawn)[0]
among = engine.generate([*prompts, "import "], **drawn)[-1]
assert alone.ids == among.ids

# %% [markdown]
# ## Embed
#
# The embedding of a text is what the head reads of its last token, a vector of length 1.

# %%
texts = ["for i in range(3):", "for key in names:", "raise ValueError("]
vectors = engine.embed(texts)
print(np.round(vectors @ vectors.T, 2))

# %% [markdown]
# ## Serve over HTTP
#
# In a terminal it is `shardlib serve RUN_DIR`; any client of the OpenAI API can ask it.

# %%
options = ["--port", "0", "--slots", "4", "--context", "128", "--chunk", "32"]
command = [sys.executable, "-m", "shardlib", "serve", RUN_DIR, *options]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
line = server.stderr.readline()
address = re.search(r"http://\S+:\d+", line)[0]
print(line)

# %%
with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
    for piece in client.completions.create(
        model="served", prompt="def ", max_tokens=24, temperature=0, stream=True
    ):
        print(piece.choices[0].text, end="")
    found = client.embeddings.create(model="served", input=texts)
    print(f"\n{len(found.data)} embeddings of {len(found.data[0].embedding)} numbers")

# %% [markdown]
# A signal ends the server once all open requests are answered. Training may go on meanwhile:
# `engine.update(params, version)` serves new parameters of the same shapes, and compiles nothing.

# %%
server.terminate()
assert server.wait() == 0

# %% [markdown]
# Next: `shardlib plan --serve llama3-8b --on 8xh100 --context 8k` for devices that are not there,
# and the guide on serving for batches, keys, limits and metrics.
