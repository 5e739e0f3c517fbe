"""One run over other devices, meshes, processes and batches: the same samples, the same numbers."""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib import run
from shardlib.checkpoint import RunCheckpoints
from shardlib.config import load
from shardlib.mesh import MeshConfig
from shardlib.run.setup import make_scope, open_source, setup
from shardlib.train.state import materialize

pytestmark = pytest.mark.process

# (devices, processes, mesh, global batch, last step)
STAGES = (
    (8, 1, "fsdp=8", 8, 3),
    (1, 1, "data=1", 4, 6),
    (8, 2, "data=2,fsdp=2,tensor=2", 24, 8),
)
# Sums in another order differ by float32 rounding, which eight steps of training carry on.
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def handed_over(lab, tmp_path_factory):
    """The run, stage by stage: in this process, in one of its own, and in two."""
    run_dir = tmp_path_factory.mktemp("elastic") / "run"
    samples_seen = []
    for devices, processes, mesh, batch, last in STAGES:
        words = ["train", lab.config_file, f"run_dir={run_dir}", f"mesh={mesh}"]
        words += [f"train.global_batch={batch}", f"train.steps={last}", "train.sample_length=0"]
        words += [f"train.cpu_devices={devices}", "eval.every_steps=0", "checkpoint.keep=9"]
        launch = ["launch", "--processes", processes, "--"] if processes > 1 else []
        done = lab.call(*words) if last == 3 else lab.shardlib(*launch, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        with RunCheckpoints(run_dir / "checkpoints") as checkpoints:
            samples_seen.append(checkpoints.metadata(last)["data"]["samples_seen"])
    return run_dir, samples_seen


def test_every_sample_is_seen_once(handed_over):
    run_dir, samples_seen = handed_over
    # 3 x 8, 3 x 4 and 2 x 24 samples.
    assert samples_seen == [24, 36, 84]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    changes = [event["facts"] for event in events if event["kind"] == "batch"]
    assert changes == [
        {"before": 8, "now": 4, "sample": 24},
        {"before": 4, "now": 24, "sample": 36},
    ]
    starts = [event["facts"] for event in events if event["kind"] == "start"]
    assert [(start["mesh"], start["processes"]) for start in starts] == [
        ("fsdp=8", 1),
        ("data=1", 1),
        ("data=2,fsdp=2,tensor=2", 2),
    ]


def test_losses_are_those_of_a_plain_loop_over_the_stream(handed_over, lab):
    """The oracle takes the samples one after the other from the stream, and never stops."""
    run_dir, _ = handed_over
    config = load(run.RunConfig, lab.config_file, [f"run_dir={run_dir}", "mesh=data=1"])
    one = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=1))
    samples = open_source(one, "train")
    parts = setup(config, samples.spec, make_scope(config, jax.devices()[:1]))
    step, state = parts.train_step(), materialize(parts.abstract, seed=config.seed)
    expected, first, number = [], 0, 0
    for _, _, _, batch, last in STAGES:
        while number < last:
            rows = [samples.read(index, 0, 1) for index in range(first, first + batch)]
            stacked = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
            state, metrics = step(state, jax.tree.map(jnp.asarray, stacked))
            expected.append(float(metrics["loss"]))
            first, number = first + batch, number + 1
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))
    losses = [json.loads(line)["loss"] for line in lines]
    np.testing.assert_allclose(losses, expected, rtol=RELATIVE)


def test_the_state_is_bit_identical_on_every_mesh_it_is_handed_to(handed_over):
    run_dir, _ = handed_over
    config = load(run.RunConfig, run_dir / "config.yaml")
    samples = open_source(config, "train")

    def state(step, mesh):
        there = dataclasses.replace(config, mesh=mesh)
        num_devices = math.prod(MeshConfig.parse(mesh).sizes.values())
        parts = setup(there, samples.spec, make_scope(there, jax.devices()[:num_devices]))
        with RunCheckpoints(run_dir / "checkpoints") as checkpoints:
            restored = checkpoints.restore(step, parts.saved_state())
        assert restored.params["head"]["kernel"].sharding.mesh == parts.scope.mesh
        key = jax.random.key_data(restored.rng)
        leaves = (restored.step, restored.params, restored.opt_state, key)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(leaves)]

    for (*_, step), (*_, mesh, _, _) in itertools.pairwise(STAGES):
        for left, right in zip(state(step, mesh), state(step, "tensor=2"), strict=True):
            assert left.tobytes() == right.tobytes()
