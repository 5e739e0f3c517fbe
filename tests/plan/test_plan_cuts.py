"""What a device holds and computes of a model, against where the trainer places it."""

import dataclasses

import pytest
from test_plan_measured import calibration

from shardlib import run
from shardlib.config import load
from shardlib.cost.layout import SHARDLIB, Layout, Software
from shardlib.cost.machine.constants import committed
from shardlib.cost.machine.measured import Line, measured_cluster
from shardlib.cost.machine.rates import rates_on
from shardlib.cost.transformer import communication, computation, step_time
from shardlib.cost.workload import Experts, Job, Transformer
from shardlib.hardware import parse_cluster
from shardlib.plan.search import candidates
from shardlib.plan.workloads.named_models import named_model
from shardlib.plan.workloads.transformer import TransformerWorkload
from shardlib.run import RunConfig
from shardlib.run.plans.planning import workload_of

CONFIG = """
run_dir: unused
model:
  name: transformer
  num_layers: 4
  embed_dim: 256
  num_heads: 8
  num_kv_heads: 2
  mlp_dim: 1024
  vocab_size: 512
data: {path: /nowhere, tokenizer: bytes, sequence_length: 256, eval_fraction: 0.2}
optimizer: {name: adamw, learning_rate: 0.001}
train: {steps: 2, global_batch: 16}
"""
EXPERTS = "model.moe={num_experts: 8, experts_per_token: 2, mlp_dim: 256}"
H100 = parse_cluster("8xh100")
V5P = parse_cluster("v5p-128")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return str(path)


def device(job, **degrees):
    return computation.Device(job, Layout(**degrees), SHARDLIB)


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("mesh", "own"),
    [
        ("fsdp=8", ()),
        ("fsdp=4,tensor=2", ()),
        ("fsdp=2,tensor=4", ()),  # Two heads of keys and values: they stay whole.
        ("tensor=8", ()),
        ("stage=2,tensor=4", ("train.microbatches=4",)),
        ("expert=4,tensor=2", (EXPERTS,)),
        ("expert=2,tensor=4", (EXPERTS,)),
    ],
)
def test_a_device_holds_the_weights_that_the_rules_leave_it(file, mesh, own):
    config = load(RunConfig, file, [f"mesh={mesh}", *own])
    report = run.explain(config, "8xh100")
    job = workload_of(config)[1].job
    sizes = {name: int(size) for name, size in (part.split("=") for part in mesh.split(","))}
    weights = communication.local_weights(device(job, **sizes)).total / sizes.get("fsdp", 1)
    stages = sizes.get("stage", 1)
    norms = (2 * 4 / stages + 1) * 256
    assert weights + norms == report.bytes_per_device("params") / 4


def test_keys_and_values_that_tensor_does_not_divide_are_held_whole():
    job = Job(named_model("llama3-8b").model, 8192, 16)
    shared, cut = device(job, tensor=16), device(job, tensor=8)
    kv = 2 * 8 * 128
    (qkv,) = (m for m in job.model.matmuls(routed=False) if m.name == "qkv")
    assert shared.local_dims(qkv) == (4096, 4096 / 16 + kv / 8)
    assert cut.local_dims(qkv) == (4096, (4096 + kv) / 8)
    assert computation.qkv_width(job.model, Layout(tensor=16)) == 4096 / 16 + kv / 8
    # Other software gives each device the weights of its own head alone.
    other = dataclasses.replace(shared, software=Software())
    more = communication.local_weights(shared).total - communication.local_weights(other).total
    assert more == 32 * 4096 * (kv - kv / 8)


def test_gate_and_up_are_two_matrices_in_shared_experts_too():
    experts = Experts(64, 4, 512, shared_mlp=256)
    model = Transformer(4, 1024, 8, 8, 128, 512, 1024, experts=experts)
    found = computation.matrices(model, Layout())
    shapes = {(fan_in, fan_out): number for fan_in, fan_out, _, number in found}
    assert (shapes[1024, 256], shapes[256, 1024]) == (2, 1)
    # Each of the 64 experts has its own gate, up and down.
    assert sum(number for *_, number in found) == model.layer_arrays + 3 * 63


def test_experts_that_are_shared_out_are_orthogonalized_once():
    experts = Experts(64, 4, 512)
    model = Transformer(4, 1024, 8, 8, 128, 512, 1024, experts=experts)
    job = Job(model, 1024, 64, newton_schulz_steps=5)
    rates = rates_on(H100, job.precision, committed())

    def seconds(job, **degrees):
        work = computation.orthogonalize(device(job, **degrees))
        return sum(one.count * one.kernel.seconds(rates) for one in work)

    everywhere, shared_out = seconds(job, data=8), seconds(job, expert=8)
    routed = 2 * 3 * 1024 * 512 * 512 + 2 * 512 * 512 * 512  # FLOPs of a matrix and iteration
    saved = 5 * 4 * 2 * (64 - 8) * routed / rates.flops
    assert everywhere - shared_out > saved
    # What is stacked is one kernel, however many layers there are.
    deep = dataclasses.replace(job, model=dataclasses.replace(model, layers=400))
    start = rates.kernel_seconds
    grown = seconds(deep) - 100 * seconds(job)
    kinds = len(computation.matrices(model, Layout()))
    assert grown == pytest.approx(-99 * 5 * 3 * kinds * start, rel=1e-6)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=64),
        Layout(data=64, microbatches=4),
        Layout(fsdp=64),
        Layout(fsdp=64, zero=1),
        Layout(fsdp=64, zero=1, microbatches=2),
        Layout(fsdp=64, zero=2, microbatches=2),
        Layout(fsdp=16, context=4),
        Layout(fsdp=16, tensor=4),
    ],
    ids=str,
)
def test_traffic_that_nothing_hides_is_all_that_is_sent(layout):
    job = Job(named_model("llama3-8b").model, 8192, 256)
    shown = dict.fromkeys(
        ("overlap_tensor", "overlap_expert", "overlap_data", "overlap_gather"), False
    )
    plainly = dataclasses.replace(SHARDLIB, **shown)
    network = ("tensor", "context", "expert", "fsdp", "data")

    def seconds(software, constants):
        parts = step_time.step_time(job, layout, V5P, software, constants).parts
        return sum(parts[name] for name in network)

    nothing_hides = {
        name: 0.0 if name.startswith("hide") else value for name, value in committed().items()
    }
    whole = seconds(plainly, committed())
    assert whole == pytest.approx(seconds(SHARDLIB, nothing_hides), rel=1e-9)
    if not layout.reduces_once:
        assert whole > seconds(SHARDLIB, committed())


def test_bounds_hold_on_devices_that_were_measured():
    """Where memory is handed out anew in each step, more microbatches ask for less of it."""
    cluster = measured_cluster(parse_cluster("cpu:8"), calibration(fresh=Line(1e-4, 5e8, 0.03)))
    model = Transformer(4, 128, 4, 4, 32, 344, 1024)
    workload = TransformerWorkload(Job(model, 256, 16, precision="f32", compute_bytes=4))
    checked = 0
    for candidate in candidates(workload, cluster):
        first = candidate.with_microbatches(candidate.microbatches[0])
        bound = workload.bound(first, cluster, candidate.microbatches[-1])
        for count in candidate.microbatches:
            layout = candidate.with_microbatches(count)
            for choice in workload.choices(layout, cluster):
                assert bound <= workload.time(layout, choice, cluster).total * (1 + 1e-12)
                checked += 1
    assert checked > 500
