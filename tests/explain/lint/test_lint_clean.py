"""Steps as they should be: no check finds anything in the project's own models and configs."""

import dataclasses
from pathlib import Path

import jax
import optax
import pytest

import shardlib as sl
from shardlib.config import load
from shardlib.explain import explain
from shardlib.explain.aot.compile import compile_step
from shardlib.explain.lint import Limits, Subject, lint
from shardlib.registry import DataSpec, family
from shardlib.run.config import RunConfig
from shardlib.run.reports.explaining import explain_compiled
from shardlib_models.moe import MoEConfig
from shardlib_models.resnet import ResNetConfig
from shardlib_models.transformer_config import TransformerConfig

pytestmark = pytest.mark.aot

# What is small counts too, so that small models have the faults of large ones. Leaves of fewer than
# 16,384 numbers are whole by the rules.
STRICT = Limits(
    replicated_bytes=2**16, activation_bytes=2**14, traffic_bytes=2**14, donated_bytes=2**12
)
LENGTH, ROWS, VOCAB = 64, 32, 512
EXPERTS = MoEConfig(num_experts=4, experts_per_token=2, mlp_dim=96)


def text(**changes):
    config = TransformerConfig(
        num_layers=4, embed_dim=128, num_heads=4, num_kv_heads=4, mlp_dim=320, **changes
    )
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), "int32")
    batch = {"tokens": tokens, "targets": tokens}
    return config, DataSpec(VOCAB, LENGTH), batch


def images():
    config = ResNetConfig(depth=18, stem="small", width=16)
    batch = {
        "images": jax.ShapeDtypeStruct((64, 16, 16, 3), "float32"),
        "labels": jax.ShapeDtypeStruct((64,), "int32"),
    }
    return config, DataSpec(num_classes=10, image_shape=(16, 16, 3)), batch


def subject(mesh, problem, rules="standard", microbatches=1, precision="f32"):
    config, data, batch = problem
    chosen = family(config.name)
    mesh = sl.make_mesh(mesh)
    with sl.use(mesh, sl.rules.preset(rules)):
        state = sl.abstract_state(
            lambda rngs: chosen.make(config, data, rngs), optax.adamw(1e-3), precision=precision
        )
    step = sl.make_train_step(
        lambda model, batch, rng: chosen.loss(model, batch, rng, train=True),
        microbatches=microbatches,
        precision=precision,
        batch_axes=dict.fromkeys(set(batch) & {"tokens", "targets"}, ("batch", "length")),
    )
    return Subject.of(compile_step(step, (state, batch), keep=False), explain(state), STRICT)


@pytest.mark.parametrize(
    ("mesh", "problem", "options"),
    [
        ("data=2,fsdp=4", text(), {"microbatches": 4}),
        ("fsdp=2,tensor=4", text(remat="full"), {"precision": "bf16"}),
        ("data=2,tensor=4", text(tied_embeddings=True), {"rules": "sequence"}),
        ("data=2,context=4", text(), {"precision": "bf16"}),
        ("fsdp=8", text(), {"rules": "zero1"}),
        ("fsdp=2,expert=4", text(moe=EXPERTS), {"precision": "bf16"}),
        ("data=2,fsdp=4", images(), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_projects_own_steps_have_no_faults(mesh, problem, options):
    made = subject(mesh, problem, **options)
    assert [str(finding) for finding in lint(made)] == []
    # Nor without the rules at hand: shardings alone tell nothing else.
    assert [str(finding) for finding in lint(dataclasses.replace(made, state=None))] == []


QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
# The quickstart's own dims are a single tile of a TPU: cut, they are padded, which is a fault.
WIDE = ("model.embed_dim=256", "model.num_heads=2", "model.mlp_dim=512", "data.sequence_length=512")


@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    ("mesh", "more"), [("fsdp=4,tensor=2", WIDE), ("fsdp=8", ()), ("data=2,fsdp=2,context=2", WIDE)]
)
def test_the_quickstart_has_no_faults_on_tpus(mesh, more):
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    config = load(RunConfig, str(QUICKSTART), [f"mesh={mesh}", *more])
    report = explain_compiled(
        config,
        "v5e-8",
        limits=dataclasses.replace(STRICT, activation_bytes=2**16, traffic_bytes=2**16),
    )
    assert [str(finding) for finding in report.findings] == []
