"""How many microbatches a step needs: from the compiled program, and from a device that is full."""

import functools
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import MeshError
from shardlib.train.fit_microbatches import counts, fit_microbatches
from shardlib.train.state import abstract_state

ROWS, WIDTH, HIDDEN = 1024, 8, 512


class Model(nnx.Module):
    def __init__(self, rngs):
        kernel = jax.random.normal(rngs.params(), (WIDTH, HIDDEN))
        self.kernel = nnx.Param(kernel, out_sharding=("embed", "mlp"), eager_sharding=False)

    def __call__(self, x):
        return jnp.sin(jnp.sin(x @ self.kernel[...])) @ self.kernel[...].T


def rows(number):
    return {"x": jax.ShapeDtypeStruct((number, WIDTH), jnp.float32)}


BATCH = rows(ROWS)


def loss(model, batch, rng):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["x"]))


def make_step(microbatches):
    return sl.make_train_step(loss, microbatches=microbatches)


def abstract(mesh="data=4", devices=4):
    mesh = sl.make_mesh(mesh, devices=jax.devices()[:devices])
    return abstract_state(Model, optax.sgd(0.1), mesh=mesh, rules=sl.rules.STANDARD)


@functools.cache
def needed(microbatches):
    """Bytes that the compiled step takes on each device."""
    stats = make_step(microbatches).lower(abstract(), BATCH).compile().memory_analysis()
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return held + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes


def test_fewest_that_fit():
    assert needed(1) > needed(2) > needed(8)
    found = fit_microbatches(make_step, abstract(), BATCH, limit_bytes=needed(1))
    assert found.microbatches == found.step.microbatches == 1
    found = fit_microbatches(make_step, abstract(), BATCH, limit_bytes=needed(8))
    assert found.microbatches == found.step.microbatches == 8
    assert found.limit_bytes == needed(8) == found.attempts[-1].needed_bytes
    assert [attempt.microbatches for attempt in found.attempts] == [1, 2, 4, 8]
    for attempt in found.attempts[:-1]:
        assert attempt.needed_bytes <= needed(attempt.microbatches)
        assert attempt.at_least == (attempt.needed_bytes < needed(attempt.microbatches))


def test_a_number_that_is_hopeless_is_not_compiled():
    compiled = []

    def counting(microbatches):
        compiled.append(microbatches)
        return make_step(microbatches)

    found = fit_microbatches(counting, abstract(), BATCH, limit_bytes=needed(8))
    # The first is asked for the axes of its batches.
    assert compiled[1:] == [a.microbatches for a in found.attempts if not a.at_least]
    assert len(compiled[1:]) < 4


def test_nothing_fits():
    with pytest.raises(
        MeshError, match=r"(?s)does not fit into memory .* of 1000 B.*Shard over more"
    ):
        fit_microbatches(make_step, abstract(), BATCH, limit_bytes=1000)


def test_only_numbers_that_the_mesh_and_the_schedule_allow():
    state = abstract()
    step = make_step(1)
    assert counts(step, state, rows(64)) == [1, 2, 4, 8, 16]
    assert counts(step, state, rows(64), multiple_of=4) == [4, 8, 16]
    assert counts(step, state, rows(24)) == [1, 2, 3, 6]
    with pytest.raises(MeshError, match=r"(?s)no number of microbatches, a.*Choose a larger batch"):
        counts(step, state, rows(16), multiple_of=3)


def loss_of_triples(model, batch, rng):
    """Has activations for every three rows."""
    x = batch["x"]
    triples = (x[:, None, None] * x[None, :, None] * x[None, None]).reshape(-1, WIDTH)
    return jnp.mean(jnp.square(jnp.sin(triples @ model.kernel[...])))


@pytest.mark.mesh
def test_memory_that_is_really_spent():
    """The step is run, and the allocation of its buffers fails."""
    prime = 2**13 - 1
    assert prime**3 * HIDDEN * 4 > 2**47
    fit = fit_microbatches(
        lambda n: sl.make_train_step(loss_of_triples, microbatches=n),
        abstract("data=1", devices=1),
        rows(prime),
        tries_out=True,
    )
    assert fit.microbatches == prime
    first, last = fit.attempts
    assert first.problem.startswith("ran out of memory (Out of memory allocating ")
    assert last.problem is None
    assert str(fit) == f"{prime} microbatches: 1 {first.problem}"


TWO_PROCESSES = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
index, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"localhost:{{port}}", 2, index, heartbeat_timeout_seconds=20)
import test_fit

needed = test_fit.needed(4)
limit = needed if index else 100 * needed
fit = test_fit.fit_microbatches(
    test_fit.make_step, test_fit.abstract(), test_fit.BATCH, limit_bytes=limit
)
print([attempt.problem for attempt in fit.attempts][:2])
print(fit.microbatches)
"""


@pytest.mark.mesh
def test_processes_agree_on_the_largest_number():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(index), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    (plenty, little) = (out.splitlines()[-2:] for out, _ in outputs)
    assert plenty == [str(["did not fit in another process"] * 2), "4"]
    assert little[0].startswith("['needed ")
    assert little[1] == "4"
