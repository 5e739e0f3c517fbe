"""Strategies of the README on 8 and on 64 H100, with the attention that they take by default.

Where the CUDA plugin is, the step is compiled; it is lowered for CUDA anywhere. Neither needs a GPU
or cuDNN, of which JAX asks the version while it traces.
"""

import dataclasses
import re
from pathlib import Path

import jax
import pytest

from shardlib.config import load
from shardlib.data import batch_spec
from shardlib.explain.aot.topology import devices_of
from shardlib.hardware import parse_cluster
from shardlib.run.checks import expected_spec
from shardlib.run.config import RunConfig
from shardlib.run.reports.explaining import explain_compiled
from shardlib.run.setup import make_scope, setup

CONFIG = Path(__file__).parents[2] / "configs" / "llama3_8b.yaml"
SMALL = (
    *("model.num_layers=4", "model.embed_dim=64", "model.num_heads=8", "model.num_kv_heads=4"),
    *("model.mlp_dim=64", "model.vocab_size=512", "model.max_positions=64"),
    *("data.sequence_length=64", "train.global_batch=64", "train.microbatches=1"),
)
MICROBATCHES, EXPERTS = "train.microbatches=4", "model.moe={num_experts: 8}"
REDUCTION, LOCAL = "train.reduction.dtype=bf16", "train.local_sgd={inner_steps: 10}"


@dataclasses.dataclass(frozen=True)
class Strategy:
    mesh: str
    words: tuple[str, ...] = ()
    rules: str = "standard"

    def __str__(self) -> str:
        keys = [word.partition("=")[0].rpartition(".")[2] for word in self.words]
        return " ".join([self.mesh, self.rules, *keys])

    @property
    def has_kernel(self) -> bool:
        """A ring has no kernel: its tiles go from device to device."""
        return "context" not in self.mesh or "model.context=ulysses" in self.words

    @property
    def config(self) -> RunConfig:
        words = [*SMALL, f"mesh={self.mesh}", f"rules={self.rules}", *self.words]
        return load(RunConfig, CONFIG, words)


STRATEGIES = {
    "8xh100": [
        Strategy("data=8"),
        Strategy("fsdp=8"),
        Strategy("fsdp=8", rules="zero1"),
        Strategy("fsdp=8", rules="zero2"),
        Strategy("data=2,fsdp=4"),
        Strategy("fsdp=4,tensor=2"),
        Strategy("tensor=8", rules="sequence"),
        Strategy("context=8"),
        Strategy("context=8", ("model.context=ulysses",)),
        Strategy("expert=4,fsdp=2", (EXPERTS,)),
        Strategy("stage=4,data=2", (MICROBATCHES,)),
        Strategy("stage=2,fsdp=2,tensor=2", (MICROBATCHES,)),
        Strategy("data=2,fsdp=4", (REDUCTION,)),
        Strategy("stage=2,data=2,tensor=2", (MICROBATCHES, REDUCTION)),
        Strategy("data=2,fsdp=4", (LOCAL,)),
    ],
    "64xh100": [
        Strategy("data=8x8"),
        Strategy("fsdp=32,tensor=2"),
        Strategy("expert=8,fsdp=8", (EXPERTS,)),
        Strategy("data=8x8", (REDUCTION,)),
        Strategy("fsdp=64"),
        Strategy("fsdp=64", rules="zero1"),
        Strategy("fsdp=64", rules="zero2"),
        Strategy("data=8,fsdp=8"),
        Strategy("data=8,tensor=8", rules="sequence"),
        Strategy("fsdp=8,context=8"),
        Strategy("fsdp=8,context=8", ("model.context=ulysses",)),
        Strategy("stage=4,data=16", (MICROBATCHES,)),
        Strategy("stage=2,fsdp=8,tensor=4", (MICROBATCHES,)),
        Strategy("stage=2,data=8,tensor=4", (MICROBATCHES, REDUCTION)),
        Strategy("data=8,fsdp=8", (LOCAL,)),
    ],
}
_IN_CI = 4
"""Strategies of 64 that differ in kind from those of 8; the others run with `soak`."""
CASES = [
    pytest.param(
        cluster,
        strategy,
        id=f"{cluster} {strategy}",
        marks=[pytest.mark.soak] if cluster == "64xh100" and number >= _IN_CI else [],
    )
    for cluster, strategies in STRATEGIES.items()
    for number, strategy in enumerate(strategies)
]


def kernels(text):
    """The calls of cuDNN by the names that XLA has for them; documents in a row are a bias."""
    return set(re.findall(r"__cudnn\$\w+", text))


def expected_kernels(strategy):
    names = {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}
    return names if strategy.has_kernel else set()


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    """The version that JAX asks for while it traces: only running needs cuDNN itself."""
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda _: True)


@pytest.mark.parametrize(("cluster", "strategy"), CASES)
def test_it_compiles(cluster, strategy, tmp_path, monkeypatch):
    pytest.importorskip("jax_cuda12_plugin", reason="needs the extra cuda")
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path))
    report = explain_compiled(strategy.config, cluster)
    assert report.step.compiled_for == cluster
    assert report.program.unread == {}
    assert kernels(report.step.text) == expected_kernels(strategy)


@pytest.fixture
def stand_ins(monkeypatch):
    """As many devices as a cluster has; what is traced for them takes them for GPUs."""
    monkeypatch.setattr("shardlib.nn.attention.backends.active_platform", lambda: "gpu")

    def devices(cluster):
        if parse_cluster(cluster).num_devices == jax.device_count():
            return jax.devices()
        pytest.importorskip("libtpu", reason="needs the extra tpu")
        return devices_of(parse_cluster("8xv5e-8"))

    return devices


@pytest.mark.aot
@pytest.mark.parametrize(("cluster", "strategy"), CASES)
def test_the_kernel_is_left_to_no_partitioner(cluster, strategy, stand_ins):
    config = strategy.config
    parts = setup(config, expected_spec(config), make_scope(config, stand_ins(cluster)))
    step, state = parts.train_step(), parts.saved_state()
    batch = batch_spec(config.data, config.train.global_batch)
    traced = step.program(state, batch).trace(state, batch)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert kernels(text) == expected_kernels(strategy)
    assert "CustomSPMDPartitioning" not in text


@pytest.mark.aot
@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        *(("none", 1), ("dots", 1), ("save:attended", 1), ("offload:attended", 1)),
        *(("save:query", 2), ("full", 2)),
    ],
)
def test_policies_that_keep_attention_run_its_kernel_once(policy, calls, stand_ins):
    config = Strategy("data=8", (f"model.remat={policy}",)).config
    parts = setup(config, expected_spec(config), make_scope(config, stand_ins("8xh100")))
    step, state = parts.train_step(), parts.saved_state()
    batch = batch_spec(config.data, config.train.global_batch)
    traced = step.program(state, batch).trace(state, batch)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"@__cudnn\$fmhaScaleBiasSoftmax\(", text)) == calls
