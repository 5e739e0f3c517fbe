"""What a run needs works where shardlib partitions: guards, offload, checkpoints, two processes."""

import io
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardlib as sl
from shardlib.checkpoint import CheckpointConfig, RunCheckpoints
from shardlib.runtime.launch import run_local
from unannotated import CASES, CLASSES

MESH, ROWS = "data=2,fsdp=2,tensor=2", 16
CASE = CASES["transformer"]
LOSSES = "losses: "


def abstract(mesh, **options):
    with sl.use(mesh, CASE.rules):
        return sl.abstract_state(CASE.model, optax.adamw(1e-2), inputs=CASE.inputs, **options)


def started(made):
    return sl.materialize(made, seed=0)


def bits(*trees):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trees)]


def batches(count):
    """Batches that differ; each is a permutation of tokens."""
    first = CASE.batch(ROWS)
    return [{name: (x + n) % CLASSES for name, x in first.items()} for n in range(count)]


def explodes(model, batch, rng):
    """The loss, not a number for a batch that begins with token 0."""
    return CASE.loss(model, batch, rng) / jnp.sign(batch["x"][0, 0]).astype(jnp.float32)


@pytest.mark.mesh
def test_a_refused_update_keeps_every_bit(mesh):
    guards = sl.GuardsConfig()
    state = started(abstract(mesh, guards=guards))
    step = sl.make_train_step(explodes, guards=guards)
    good, bad = ({**batch, "x": batch["x"].copy()} for batch in batches(2))
    good["x"][0, 0], bad["x"][0, 0] = 1, 0
    assert step.partition(state, good).by == "shardlib"
    for batch, skipped in ((good, 0), (bad, 1), (good, 0)):
        before = bits(state.params, state.opt_state)
        state, metrics = step(state, batch)
        assert metrics["skipped"] == skipped
        assert (bits(state.params, state.opt_state) == before) == bool(skipped)


@pytest.mark.mesh
def test_a_run_goes_on_from_a_checkpoint_with_its_optimizer_state_on_the_host(mesh, tmp_path):
    made = sl.offload_optimizer(abstract(mesh))
    step, losses = sl.make_train_step(CASE.loss, microbatches=2), []
    assert step.partition(made, CASE.batch(ROWS)).by == "shardlib"
    with RunCheckpoints(tmp_path, CheckpointConfig()) as checkpoints:
        state = started(made)
        for number, batch in enumerate(batches(4)):
            if number == 2:
                checkpoints.save(2, state, {})
                checkpoints.wait()
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        again = checkpoints.restore(2, made)
    for batch, loss in zip(batches(4)[2:], losses[2:], strict=True):
        again, metrics = step(again, batch)
        assert float(metrics["loss"]) == loss
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(again.opt_state) if leaf.ndim}
    assert kinds == {"pinned_host"}
    assert bits(again.params, again.opt_state) == bits(state.params, state.opt_state)


def losses_of(mesh):
    """Returns the losses of three steps, and who partitions them."""
    state, step, losses = started(abstract(mesh)), sl.make_train_step(CASE.loss), []
    by = step.partition(state, CASE.batch(ROWS)).by
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    for batch in batches(3):
        placed = {
            name: jax.make_array_from_callback(x.shape, rows, x.__getitem__)
            for name, x in batch.items()
        }
        state, metrics = step(state, placed)
        losses.append(float(metrics["loss"]))
    return by, losses


@pytest.mark.process
def test_two_processes_train_as_one():
    names = ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    here, output = os.path.dirname(__file__), io.StringIO()
    paths = os.pathsep.join((here, os.environ.get("PYTHONPATH", "")))
    environment = clean | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    code = run_local([sys.executable, __file__], 2, environment=environment, output=output)
    assert code == 0, output.getvalue()
    lines = output.getvalue().splitlines()
    found = [line.partition(LOSSES)[2] for line in lines if LOSSES in line]
    _, expected = losses_of(sl.make_mesh("fsdp=1", devices=jax.devices()[:1]))
    assert len(found) == 2
    for words in found:
        by, *losses = words.split()
        assert by == "shardlib"
        # A mean over 128 tokens of size 1 in float32, added in another order in three steps.
        np.testing.assert_allclose(list(map(float, losses)), expected, rtol=2e-5)


def main():
    from shardlib.runtime import distributed

    group = distributed.initialize(heartbeat_timeout_seconds=20)
    distributed.local_cpu_devices(4, processes=group.count)
    by, losses = losses_of(sl.make_mesh("fsdp=2,tensor=2"))
    # In one write: gloo prints on its own from other threads.
    sys.stdout.write(f"\n{LOSSES}{by} {' '.join(map(str, losses))}\n")
    distributed.shutdown()


if __name__ == "__main__":
    main()
