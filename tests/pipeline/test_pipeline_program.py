"""What the compiled program of a pipeline holds: memory and collectives."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pipelines import HIDDEN, WIDTH, make_batch, make_job

from shardlib.explain.analysis.collectives import collectives
from shardlib.train.pipeline import PipelineConfig

pytestmark = pytest.mark.mesh

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "pipeline_memory.py"
EXAMPLES = 512
"""In each microbatch, so that activations are most of the memory."""


@functools.cache
def compiled(mesh, schedule, microbatches, examples=EXAMPLES):
    job = make_job(mesh, num_layers=4, batch=make_batch(examples * microbatches))
    config = PipelineConfig(schedule=schedule, skip_idle=True)
    return job.gradients(config, microbatches).lower(*job.arguments).compile(), job


def temp_bytes(schedule, microbatches):
    program, _ = compiled("stage=4", schedule, microbatches)
    return program.memory_analysis().temp_size_in_bytes


def test_memory_of_1f1b_does_not_grow_with_microbatches():
    assert temp_bytes("1f1b", 64) <= 1.05 * temp_bytes("1f1b", 16)


def test_memory_of_gpipe_grows_by_an_input_for_each_microbatch():
    grown = temp_bytes("gpipe", 64) - temp_bytes("gpipe", 16)
    inputs = (64 - 16) * EXAMPLES * WIDTH * 4
    assert inputs <= grown <= 2.2 * inputs


def sent(mesh, schedule):
    program, job = compiled(mesh, schedule, 4, 8)
    return collectives(program.as_text(), job.mesh)


def over_stage(found, kind):
    return [c for c in found if c.kind == kind and "stage" in (c.mesh_axes or ())]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_send_activations_and_their_gradients_alone(schedule):
    found = sent("stage=2,fsdp=2,tensor=2", schedule)
    permutes = [c for c in found if c.kind == "collective-permute"]
    # Activations and the penalty each way, and the count of layers one way, in each of the four
    # turns of a stage and in no idle turn.
    assert {(c.mesh_axes, c.count, c.senders) for c in permutes} == {(("stage",), 4, 4)}
    shapes = sorted(shape for c in permutes for shape in c.shapes)
    assert shapes == ["f32[4,4]", "f32[4,4]", "f32[]", "f32[]", "s32[]"]
    assert not over_stage(found, "all-gather") + over_stage(found, "all-to-all")
    # The gradients of what all stages share, and the sums, once a step.
    assert not [c for c in over_stage(found, "all-reduce") if c.in_loop]


def test_interleaving_sends_each_chunk_of_layers_there_and_its_gradients_back():
    found = sent("stage=2,fsdp=2,tensor=2", "interleaved")
    once = [c for c in over_stage(found, "collective-permute") if not c.in_loop]
    kernel = f"f32[1,{WIDTH // 2},{HIDDEN // 2}]"
    chunks = [shape for c in once for shape in c.shapes if shape == kernel]
    # In one of two rounds every chunk stays where it is; the other goes there and back.
    assert len(chunks) == 2
    assert not over_stage(found, "all-gather") + over_stage(found, "all-to-all")


def test_benchmark():
    sizes = ("--embed=8", "--length=8", "--mesh=stage=8", "--layers=8", "--schedules=gpipe")
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *sizes], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["gpipe_ratio"] == pytest.approx(
        found["gpipe_64_bytes"] / found["gpipe_16_bytes"], abs=1e-3
    )
    assert found["gpipe_ratio"] > 1
