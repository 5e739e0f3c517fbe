"""Two processes that train the same steps on a GPU end with the same bits."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

# Embeddings, whose gradients are scattered with atomics unless told otherwise; attention; matmuls.
TRAIN = """
from shardlib.run.devices import make_deterministic
make_deterministic()
import functools, hashlib, jax, numpy as np, optax, shardlib as sl
from shardlib import registry

family = registry.family("transformer")
config = family.config(num_layers=2, embed_dim=128, num_heads=2, head_dim=64)
data = registry.DataSpec(vocab_size=512, sequence_length=256)
tokens = np.random.default_rng(0).integers(0, 512, (8, 257)).astype(np.int32)
batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
with sl.use(sl.make_mesh("data=1", devices=jax.devices()[:1]), sl.rules.STANDARD):
    state = sl.init_state(lambda rngs: family.make(config, data, rngs), optax.adamw(1e-2))
    step = sl.make_train_step(functools.partial(family.loss, train=True), precision="bf16")
    for _ in range(10):
        state, metrics = step(state, batch)
bits = hashlib.sha256()
for leaf in jax.tree.leaves((state.params, state.opt_state, metrics)):
    bits.update(np.asarray(leaf).tobytes())
assert jax.default_backend() == "gpu"
print(bits.hexdigest())
"""

LATE = """
import jax
jax.devices()
from shardlib.run.devices import make_deterministic
make_deterministic()
"""


def python(program):
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    # Each compiles for itself: the choice of kernels is what has to be the same.
    kept["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    return subprocess.run(
        [sys.executable, "-c", program], env=kept, capture_output=True, text=True, check=False
    )


def test_two_runs_are_bit_identical():
    first, second = python(TRAIN), python(TRAIN)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout


def test_flags_that_come_too_late_are_an_error():
    done = python(LATE)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "shardlib.errors.ConfigError: deterministic: JAX has already started its GPUs without the "
        "required flags.",
        "  Set XLA_FLAGS='--xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_autotune_level=0' "
        "before Python starts.",
    ]
